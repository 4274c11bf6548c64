"""Operations on one uint8 image, run by the loader before images are batched.

Letters: H and W height and width before, h and w after, C channels.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from jaxtyping import UInt8

from vit_jax.data import decode, jpeg
from vit_jax.data.randaugment import AugReg, RandAugment
from vit_jax.data.resizing import (
    centre_crop_start,
    resize_bilinear,
    resize_box,
    resize_fast,
    short_side_size,
)

Before = UInt8[np.ndarray, "H W C"]
After = UInt8[np.ndarray, "h w C"]
# A line of 1x10000 pixels resized to 256 would be 2 GB; no photograph comes near.
MAX_RESIZED = 25_000_000
Given = Any  # What a user wrote in a config; `__post_init__` checks it.


@dataclasses.dataclass(frozen=True)
class InceptionCrop:
    """Crops a random part of random shape and resizes it (Szegedy et al., 2015).

    Args:
      size: height and width of the result in pixels, or one number for both.
      area: smallest and largest part of the image's area.
      ratio: smallest and largest width by height of the part.
      antialias: whether detail that is too fine for the result is averaged.
      rough: whether chroma of JPEG files is repeated, not interpolated, which is
        faster; needs the extra `fast`.
    """

    size: Given = None
    area: Given = (0.05, 1.0)
    ratio: Given = (3 / 4, 4 / 3)
    antialias: Given = True
    rough: Given = False

    def __post_init__(self):
        check_size(self.size)
        check_part(self.area, self.ratio)
        for name in ("antialias", "rough"):
            if getattr(self, name) not in (True, False):
                raise ValueError(f"{name}={getattr(self, name)!r} is not True or False")
        if self.rough:
            try:
                jpeg.import_simplejpeg()
            except ImportError as error:
                raise ValueError(f"rough=True {error}") from error

    def __call__(self, image: Before, rng: np.random.Generator) -> After:
        return self._cut(image, self.box(*image.shape[:2], rng))

    def from_file(self, data: bytes, channels: int, rng: np.random.Generator) -> After:
        """Decodes, crops and resizes, and decodes only what the part needs.

        Args:
          data: content of an image file.
          channels: 3 for RGB, 1 for grey.
          rng: what `__call__` would get; the part is the same.

        Returns:
          The same as of the decoded image, to the bit, unless it is `rough`. But if
          the part is twice the result's size or more, a JPEG is shrunk while it is
          decoded, which is faster and comes closer to the exact filter.

        Raises:
          DamagedImage: as `decode.decode`.
        """
        header = decode.plain_header(data)
        if header is None:
            return self(decode.decode(data, channels), rng)
        box = self.box(header.height, header.width, rng)
        top, _, height, width = box
        target = pair(self.size)
        times = min(height / target[0], width / target[1])
        shrink = next((n for n in jpeg.SHRINKS if n <= times), 1)
        stop = top + height
        pixels = jpeg.decode(data, header, channels, stop, shrink, self.rough)
        if pixels is None:  # Damaged, or for Pillow alone.
            return self._cut(decode.decode(data, channels), box)
        if shrink == 1:
            return self._cut(pixels, box)
        return resize_box(pixels, tuple(x / shrink for x in box), target)

    def _cut(self, image: Before, box: tuple[int, int, int, int]) -> After:
        top, left, height, width = box
        part = image[top : top + height, left : left + width]
        return resize_fast(part, pair(self.size), self.antialias)

    def box(
        self, height: int, width: int, rng: np.random.Generator
    ) -> tuple[int, int, int, int]:
        """Draws a part: top, left, height and width, in pixels."""
        low, high = map(math.log, self.ratio)
        span = self.area[1] - self.area[0]
        for _ in range(10):
            area = height * width * (self.area[0] + rng.random() * span)
            ratio = math.exp(low + rng.random() * (high - low))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                return _below(height - h + 1, rng), _below(width - w + 1, rng), h, w
        # An extreme shape: the largest central part whose ratio is allowed.
        w = max(1, min(width, round(height * self.ratio[1])))
        h = max(1, min(height, round(width / self.ratio[0])))
        return (height - h) // 2, (width - w) // 2, h, w


@dataclasses.dataclass(frozen=True)
class Resize:
    """Resizes to exactly `size` pixels, bilinear and antialiased."""

    size: Given = None

    def __post_init__(self):
        check_size(self.size)

    def __call__(self, image: Before, rng: np.random.Generator) -> After:
        return resize_bilinear(image, pair(self.size))


@dataclasses.dataclass(frozen=True)
class ResizeSmall:
    """Resizes the short side to `size` pixels and keeps the aspect ratio."""

    size: Given

    def __post_init__(self):
        if type(self.size) is not int or self.size < 1:
            raise ValueError(f"size={self.size!r} is not a positive whole number")

    def __call__(self, image: Before, rng: np.random.Generator) -> After:
        height, width = image.shape[:2]
        target = short_side_size((height, width), self.size)
        if math.prod(target) > MAX_RESIZED:
            raise TooLong(f"is {height}x{width}, too long to resize to {self.size}")
        return resize_bilinear(image, target)


@dataclasses.dataclass(frozen=True)
class CentralCrop:
    """Cuts `size` pixels out of the middle."""

    size: Given = None

    def __post_init__(self):
        check_size(self.size)

    def __call__(self, image: Before, rng: np.random.Generator) -> After:
        _room(image, self.size)
        height, width = pair(self.size)
        top = centre_crop_start(image.shape[0], height)
        left = centre_crop_start(image.shape[1], width)
        return image[top : top + height, left : left + width]


@dataclasses.dataclass(frozen=True)
class RandomCrop:
    """Cuts `size` pixels out of a random place."""

    size: Given = None

    def __post_init__(self):
        check_size(self.size)

    def __call__(self, image: Before, rng: np.random.Generator) -> After:
        (top, left), (height, width) = _room(image, self.size), pair(self.size)
        top, left = _below(top + 1, rng), _below(left + 1, rng)
        return image[top : top + height, left : left + width]


class TooLong(ValueError):
    """A resize by the short side would give more than `MAX_RESIZED` pixels."""


class TooSmall(ValueError):
    """A crop is larger than the image."""


def _room(image: np.ndarray, size: Given) -> tuple[int, int]:
    """Returns by how many rows and columns the image is larger than the crop.

    Raises:
      TooSmall: it is smaller.
    """
    height, width = pair(size)
    room = image.shape[0] - height, image.shape[1] - width
    if min(room) < 0:
        raise TooSmall(
            f"crop of {height}x{width} from an image of "
            f"{image.shape[0]}x{image.shape[1]}: put resize_small before it"
        )
    return room


def _below(stop: int, rng: np.random.Generator) -> int:
    # From `random`, whose stream numpy keeps, unlike that of `integers`.
    return int(rng.random() * stop)


def pair(size: Given) -> tuple[int, int]:
    """Returns height and width of a size that may be one number for both."""
    return (size, size) if isinstance(size, int) else tuple(size)


def check_size(size: Given) -> None:
    """Raises ValueError for a size that is neither a number nor a pair."""
    if size is None:  # The parser puts data.image_size.
        return
    sides = pair(size) if isinstance(size, (int, tuple, list)) else ()
    if len(sides) != 2 or any(type(n) is not int or n < 1 for n in sides):
        raise ValueError(f"size={size!r} is not a whole number or (height, width)")


def check_part(area: Given, ratio: Given) -> None:
    """Raises ValueError for bounds that no random part of an image can keep."""
    if not 0 < area[0] <= area[1] <= 1:
        raise ValueError(f"area={area} is not 0 < least <= most <= 1")
    if not 0 < ratio[0] <= ratio[1]:
        raise ValueError(f"ratio={ratio} is not 0 < least <= most")


HOST_OPS = {
    "inception_crop": InceptionCrop,
    "resize": Resize,
    "resize_small": ResizeSmall,
    "central_crop": CentralCrop,
    "random_crop": RandomCrop,
    "randaugment": RandAugment,
    "augreg": AugReg,
}
# What may prepare images for evaluation: the operations without randomness.
EVAL_OPS = ("resize", "resize_small", "central_crop")
