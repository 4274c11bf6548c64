"""Opens the splits of a sweep: each once, and the test split only after the choice."""

import json
from collections.abc import Callable

from vit_jax.config import fields
from vit_jax.data import splits
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.base import Source
from vit_jax.errors import UserError

# Numbers of the records by split, or ids of records if they have no numbers.
Records = dict[str, list[range]] | frozenset[str]


class SplitCache:
    """Opens each split once; to be passed to `opened_by`."""

    def __init__(self):
        self._sources: dict[str, Source] = {}

    def __call__(
        self, data: DataConfig, split: str, open_it: Callable[[], Source]
    ) -> Source:
        """Returns a split's source."""
        key = json.dumps([fields.to_json(data), split])
        if key not in self._sources:
            self._sources[key] = open_it()
        return self._sources[key]


class TestSplitGuard(SplitCache):
    """Opens splits for all runs of a sweep; to be passed to `opened_by`.

    Until `release` is called, it rejects every split that overlaps the test split, so
    that no choice can depend on a test image. When the test split is opened, none of
    its records may be in another split that was opened.

    Args:
      test: split expression.
    """

    def __init__(self, test: str):
        super().__init__()
        self._test, self._sealed = test, True
        self._records: dict[str, Records] = {}

    def __call__(
        self, data: DataConfig, split: str, open_it: Callable[[], Source]
    ) -> Source:
        """Returns a split's source.

        Raises:
          UserError: the split overlaps the test split before `release`, or training and
            test share a record.
        """
        if self._sealed and overlap(split, self._test):
            raise UserError(
                f"split {split!r} of {data.name} is locked: it has images of the test "
                f"split {self._test!r}, which is not opened until the rate is chosen"
            )

        def open_and_check():
            source = open_it()
            self._check(data.name, split, source)
            return source

        return super().__call__(data, split, open_and_check)

    def release(self) -> None:
        """Allows the test split to be opened, and drops the splits read so far."""
        self._sealed, self._sources = False, {}

    def _check(self, name: str, split: str, source: Source) -> None:
        self._records[split] = _records(source)
        tests = [one for one in self._records if overlap(one, self._test)]
        for one in tests:
            for other in self._records.keys() - set(tests):
                if shared := _common(self._records[one], self._records[other]):
                    raise UserError(
                        f"{name}: {shared} is in the test split {one!r} and in "
                        f"{other!r}, used to train or choose: set another --test"
                    )


def overlap(split: str, test: str) -> bool:
    """Returns whether two split expressions have a split in common."""
    return not set(splits.names(split)).isdisjoint(splits.names(test))


def _records(source: Source) -> Records:
    if numbering := source.split_numbering():
        records = {}
        for name, numbers in numbering.parts:
            records.setdefault(name, []).append(numbers)
        return records
    return frozenset(source.record_id(i) for i in range(len(source)))


def _common(one: Records, other: Records) -> str:
    """Returns a record that is in both, or ""."""
    if isinstance(one, frozenset) or isinstance(other, frozenset):
        return min(one & other, default="") if type(one) is type(other) else ""
    for name in one.keys() & other.keys():
        for a in one[name]:
            for b in other[name]:
                first = max(a.start, b.start)
                if first < min(a.stop, b.stop):
                    return f"record {name}/{first}"
    return ""
