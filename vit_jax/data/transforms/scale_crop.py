"""Crop and padding of images with masks, as in semantic segmentation, done by the loader.

Letters: H and W height and width before, h and w after, C channels.
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

_PARTS_DRAWN = 10  # By `ScaleCrop`, at most.


@dataclasses.dataclass(frozen=True)
class ScaleCrop(HostTransform):
    """Resizes by a random factor, the aspect kept, and cuts a random part out.

    A part that reaches beyond the image is padded at the bottom and the right: images with
    black, masks with pixels that count for no class. This is the usual augmentation of
    semantic segmentation, RandomResize and RandomCrop of mmsegmentation, which pads at the
    end: `pad=False` leaves it to `Pad`.

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
        "Share of one class in the pixels that count, from which on another part is drawn, "
        "ten times at most; mmsegmentation's recipes have 0.75 (cat_max_ratio). 1: none.",
        above=0,
        at_most=1,
    )
    pad: Given = key(True, "Pad a part that reaches beyond the image, in black.")

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
        # In pixels of the image, so that only the part is resized.
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

    Masks get pixels that count for no class. Behind the changes of colour of a line, which
    then leave the padding alone, and with the mean of the images, this is the Pad of
    mmsegmentation: 0 in normalised images.

    Args:
      fill: grey levels of 255, one for each channel; of other channels their mean. The
        default, ImageNet's mean in whole levels, is within 0.01 of 0 once normalised.
    """

    in_eval = True
    moves_pixels = True
    output_size = to_size

    size: Given = None
    fill: Given = (124, 116, 104)

    def __call__(self, image: Before, rng: np.random.Generator) -> After:
        return padded(image, pair(self.size), self.fill)


def padded(image: Before, size: Size, fill: float | Sequence[float] = 0) -> After:
    """Returns an image of at least `size` pixels, filled at the bottom and the right.

    Args:
      image: masks are filled with pixels that count for no class.
      size: height and width in pixels.
      fill: grey levels of 255, one for each channel; of other channels their mean.
    """
    height, width = image.shape[:2]
    if height >= size[0] and width >= size[1]:
        return image
    out = filled((max(height, size[0]), max(width, size[1])), image, fill)
    out[:height, :width] = image
    return out


def filled(size: Size, image: Before, fill: float | Sequence[float]) -> After:
    """Returns an image of one colour with the channels of another, see `padded`."""
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
    """Returns the share of the most frequent class in the pixels that count."""
    counts = np.bincount(maps[maps != IGNORED])
    return counts.max() / counts.sum() if counts.size else 1.0
