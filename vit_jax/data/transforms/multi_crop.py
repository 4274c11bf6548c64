"""Multi-crop (arXiv:2006.09882): two large and several small random parts of an image.

Sizes, areas and filter are those of DINO (arXiv:2104.14294, main_dino.py). Letters: H and
W height and width before, C channels.
"""

import dataclasses
import functools
from typing import ClassVar

import numpy as np
from jaxtyping import UInt8

from vit_jax.config.fields import key
from vit_jax.data import decode
from vit_jax.data.transforms.base import (
    Given,
    check_arguments,
    check_part,
    check_size,
    pair,
)
from vit_jax.data.transforms.host import Box, InceptionCrop, decode_parts

Image = UInt8[np.ndarray, "H W C"]
Views = dict[str, UInt8[np.ndarray, "N h w C"]]

_LARGE = 2


@dataclasses.dataclass(frozen=True)
class MultiCrop:
    """Crops two large and some small random parts and resizes them.

    It returns "image", the two large crops (2, height, width, C), and "small_crops"
    (num_small, height, width, C), unless there are none.

    Args:
      size: height and width of the large crops in pixels, or one number for both.
      small_size: the same of the small ones.
      num_small: number of small crops.
      area: smallest and largest part of the image's area, of the large crops.
      small_area: the same of the small ones.
      ratio: smallest and largest width by height of all parts.
      interpolation: as of `InceptionCrop`.
    """

    runs_on: ClassVar[str] = "host"

    size: Given = None
    small_size: Given = 96
    num_small: Given = key(8, "Number of small crops.")
    area: Given = (0.4, 1.0)
    small_area: Given = (0.05, 0.4)
    ratio: Given = (3 / 4, 4 / 3)
    interpolation: Given = key(
        "bicubic", "Filter of the resize.", choices=("fast", "bicubic")
    )

    def __post_init__(self):
        check_arguments(self)
        check_size(self.size)
        check_size(self.small_size)
        check_part(self.area, self.ratio)
        check_part(self.small_area, self.ratio)

    def __call__(self, image: Image, rng: np.random.Generator) -> Views:
        boxes = self._boxes(*image.shape[:2], rng)
        return self._cut(image, boxes, 1)

    def from_file(self, data: bytes, channels: int, rng: np.random.Generator) -> Views:
        """Decodes an image file once, and cuts all crops out of it.

        Args and Raises: as of `InceptionCrop.from_file`.

        Returns:
          The same as of the decoded image, unless even the smallest part has twice the
          size of its crop: a JPEG is then shrunk while it is decoded.
        """
        header = decode.plain_header(data)
        if header is None:
            return self(decode.decode(data, channels), rng)
        boxes = self._boxes(header.height, header.width, rng)
        sizes = [pair(crop.size) for crop in self._crops]
        pixels, shrink = decode_parts(data, header, channels, boxes, sizes)
        return self._cut(pixels, boxes, shrink)

    def output_shapes(self, channels: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the crops of one image."""
        shapes = {"image": (_LARGE, *pair(self.size), channels)}
        if self.num_small:
            small = (self.num_small, *pair(self.small_size), channels)
            shapes["small_crops"] = small
        return shapes

    @functools.cached_property
    def _crops(self) -> list[InceptionCrop]:
        """The crops of an image, in the order in which they are drawn."""
        make = functools.partial(
            InceptionCrop, ratio=self.ratio, interpolation=self.interpolation
        )
        large = make(self.size, area=self.area)
        small = make(self.small_size, area=self.small_area)
        return [large] * _LARGE + [small] * self.num_small

    def _boxes(self, height: int, width: int, rng: np.random.Generator) -> list[Box]:
        return [crop.box(height, width, rng) for crop in self._crops]

    def _cut(self, image: Image, boxes: list[Box], shrink: int) -> Views:
        crops = [
            crop.cut(image, box, shrink)
            for crop, box in zip(self._crops, boxes, strict=True)
        ]
        views = {"image": np.stack(crops[:_LARGE])}
        if self.num_small:
            views["small_crops"] = np.stack(crops[_LARGE:])
        return views


TRANSFORMS = {"multi_crop": MultiCrop}
