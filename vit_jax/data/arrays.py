"""A data set that lies in memory as one array, so that a batch is one gather."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Integer, UInt8

from vit_jax.data.fingerprint import Entries, in_memory
from vit_jax.data.splits import Numbered, Numbering


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
      arrays: split name -> images, uint8 (N, H, W, C), and labels, integers (N,).
      split: split expression.
      name: of the data set, for messages.
      class_names: in label order; may be empty.

    Raises:
      UserError: no such split, or it selects no record.
    """
    sizes = {key: len(labels) for key, (_, labels) in arrays.items()}
    numbering = Numbering.of(split, sizes, name)
    pick = lambda which: np.concatenate(
        [arrays[key][which][part.start : part.stop] for key, part in numbering.parts]
    )
    title = f"{name} {split}"
    return ArraySource(title, pick(0), pick(1), tuple(class_names), numbering)
