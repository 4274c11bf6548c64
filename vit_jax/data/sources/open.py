"""Opens the data set that a config names, checks it, and leaves records out of it.

Training without some records, such as near-duplicates of test images, is a source that
skips them, see `exclude`.
"""

import contextlib
import dataclasses
import pathlib
import re
import zlib
from collections.abc import Callable

import numpy as np
from jaxtyping import Integer

from vit_jax import files
from vit_jax.data.config import DataConfig
from vit_jax.data.fingerprint import Entries
from vit_jax.data.sources import custom, folder, parquet, table, tfds, vtab  # noqa: F401 (each registers its own)
from vit_jax.data.sources.arrays import ArraySource
from vit_jax.data.sources.base import SOURCES, Derived, Source, SourceType, check_label
from vit_jax.errors import NoLabels, UserError

# Of a config, a split and what opens it, the innermost last.
Opener = Callable[[DataConfig, str, Callable[[], Source]], Source]
_openers: list[Opener] = []


@contextlib.contextmanager
def opened_by(opener: Opener):
    """Calls `opener` for every split that this process opens inside the context."""
    _openers.append(opener)
    try:
        yield
    finally:
        _openers.remove(opener)


def open_source(data: DataConfig, split: str) -> Source:
    """Opens a split of the configured data set and checks it against the config.

    Args:
      data: `config.data`.
      split: split expression, see `splits.py`; `data.split` for training.

    Raises:
      UserError: the set, the split, a size, or a label is not as the config says.
    """
    try:
        source = open_unchecked(data, split)
    except NoLabels as error:
        raise UserError(
            f"{error}; or set --config.data.num_classes=0 to learn without labels"
        ) from error
    _check(source, data, split)
    if data.exclude and split == data.split:
        source = exclude(source, data.exclude)
    return source


def open_unchecked(data: DataConfig, split: str) -> Source:
    """Opens a split as `open_source` does, whatever classes and size it has.

    Raises:
      NoLabels: it has no labels, and `data.num_classes` is not 0.
      UserError: there is no such set or split.
    """
    if _openers:
        return _openers[-1](data, split, lambda: _open(data, split))
    return _open(data, split)


def source_type(name: str) -> SourceType:
    """Returns the kind of data set that a `data.name` is of."""
    found = (kind for kind in SOURCES.values() if re.fullmatch(kind.pattern, name))
    return next(found, tfds.TYPE)


def _open(data: DataConfig, split: str) -> Source:
    return source_type(data.name).open(data, split)


def _check(source: Source, data: DataConfig, split: str) -> None:
    if data.num_classes:
        _check_classes(source, data)
    stated = split == data.split and data.num_examples
    generated = source_type(data.name).generated
    if stated and not generated and data.num_examples != len(source):
        raise UserError(
            f"data.num_examples={data.num_examples}, but split {split!r} of {data.name} has "
            f"{len(source)}: set --config.data.num_examples={len(source)}"
        )


def _check_classes(source: Source, data: DataConfig) -> None:
    known = len(source.class_names)
    if known and known != data.num_classes:
        raise UserError(
            f"data.num_classes={data.num_classes}, but {data.name} has {known} classes: "
            f"set --config.data.num_classes={known}"
        )
    if source.labels is not None:
        bad = (source.labels < 0) | (source.labels >= data.num_classes)
        for i in np.flatnonzero(bad)[:1].tolist():
            check_label(int(source.labels[i]), data.num_classes, source.describe(i))


@dataclasses.dataclass(frozen=True)
class Excluding(Derived):
    """A source less some of its records.

    Attributes:
      source: all records; without its images if those lie in memory.
      gaps: sorted; where each left-out record stood among those that stay. Costs
        memory for the records left out, not for the millions that stay.
      images: of the records that stay, or None.
      labels: of the records that stay, or None.
    """

    source: Source
    gaps: Integer[np.ndarray, " M"]
    images: np.ndarray | None = None
    labels: np.ndarray | None = None

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.class_names

    def __len__(self) -> int:
        return len(self.source) - len(self.gaps)

    def __getitem__(self, i: int) -> dict:
        if self.images is None:
            return super().__getitem__(i)
        if self.labels is None:
            return {"image": self.images[i]}
        return {"image": self.images[i], "label": int(self.labels[i])}

    def known_labels(self) -> np.ndarray | list[list[int]] | None:
        if self.images is not None:
            return super().known_labels()
        labels = self.source.known_labels()
        if isinstance(labels, list):
            gone = set(self._left_out().tolist())
            return [each for i, each in enumerate(labels) if i not in gone]
        return None if labels is None else np.delete(labels, self._left_out())

    def entries(self) -> Entries:
        if self.images is not None:
            return super().entries()
        every = self.source.entries()
        # Records cannot be taken off a shard: one more entry stands for them.
        sums = zlib.crc32(self._left_out().astype("<i8").tobytes())
        labels, sizes = (
            None if values is None else np.append(values, 0)
            for values in (every.labels, every.sizes)
        )
        names = [*every.names, f"{len(self.gaps)} records left out ({sums:08x})"]
        return every._replace(names=names, labels=labels, sizes=sizes)

    def _left_out(self) -> Integer[np.ndarray, " M"]:
        """Returns the numbers of the records that are left out."""
        return self.gaps + np.arange(len(self.gaps))

    def _inner(self, i: int) -> int:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return int(i + np.searchsorted(self.gaps, i, side="right"))


def exclude(source: Source, path: str) -> Excluding:
    """Returns a source without the records that a file names.

    Args:
      source: data set.
      path: text file of record ids, one a line; a line of "# ..." is a comment. Ids of the
        data set that the source's split does not select change nothing, unless a user's
        own source lacks `locate`: they are an error then.

    Raises:
      UserError: no such file, the data set lacks a record, or none stays.
    """
    record_ids = read_ids(path)
    try:
        found = np.unique(np.asarray(source.locate(record_ids), np.int64))
    except KeyError as error:
        raise UserError(
            f"data.exclude={path!r}: line {_line(path, error.args[0])} names record "
            f"{error.args[0]!r}, which the data set lacks; its records are named as "
            f"{source.record_id(0)!r}"
        ) from error
    if len(found) == len(source):
        raise UserError(
            f"data.exclude={path!r} names all {len(source)} records of the training "
            "split: nothing is left to train on"
        )
    gaps = found - np.arange(len(found))
    if source.images is None:
        return Excluding(source, gaps)
    images, labels = (
        None if values is None else np.delete(values, found, 0)
        for values in (source.images, source.labels)
    )
    if isinstance(source, ArraySource):  # Else all images would stay in memory twice.
        blank = np.broadcast_to(np.uint8(0), source.images.shape)
        source = dataclasses.replace(source, images=blank)
    return Excluding(source, gaps, images, labels)


def read_ids(path: str) -> list[str]:
    """Reads a file of record ids, one a line.

    Blank lines do not count, nor do comments: "#" alone, or before a space. An id may
    begin with one, as "#1/a.jpg".

    Raises:
      UserError: it cannot be read.
    """
    files.check("data.exclude", pathlib.Path(path).expanduser())
    try:
        text = pathlib.Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.exclude={path!r} cannot be read ({error}): name a text file of "
            "record ids, one a line"
        ) from error
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not f"{line} ".startswith("# ")]


def _line(path: str, record_id: str) -> int:
    text = pathlib.Path(path).expanduser().read_text("utf-8")
    return [line.strip() for line in text.splitlines()].index(record_id) + 1
