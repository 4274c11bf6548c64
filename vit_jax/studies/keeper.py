"""The one door to a data set: each split is opened once, the test split last."""

import json
from collections.abc import Callable

from ml_collections import ConfigDict

from vit_jax import config as configuration
from vit_jax.data import splits
from vit_jax.data.sources import Source
from vit_jax.errors import UserError

# Split to numbers of its records, or names of records.
Records = dict[str, list[range]] | frozenset[str]


class Kept:
    """Opens each split once; give it to `sources.opened_by`."""

    def __init__(self):
        self._sources: dict[str, Source] = {}

    def __call__(
        self, data: ConfigDict, split: str, open_it: Callable[[], Source]
    ) -> Source:
        """Returns a split's source."""
        key = json.dumps([configuration.to_json(data), split])
        if key not in self._sources:
            self._sources[key] = open_it()
        return self._sources[key]


class Keeper:
    """Opens splits for all runs of a study; give it to `sources.opened_by`.

    Until `release` it refuses every split that has a part of the test split, whoever
    asks. So nothing that is chosen before can depend on a test image. When the test
    split is opened, none of its records may be in another split that was opened.

    Args:
      test: split expression.

    Attributes:
      opened: splits in the order in which they were opened.
    """

    def __init__(self, test: str):
        self._test, self._sealed = test, True
        self._kept = Kept()
        self._records: dict[str, Records] = {}
        self.opened: list[str] = []

    def __call__(
        self, data: ConfigDict, split: str, open_it: Callable[[], Source]
    ) -> Source:
        """Returns a split's source.

        Raises:
          UserError: it has test images and the choice is not made yet, or training and
            test have a record in common.
        """
        if self._sealed and touch(split, self._test):
            raise UserError(
                f"split {split!r} of {data.name} is sealed: it has images of the test "
                f"split {self._test!r}, which stays shut until the rate is chosen"
            )

        def open_and_check():
            self.opened.append(split)
            source = open_it()
            self._check(data.name, split, source)
            return source

        return self._kept(data, split, open_and_check)

    def release(self) -> None:
        """Lets the test split be opened, and forgets what was read for the choice."""
        self._sealed, self._kept = False, Kept()

    def _check(self, name: str, split: str, source: Source) -> None:
        self._records[split] = _records(source)
        for one, there in self._records.items():
            for other, here in self._records.items():
                if not touch(one, self._test) or touch(other, self._test):
                    continue
                if shared := _common(there, here):
                    raise UserError(
                        f"{name}: {shared} is in the split {one!r} to test on and in "
                        f"{other!r} to train or choose on: state another --test"
                    )


def touch(split: str, test: str) -> bool:
    """Tells whether two split expressions name a split in common."""
    return not set(splits.names(split)).isdisjoint(splits.names(test))


def _records(source: Source) -> Records:
    if numbering := getattr(source, "numbering", None):
        found = {}
        for name, numbers in numbering.parts:
            found.setdefault(name, []).append(numbers)
        return found
    return frozenset(source.record_id(i) for i in range(len(source)))


def _common(one: Records, other: Records) -> str:
    """Names a record that is in both; "" if there is none."""
    if isinstance(one, frozenset) or isinstance(other, frozenset):
        return min(one & other, default="") if type(one) is type(other) else ""
    for name in one.keys() & other.keys():
        for a in one[name]:
            for b in other[name]:
                first = max(a.start, b.start)
                if first < min(a.stop, b.stop):
                    return f"record {name}/{first}"
    return ""
