"""Base class of fields: arrays of a batch besides the image."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from vit_jax.data.config import DataConfig
from vit_jax.data.sources.base import Source
from vit_jax.data.transforms.base import HostTransform, Transform

Spec = tuple[tuple[int, ...], str]  # Shape and dtype of a row.


@dataclasses.dataclass(frozen=True)
class Field(abc.ABC):
    """An array of a batch with a row per image; objects are sent to loader processes.

    Attributes:
      name: name of the array in a batch.
      blank: value of rows without a record.
      in_eval: whether batches of evaluations have the field too.
      moves: whether transforms that move pixels change the field, such as a mask; see
        `move`.
    """

    name: ClassVar[str]
    blank: ClassVar[float] = 0
    in_eval: ClassVar[bool] = False
    moves: ClassVar[bool] = False

    @classmethod
    @abc.abstractmethod
    def of(cls, data: DataConfig, source: Source) -> "Field | None":
        """Returns the field of a split; None if the config does not enable it.

        Raises:
          UserError: the records lack what the field needs.
        """

    @classmethod
    def part(cls, data: DataConfig) -> str:
        """Returns the part of a fingerprint that covers its values; "" if none does.

        Parts are "labels" and the names in `Entries.more`.
        """
        return ""

    @classmethod
    def checksums(cls, data: DataConfig) -> dict[str, int]:
        """Returns checksums of files that the field needs, by their key of `data`."""
        return {}

    @classmethod
    def missing(cls, data: DataConfig) -> str:
        """Returns why the config does not enable the field, and the remedy."""
        raise NotImplementedError

    @classmethod
    def check(cls, ops: Sequence[Transform], data: DataConfig) -> None:
        """Raises UserError if a transform of the training line does not suit the field."""

    @abc.abstractmethod
    def spec(self, size: tuple[int, int]) -> Spec:
        """Returns shape and dtype of a row; `size` is height and width of the image."""

    @abc.abstractmethod
    def read(self, record: Mapping[str, Any], size: tuple[int, int] | None) -> Any:
        """Reads and checks the value of a record.

        Args:
          record: an item of a source.
          size: height and width of its image before all transforms; None if unknown. It
            is known for a field that `moves`.

        Raises:
          DamagedImage: the value cannot be read.
          UserError: the value contradicts the config; the loader adds the record's
            name.
        """

    def seen_by(self, op: HostTransform) -> bool:
        """Returns whether a transform also gets the value of this field."""
        return False

    def move(
        self, value: Any, op: HostTransform, rng: np.random.Generator, *seen: Any
    ) -> Any:
        """Applies a transform to the value of a field that `moves`.

        Args:
          value: output of `read`, or of the previous transform.
          op: transform that moves pixels.
          rng: generator in the state that it had for the image, for the same choices.
          seen: values of the fields that are `seen_by` the transform.
        """
        return op(value, rng, *seen)

    def row(self, value: Any, rng: np.random.Generator) -> Any:
        """Returns the row of a batch; `rng` has already been used for the image."""
        return value

    def column(self, source: Source) -> np.ndarray | None:
        """Returns the rows of all records if they are in memory, else None."""
        return None

    def inspect(self, source: Source, records: Sequence[int]) -> None:
        """Warns of suspicious values in some records before training begins."""

    def empty(self, rows: int, size: tuple[int, int]) -> np.ndarray:
        """Returns rows of the value `blank`, without records."""
        shape, dtype = self.spec(size)
        return np.full((rows, *shape), self.blank, dtype)
