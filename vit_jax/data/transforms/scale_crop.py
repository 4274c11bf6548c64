"""Crops and pads images with masks, as in semantic segmentation, in the loader.

Letters: H and W height and width before, h and w height and width after, C channels.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int16

from vit_jax.config.fields import key
from vit_jax.data.config import IGNORED
from vit_jax.data.transforms.base import (
    Given,
    HostTransform,
    Size,
    check_range,
    pair,
    to_size,
)
from vit_jax.data.transforms.host import (
    After,
    Before,
    below,
    nearest,
    resize_box,
)

_PARTS_DRAWN = 10  # Largest number of parts that `ScaleCrop` draws.


@dataclasses.dataclass(frozen=True)
class ScaleCrop(HostTransform):
    """Resizes by a random factor with fixed aspect ratio, and cuts a random part out.

    A part that is larger than the image is padded at the bottom and the right: images
    with black, masks with pixels without a class. This is the usual augmentation of
    semantic segmentation, RandomResize and RandomCrop of mmsegmentation, which pads at
    the end of the transforms: for that, set `pad=False` and add `Pad`.

    Args:
      size: height and width of the part in pixels, or one number for both.
      scale: smallest and largest short side of the resized image, divided by the short
        side of `size`.
    """

    moves_pixels = True
    sees_mask = True

    size: Given = None
    scale: Given = (0.5, 2.0)
    most_of_one: Given = key(
        1.0,
        "If one class has at least this share of the pixels with a class, another part "
        "is drawn, at most ten times; 1 is off. mmsegmentation's recipes use 0.75 "
        "(cat_max_ratio).",
        above=0,
        at_most=1,
    )
    pad: Given = key(True, "Pad a part that is larger than the image with black.")

    def __post_init__(self):
        super().__post_init__()
        check_range("scale", self.scale)

    def output_size(self, before: Size | None) -> Size | None:
        return pair(self.size) if self.pad else None

    def __call__(
        self,
        image: Before,
        rng: np.random.Generator,
        mask: Int16[np.ndarray, "H W 1"] | None = None,
    ) -> After:
        size, before = pair(self.size), image.shape[:2]
        factor = self.scale[0] + rng.random() * (self.scale[1] - self.scale[0])
        ratio = factor * min(size) / min(before)
        resized = [max(1, round(side * ratio)) for side in before]
        part = tuple(map(min, resized, size))
        # The part in pixels of the original image, so that only the part is resized.
        shrunk = [n / m for n, m in zip(before, resized, strict=True)] * 2
        for _ in range(_PARTS_DRAWN):
            start = [below(n - m + 1, rng) for n, m in zip(resized, part, strict=True)]
            box = tuple(n * m for n, m in zip((*start, *part), shrunk, strict=True))
            if self.most_of_one == 1 or mask is None:
                break
            if _largest_share(nearest(mask, box, part)) < self.most_of_one:
                break
        cut = resize_box(image, box, part)
        return padded(cut, size) if self.pad else cut


@dataclasses.dataclass(frozen=True)
class Pad(HostTransform):
    """Pads smaller images to `size` pixels at the bottom and the right.

    Masks are padded with pixels without a class. If this transform comes after all
    changes of colour, and `fill` is the mean of the images, it equals mmsegmentation's
    Pad, which pads normalised images with 0.

    Args:
      size: height and width of the result in pixels, or one number for both.
      fill: grey levels from 0 to 255, one per channel; their mean is used for images
        with another number of channels. The default, ImageNet's rounded mean, differs
        from 0 by at most 0.01 after normalisation.
    """

    in_eval = True
    moves_pixels = True
    output_size = to_size

    size: Given = None
    fill: Given = (124, 116, 104)

    def __call__(self, image: Before, rng: np.random.Generator) -> After:
        return padded(image, pair(self.size), self.fill)


def padded(image: Before, size: Size, fill: float | Sequence[float] = 0) -> After:
    """Returns an image of at least `size` pixels, padded at the bottom and the right.

    Args:
      image: image, or a mask, which is padded with pixels without a class.
      size: height and width in pixels.
      fill: grey levels from 0 to 255, one per channel; their mean is used for images
        with another number of channels.
    """
    height, width = image.shape[:2]
    if height >= size[0] and width >= size[1]:
        return image
    out = filled((max(height, size[0]), max(width, size[1])), image, fill)
    out[:height, :width] = image
    return out


def filled(size: Size, image: Before, fill: float | Sequence[float]) -> After:
    """Returns an image of one colour with the channels and dtype of another.

    Args:
      size: height and width in pixels.
      image: image with the channels and dtype of the result.
      fill: grey levels as in `padded`.
    """
    levels = np.atleast_1d(fill)
    if len(levels) != image.shape[-1]:
        levels = levels.mean(keepdims=True)
    if image.dtype == np.int16:
        levels = np.array([IGNORED])
    elif image.dtype != np.float32:
        levels = (levels * (257 if image.dtype == np.uint16 else 1)).round()
    out = np.empty((*size, image.shape[-1]), image.dtype)
    out[:] = levels.astype(image.dtype)
    return out


def _largest_share(maps: Int16[np.ndarray, "..."]) -> float:
    """Returns the share of the most frequent class among pixels with a class."""
    counts = np.bincount(maps[maps != IGNORED])
    return counts.max() / counts.sum() if counts.size else 1.0
