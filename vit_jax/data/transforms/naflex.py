"""Images of any size as sequences of patches (SigLIP 2, arXiv:2502.14786, section 2.4.2).

Letters: H and W height and width before, C channels, N patches per sequence, S side of
a patch in pixels.
"""

import dataclasses
import itertools
import math

import numpy as np
from jaxtyping import Num

from vit_jax.config.fields import key
from vit_jax.data.config import MAX_PIXELS
from vit_jax.data.transforms.base import Given, check_part
from vit_jax.data.transforms.host import INTERPOLATIONS, RandomResizedCrop, resize_box
from vit_jax.data.transforms.views import Views

GRIDS = "grids"  # Array of a batch: rows and columns of patches of each image.

Sequence = dict[str, Num[np.ndarray, "..."]]


@dataclasses.dataclass(frozen=True)
class NaFlex(Views):
    """Resizes with fixed aspect ratio to at most `max_tokens` patches, and cuts them.

    The results are "image", the patches one below the other, row by row, then black
    padding, (max_tokens * patch, patch, C); and "grids", rows and columns of patches,
    (1, 2) int32. Sides are rounded up to whole patches, which stretches the image
    slightly.

    Args:
      max_tokens: maximum number of patches per sequence, N; if several numbers are
        given, such as (64, 256), each batch draws one.
      patch: side of a patch, S; the network resizes its patch embedding to it
        (models/flexivit.py). If several numbers are given, such as (8, 16, 32), each
        batch draws a pair with `max_tokens` or `side`.
      area, ratio: bounds of a random part to cut out first, as in `RandomResizedCrop`;
        with an area of (1, 1) the whole image is used.
      pack: number of images per sequence; each gets an equal share of the patches that
        the images before it have left. "image" and "grids" then have fewer rows than
        the labels.
      side: side in pixels of a square with the area of the resized images, instead of
        `max_tokens`, so that images keep their size and smaller patches are more
        numerous (FlexiViT, arXiv:2212.08013); if several numbers are given, each batch
        draws one.
      relative: multiplies `ratio` by the image's width divided by its height, as in
        timm's RandomResizedCropToSequence, so that parts of wide images are wide.
    """

    moves_pixels = True
    moves_masks = False
    numbers = (GRIDS,)

    max_tokens: Given = 256
    patch: Given = 16
    area: Given = (1.0, 1.0)
    ratio: Given = (3 / 4, 4 / 3)
    flip: Given = key(False, "Flip left and right with probability 0.5.")
    pack: Given = key(1, "Number of images per sequence.", at_least=1)
    interpolation: Given = key(
        "bilinear", "Filter of the resize.", choices=INTERPOLATIONS
    )
    side: Given = 0
    relative: Given = key(
        False,
        "Multiply `ratio` by the image's width divided by its height, as timm does.",
    )

    def __post_init__(self):
        super().__post_init__()
        check_part(self.area, self.ratio)
        for name in ("max_tokens", "patch", *(["side"] if self.side else [])):
            values = _several(getattr(self, name))
            if not values or any(type(n) is not int or n < 1 for n in values):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: give whole numbers of at least 1"
                )
        if self.side and self.max_tokens != NaFlex.max_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens} and side={self.side}, which replaces it: "
                "leave one out"
            )
        for most, patch in self.choices:
            if most * patch**2 > MAX_PIXELS:
                raise ValueError(
                    f"{most} patches of {patch} pixels per side are more than "
                    f"{MAX_PIXELS:,} pixels: choose fewer"
                )
            if most < self.pack:
                raise ValueError(
                    f"{most} patches of {patch} pixels are fewer than pack={self.pack} "
                    f"images: raise {'side' if self.side else 'max_tokens'}"
                )

    @property
    def in_eval(self) -> bool:
        """True if the transform makes no random choices."""
        whole = tuple(self.area) == (1, 1) and not self.flip
        return whole and len(self.choices) == self.pack == 1

    @property
    def choices(self) -> list[tuple[int, int]]:
        """Pairs of maximum number of patches and patch side; each batch draws one."""
        if not self.side:
            return [*itertools.product(_several(self.max_tokens), _several(self.patch))]
        pairs = itertools.product(_several(self.side), _several(self.patch))
        return [(side**2 // patch**2, patch) for side, patch in pairs]

    @property
    def packs(self) -> int:
        """Number of images that share a row."""
        return self.pack

    def alternatives(self) -> list[tuple["NaFlex", float]]:
        """Returns a transform for each of `choices`, with equal weights."""
        return [
            (dataclasses.replace(self, max_tokens=most, patch=patch, side=0), 1.0)
            for most, patch in self.choices
        ]

    def of_share(self, left: int, images: int) -> "NaFlex":
        """Returns the transform of one of `images` images that share `left` patches."""
        return dataclasses.replace(self, max_tokens=left // images, pack=1)

    def __call__(
        self, image: Num[np.ndarray, "H W C"], rng: np.random.Generator
    ) -> Sequence:
        height, width = image.shape[:2]
        box = (0, 0, height, width)
        if tuple(self.area) != (1, 1):
            whole = width / height if self.relative else 1
            ratio = tuple(whole * part for part in self.ratio)
            box = RandomResizedCrop(area=self.area, ratio=ratio).box(height, width, rng)
        most, patch = max(self.choices)
        grid = fitting_grid(*box[2:], most)
        size = tuple(count * patch for count in grid)
        resized = resize_box(image, box, size, self.interpolation)
        if self.flip and rng.random() < 0.5:
            resized = resized[:, ::-1]
        strip = np.zeros(self.output_shapes(image.shape[-1])["image"], image.dtype)
        patches = cut(resized, patch)
        strip[: len(patches)] = patches
        return {"image": strip, GRIDS: np.array([grid], np.int32)}

    def output_shapes(self, channels: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the results, with the most patches of all `choices`."""
        most, patch = max(self.choices)
        return {"image": (most * patch, patch, channels), GRIDS: (self.pack, 2)}


def _several(value: Given) -> tuple:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def fitting_grid(height: int, width: int, most: int) -> tuple[int, int]:
    """Returns the largest grid (rows, columns) of at most `most` patches for an image.

    It belongs to the largest scale at which the image, with both sides rounded up to
    whole patches, has at most `most` patches.

    Source: transformers' Siglip2ImageProcessor, which finds the scale by bisection.
    """
    rows, columns = _fitting(height, width, most), _fitting(width, height, most)
    return max(rows, columns[::-1], key=sum)


def _fitting(one: int, other: int, most: int) -> tuple[int, int]:
    """Returns the largest grid with whole patches along side `one`; (0, 0) if none."""
    for count in range(math.isqrt(most * one // other), 0, -1):
        patches = count, -(-other * count // one)
        if math.prod(patches) <= most:
            return patches
    return 0, 0


def cut(image: Num[np.ndarray, "H W C"], side: int) -> Num[np.ndarray, "NS S C"]:
    """Cuts an image of whole patches into patches, row by row, one below the other."""
    (H, W, C), S = image.shape, side
    cells = image.reshape(H // S, S, W // S, S, C).swapaxes(1, 2)
    return cells.reshape(-1, S, C)
