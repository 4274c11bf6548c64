"""Base classes of data sets and of kinds of data sets."""

import dataclasses
import logging
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Integer

from vit_jax.data.config import DataConfig
from vit_jax.data.decode import DamagedImage
from vit_jax.data.fingerprint import NAMES, Entries, in_memory
from vit_jax.data.splits import Numbering
from vit_jax.errors import NoLabels, UserError

_INSPECTED = 8  # Records of a split that are inspected at the start.


class Source:
    """Images, with labels or without, that can be read in any order.

    If `data.has_labels` is False, labels are not read: `labels` may be None or raise,
    and records may lack them. A user's source need not derive from this class:
    `CustomSource` adds `read` and the methods after it if the user's class lacks them.

    Attributes:
      class_names: names in label order; may be empty.
      class_colors: red, green and blue of each class in pictures of masks; empty if the
        data set does not fix them.
      images: uint8, uint16 or float32 array (N, H, W, C) if the set is in memory, else
        None.
      labels: integer array (N,) if the set is in memory, else None.
      targets: numbers of the images, float (N, T), if the set is in memory, else None.
      record_groups: group of each record by `data.group_key`; None without groups.
    """

    class_names: tuple[str, ...]
    class_colors: tuple[tuple[int, int, int], ...] = ()
    images: np.ndarray | None
    labels: np.ndarray | None
    targets: np.ndarray | None = None
    record_groups: Sequence[str] | None = None

    def __len__(self) -> int:
        """Returns the number of records."""
        raise NotImplementedError

    def __getitem__(self, i: int) -> dict:
        """Returns {"image": encoded bytes or uint8 HWC array, "label": int}.

        With `data.caption_key` there is also "text", a caption or a list of captions;
        with `data.mask_key` also "mask", encoded bytes or an integer array (H, W) or
        (H, W, 1); with `data.target_key` also "targets", a number for each of its
        names, NaN or None if missing.
        """
        raise NotImplementedError

    def describe(self, i: int) -> str:
        """Returns the name of record i for messages: a path, or "cifar10 record 17"."""
        raise NotImplementedError

    def record_id(self, i: int) -> str:
        """Returns the name of record i within its data set, equal in all sub-splits.

        The name is the path of a file below data_dir, such as "train/roses/a.jpg", or
        "<split>/<number in the whole split>".
        """
        raise NotImplementedError

    def read(self, numbers: range) -> list[dict]:
        """Returns neighbouring records, if possible faster than one by one."""
        return [self[i] for i in numbers]

    def known_labels(self) -> np.ndarray | list[list[int]] | None:
        """Returns the class of every record, or its classes with `data.multi_label`.

        The result is None if the classes are unknown without reading the records.
        """
        return None if self.labels is None else np.asarray(self.labels, np.int64)

    def known_targets(self) -> np.ndarray | None:
        """Returns the numbers of all images, (N, T); None if records must be read."""
        return self.targets

    def locate(
        self, record_ids: Sequence[str]
    ) -> Integer[np.ndarray, " M"] | list[int]:
        """Returns the numbers of the named records that are in this split.

        Raises:
          KeyError: the data set lacks a record of that name in all splits.
        """
        wanted = set(record_ids)
        names = ((i, self.record_id(i)) for i in range(len(self)))
        matches = {i: name for i, name in names if name in wanted}
        for missing in sorted(wanted.difference(matches.values())):
            raise KeyError(missing)
        return list(matches)

    def entries(self) -> Entries:
        """Returns the entries that identify the data when a run resumes."""
        step = max(1, -(-len(self) // NAMES))
        names = [self.record_id(i) for i in range(0, len(self), step)]
        labels = None if self.labels is None else np.asarray(self.labels)[::step]
        images = None if self.images is None else self.images[::step]
        return in_memory(names, labels, images)

    def split_numbering(self) -> Numbering | None:
        """Returns the numbering of the records by split; None if it is unknown."""
        return None

    def read_feature(self, name: str) -> list | None:
        """Returns a feature of all records as TFDS stores it; None without it."""
        return None

    def without_images(self) -> "Source":
        """Returns the source without images, so that their memory can be freed."""
        return self


class Beside:
    """A part of records that is read from files beside the images.

    Attributes:
      name: name of the part in a record.
      part: name of the part in `Entries.more`.
    """

    name: str
    part: str

    def read(self, root: str, path: str) -> object:
        """Returns the value for the image at a path below `root`; may raise OSError."""
        raise NotImplementedError

    def entries(self, root: str, paths: Sequence[str]) -> object:
        """Returns a value that identifies the part of some images when a run resumes."""
        raise NotImplementedError


class Numbered(Source):
    """A source with a `name` for messages, whose records are named by a `numbering`."""

    name: str
    numbering: Numbering

    def __len__(self) -> int:
        return len(self.numbering)

    def describe(self, i: int) -> str:
        return f"{self.name} record {i}"

    def record_id(self, i: int) -> str:
        return self.numbering.record_id(i)

    def locate(
        self, record_ids: Sequence[str]
    ) -> Integer[np.ndarray, " M"] | list[int]:
        return self.numbering.locate(record_ids)

    def split_numbering(self) -> Numbering:
        return self.numbering


class Derived(Source):
    """Records of another `source`: all of them, or those that `_inner` selects."""

    source: Source

    @property
    def class_colors(self) -> tuple[tuple[int, int, int], ...]:
        return self.source.class_colors

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> dict:
        return self.source[self._inner(i)]

    def describe(self, i: int) -> str:
        return self.source.describe(self._inner(i))

    def record_id(self, i: int) -> str:
        return self.source.record_id(self._inner(i))

    def _inner(self, i: int) -> int:
        return i


@dataclasses.dataclass(frozen=True)
class SplitRequest:
    """The split that an evaluation asks for.

    Attributes:
      name: name of the evaluation, for messages.
      given: split expression in its config; "" if not set.
      order: default splits; the first that exists is read.
      model_classes: whether the labels must be the model's classes.
      trained: True if the run trains on this data set.
    """

    name: str
    given: str
    order: Sequence[str]
    model_classes: bool
    trained: bool

    @property
    def splits(self) -> Sequence[str]:
        """The splits that may be read."""
        return [self.given] if self.given else self.order


def _as_requested(
    data: DataConfig, request: SplitRequest
) -> tuple[Sequence[str], DataConfig]:
    return request.splits, data


def default_split(of_name: Callable[[str], str]) -> Callable:
    """Returns `SourceType.eval_splits` for data sets with a published test split.

    Args:
      of_name: function from `data.name` to the test split; "" if it has no such split.
    """

    def eval_splits(data, request):
        split = "" if request.given else of_name(data.name)
        return [split] if split else request.splits, data

    return eval_splits


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceType:
    """A kind of data set.

    Attributes:
      open: function from `config.data` and a split expression to the source. It raises
        NoSplit if the split does not exist; NoLabels if `data.has_labels` but labels
        are missing; UserError if the data set does not exist or is damaged.
      help: description for lists of data sets.
      needs_files: True if `data.data_dir` is read.
      generated: True if any number of examples, `data.num_examples`, can be generated.
      numbered: True if every opened split has `split_numbering`, with the sizes of all
        splits, by names that are valid in split expressions.
      has_masks: True if records have masks with `data.mask_key`.
      eval_splits: function from `config.data` and the request of an evaluation to the
        splits to try, in order, and the config to open them with. It raises NoSplit if
        no split is possible.
    """

    open: Callable[[DataConfig, str], Source]
    help: str
    needs_files: bool = True
    generated: bool = False
    numbered: bool = True
    has_masks: bool = False
    eval_splits: Callable[
        [DataConfig, SplitRequest], tuple[Sequence[str], DataConfig]
    ] = _as_requested


def name_of(source: Source, i: int) -> str:
    """Returns the data set or path of a record, and its number, for messages."""
    name = source.describe(i)
    return name if str(i) in name.split() else f"{name} (record {i})"


def read_record(source: Source, i: int) -> dict:
    """Returns a record; raises DamagedImage if its file cannot be read."""
    try:
        return source[i]
    except OSError as error:
        raise DamagedImage(f"cannot be read ({error})") from error
    except Exception as error:  # A bug in the reader: keep its traceback.
        error.add_note(f"while reading {name_of(source, i)}")
        raise


def read_labels(source: Source) -> Integer[np.ndarray, " N"]:
    """Returns the class of every record; reads records if needed, without decoding."""
    labels = source.known_labels()
    if labels is None:
        labels = [record["label"] for record in read_all(source)]
    return np.asarray(labels, np.int64)


def read_all(source: Source) -> Iterator[dict]:
    """Yields every record, read a thousand at a time."""
    for start in range(0, len(source), 1000):
        yield from source.read(range(start, min(start + 1000, len(source))))


def inspected(source: Source) -> range:
    """Returns the numbers of the records that are inspected at the start."""
    return range(0, len(source), max(1, len(source) // _INSPECTED))[:_INSPECTED]


def read_file(path: str) -> bytes:
    """Returns the content of a file."""
    # Unbuffered and as a whole, which takes half the time of `read_bytes`.
    with open(path, "rb", buffering=0) as file:
        return file.read()


_warned: set[str] = set()


def warn(message: str, about: str = "") -> None:
    """Logs a warning once per process and subject; `about` "" is the message."""
    if (about or message) not in _warned:
        _warned.add(about or message)
        logging.getLogger(__name__).warning("%s", message)


def composed(name: str) -> str:
    """Returns a name with accents composed (NFC); file names of macOS are decomposed."""
    return unicodedata.normalize("NFC", name)


def warn_of_twins(what: str, names: Iterable[str]) -> None:
    """Warns of names of classes or splits that differ only in case or outer spaces."""
    first: dict[str, str] = {}
    for name in names:
        twin = first.setdefault(name.strip().casefold(), name)
        if twin != name:
            warn(f"the {what} {twin!r} and {name!r} differ only in case or spaces")


def check_known(
    key: str,
    names: Iterable[str],
    known: Collection[str],
    where: object,
    what: str = "column",
) -> None:
    """Raises UserError (NoLabels for label_key) if the data lack a name in a key.

    Args:
      key: key of `config.data` without "data.".
      names: names that the key asks for.
      known: names that exist.
      where: place that should have them, for the message.
      what: kind of the names, for the message.
    """
    for name in names:
        if name not in known:
            error = NoLabels if key == "label_key" else UserError
            raise error(
                f"data.{key}={name!r}: {where} has no such {what}; it has "
                f"{', '.join(known) or 'none'}"
            )


def check_label(label: int, num_classes: int, record: str) -> None:
    """Raises UserError, with the name of the record, unless 0 <= label < classes."""
    if not 0 <= label < num_classes:
        raise UserError(
            f"{record} has label {label}, but data.num_classes={num_classes} allows 0 to "
            f"{num_classes - 1}: set --config.data.num_classes to the number of classes"
        )
