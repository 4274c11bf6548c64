"""Loads a record of a source as a row of each array of a batch.

Letters: b rows of a batch, B records.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Integer

from vit_jax.data import decode
from vit_jax.data.config import DataConfig
from vit_jax.data.fields.base import Field, Spec
from vit_jax.data.fields.image import Image
from vit_jax.data.sources.base import Source, name_of, read_record, warn
from vit_jax.data.transforms import parse
from vit_jax.data.transforms.base import TooSmall, Transform
from vit_jax.errors import UserError

Batch = dict[str, np.ndarray]

# Keeps augmentation's random bits apart from those of other uses of the same seed.
_STREAM = 0x617567


@dataclasses.dataclass(frozen=True)
class Loader:
    """Loads records of a source; objects are sent to loader processes.

    Attributes:
      source: split to read.
      data: `config.data`.
      key: config key of the transforms, for messages.
      ops: host transforms in order.
      specs: name -> shape and dtype of each array made from an image.
      seed: seed of random choices.
      fields: fields of a record that a batch has besides the image.
      damaged: records that were skipped.
    """

    source: Source
    data: DataConfig
    key: str
    ops: Sequence[Transform]
    specs: dict[str, Spec]
    seed: int = 0
    fields: Sequence[Field] = ()
    damaged: set[int] = dataclasses.field(default_factory=set)

    @property
    def image(self) -> Image:
        """The field from which transforms make the arrays."""
        return Image(self.data)

    @property
    def gathers(self) -> bool:
        """Whether a batch is gathered from arrays in memory in one step."""
        every = (self.image, *self.fields)
        return not self.ops and all(f.column(self.source) is not None for f in every)

    def gather(self, records: Integer[np.ndarray, " B"]) -> Batch:
        """Returns a batch of records that are in memory."""
        images = self.image.column(self.source)
        self._check_shapes({"image": images.shape[1:]}, "images")
        self._check_dtypes({"image": images}, "images")
        batch = {"image": images[records], "skipped": np.zeros(len(records), np.int32)}
        for field in self.fields:
            _, dtype = field.spec(images.shape[1:3])
            batch[field.name] = field.column(self.source)[records].astype(dtype)
        return batch

    def of_step(self, step: int) -> "Loader":
        """Returns the loader for the batch of a step."""
        return self

    def fill(self, batch: Batch, row: int, record: int, position: int) -> None:
        """Loads a record into a row of a batch; see `load_next`."""
        for name, values in self.load_next(record, position).items():
            batch[name][row] = values

    def load_next(self, record: int, position: int) -> Batch:
        """Loads a record or, if damaged ones are skipped, the next readable one.

        Returns:
          The arrays of `load`, and "skipped", the number of damaged records before it.
        """
        examples = len(self.source)
        for skipped in range(examples):
            here = (record + skipped) % examples
            try:
                return self.load(here, position) | {"skipped": skipped}
            except decode.DamagedImage as error:
                self.refuse(here, error)
        raise UserError(f"none of the {examples} records can be read")

    def load(self, record: int, position: int) -> Batch:
        """Reads and transforms a record; its position and the seed fix the random choices.

        Raises:
          DamagedImage: the record cannot be read.
          UserError: a field, or the shape of an array, contradicts the config.
        """
        item = read_record(self.source, record)
        name = name_of(self.source, record)
        bits = np.random.Philox(
            key=np.array([self.seed % 2**64, _STREAM], np.uint64),
            counter=np.array([0, 0, 0, position], np.uint64),
        )
        rng = np.random.Generator(bits)
        try:
            image, ops = self._open(record, item, rng)
            # Unknown if the first transform has read the file.
            size = image.shape[:2] if ops is self.ops else None
            values = {f.name: f.read(item, size) for f in self.fields}
            image, values = self._transform(image, values, ops, rng)
            rows = {f.name: f.row(values[f.name], rng) for f in self.fields}
        except TooSmall as error:
            raise UserError(f"{self.key}: {name}: {error}") from error
        except UserError as error:  # Raised by a field or a user's transform.
            raise UserError(f"{name}: {error}") from error
        arrays = image if isinstance(image, dict) else {"image": image}
        self._check_shapes({key: a.shape for key, a in arrays.items()}, name)
        self._check_dtypes(arrays, name)
        return arrays | rows

    def _transform(
        self, image, values: dict[str, Any], ops: Sequence[Transform], rng
    ) -> tuple[np.ndarray | dict[str, np.ndarray], dict[str, Any]]:
        """Applies transforms to an image, and to the fields that they move."""
        moved = [field for field in self.fields if field.moves]
        for op in ops:
            # So that masks are transformed with the same random choices.
            same = [copy.deepcopy(rng) for _ in moved if op.moves_pixels]
            seen = [values[f.name] for f in self.fields if f.seen_by(op)]
            image = op(image, rng, *seen)
            for field, equal in zip(moved, same):
                value = values[field.name]
                values[field.name] = field.move(value, op, equal, *seen)
        return image, values

    def _open(
        self, record: int, item: dict, rng: np.random.Generator
    ) -> tuple[np.ndarray | dict[str, np.ndarray], Sequence[Transform]]:
        """Returns pixels, and the transforms that remain to be applied to them."""
        data, value = self.data, item["image"]
        upright = self.image.is_upright(value, self.source, record)
        by_op = upright and isinstance(value, bytes) and self.image.is_decoded(value)
        # Fields that move with the pixels need the size of the image.
        by_op = by_op and not any(field.moves for field in self.fields)
        if by_op and self.ops and self.ops[0].from_file:
            how = data.channels, rng, data.max_megapixels
            return self.ops[0].from_file(value, *how), self.ops[1:]
        return self.image.read(item, None), self.ops

    def refuse(self, record: int, error: decode.DamagedImage) -> None:
        """Raises UserError for a damaged record, unless the config says to skip it."""
        name = name_of(self.source, record)
        if self.data.on_error == "raise":
            raise UserError(
                f"{name} {error}: mend or remove it, or skip it with "
                "--config.data.on_error=skip"
            ) from error
        if self.data.on_error == "skip":
            return
        self.damaged.add(record)
        count, most = len(self.damaged), max(1, len(self.source) // 100)
        if count > most:
            raise UserError(
                f"{name} {error}, like {count - 1} others: more than 1 % of "
                f"{len(self.source):,} images; mend or remove them, or skip them with "
                "--config.data.on_error=skip"
            ) from error
        warn(
            f"{name} {error}: left out, {count} of at most {most} "
            "(--config.data.on_error=raise ends the run instead)",
            about=f"damaged {self.source.describe(record)}",
        )

    def empty(self, rows: int) -> Batch:
        """Returns a batch of blank rows."""
        arrays = {
            name: np.zeros((rows, *shape), dtype)
            for name, (shape, dtype) in self.specs.items()
        }
        arrays["skipped"] = np.zeros(rows, np.int32)
        size = self.specs["image"][0][-3:-1]
        return arrays | {f.name: f.empty(rows, size) for f in self.fields}

    def _check_dtypes(self, arrays: Batch, name: str) -> None:
        dtypes = {key: dtype for key, (_, dtype) in self.specs.items()}
        self.image.check_dtypes(arrays, dtypes, f"{self.key} gives {name}")

    def _check_shapes(self, shapes: dict[str, tuple[int, ...]], name: str) -> None:
        made = {name: shape for name, (shape, _) in self.specs.items()}
        if shapes == made:
            return
        actual, wanted = map(parse.in_words, (shapes, made))
        says = "data.image_size and data.channels say"
        remedy = (
            "end the operations with resize, a crop or pad, or change data.image_size"
        )
        if self.ops and self.ops[-1].makes_arrays:
            says, remedy = "its `output_shapes` says", "make them equal"
        raise UserError(
            f"{self.key} gives {name} of {actual} (height, width, channels), but {says} "
            f"{wanted}: {remedy}"
        )
