"""Other ways to look at a source: prepared otherwise, in part, with other labels.

Letters: N records, R of them, K classes.
"""

import dataclasses
import functools

import numpy as np
from jaxtyping import Integer

from vit_jax.data import sources
from vit_jax.weights.pretrained import Preprocess, prepare_image


@dataclasses.dataclass(frozen=True)
class Travelled:
    """A host operation: what travels with weights, see `pretrained.prepare_image`."""

    preprocess: Preprocess
    channels: int

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return prepare_image(image, self.preprocess, self.channels)


@dataclasses.dataclass(frozen=True)
class Part:
    """Some records of a source, in their order.

    Attributes:
      source: all records.
      rows: numbers of those taken.
    """

    source: sources.Source
    rows: Integer[np.ndarray, " R"]

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.source.class_names

    @functools.cached_property
    def images(self) -> np.ndarray | None:
        return None if self.source.images is None else self.source.images[self.rows]

    @functools.cached_property
    def labels(self) -> np.ndarray | None:
        return None if self.source.labels is None else self.source.labels[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        return self.source[int(self.rows[i])]

    def describe(self, i: int) -> str:
        return self.source.describe(int(self.rows[i]))

    def record_id(self, i: int) -> str:
        return self.source.record_id(int(self.rows[i]))


@dataclasses.dataclass(frozen=True)
class Reordered:
    """All records of a source, whose classes have other numbers.

    Attributes:
      source: the records.
      class_names: in the order of the new numbers.
      numbers: the new number of each class.
    """

    source: sources.Source
    class_names: tuple[str, ...]
    numbers: Integer[np.ndarray, " K"]

    @property
    def images(self) -> np.ndarray | None:
        return self.source.images

    @functools.cached_property
    def labels(self) -> np.ndarray | None:
        labels = self.source.labels
        return None if labels is None else self.numbers[labels].astype(labels.dtype)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> dict:
        record = self.source[i]
        if not 0 <= record["label"] < len(self.numbers):
            return record  # Which whoever reads it refuses.
        return record | {"label": int(self.numbers[record["label"]])}

    def describe(self, i: int) -> str:
        return self.source.describe(i)

    def record_id(self, i: int) -> str:
        return self.source.record_id(i)
