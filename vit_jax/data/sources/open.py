"""Opens the data set that a config or a command line names.

`exclude` leaves records out, such as near-duplicates of test images. On a command line
a split of a data set is NAME[@DIR][#SPLIT], see `parse_spec`.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import zlib
from collections.abc import Callable

import numpy as np
from jaxtyping import Integer

from vit_jax.command_line import files
from vit_jax.config.fields import is_custom
from vit_jax.data.config import PLACE, DataConfig
from vit_jax.data.fingerprint import Entries
from vit_jax.data.sources import SOURCES, key_of
from vit_jax.data.sources.base import Derived, Source, SourceType, check_label
from vit_jax.errors import NoLabels, UserError

# Functions from a config, a split and the function that opens it to the source. The
# last one in the list belongs to the innermost context.
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

    Raises:
      UserError: the set or the split does not exist, or its size, its classes or a
        label contradict the config.
    """
    try:
        source = open_unchecked(data, split)
    except NoLabels as error:
        raise UserError(
            f"{error}; or set --config.data.num_classes=0 to learn without labels"
        ) from error
    if data.num_classes:
        _check_classes(source, data)
    trained = split == data.split
    checked = trained and data.num_examples and not source_type(data.name).generated
    if checked and data.num_examples != len(source):
        raise UserError(
            f"data.num_examples={data.num_examples}, but split {split!r} of {data.name} has "
            f"{len(source)}: set --config.data.num_examples={len(source)}"
        )
    return exclude(source, data.exclude) if trained and data.exclude else source


def open_unchecked(data: DataConfig, split: str) -> Source:
    """Opens a split without checking classes and size; raises as `SourceType.open`."""
    kind = source_type(data.name)
    if data.mask_key and not kind.has_masks:
        others = ", ".join(key for key, each in SOURCES.items() if each.has_masks)
        raise UserError(
            f"data.mask_key={data.mask_key!r}: data.name={data.name!r} has no masks; sets "
            f"of TFDS and these have masks: {others}"
        )
    if not is_custom(data.name):
        for name in ("data_dir", "image_dir", "exclude"):
            files.refuse_scheme(f"data.{name}", getattr(data, name))
    open_split = lambda: kind.open(data, split)
    return _openers[-1](data, split, open_split) if _openers else open_split()


def source_type(name: str) -> SourceType:
    """Returns the kind of data set of a `data.name`."""
    if key := key_of(name):
        return SOURCES[key]
    from vit_jax.data.sources import tfds  # Sets of other kinds do not need it.

    return tfds.TFDS


def _check_classes(source: Source, data: DataConfig) -> None:
    known = len(source.class_names)
    if known and known != data.num_classes:
        raise UserError(
            f"data.num_classes={data.num_classes}, but {data.name} has {known} classes: "
            f"set --config.data.num_classes={known}"
        )
    if data.has_labels and source.labels is not None:
        bad = (source.labels < 0) | (source.labels >= data.num_classes)
        for i in np.flatnonzero(bad)[:1].tolist():
            check_label(int(source.labels[i]), data.num_classes, source.describe(i))


