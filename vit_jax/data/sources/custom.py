"""A user's data set: data.name="my_module:open_source".

The name runs code: the module is imported and the function called, with the rights of
the user who started the command. An exception of that code ends the command with one
line.
"""

import dataclasses
import operator
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from vit_jax.config import fields
from vit_jax.data import bands
from vit_jax.data.config import DataConfig
from vit_jax.data.decode import DamagedImage
from vit_jax.data.fingerprint import Entries
from vit_jax.data.sources import arrays
from vit_jax.data.sources.base import Source, SourceType
from vit_jax.data.splits import Numbering
from vit_jax.errors import NoLabels, UserError

_MEMBERS = ("class_names", "images", "labels", "describe", "record_id")


def open_custom(data: DataConfig, split: str):
    """Calls the user's function with `config.data` and a split; returns its source.

    Raises:
      NoLabels: the source has no `labels`.
      UserError: the module or function does not exist, the result is not a source, its
        images in memory are not uint8 (N, H, W, C), each with a label, or the code
        raised.
    """
    open_source = fields.import_custom(data.name, "data.name")
    if not callable(open_source):
        raise UserError(
            f"data.name={data.name!r} is {open_source!r}: it must be a function of "
            "`config.data` and a split expression"
        )
    labelled = data.has_labels
    with guarded(data.name):
        source = open_source(data, split)
        members = [name for name in _MEMBERS if labelled or name != "labels"]
        missing = [name for name in members if not hasattr(source, name)]
    missing += [
        name for name in ("__len__", "__getitem__") if not hasattr(type(source), name)
    ]
    if missing:
        error = NoLabels if missing == ["labels"] else UserError
        raise error(
            f"data.name={data.name!r} returned {type(source).__name__}, which lacks "
            f"{', '.join(missing)}: see Source in vit_jax/data/sources/base.py"
        )
    with guarded(data.name):
        _check_arrays(data.name, source, labelled)
    with_masks = bool(data.mask_key)
    if isinstance(source, arrays.ArraySource) and not with_masks:
        return source  # It runs no more user code.
    return CustomSource(data.name, source, labelled, with_masks)


@dataclasses.dataclass(frozen=True)
class CustomSource(Source):
    """Wraps a user's source, so that its errors become one line with its name.

    The optional methods are those of the user's class if it has them, else of `Source`.

    Attributes:
      name: value of `data.name`.
      source: result of the user's function.
      labelled: whether labels are read.
      with_masks: whether masks are read.
    """

    name: str
    source: object
    labelled: bool = True
    with_masks: bool = False

    @property
    def class_names(self):
        return self.source.class_names

    @property
    def class_colors(self):
        return getattr(self.source, "class_colors", ())

    @property
    def images(self):
        # With masks, records are read one by one.
        return None if self.with_masks else self.source.images

    @property
    def labels(self):
        return self.source.labels if self.labelled else None

    def __len__(self) -> int:
        with guarded(self.name):
            return len(self.source)

    def __getitem__(self, i: int) -> dict:
        with guarded(self.name, f" for record {i}"):
            item = self.source[i]
            checked = ("label", "mask")
            record = {key: item[key] for key in item if key not in checked}
            if self.with_masks:
                if not isinstance(item.get("mask"), bytes | np.ndarray):
                    raise TypeError('"mask" is missing, or neither bytes nor an array')
                record["mask"] = item["mask"]
            if not isinstance(record["image"], bytes | np.ndarray):
                raise TypeError('"image" is neither bytes nor an array')
            if self.labelled:
                if "label" not in item:
                    raise NoLabels(
                        f'data.name={self.name!r} gives record {i} no "label": add it'
                    )
                record["label"] = _whole(item["label"])
            return record

    def describe(self, i: int) -> str:
        with guarded(self.name, f" for record {i}"):
            return str(self.source.describe(i))

    def record_id(self, i: int) -> str:
        with guarded(self.name, f" for record {i}"):
            return str(self.source.record_id(i))

    def known_labels(self) -> np.ndarray | list[list[int]] | None:
        return self._call("known_labels") if self.labelled else None

    def read(self, numbers: range) -> list[dict]:
        return self._call("read", numbers)

    def locate(
        self, record_ids: Sequence[str]
    ) -> Integer[np.ndarray, " M"] | list[int]:
        # A KeyError means a record that the data set lacks.
        return self._call("locate", record_ids, known=(KeyError,))

    def entries(self) -> Entries:
        return self._call("entries")

    def split_numbering(self) -> Numbering | None:
        return self._call("split_numbering")

    def read_feature(self, name: str) -> list | None:
        return self._call("read_feature", name)

    def _call(self, name: str, *args, known: tuple[type[Exception], ...] = ()):
        """Calls the user's method of that name if it exists, else that of `Source`."""
        method = getattr(self.source, name, None)
        if method is None:
            return getattr(super(), name)(*args)
        with guarded(self.name, known=known):
            return method(*args)


def _whole(label) -> int:
    """Converts a whole number of any type to int; raises TypeError for other values."""
    try:
        return operator.index(label)
    except TypeError:
        value = np.asarray(label)
        if value.size != 1 or value.dtype.kind not in "buif" or value.item() % 1:
            raise
        return int(value.item())


def _check_arrays(name: str, source, labelled: bool) -> None:
    """Raises UserError if images or labels in memory have a wrong type or shape."""
    where, labels = f"data.name={name!r} returned", source.labels if labelled else None
    images = source.images
    if labelled and (labels is not None or images is not None):
        if not hasattr(labels, "dtype"):
            raise UserError(
                f"{where} labels of type {type(labels).__name__}; make them a NumPy array "
                "of integers"
            )
        arrays.check_labels(f"{where} ", np.asarray(labels), source.class_names)
    if images is None:
        return
    if images.dtype.name not in bands.WHITE or images.ndim != 4:
        raise UserError(
            f"{where} images={arrays.describe(images)}: not uint8 or uint16 (N, H, W, C); "
            "convert them, or use open_arrays of vit_jax.data.sources.arrays"
        )
    if labelled and len(labels) != len(images) or len(images) != len(source):
        number = f", {len(labels)} labels" if labelled else ""
        raise UserError(
            f"{where} {len(images)} images{number} and a length of {len(source)}; make "
            "them equal"
        )


def guarded(name: str, during: str = "", known: tuple[type[Exception], ...] = ()):
    """Returns a context that converts exceptions of the user's source into one line.

    Args:
      name: value of `data.name`.
      during: name of the record that is read; then OSError and DamagedImage pass
        through.
      known: further exceptions that pass through.
    """
    damaged = (OSError, DamagedImage) if during else ()
    return fields.guarded(f"data.name={name!r}", during, (*known, *damaged))


CUSTOM = SourceType(
    open=open_custom,
    help="The source that your function returns.",
    has_masks=True,
    numbered=False,  # Its code may return anything.
)
