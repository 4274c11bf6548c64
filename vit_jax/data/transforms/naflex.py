"""Images of any size as sequences of patches (SigLIP 2, arXiv:2502.14786, section 2.4.2).

Letters: H and W height and width before, C channels, N patches of a sequence, S side of a
patch in pixels.
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
    """Resizes to the most patches that fit, the aspect kept, and cuts the image into them.

    The results are "image", the patches one below the other, row by row, and black padding,
    (max_tokens * patch, patch, C); and "grids", rows and columns of patches, (1, 2) int32. Sides
    are rounded up to whole patches, which stretches the image a little.

    Args:
      max_tokens: N, most patches of a sequence; of several numbers, as (64, 256), each batch
        draws one.
      patch: S, to which the network resizes its kernel (models/flexivit.py); of several,
        as (8, 16, 32), each batch draws one, of all pairs with `max_tokens` or `side`.
      area, ratio: of a random part to cut out first, see `RandomResizedCrop`; the whole image for
        an area of (1, 1).
      pack: images of a sequence, each of which gets its share of what the ones before have
        left; rows of "image" and "grids" are then fewer than labels.
      side: in place of `max_tokens`, side in pixels of a square of the area of the resized
        images: a sequence has the patches that it holds, so that images keep their size
        and smaller patches are more (FlexiViT, arXiv:2212.08013). Several as above.
      relative: whether `ratio` is multiplied by the image's own width by height, as in timm's
        RandomResizedCropToSequence, so that parts of wide images are wide.
    """

    moves_pixels = True
    moves_masks = False
    numbers = (GRIDS,)

    max_tokens: Given = 256
    patch: Given = 16
    area: Given = (1.0, 1.0)
    ratio: Given = (3 / 4, 4 / 3)
    flip: Given = key(False, "Flip left and right with probability 0.5.")
    pack: Given = key(1, "Images of a sequence.", at_least=1)
    interpolation: Given = key(
        "bilinear", "Filter of the resize.", choices=INTERPOLATIONS
    )
    side: Given = 0
    relative: Given = key(
        False, "Multiply `ratio` by the image's own width by height, as timm does."
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
                    f"{most} patches of {patch} pixels a side are more than "
                    f"{MAX_PIXELS:,} pixels: choose fewer"
                )
            if most < self.pack:
                raise ValueError(
                    f"room for {most} patches of {patch} pixels, but pack={self.pack} "
                    f"needs as many: raise {'side' if self.side else 'max_tokens'}"
                )

    @property
    def in_eval(self) -> bool:
        """Whether there are no random choices."""
        whole = tuple(self.area) == (1, 1) and not self.flip
        return whole and len(self.choices) == self.pack == 1

    @property
    def choices(self) -> list[tuple[int, int]]:
        """Pairs of most patches and their side, of which each batch draws one."""
        if not self.side:
            return [*itertools.product(_several(self.max_tokens), _several(self.patch))]
        pairs = itertools.product(_several(self.side), _several(self.patch))
        return [(side**2 // patch**2, patch) for side, patch in pairs]

    @property
    def packs(self) -> int:
        """See `Views`."""
        return self.pack

    def alternatives(self) -> list[tuple["NaFlex", float]]:
        """See `Views`."""
        return [
            (dataclasses.replace(self, max_tokens=most, patch=patch, side=0), 1.0)
            for most, patch in self.choices
        ]

    def of_share(self, left: int, images: int) -> "NaFlex":
        """Returns the transform of one of so many images that share what is left of N."""
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
        """Returns the shapes of the results; of several, those with the most patches."""
        most, patch = max(self.choices)
        return {"image": (most * patch, patch, channels), GRIDS: (self.pack, 2)}


def _several(value: Given) -> tuple:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def fitting_grid(height: int, width: int, most: int) -> tuple[int, int]:
    """Returns rows and columns of the most patches that an image fills, at most `most`.

    They are those of the largest scale at which both sides, rounded up to whole patches, have
    no more patches than that.

    Source: transformers' Siglip2ImageProcessor, which finds the scale by bisection.
    """
    rows, columns = _fitting(height, width, most), _fitting(width, height, most)
    return max(rows, columns[::-1], key=sum)


def _fitting(one: int, other: int, most: int) -> tuple[int, int]:
    """Returns the largest grid for which the side `one` is whole patches; (0, 0) if none fits."""
    for count in range(math.isqrt(most * one // other), 0, -1):
        patches = count, -(-other * count // one)
        if math.prod(patches) <= most:
            return patches
    return 0, 0


def cut(image: Num[np.ndarray, "H W C"], side: int) -> Num[np.ndarray, "NS S C"]:
    """Cuts an image of whole patches into patches, one below the other, row by row."""
    (H, W, C), S = image.shape, side
    cells = image.reshape(H // S, S, W // S, S, C).swapaxes(1, 2)
    return cells.reshape(-1, S, C)
