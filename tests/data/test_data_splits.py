import numpy as np
import pytest

from vit_jax.data import splits
from vit_jax.data.sources.arrays import open_arrays
from vit_jax.data.sources.base import read_labels
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


@pytest.mark.parametrize(
    ("split", "match"),
    [
        ("train+val[:5]", r"digits has no split 'val'.*test, train"),
        ("train[5]", r"write for example train\[:90%\]"),
        ("train[:9999]", r"write for example train\[:90%\]"),
        ("train[a:b]", r"write for example train\[:90%\]"),
        ("train[7:7]", "selects no record"),
        ("even_splits(train, 3)[3]", "3 parts are numbered 0 to 2"),
        ("even_splits(train, 0)[0]", "0 parts"),
        ("even_splits(train, 3)", "has no split 'even_splits"),
        ("even_splits(val, 3)[1]", "has no split 'val'"),
        ("interleaved_splits(train, 5)[5]", "5 parts are numbered 0 to 4"),
        ("train+", "has no split ''"),
        ("train[:5]]", "write for example"),
    ],
)
def test_a_bad_split_is_a_user_error(split, match):
    with pytest.raises(UserError, match=match):
        splits.select(split, SIZES, "digits")


@pytest.mark.parametrize(
    "split", ["train", "train[:98%]", "train[800:1000]+test", "test[-7:]+train[3:]"]
)
@pytest.mark.parametrize("n", [1, 3, 7])
def test_even_splits_are_those_of_tfds(split, n):
    tfds = pytest.importorskip("tensorflow_datasets")
    infos = {
        name: tfds.core.SplitInfo(name=name, shard_lengths=[size], num_bytes=0)
        for name, size in SIZES.items()
    }
    found = []
    for i, reference in enumerate(tfds.even_splits(split, n)):
        expected = [
            (
                part.splitname,
                part.from_ or 0,
                SIZES[part.splitname] if part.to is None else part.to,
            )
            for part in reference.to_absolute(infos)
        ]
        parts = splits.select(f"even_splits({split}, {n})[{i}]", SIZES, "digits")
        assert [(name, p.start, p.stop) for name, p in parts] == expected
        found += [(name, number) for name, numbers in parts for number in numbers]
    whole = [(k, i) for k, p in splits.select(split, SIZES, "digits") for i in p]
    assert sorted(found) == sorted(whole)


def test_even_splits_add_up_with_others():
    parts = splits.select("even_splits(train,2)[1]+test[:5]", SIZES, "digits")
    assert parts == [("train", range(719, 1437)), ("test", range(5))]
    assert splits.names("even_splits(train+test, 2)[1]+val") == ["train", "test", "val"]
    inner = "even_splits(even_splits(train, 2)[0], 4)[3]"
    assert splits.select(inner, SIZES, "digits") == [("train", range(540, 719))]


def test_interleaved_splits_are_every_nth_record():
    parts = [
        splits.select(f"interleaved_splits(train[3:20]+test, 5)[{i}]", SIZES, "digits")
        for i in range(5)
    ]
    assert parts[1][0] == ("train", range(4, 20, 5))
    for k, name in enumerate(("train", "test")):
        numbers = sorted(number for part in parts for number in part[k][1])
        assert numbers == list(range(3, 20) if name == "train" else range(SIZES[name]))


def test_interleaved_records_keep_their_names_and_images():
    images = np.arange(9, dtype=np.uint8).repeat(16).reshape(9, 4, 4)
    data = {"train": (images, np.arange(9) % 3)}
    found = open_arrays(data, "interleaved_splits(train, 4)[1]", "mine")
    assert [found[i]["image"][0, 0, 0] for i in range(len(found))] == [1, 5]
    assert [found.record_id(i) for i in range(2)] == ["train/1", "train/5"]
    assert found.locate(["train/5"]).tolist() == [1]
    both = "interleaved_splits(train, 4)[1]+train[:2]"
    assert read_labels(open_arrays(data, both, "mine")).tolist() == [1, 2, 0, 1]
