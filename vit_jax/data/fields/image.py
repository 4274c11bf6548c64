"""The image of a record: photographs, or images of any bands and depth (bands.py)."""

import contextlib
import dataclasses
from collections.abc import Iterable

import numpy as np

from vit_jax.data import decode
from vit_jax.data.config import DataConfig
from vit_jax.data.fields.base import Field
from vit_jax.data.sources.base import Source, name_of, warn
from vit_jax.data.transforms import where_of
from vit_jax.data.transforms.base import Transform
from vit_jax.errors import UserError

_TAGS_READ = 1_000  # Images of a split whose orientation tags are read.


@dataclasses.dataclass(frozen=True)
class Image(Field):
    """Pixels (H, W, C) of `data.pixels`, from which transforms make a batch's arrays."""

    name = "image"
    in_eval = True

    data: DataConfig

    @classmethod
    def of(cls, data, source):
        return cls(data)

    @classmethod
    def check(cls, ops, data):
        check_colors(ops, data, "data.train_transform")

    def spec(self, size):
        return (*size, self.data.channels), self.data.pixels

    @property
    def white(self) -> int:
        """The value of white."""
        return 65_535 if self.data.pixels == "uint16" else 255

    def read(self, record, size):
        data, value = self.data, record["image"]
        if self.is_decoded(value):
            limit = data.max_megapixels
            return decode.decode(
                value, data.channels, exif=data.exif, max_megapixels=limit
            )
        from vit_jax.data import bands  # Photographs do not need it.

        return bands.read(value, bands.PixelFormat.of(data), exif=data.exif)

    def is_decoded(self, value: bytes | np.ndarray) -> bool:
        """Returns whether `decode.decode` reads a file or array, as a photograph."""
        return self.data.of_photographs and decode.reads(value)

    def is_upright(
        self, value: bytes | np.ndarray, source: Source, record: int
    ) -> bool:
        """Returns whether an image is upright; warns if its tag is ignored."""
        exif = self.data.exif
        inspected = exif or not record % -(-len(source) // _TAGS_READ)
        encoded = isinstance(value, bytes)
        tagged = inspected and encoded and decode.orientation(value) != 1
        if tagged and not exif:
            warn(
                f"{name_of(source, record)} is upright only by its orientation tag, "
                "which is not read: --config.data.exif=True turns such images",
                about="data.exif",
            )
        return not (tagged and exif)

    def column(self, source):
        images = source.images
        # Floats are fractions of white, which `read` scales one by one.
        return None if images is None or images.dtype == np.float32 else images

    def check_dtypes(
        self, arrays: dict[str, np.ndarray], dtypes: dict[str, str], where: str
    ) -> None:
        """Raises UserError unless arrays have their dtypes.

        Args:
          arrays: arrays made from an image, by name.
          dtypes: dtypes of these arrays in a batch, by name.
          where: key of the transforms, and name of the record.
        """
        for name, array in arrays.items():
            if array.dtype != dtypes[name]:
                raise UserError(
                    f"{where} of {array.dtype}, but data.pixels={self.data.pixels!r}: set "
                    f"--config.data.pixels={array.dtype}, or mend the transform"
                )

    def inspect(self, source, records):
        """Warns once if at least half of the images are almost black, as 12 bits in 16.

        If all bits are read, an image with values above `data.mean` is not dark.
        """
        from vit_jax.data import bands  # Loader processes do not need it.

        mean = (1.0,) if self.data.pixels == "uint8" else self.data.mean
        odd = {}
        for i in records:
            with contextlib.suppress(OSError, decode.DamagedImage):
                value = (
                    source[i]["image"] if source.images is None else source.images[i]
                )
                odd |= {i: text} if (text := bands.doubt(value, mean)) else {}
        if 2 * len(odd) >= len(records):
            first, text = next(iter(odd.items()))
            warn(
                f"{source.describe(first)} {text}; so are {len(odd)} of {len(records)} "
                "images looked at: make their values fill the range, or estimate "
                "data.mean and data.std",
                about="dark images",
            )


def check_colors(ops: Iterable[Transform], data: DataConfig, key: str) -> None:
    """Raises UserError if a transform of colours would get other bands or more depth.

    Args:
      ops: transforms.
      data: `config.data`.
      key: key of the transforms, such as "data.train_transform".
    """
    for op in ops:
        if not op.on_colors:
            continue
        if data.channels not in (1, 3):
            raise UserError(
                f"{where_of(op, key)} changes colours, and data.channels={data.channels} "
                "is neither 1 nor 3: remove it"
            )
        if op.runs_on == "host" and data.pixels != "uint8":
            raise UserError(
                f"{where_of(op, key)} changes colours of 8 bits, and data.pixels="
                f"{data.pixels!r}: remove it, or set --config.data.pixels=uint8"
            )
