"""A user's own data set: data.name="my_module:open_source".

The name runs code: the module is imported and the function called, with the rights of
whoever started the command. What that code raises ends the command with one line.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Integer

from vit_jax.config import fields
from vit_jax.data import captions
from vit_jax.data.config import DataConfig
from vit_jax.data.decode import DamagedImage
from vit_jax.data.fingerprint import Entries
from vit_jax.data.sources import arrays
from vit_jax.data.sources.base import SOURCES, Source, SourceType
from vit_jax.data.splits import Numbering
from vit_jax.errors import NoLabels, UserError

_MEMBERS = ("class_names", "images", "labels", "describe", "record_id")


def open_custom(data: DataConfig, split: str):
    """Calls the user's function with `config.data` and the split expression.

    Returns:
      The `Source` that it returns.

    Raises:
      NoLabels: the source says nothing of labels.
      UserError: no such module or function, what it returns is no source, its images in
        memory are not uint8 (N, H, W, C), each with a label, or it raised.
    """
    open_source = fields.import_custom(data.name, "data.name")
    if not callable(open_source):
        raise UserError(
            f"data.name={data.name!r} is {open_source!r}: it must be a function of "
            "`config.data` and a split expression"
        )
    labelled = bool(data.num_classes)
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
    if isinstance(source, arrays.ArraySource):  # It runs no more code of theirs.
        return source
    return CustomSource(data.name, source, labelled)


@dataclasses.dataclass(frozen=True)
class CustomSource(Source):
    """A user's own source, whose errors name it.

    Of the methods of `Source` that its class need not have, it has the user's or else
    those of `Source`.

    Attributes:
      name: `data.name`.
      source: what the user's function returned.
      labelled: whether its labels are read.
    """

    name: str
    source: object
    labelled: bool = True

    @property
    def class_names(self):
        return self.source.class_names

    @property
    def images(self):
        return self.source.images

    @property
    def labels(self):
        return self.source.labels if self.labelled else None

    def __len__(self) -> int:
        with guarded(self.name):
            return len(self.source)

    def __getitem__(self, i: int) -> dict:
        with guarded(self.name, f" for record {i}"):
            item = self.source[i]
            image = item["image"]
            label = {"label": self._label(item, i)} if self.labelled else {}
            if not isinstance(image, bytes | np.ndarray):
                raise TypeError('"image" is neither bytes nor an array')
            texts = {k: item[k] for k in (captions.TEXT,) if k in item}
            return {"image": image, **label, **texts}

    def _label(self, item: Mapping, i: int) -> int:
        try:
            return _whole(item["label"])
        except KeyError as error:
            raise NoLabels(
                f'data.name={self.name!r} gives record {i} no "label": add it'
            ) from error

    def describe(self, i: int) -> str:
        with guarded(self.name, f" for record {i}"):
            return str(self.source.describe(i))

    def record_id(self, i: int) -> str:
        with guarded(self.name, f" for record {i}"):
            return str(self.source.record_id(i))

    def read(self, numbers: range) -> list[dict]:
        return self._theirs("read", super().read)(numbers)

    def known_labels(self) -> np.ndarray | list[list[int]] | None:
        if not self.labelled:
            return None
        return self._theirs("known_labels", super().known_labels)()

    def locate(
        self, record_ids: Sequence[str]
    ) -> Integer[np.ndarray, " M"] | list[int]:
        # Its KeyError names a record that the set lacks.
        return self._theirs("locate", super().locate, KeyError)(record_ids)

    def entries(self) -> Entries:
        return self._theirs("entries", super().entries)()

    def split_numbering(self) -> Numbering | None:
        return self._theirs("split_numbering", super().split_numbering)()

    def read_feature(self, name: str) -> list | None:
        return self._theirs("read_feature", super().read_feature)(name)

    def _theirs(self, name: str, default: Callable, *known: type[Exception]):
        """Returns the user's method of a name, guarded, or the default without one."""
        method = getattr(self.source, name, None)
        return guarded(self.name, known=known)(method) if method else default


def _whole(label) -> int:
    """Returns a label, one whole number of any type, as an int; raises TypeError for others."""
    try:
        return operator.index(label)
    except TypeError:
        value = np.asarray(label)
        if value.size != 1 or value.dtype.kind not in "buif" or value.item() % 1:
            raise
        return int(value.item())


def _check_arrays(name: str, source, labelled: bool) -> None:
    """Raises UserError for images or labels in memory that cannot be taken as they are."""
    images, labels = source.images, source.labels if labelled else None
    if labelled and (labels is not None or images is not None):
        if not hasattr(labels, "dtype"):
            raise UserError(
                f"data.name={name!r} returned labels of type {type(labels).__name__}; "
                "make them a NumPy array of integers"
            )
        arrays.check_labels(
            f"data.name={name!r} returned ", np.asarray(labels), source.class_names
        )
    if images is None:
        return
    if images.dtype != np.uint8 or images.ndim != 4:
        raise UserError(
            f"data.name={name!r} returned images={arrays.describe(images)}: not uint8 "
            "(N, H, W, C); convert them, or let open_arrays of "
            "vit_jax.data.sources.arrays do it"
        )
    if labelled and len(labels) != len(images) or len(images) != len(source):
        number = f", {len(labels)} labels" if labelled else ""
        raise UserError(
            f"data.name={name!r} returned {len(images)} images{number} and a length of "
            f"{len(source)}; make them equal"
        )


def guarded(name: str, during: str = "", known: tuple[type[Exception], ...] = ()):
    """Returns a context that converts what the user's source raises into one line.

    `during` says for which record; its OSError and DamagedImage then pass through, and so
    do the exceptions `known`.
    """
    damaged = (OSError, DamagedImage) if during else ()
    return fields.guarded(f"data.name={name!r}", during, (*known, *damaged))


SOURCES["my_module:open_source"] = SourceType(
    open=open_custom,
    pattern=fields.CUSTOM,
    help="The source that a function of your own returns.",
    numbered=False,  # It may be, but its code may do anything.
)
