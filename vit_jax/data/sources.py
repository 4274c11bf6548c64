"""Data sets: one small protocol, and `open_source` that picks the right reader."""

import contextlib
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np

from vit_jax.data import hub, objectnet, own, vtab
from vit_jax.data.config import DataConfig
from vit_jax.data.digits import open_digits
from vit_jax.data.excluding import without
from vit_jax.data.folder import open_folder
from vit_jax.data.made import open_made
from vit_jax.data.parquet import open_parquet
from vit_jax.data.tfds_source import open_tfds, small_in_memory
from vit_jax.errors import UserError


@runtime_checkable
class Source(Protocol):
    """Labelled images that can be read in any order.

    Attributes:
      class_names: names in label order; may be empty.
      images: uint8 array (N, H, W, C) if the set lies in memory, else None.
      labels: integer array (N,) if the set lies in memory, else None.
    """

    class_names: tuple[str, ...]
    images: np.ndarray | None
    labels: np.ndarray | None

    def __len__(self) -> int:
        """Returns the number of records."""

    def __getitem__(self, i: int) -> dict:
        """Returns {"image": encoded bytes or uint8 HWC array, "label": int}."""

    def describe(self, i: int) -> str:
        """Names record i for a message: a file path, or "cifar10 train record 17"."""

    def record_id(self, i: int) -> str:
        """Returns the stable name of record i within its data set.

        It is the same under any sub-split: a folder's path below data_dir, as
        "train/roses/a.jpg"; else "<split>/<number in the whole split>". A source may
        also have `locate(record_ids)`, which returns their numbers here, leaves out
        those of other splits, and raises KeyError for one that the set lacks; and
        `entries()`, which returns what a resumed run recognises its data by, see
        fingerprint.py.
        """


# Of a config, a split and what opens it, the innermost last.
Opener = Callable[[DataConfig, str, Callable[[], Source]], Source]
_openers: list[Opener] = []


@contextlib.contextmanager
def opened_by(opener: Opener):
    """Lets a function stand before every split that this process opens within.

    Args:
      opener: of `config.data`, a split expression and a function that opens it; it
        returns the source, or raises.
    """
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
    source = open_unchecked(data, split)
    _check(source, data, split)
    if data.exclude and split == data.split:
        source = without(source, data.exclude)
    return source


def open_unchecked(data: DataConfig, split: str) -> Source:
    """Opens a split as `open_source` does, whatever classes and size it has."""
    if _openers:
        return _openers[-1](data, split, lambda: _open(data, split))
    return _open(data, split)


def _open(data: DataConfig, split: str) -> Source:
    name, data_dir = data.name, data.data_dir
    if name == "digits":
        return open_digits(split, data.channels)
    if name == "made":
        return open_made(
            split, data.image_size, data.channels, data.classes, data.examples
        )
    if name == "folder":
        return open_folder(data_dir, split, data.split)
    if name == "objectnet":
        return open_folder(data_dir, split, split, only=tuple(objectnet.CLASSES))
    if own.is_own(name):
        return own.open_own(data, split)
    keys = data.image_key, data.label_key
    if name == "parquet" or hub.is_hub(name):
        source = open_parquet(name, data_dir, split, *keys)
    elif name.startswith("vtab/"):
        source = vtab.open_task(name, data_dir, split)
    else:
        source = open_tfds(name, data_dir, split, *keys)
    return small_in_memory(source, data.channels)


def check_label(label: int, classes: int, record: str) -> None:
    """Raises UserError unless 0 <= label < classes, naming the record."""
    if not 0 <= label < classes:
        raise UserError(
            f"{record} has label {label}, but data.classes={classes} allows 0 to "
            f"{classes - 1}: set --config.data.classes to the number of classes"
        )


def _check(source: Source, data: DataConfig, split: str) -> None:
    known = len(source.class_names)
    if known and known != data.classes:
        raise UserError(
            f"data.classes={data.classes}, but {data.name} has {known} classes: "
            f"set --config.data.classes={known}"
        )
    if source.labels is not None:
        bad = (source.labels < 0) | (source.labels >= data.classes)
        for i in np.flatnonzero(bad)[:1].tolist():
            check_label(int(source.labels[i]), data.classes, source.describe(i))
    sized = data.name != "made" and split == data.split and data.examples
    if sized and data.examples != len(source):
        raise UserError(
            f"data.examples={data.examples}, but split {split!r} of {data.name} has "
            f"{len(source)}: set --config.data.examples={len(source)}"
        )
