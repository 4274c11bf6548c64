"""A data set that lies in memory as one array, so that a batch is one gather."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Integer, UInt8

from vit_jax.data.fingerprint import Entries, in_memory
from vit_jax.data.splits import Numbered, Numbering
from vit_jax.errors import UserError

_CHANNELS = (1, 3)


@dataclasses.dataclass(frozen=True)
class ArraySource(Numbered):
    """Images and labels in memory.

    Attributes:
      name: data set and split, for messages.
      images: uint8, records by height by width by channels.
      labels: class numbers, one a record.
      class_names: may be empty.
      numbering: which records of the data set these are; else each is its own number.
    """

    name: str
    images: UInt8[np.ndarray, "N H W C"]
    labels: Integer[np.ndarray, " N"]
    class_names: tuple[str, ...] = ()
    numbering: Numbering | None = None

    def __post_init__(self):
        if self.numbering is None:
            whole = Numbering(
                {self.name: len(self.labels)}, [(self.name, range(len(self.labels)))]
            )
            object.__setattr__(self, "numbering", whole)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict:
        return {"image": self.images[i], "label": int(self.labels[i])}

    def entries(self) -> Entries:
        parts = self.numbering.parts
        names = [f"{name}/{number}" for name, part in parts for number in part]
        return in_memory(names, self.labels, self.images)


def open_arrays(
    arrays: Mapping[str, tuple[np.ndarray, np.ndarray]],
    split: str,
    name: str,
    class_names: Sequence[str] = (),
) -> ArraySource:
    """Makes a source of arrays, for a source of your own (see own.py).

    Args:
      arrays: split name -> images, (N, H, W, C) or grey (N, H, W), and labels,
        integers (N,). Images are uint8, or other integers from 0 to 255, which are
        converted.
      split: split expression.
      name: of the data set, for messages.
      class_names: in label order; may be empty.

    Raises:
      UserError: no such split, or it selects no record; or the dtype, the shape, the
        length or the values of an array are not as above.
    """
    sizes = {}
    for key, (images, labels) in arrays.items():
        sizes[key] = len(images)
        _check(f"{name} {key}: ", np.asarray(images), np.asarray(labels), class_names)
    numbering = Numbering.of(split, sizes, name)

    def pick(which):
        parts = [
            np.asarray(arrays[key][which])[part.start : part.stop]
            for key, part in numbering.parts
        ]
        return np.concatenate(parts)

    images, labels = pick(0).astype(np.uint8, copy=False), pick(1)
    images = images if images.ndim == 4 else images[..., None]
    return ArraySource(f"{name} {split}", images, labels, tuple(class_names), numbering)


def _check(
    where: str, images: np.ndarray, labels: np.ndarray, class_names: Sequence[str]
) -> None:
    """Raises UserError unless images and labels are as `open_arrays` takes them."""
    if problem := _problem(images):
        raise UserError(f"{where}images={describe(images)}: {problem}")
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"{where}labels={describe(labels)}: not one whole number per image; "
            "take labels.argmax(1) of one-hot rows, labels.astype(int) of other numbers"
        )
    if len(images) != len(labels):
        raise UserError(
            f"{where}{len(images)} images, but {len(labels)} labels; give one label "
            "per image"
        )
    most = len(class_names) - 1 if class_names else np.inf
    for i in np.flatnonzero((labels < 0) | (labels > most))[:1]:
        allowed = f"0 to {most}, the number of class_names less 1"
        raise UserError(
            f"{where}record {i} has label {labels[i]}; give labels from "
            f"{allowed if class_names else '0'}"
        )


def _problem(images: np.ndarray) -> str:
    """Returns what is wrong with images, and the remedy; "" if they can be taken."""
    shape, whole = images.shape, np.issubdtype(images.dtype, np.integer)
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[-1] not in _CHANNELS):
        if len(shape) == 4 and shape[1] in _CHANNELS:
            return "channels do not stand last; take np.moveaxis(images, 1, -1)"
        return "not (N, H, W), (N, H, W, 1) or (N, H, W, 3); change the shape"
    low, high = (images.min(), images.max()) if images.size else (0, 0)
    if whole and 0 <= low <= high <= 255:
        return ""
    # Of floats nobody but the user knows what white is: 1 or 255.
    if not whole and 0 <= low <= high <= 1:
        remedy = "take (images * 255).round().astype('uint8')"
    else:
        remedy = "scale them to 0..255 and take .round().astype('uint8')"
    return f"not whole numbers from 0 to 255; {remedy}"


def describe(values: np.ndarray) -> str:
    """Returns the dtype, the shape and the range of an array, for a message."""
    text = f"{values.dtype} {values.shape}"
    if values.size and np.issubdtype(values.dtype, np.number):
        text += f" from {values.min():g} to {values.max():g}"
    return text