@dataclasses.dataclass(frozen=True)
class Excluding(Derived):
    """A source without some of its records.

    `gaps` has the position of each excluded record among the others, sorted, so that
    memory is needed for excluded records only, not for the millions that stay. Images
    in memory are copied without the excluded ones; `source` then has no images.
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
            excluded = set(self._excluded().tolist())
            return [each for i, each in enumerate(labels) if i not in excluded]
        return None if labels is None else np.delete(labels, self._excluded())

    def entries(self) -> Entries:
        if self.images is not None:
            return super().entries()
        every = self.source.entries()
        # Records cannot be removed from a shard's entry, so one more entry describes
        # them.
        sums = zlib.crc32(self._excluded().astype("<i8").tobytes())
        labels, sizes = (
            None if values is None else np.append(values, 0)
            for values in (every.labels, every.sizes)
        )
        names = [*every.names, f"{len(self.gaps)} records left out ({sums:08x})"]
        return every._replace(names=names, labels=labels, sizes=sizes)

    def _excluded(self) -> Integer[np.ndarray, " M"]:
        """Returns the numbers of the excluded records."""
        return self.gaps + np.arange(len(self.gaps))

    def _inner(self, i: int) -> int:
        if not 0 <= i < len(self):
            raise IndexError(i)
        return int(i + np.searchsorted(self.gaps, i, side="right"))


def exclude(source: Source, path: str) -> Excluding:
    """Returns a source without the records that a file names, see `read_ids`.

    Ids of other splits of the data set have no effect; if a user's source lacks
    `locate`, they are an error.

    Raises:
      UserError: the file or a record does not exist, or no record stays.
    """
    record_ids = read_ids(path)
    try:
        excluded = np.unique(np.asarray(source.locate(record_ids), np.int64))
    except KeyError as error:
        raise UserError(
            f"data.exclude={path!r}: line {_line(path, error.args[0])} names record "
            f"{error.args[0]!r}, which the data set lacks; its records have names such "
            f"as {source.record_id(0)!r}"
        ) from error
    if len(excluded) == len(source):
        raise UserError(
            f"data.exclude={path!r} names all {len(source)} records of the training "
            "split: leave one to train on"
        )
    gaps = excluded - np.arange(len(excluded))
    if source.images is None or source.targets is not None:
        return Excluding(source, gaps)
    images, labels = (
        None if values is None else np.delete(values, excluded, 0)
        for values in (source.images, source.labels)
    )
    # Without this, all images would stay in memory twice.
    return Excluding(source.without_images(), gaps, images, labels)


def read_ids(path: str) -> list[str]:
    """Reads a file of record ids, one per line; raises UserError if it cannot be read.

    Blank lines and comments are ignored. A comment begins with "#" and a space, or is
    only "#"; an id may begin with "#", such as "#1/a.jpg".
    """
    files.check("data.exclude", pathlib.Path(path).expanduser())
    try:
        text = pathlib.Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.exclude={path!r} cannot be read ({error}): name a text file of "
            "record ids, one per line"
        ) from error
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not f"{line} ".startswith("# ")]


def _line(path: str, record_id: str) -> int:
    text = pathlib.Path(path).expanduser().read_text("utf-8")
    return [line.strip() for line in text.splitlines()].index(record_id) + 1


@dataclasses.dataclass(frozen=True)
class Spec:
    """One split of a data set; attributes have the values of keys of `config.data`."""

    name: str
    data_dir: str
    split: str
    image_key: str = "image"  # These three cannot be set in the text of a spec.
    image_dir: str = ""
    image_suffix: str = ""

    @classmethod
    def of(cls, data: DataConfig, split: str) -> "Spec":
        """Returns a split of the data set of a config."""
        return cls(data.name, split=split, **{key: getattr(data, key) for key in PLACE})

    def __str__(self) -> str:
        where = f"@{self.data_dir}" if self.data_dir else ""
        return f"{self.name}{where}#{self.split}"

    def open(self) -> Source:
        """Opens the split without its labels; raises UserError if it does not exist."""
        data = DataConfig(**dataclasses.asdict(self), num_classes=0)
        # Without training, the checks against a config's sizes do not apply.
        return open_unchecked(data, self.split)


def parse_spec(text: str, default_split: str) -> Spec:
    """Parses NAME[@DIR][#SPLIT], where `default_split` replaces a missing split.

    The name ends at the first "@", the folder at the last "#".

    Raises:
      UserError: the name, the folder or the split is empty.
    """
    # A split has no "#", but a folder may.
    rest, hash_sign, split = text.rpartition("#")
    if not hash_sign:
        rest, split = text, default_split
    name, at, data_dir = rest.partition("@")
    if not name.strip() or (at and not data_dir) or not split.strip():
        raise UserError(
            f"{text!r} is not NAME[@DIR][#SPLIT]: write for example cifar10#test or "
            "folder@/data/flowers#val"
        )
    return Spec(name.strip(), os.path.expanduser(data_dir), split.strip())


def parse_specs(text: str, default_split: str) -> list[Spec]:
    """Parses specs between commas (`parse_spec`); commas in parentheses do not count."""
    return [parse_spec(one, default_split) for one in re.split(r",(?![^(]*\))", text)]
