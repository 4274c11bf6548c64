"""A data set that lies in memory as one array, so that a batch is one gather."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer, UInt8

from vit_jax.data.splits import Numbering


@dataclasses.dataclass(frozen=True)
class ArraySource:
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

    def describe(self, i: int) -> str:
        return f"{self.name} record {i}"

    def record_id(self, i: int) -> str:
        return self.numbering.record_id(i)

    def locate(self, record_ids: Sequence[str]) -> Integer[np.ndarray, " M"]:
        return self.numbering.locate(record_ids)
