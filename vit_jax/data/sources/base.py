"""The protocol of a data set, and the registry of the kinds of data sets."""

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

    Where `data.has_labels` is false, labels are not read: `labels` may be None or raise, and
    records may lack them. A user's source need not derive from this class: `CustomSource`
    adds the methods from `read` on if the user's class lacks them.

    Attributes:
      class_names: names in label order; may be empty.
      class_colors: red, green and blue of each class in pictures of masks; empty if the
        data set does not fix them.
      images: uint8, uint16 or float32 array (N, H, W, C) if the set lies in memory, else None.
      labels: integer array (N,) if the set lies in memory, else None.
    """

    class_names: tuple[str, ...]
    class_colors: tuple[tuple[int, int, int], ...] = ()
    images: np.ndarray | None
    labels: np.ndarray | None

    def __len__(self) -> int:
        """Returns the number of records."""
        raise NotImplementedError

    def __getitem__(self, i: int) -> dict:
        """Returns {"image": encoded bytes or uint8 HWC array, "label": int}.

        With `data.caption_key` also "text": its caption, or a list of several; with
        `data.mask_key` "mask": encoded bytes or an integer array (H, W) or (H, W, 1).
        """
        raise NotImplementedError

    def describe(self, i: int) -> str:
        """Returns the name of record i for a message: a path, "cifar10 record 17"."""
        raise NotImplementedError

    def record_id(self, i: int) -> str:
        """Returns the stable name of record i within its data set, under any sub-split.

        It is the path of a file below data_dir, as "train/roses/a.jpg", or else
        "<split>/<number in the whole split>".
        """
        raise NotImplementedError

    def read(self, numbers: range) -> list[dict]:
        """Returns neighbouring records, cheaper than one by one where that is possible."""
        return [self[i] for i in numbers]

    def known_labels(self) -> np.ndarray | list[list[int]] | None:
        """Returns the class of every record, or its classes with `data.multi_label`.

        None if only reading the records would show it.
        """
        return None if self.labels is None else np.asarray(self.labels, np.int64)

    def locate(
        self, record_ids: Sequence[str]
    ) -> Integer[np.ndarray, " M"] | list[int]:
        """Returns the numbers of named records, without those of other splits.

        Raises:
          KeyError: the data set lacks a record of that name.
        """
        wanted = set(record_ids)
        names = ((i, self.record_id(i)) for i in range(len(self)))
        matches = {i: name for i, name in names if name in wanted}
        for missing in sorted(wanted.difference(matches.values())):
            raise KeyError(missing)
        return list(matches)

    def entries(self) -> Entries:
        """Returns the entries by which a resumed run recognises the data."""
        step = max(1, -(-len(self) // NAMES))
        names = [self.record_id(i) for i in range(0, len(self), step)]
        labels = None if self.labels is None else np.asarray(self.labels)[::step]
        images = None if self.images is None else self.images[::step]
        return in_memory(names, labels, images)

    def split_numbering(self) -> Numbering | None:
        """Returns the numbering of the records by split; None if it is unknown."""
        return None

    def read_feature(self, name: str) -> list | None:
        """Returns a feature of all records as TFDS stores it; None if they lack it."""
        return None

    def without_images(self) -> "Source":
        """Returns the source without its images in memory, where that frees them."""
        return self


class Beside:
    """What records have in other files than their images.

    Attributes:
      name: its name in a record.
      part: its name in `Entries.more`.
    """

    name: str
    part: str

    def read(self, root: str, path: str) -> object:
        """Returns its value for the image at a path below `root`; may raise OSError."""
        raise NotImplementedError

    def entries(self, root: str, paths: Sequence[str]) -> object:
        """Returns the value by which a resumed run recognises that of some images."""
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
    """The split that an evaluation wants.

    Attributes:
      name: name of the evaluation, for messages.
      given: split expression of its config; "" if there is none.
      order: default splits, of which the first that exists is read.
      model_classes: whether the labels are to be the model's classes.
      trained: whether it is the data set that the run trains on.
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
    """Returns `SourceType.eval_splits` of sets whose authors name a split to test on.

    Args:
      of_name: function from `data.name` to that split; "" if there is none.
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
        NoSplit if the split does not exist; NoLabels if there are no labels and
        `data.has_labels`; UserError if the set does not exist or is damaged.
      help: description for lists.
      needs_files: True if `data.data_dir` is read.
      generated: True if it makes any `data.num_examples` examples.
      numbered: True if every opened split has `split_numbering`, with the sizes of all
        splits by the names that a split expression takes.
      has_masks: True if records have masks with `data.mask_key`.
      eval_splits: function from `config.data` and the request of an evaluation to the
        splits to try in their order, and the config to open them with. It raises NoSplit
        if there is none.
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
    """Returns data set, split and number, or path and number, of a record for a message."""
    name = source.describe(i)
    return name if str(i) in name.split() else f"{name} (record {i})"


def read_record(source: Source, i: int) -> dict:
    """Returns a record; raises DamagedImage if its file cannot be read."""
    try:
        return source[i]
    except OSError as error:
        raise DamagedImage(f"cannot be read ({error})") from error
    except Exception as error:  # A bug of the reader keeps its traceback.
        error.add_note(f"while reading {name_of(source, i)}")
        raise


def read_labels(source: Source) -> Integer[np.ndarray, " N"]:
    """Returns the class of every record; some sets are read for it, but not decoded."""
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
    # Unbuffered, as a whole: half the time of `read_bytes`.
    with open(path, "rb", buffering=0) as file:
        return file.read()


_warned: set[str] = set()


def warn(message: str, about: str = "") -> None:
    """Logs a warning, once per process about the same thing ("" is the message itself)."""
    if (about or message) not in _warned:
        _warned.add(about or message)
        logging.getLogger(__name__).warning("%s", message)


def composed(name: str) -> str:
    """Returns a name with letters and accents composed (NFC), unlike files of macOS."""
    return unicodedata.normalize("NFC", name)


def warn_of_twins(what: str, names: Iterable[str]) -> None:
    """Warns of names of classes or splits that differ in case and outer blanks alone."""
    first: dict[str, str] = {}
    for name in names:
        twin = first.setdefault(name.strip().casefold(), name)
        if twin != name:
            warn(f"the {what} {twin!r} and {name!r} differ in case or blanks alone")


def check_known(
    key: str,
    names: Iterable[str],
    known: Collection[str],
    where: object,
    what: str = "column",
) -> None:
    """Raises UserError (NoLabels for label_key) if data lack a name in `data.KEY`."""
    for name in names:
        if name not in known:
            error = NoLabels if key == "label_key" else UserError
            raise error(
                f"data.{key}={name!r}: {where} has no such {what}; it has "
                f"{', '.join(known) or 'none'}"
            )


def check_label(label: int, num_classes: int, record: str) -> None:
    """Raises UserError unless 0 <= label < classes, naming the record."""
    if not 0 <= label < num_classes:
        raise UserError(
            f"{record} has label {label}, but data.num_classes={num_classes} allows 0 to "
            f"{num_classes - 1}: set --config.data.num_classes to the number of classes"
        )
