"""The protocol of a data set, and the registry of the kinds of data sets."""

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer

from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError


@runtime_checkable
class Source(Protocol):
    """Images, with labels or without, that can be read in any order.

    Where `data.num_classes` is 0, labels are not read: `labels` may be None or raise, and
    records may lack them. Otherwise opening a set that has none raises NoLabels.

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
        """Returns {"image": encoded bytes or uint8 HWC array, "label": int}.

        With `data.caption_key` also "text": its caption, or a list of several.
        """

    def describe(self, i: int) -> str:
        """Returns the name of record i for a message: a path, "cifar10 record 17"."""

    def record_id(self, i: int) -> str:
        """Returns the stable name of record i within its data set.

        It is the same under any sub-split: a folder's path below data_dir, as
        "train/roses/a.jpg"; else "<split>/<number in the whole split>". A source may
        also have `locate(record_ids)`, which returns their numbers here, leaves out
        those of other splits, and raises KeyError for one that the set lacks; and
        `entries()`, which returns what a resumed run recognises its data by, see
        fingerprint.py.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceType:
    """A kind of data set: all that opening one needs to know of it.

    Attributes:
      open: returns the source for `config.data` and a split expression.
      pattern: regular expression that matches the whole of its values of `data.name`.
      help: what it reads, for lists.
      needs_files: whether it reads files; else `data.data_dir` is not read.
      generated: whether it makes as many examples as `data.num_examples` states, so that
        the number need not be checked.
      numbered: whether any opened split knows the sizes of all splits, by the names
        that a split expression takes (`source.numbering.sizes`).
    """

    open: Callable[[DataConfig, str], Source]
    pattern: str
    help: str
    needs_files: bool = True
    generated: bool = False
    numbered: bool = True


# By the name that messages list. A name that none matches is one of TFDS.
SOURCES: dict[str, SourceType] = {}


def read_labels(source: Source) -> Integer[np.ndarray, " N"]:
    """Returns the class of every record.

    Some sets must be read for it; no image is decoded.
    """
    if source.labels is not None:
        return np.asarray(source.labels, np.int64)
    if hasattr(source, "labels_of_paths"):
        return np.asarray(source.labels_of_paths, np.int64)
    if not hasattr(source, "read"):
        return np.array([source[i]["label"] for i in range(len(source))], np.int64)
    found = np.empty(len(source), np.int64)
    for start in range(0, len(source), 1000):
        numbers = range(start, min(start + 1000, len(source)))
        found[start : numbers.stop] = [r["label"] for r in source.read(numbers)]
    return found


_warned: set[str] = set()


def warn(message: str, about: str = "") -> None:
    """Logs a warning, once per process, however often a split is opened.

    Args:
      message: one line.
      about: one warning about it is enough; "" is the message itself.
    """
    if (about or message) not in _warned:
        _warned.add(about or message)
        logging.getLogger(__name__).warning("%s", message)


def warn_of_twins(what: str, names: Iterable[str]) -> None:
    """Logs the names that are equal but for case and outer blanks.

    Args:
      what: they name, in the plural.
      names: of classes or splits.
    """
    there: dict[str, str] = {}
    for name in names:
        twin = there.setdefault(name.strip().casefold(), name)
        if twin != name:
            warn(f"the {what} {twin!r} and {name!r} differ in case or blanks alone")


def known_labels(source: Source) -> Integer[np.ndarray, " N"] | None:
    """Returns `read_labels` if no record has to be read for it, else None."""
    known = source.labels is not None or hasattr(source, "labels_of_paths")
    return read_labels(source) if known else None


def check_label(label: int, num_classes: int, record: str) -> None:
    """Raises UserError unless 0 <= label < classes, naming the record."""
    if not 0 <= label < num_classes:
        raise UserError(
            f"{record} has label {label}, but data.num_classes={num_classes} allows 0 to "
            f"{num_classes - 1}: set --config.data.num_classes to the number of classes"
        )
