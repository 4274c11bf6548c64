"""A record of a source -> the arrays of a batch's row.

Letters: b rows of a batch, B records.
"""

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int16, Integer

from vit_jax.data import bands, decode, masks
from vit_jax.data.captions import TEXT, Captions
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.base import Source, check_label, name_of, read_record, warn
from vit_jax.data.transforms import host as host_transforms
from vit_jax.data.transforms import parse
from vit_jax.data.transforms.base import Transform
from vit_jax.errors import UserError

Batch = dict[str, np.ndarray]

# Keeps augmentation's random bits apart from those of other uses of the same seed.
_STREAM = 0x617567
_INSPECTED = 1_000  # Images of a split whose orientation tags are read.


@dataclasses.dataclass(frozen=True)
class Loader:
    """Loads records of a source; is sent to loader processes.

    Attributes:
      key: config key of the transforms, for messages.
      ops: host transforms in order.
      shapes: name -> shape of each array made of an image.
      captions: makes the tokens of captions; None: they are not read.
      with_masks: whether label maps are loaded.
      damaged: records that were skipped.
    """

    source: Source
    data: DataConfig
    key: str
    ops: Sequence[Transform]
    shapes: dict[str, tuple[int, ...]]
    seed: int = 0
    captions: Captions | None = None
    with_masks: bool = False
    damaged: set[int] = dataclasses.field(default_factory=set)

    @property
    def packs(self) -> int:
        """Number of images that share a row of the arrays made of them."""
        return self.ops[-1].packs if self.ops else 1

    def ending_in(self, op: Transform) -> "Loader":
        """Returns the loader with another last transform."""
        ops = (*self.ops[:-1], op)
        return dataclasses.replace(
            self, ops=ops, shapes=op.output_shapes(self.data.channels)
        )

    @property
    def gathers(self) -> bool:
        """Whether a batch is one gather from memory."""
        images, more = self.source.images, self.ops or self.captions or self.with_masks
        # Floats, fractions of white, are scaled one by one.
        return images is not None and images.dtype != np.float32 and not more

    def gather(self, records: Integer[np.ndarray, " B"]) -> Batch:
        """Returns a batch of records that lie in memory."""
        images = self.source.images
        self._check_shapes({"image": images.shape[1:]}, "images")
        self._check_depth({"image": images}, "images")
        batch = {"image": images[records], "skipped": np.zeros(len(records), np.int32)}
        if self.data.has_labels:
            batch["label"] = self.source.labels[records].astype(np.int32)
        return batch

    def load(self, record: int, position: int) -> Batch:
        """Reads and transforms a record; its position and the seed fix the random choices.

        Raises:
          DamagedImage: the record cannot be read.
          UserError: the label, the mask or an array's shape contradicts the config.
        """
        item = read_record(self.source, record)
        name = name_of(self.source, record)
        label = {}
        if self.data.has_labels:
            label["label"] = self._label(item["label"], name)
        bits = np.random.Philox(
            key=np.array([self.seed % 2**64, _STREAM], np.uint64),
            counter=np.array([0, 0, 0, position], np.uint64),
        )
        rng = np.random.Generator(bits)
        try:
            image, ops = self._open(record, item["image"], rng)
            if self.with_masks:
                label_map = masks.read(item["mask"], self.data, image.shape[:2])
                image, label["label_map"] = self._transform_pair(image, label_map, rng)
            else:
                for op in ops:
                    image = op(image, rng)
        except host_transforms.TooSmall as error:
            raise UserError(f"{self.key}: {name}: {error}") from error
        except UserError as error:  # Raised by a transform of the user's.
            raise UserError(f"{name}: {error}") from error
        arrays = image if isinstance(image, dict) else {"image": image}
        self._check_shapes({key: a.shape for key, a in arrays.items()}, name)
        self._check_depth(arrays, name)
        if self.captions:
            arrays[TEXT] = self.captions(item, rng)
        return arrays | label

    def _transform_pair(
        self, image: np.ndarray, label_map: masks.LabelMap, rng: np.random.Generator
    ) -> tuple[np.ndarray, Int16[np.ndarray, "h w"]]:
        """Applies the transforms to an image, and those that move pixels to its mask."""
        for op in self.ops:
            same = copy.deepcopy(rng)  # For the same choices.
            seen = (label_map,) if op.sees_mask else ()
            image = op(image, rng, *seen)
            if op.moves_pixels:
                label_map = op(label_map, same, *seen)
        return image, label_map[..., 0]

    def _label(
        self, label: int | Sequence[int], name: str
    ) -> int | Integer[np.ndarray, " K"]:
        """Returns the class, or 0 or 1 for each class."""
        for each in label if self.data.multi_label else [label]:
            check_label(each, self.data.num_classes, name)
        if not self.data.multi_label:
            return label
        present = np.zeros(self.data.num_classes, np.int32)
        present[list(label)] = 1
        return present

    def _open(
        self, record: int, data: bytes | np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray | dict[str, np.ndarray], tuple]:
        """Returns pixels, and the transforms that remain to be applied to them."""
        exif, encoded = self.data.exif, isinstance(data, bytes)
        inspected = exif or not record % -(-len(self.source) // _INSPECTED)
        tagged = inspected and encoded and decode.orientation(data) != 1
        if tagged and not exif:
            warn(
                f"{name_of(self.source, record)} is upright only by its orientation tag, "
                "which is not read: --config.data.exif=True turns such images",
                about="data.exif",
            )
        form = bands.PixelFormat.of(self.data)
        by_op = encoded and self.ops and self.ops[0].from_file and form.is_decoded(data)
        by_op = by_op and not self.with_masks  # The size of the image must be known.
        if by_op and not (tagged and exif):
            how = self.data.channels, rng, self.data.max_megapixels
            return self.ops[0].from_file(data, *how), self.ops[1:]
        return bands.read(data, form, exif=exif), self.ops

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
                f"{name} {error}, as {count - 1} others: more than 1 % of "
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
            name: np.zeros((rows // self.packs, *shape), self._dtype(name))
            for name, shape in self.shapes.items()
        }
        if self.captions:
            shape = rows, self.captions.num_tokens
            arrays[TEXT] = np.zeros(shape, np.int32)
        arrays["skipped"] = np.zeros(rows, np.int32)
        if self.with_masks:
            shape = rows, *self.shapes["image"][:2]
            arrays["label_map"] = np.full(shape, masks.IGNORED, np.int16)
        if self.data.has_labels:
            classes = (self.data.num_classes,) if self.data.multi_label else ()
            arrays["label"] = np.zeros((rows, *classes), np.int32)
        return arrays

    def _dtype(self, array: str) -> str:
        return (
            "int32" if self.ops and array in self.ops[-1].numbers else self.data.pixels
        )

    def _check_depth(self, arrays: Batch, name: str) -> None:
        for key, array in arrays.items():
            if array.dtype != self._dtype(key):
                raise UserError(
                    f"{self.key} gives {name} of {array.dtype}, but data.pixels="
                    f"{self.data.pixels!r}: set --config.data.pixels={array.dtype}, or "
                    "mend the transform"
                )

    def _check_shapes(self, shapes: dict[str, tuple[int, ...]], name: str) -> None:
        if shapes == self.shapes:
            return
        actual, wanted = map(parse.in_words, (shapes, self.shapes))
        says = "data.image_size and data.channels say"
        remedy = (
            "end the operations with resize, a crop or pad, or change data.image_size"
        )
        if self.ops and self.ops[-1].output_shapes:
            says, remedy = "its `output_shapes` says", "make them equal"
        raise UserError(
            f"{self.key} gives {name} of {actual} (height, width, channels), but {says} "
            f"{wanted}: {remedy}"
        )
