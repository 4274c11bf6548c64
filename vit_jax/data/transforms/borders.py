"""Resizes and crops that leave a border, as in evaluations of timm and OpenCLIP.

Letters: H and W height and width before, h and w after, C channels.
"""

import dataclasses
import operator

import numpy as np
from jaxtyping import Num

from vit_jax.data.transforms.base import Given, Size, pair
from vit_jax.data.transforms.host import CentralCrop, ResizeSmall
from vit_jax.data.transforms.scale_crop import filled


@dataclasses.dataclass(frozen=True)
class ResizeLong(ResizeSmall):
    """Resizes with fixed aspect ratio until the image just fits into `size`.

    If `size` is one number, the long side gets this number of pixels; otherwise it is
    (height, width).
    """

    def target(self, size: Size) -> Size:
        ratio = max(map(operator.truediv, size, pair(self.size)))
        return tuple(max(1, round(side / ratio)) for side in size)


@dataclasses.dataclass(frozen=True)
class CropOrPad(CentralCrop):
    """Cuts `size` pixels out of the middle, and adds a border if the image is smaller.

    Args:
      size, down: arguments of `CentralCrop`.
      fill: colour of the border, from 0 to 255, one for all channels or one per
        channel; the image is then placed as by timm's CenterCropOrPad. With () the
        border is black, and `down` decides how half a pixel is rounded.
      cut: rows at the bottom and columns on the right that belong to the crop but are
        removed from it, since they do not fill a patch.
    """

    fill: Given = ()
    cut: Given = (0, 0)

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.fill, (tuple, list)):
            raise TypeError(f"fill={self.fill!r} is not a tuple, such as (0, 0, 0)")
        if len(self.cut) != 2 or any(type(n) is not int or n < 0 for n in self.cut):
            raise ValueError(f"cut={self.cut!r} is not two whole numbers from 0 on")

    @property
    def sides(self) -> Size:
        return tuple(map(operator.add, pair(self.size), self.cut))

    def corner(self, size: Size) -> Size:
        if not self.fill:
            return super().corner(size)
        inside = super().corner(size)
        outside = [
            -((crop - side) // 2) for side, crop in zip(size, self.sides, strict=True)
        ]
        return tuple(
            place if place >= 0 else other
            for place, other in zip(inside, outside, strict=True)
        )

    def __call__(
        self, image: Num[np.ndarray, "H W C"], rng: np.random.Generator
    ) -> Num[np.ndarray, "h w C"]:
        (top, left), (height, width) = self.corner(image.shape[:2]), pair(self.size)
        inside = image[max(top, 0) : top + height, max(left, 0) : left + width]
        if inside.shape[:2] == (height, width):
            return inside
        out = filled((height, width), image, self.fill or 0)
        rows, columns = inside.shape[:2]
        down, across = max(-top, 0), max(-left, 0)
        out[down : down + rows, across : across + columns] = inside
        return out
