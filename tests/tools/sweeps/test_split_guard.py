import numpy as np
import pytest

from vit_jax.data.config import DataConfig
from vit_jax.data.sources.arrays import open_arrays
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.open import open_source, open_unchecked, opened_by
from vit_jax.errors import UserError
from vit_jax.tools.sweeps import split_guard


def digits(**keys):
    return DataConfig(**{"name": "digits", "channels": 1} | keys)


@pytest.mark.parametrize("split", ["test", "test[:3]", "train+test[50%:]"])
@pytest.mark.parametrize("door", [open_unchecked, open_source])
def test_the_test_split_stays_shut_until_it_is_released(split, door):
    keeper = split_guard.TestSplitGuard("test")
    with opened_by(keeper):
        with pytest.raises(
            UserError, match="locked: it has images of the test .*until the rate is ch"
        ):
            door(digits(num_classes=10), split)
        keeper.release()
        assert len(door(digits(num_classes=10), split))


def test_a_split_is_opened_once_and_forgotten_with_the_choice():
    keeper = split_guard.TestSplitGuard("test")
    with opened_by(keeper):
        first = open_unchecked(digits(), "train[:90%]")
        assert open_unchecked(digits(), "train[:90%]") is first
        assert open_unchecked(digits(channels=3), "train[:90%]") is not first
        keeper.release()
        assert open_unchecked(digits(), "train[:90%]") is not first


class Named(Source):
    """A source whose records have names alone, as a folder's."""

    images = labels = None
    class_names = ()

    def __init__(self, *names):
        self._names = names

    def __len__(self):
        return len(self._names)

    def __getitem__(self, i):
        raise AssertionError("nothing is read to compare names")

    def describe(self, i):
        return self._names[i]

    record_id = describe


def numbered(split):
    sizes = {"train": 30, "test": 20}
    arrays = {
        name: (np.zeros((n, 2, 2, 1), np.uint8), np.zeros(n, int))
        for name, n in sizes.items()
    }
    return open_arrays(arrays, split, "set")


@pytest.mark.parametrize(
    ("held_out", "test"),
    [
        # As VTAB names its splits: by their roles, whatever they are made of.
        (numbered("test[:5]"), numbered("test[4:]")),
        (numbered("train[:8]+test[:2]"), numbered("test[:1]")),
        (Named("a/1.jpg", "a/2.jpg"), Named("b/1.jpg", "a/2.jpg")),
    ],
)
@pytest.mark.parametrize("test_first", [False, True])
def test_a_record_in_both_is_a_leak(held_out, test, test_first):
    keeper = split_guard.TestSplitGuard("test")
    keeper.release()
    doors = [("val200", held_out), ("test", test)]
    first, second = doors[::-1] if test_first else doors
    keeper(digits(), first[0], lambda: first[1])
    with pytest.raises(UserError, match="is in the test split 'test' and in 'val"):
        keeper(digits(), second[0], lambda: second[1])


def test_parts_that_touch_nowhere_are_no_leak():
    keeper = split_guard.TestSplitGuard("test")
    keeper(digits(), "train800", lambda: numbered("train[:20]"))
    keeper(digits(), "val200", lambda: numbered("test[:5]"))
    keeper.release()
    keeper(digits(), "train800val200", lambda: numbered("train[:20]+test[:5]"))
    assert keeper(digits(), "test", lambda: numbered("test[5:]"))
