"""A data set that lies in memory as one array, so that a batch is one gather."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Integer, UInt8

from vit_jax.data.fingerprint import Entries, in_memory
from vit_jax.data.splits import Numbered, Numbering
from vit_jax.errors import UserError

_CHANNELS = (1, 3)
_SHAPE = "not (N, H, W), (N, H, W, 1) or (N, H, W, 3); change the shape"


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
        converted. Of a split that is not selected only the length is checked: its
        labels may be None or placeholders.
      split: split expression.
      name: of the data set, for messages.
      class_names: in label order; may be empty.

    Raises:
      UserError: no such split, or it selects no record; or the dtype, the shape, the
        length or the values of an array are not as above.
    """
    sizes = {}
    for key, (images, labels) in arrays.items():
        images = np.asarray(images)
        if not images.ndim:
            raise UserError(f"{name} {key}: images={describe(images)}: {_SHAPE}")
        sizes[key] = len(images)
        if np.ndim(labels) and len(labels) != len(images):
            raise UserError(
                f"{name} {key}: {len(images)} images, but {len(labels)} labels; give "
                "one label per image"
            )
    numbering = Numbering.of(split, sizes, name)
    for key in dict(numbering.parts):
        images, labels = map(np.asarray, arrays[key])
        if problem := _problem(images):
            raise UserError(f"{name} {key}: images={describe(images)}: {problem}")
        check_labels(f"{name} {key}: ", labels, class_names)

    image_parts, label_parts = [], []
    for key, part in numbering.parts:
        images, labels = (np.asarray(a)[part.start : part.stop] for a in arrays[key])
        images = images if images.ndim == 4 else images[..., None]
        image_parts.append(images.astype(np.uint8, copy=False))
        label_parts.append(labels)
    shapes = sorted({images.shape[1:] for images in image_parts})
    if len(shapes) > 1:
        raise UserError(
            f"{name} {split}: images of the shapes {' and '.join(map(str, shapes))}; "
            "make them equal, or open the splits one by one"
        )
    return ArraySource(
        f"{name} {split}",
        np.concatenate(image_parts),
        np.concatenate(label_parts),
        tuple(class_names),
        numbering,
    )


def check_labels(where: str, labels: np.ndarray, class_names: Sequence[str]) -> None:
    """Raises UserError unless labels are one class number per image.

    Args:
      where: start of the message.
      labels: to check.
      class_names: in label order; empty if unknown.
    """
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(
            f"{where}labels={describe(labels)}: not one whole number per image; "
            "take labels.argmax(1) of one-hot rows, labels.astype(int) of other numbers"
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
    shape, kind = images.shape, images.dtype.kind
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[-1] not in _CHANNELS):
        if len(shape) == 4 and shape[1] in _CHANNELS:
            return "channels do not stand last; take np.moveaxis(images, 1, -1)"
        return _SHAPE
    if images.dtype == np.uint8:  # The range cannot be wrong: no need to read a memmap.
        return ""
    if kind not in "buif":
        return "not whole numbers from 0 to 255; make them one array of uint8"
    whole = kind in "ui"
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
