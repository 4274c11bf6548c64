"""From record numbers to rows of a batch: read, decode, transform, check."""

import dataclasses

import numpy as np
from jaxtyping import Integer

from vit_jax.data import decode, host_ops, sources
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError

Batch = dict[str, np.ndarray]

# Keeps augmentation's random bits apart from those of other uses of the same seed.
_STREAM = 0x617567


@dataclasses.dataclass(frozen=True)
class Loader:
    """Loads records of a source as the config says; travels to loader processes.

    Attributes:
      source: the data set.
      ops: host operations in order.
      key: config key of the operations, for messages.
      shape: height, width and channels of the images that it makes.
      classes: number of classes.
      on_error: "raise" or "skip".
      seed: of the run.
    """

    source: sources.Source
    ops: tuple
    key: str
    shape: tuple[int, int, int]
    classes: int
    on_error: str
    seed: int

    @classmethod
    def from_config(
        cls,
        source: sources.Source,
        data: DataConfig,
        key: str,
        ops: tuple,
        seed: int,
        size: tuple[int, int] | None = None,
    ) -> "Loader":
        """Takes what it needs of `config.data`, as plain values.

        `size` is of the loaded images, where it is not `data.image_size`.
        """
        shape = (*(size or data.image_size), data.channels)
        return cls(source, ops, key, shape, data.classes, data.on_error, seed)

    @property
    def gathers(self) -> bool:
        """Whether a batch is one gather from memory."""
        return self.source.images is not None and not self.ops

    def gather(self, records: Integer[np.ndarray, " B"]) -> Batch:
        """Returns image, label and skipped of records that lie in memory."""
        self._check_shape(self.source.images.shape[1:], "images")
        return {
            "image": self.source.images[records],
            "label": self.source.labels[records].astype(np.int32),
            "skipped": np.zeros(len(records), np.int32),
        }

    def load(self, record: int, position: int) -> tuple[np.ndarray, int]:
        """Reads and transforms one record.

        Args:
          record: its number.
          position: of the row in the run; with the seed it fixes the random choices.

        Returns:
          Image of `shape`, and label.

        Raises:
          DamagedImage: the record cannot be read.
          UserError: the label or the image's size is not as the config says.
        """
        try:
            item = self.source[record]
        except OSError as error:
            raise decode.DamagedImage(f"cannot be read ({error})") from error
        except Exception as error:  # The reader's own fault: it goes on as it is.
            error.add_note(f"while reading {self._name(record)}")
            raise
        name = self._name(record)
        sources.check_label(item["label"], self.classes, name)
        bits = np.random.Philox(
            key=np.array([self.seed % 2**64, _STREAM], np.uint64),
            counter=np.array([0, 0, 0, position], np.uint64),
        )
        rng = np.random.Generator(bits)
        try:
            image, ops = self._open(item["image"], rng)
            for op in ops:
                image = op(image, rng)
        except host_ops.TooLong as error:
            raise decode.DamagedImage(str(error)) from error
        except host_ops.TooSmall as error:
            raise UserError(f"{self.key}: {name}: {error}") from error
        self._check_shape(image.shape, name)
        return image, item["label"]

    def _open(
        self, data: bytes | np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, tuple]:
        """Returns pixels, and the operations that are still to be done on them."""
        fused = self.ops and hasattr(self.ops[0], "from_file")
        if fused and isinstance(data, bytes):
            return self.ops[0].from_file(data, self.shape[-1], rng), self.ops[1:]
        return decode.decode(data, self.shape[-1]), self.ops

    def refuse(self, record: int, error: decode.DamagedImage) -> None:
        """Raises UserError for a damaged record, unless the config says to skip it."""
        if self.on_error == "raise":
            raise UserError(
                f"{self._name(record)} {error}: mend or remove it, or go on "
                "without with --config.data.on_error=skip"
            ) from error

    def empty(self, rows: int) -> Batch:
        """Returns a batch of blank rows."""
        return {
            "image": np.zeros((rows, *self.shape), np.uint8),
            "label": np.zeros(rows, np.int32),
            "skipped": np.zeros(rows, np.int32),
        }

    def _name(self, record: int) -> str:
        """Names a record for a message, by data set, split and number."""
        name = self.source.describe(record)  # Of a file its path, which has no number.
        return name if str(record) in name.split() else f"{name} (record {record})"

    def _check_shape(self, shape: tuple[int, ...], name: str) -> None:
        if tuple(shape) != self.shape:
            found, wanted = ("x".join(map(str, s)) for s in (shape, self.shape))
            raise UserError(
                f"{self.key} gives {name} of {found} (height, width, channels), but "
                f"data.image_size and data.channels say {wanted}: end the operations "
                "with resize or a crop, or change data.image_size"
            )
