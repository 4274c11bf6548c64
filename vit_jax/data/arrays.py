"""A data set that lies in memory as one array, so that a batch is one gather."""

import dataclasses

import numpy as np
from jaxtyping import Integer, UInt8


@dataclasses.dataclass(frozen=True)
class ArraySource:
    """Images and labels in memory.

    Attributes:
      name: data set and split, for messages.
      images: uint8, records by height by width by channels.
      labels: class numbers, one a record.
      class_names: may be empty.
    """

    name: str
    images: UInt8[np.ndarray, "N H W C"]
    labels: Integer[np.ndarray, " N"]
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict:
        return {"image": self.images[i], "label": int(self.labels[i])}

    def describe(self, i: int) -> str:
        return f"{self.name} record {i}"
