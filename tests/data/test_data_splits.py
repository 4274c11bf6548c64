import pytest

from vit_jax.data import splits
from vit_jax.errors import UserError

SIZES = {"train": 1437, "test": 360}


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", [("train", range(1437))]),
        ("train[:90%]", [("train", range(1293))]),
        ("train[90%:]", [("train", range(1293, 1437))]),
        ("train[800:1000]+test", [("train", range(800, 1000)), ("test", range(360))]),
        ("test[-7:]", [("test", range(353, 360))]),
    ],
)
def test_a_split_expression_selects_ranges_of_records(split, expected):
    assert splits.select(split, SIZES, "digits") == expected


def test_an_unknown_split_names_those_that_exist():
    with pytest.raises(UserError, match=r"digits has no split 'val'.*test, train"):
        splits.select("train+val[:5]", SIZES, "digits")


@pytest.mark.parametrize("split", ["train[5]", "train[:9999]", "train[a:b]"])
def test_a_bad_slice_is_a_user_error(split):
    with pytest.raises(UserError, match=r"write as train\[:90%\]"):
        splits.select(split, SIZES, "digits")


def test_an_empty_selection_is_a_user_error():
    with pytest.raises(UserError, match="selects no record"):
        splits.select("train[7:7]", SIZES, "digits")
