"""Large and small crops of an image (SwAV, DINO), cut by the loader.

Letters: H and W height and width before, N crops, h and w height and width of crops, C
channels.
"""

import dataclasses
import functools
import math

import numpy as np
from jaxtyping import Num

from vit_jax.config.fields import key
from vit_jax.data.config import MAX_MEGAPIXELS
from vit_jax.data.transforms.base import (
    Given,
    check_part,
    check_size,
    pair,
)
from vit_jax.data.transforms.host import Before, RandomResizedCrop, crops_of_file
from vit_jax.data.transforms.views import Views

Crops = dict[str, Num[np.ndarray, "N h w C"]]
_LARGE = 2  # Large crops of `MultiCrop`.


@dataclasses.dataclass(frozen=True)
class MultiCrop(Views):
    """Crops two large and some small random parts and resizes them (arXiv:2006.09882).

    Sizes, areas and filter are those of DINO (arXiv:2104.14294, main_dino.py). The
    results are "image", the two large crops (2, height, width, C), and "small_crops"
    (num_small, height, width, C), if any. Other arguments are those of
    `RandomResizedCrop`.

    Args:
      small_size: size of small crops; None is 96, unless `sizes` is given.
      sizes: pairs of sizes of large and small crops, such as ((512, 112), (768, 168)),
        instead of `size` and `small_size`. Each batch draws a pair (DINOv3,
        arXiv:2508.10104).
      shares: relative frequency of each pair in `sizes`; () for equal ones.
    """

    moves_pixels = True
    moves_masks = False

    size: Given = None
    small_size: Given = None
    num_small: Given = key(8, "Number of small crops.")
    area: Given = (0.4, 1.0)
    small_area: Given = (0.05, 0.4)
    ratio: Given = (3 / 4, 4 / 3)
    interpolation: Given = key(
        "bicubic", "Filter of the resize.", choices=("fast", "bicubic")
    )
    sizes: Given = ()
    shares: Given = ()

    def __post_init__(self):
        super().__post_init__()
        if self.sizes and (self.size, self.small_size) != (None, None):
            raise ValueError(
                f"size={self.size} or small_size={self.small_size} beside sizes="
                f"{self.sizes}, which has both: remove it"
            )
        if not self.sizes and self.small_size is None:
            object.__setattr__(self, "small_size", 96)
        check_size(self.small_size)
        check_part(self.area, self.ratio)
        check_part(self.small_area, self.ratio)
        for each in self.sizes:
            if not isinstance(each, (list, tuple)) or len(each) != 2:
                raise ValueError(f"sizes={self.sizes}: {each} is not (large, small)")
            for size in each:
                check_size(size)
        if self.shares and len(self.shares) != len(self.sizes):
            raise ValueError(
                f"shares={self.shares}: give one for each of sizes={self.sizes}"
            )
        if any(not share > 0 for share in self.shares):
            raise ValueError(f"shares={self.shares}: give numbers above 0")

    def alternatives(self) -> list[tuple["MultiCrop", float]]:
        """Returns a transform for each pair of `sizes`, with its share."""
        if not self.sizes:
            return [(self, 1.0)]
        shares = self.shares or [1.0] * len(self.sizes)
        pairs = zip(self.sizes, shares, strict=True)
        return [(self._of_sizes(*each), share) for each, share in pairs]

    def _of_sizes(self, size: Given, small_size: Given) -> "MultiCrop":
        return dataclasses.replace(
            self, size=size, small_size=small_size, sizes=(), shares=()
        )

    def __call__(self, image: Before, rng: np.random.Generator) -> Crops:
        boxes = [crop.box(*image.shape[:2], rng) for crop in self._crops]
        cut = [
            crop.cut(image, box) for crop, box in zip(self._crops, boxes, strict=True)
        ]
        return self._views(cut)

    def from_file(
        self,
        data: bytes,
        channels: int,
        rng: np.random.Generator,
        max_megapixels: float = MAX_MEGAPIXELS,
    ) -> Crops:
        """Decodes an image file once and cuts all crops, see `RandomResizedCrop`."""
        of_file = data, channels, rng, max_megapixels
        return self._views(crops_of_file(self._crops, *of_file))

    def output_shapes(self, channels: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the results; with `sizes`, those of most pixels."""
        if self.sizes:
            made = (op.output_shapes(channels) for op, _ in self.alternatives())
            return max(made, key=lambda shapes: sum(map(math.prod, shapes.values())))
        shapes = {"image": (_LARGE, *pair(self.size), channels)}
        if self.num_small:
            small = (self.num_small, *pair(self.small_size), channels)
            shapes["small_crops"] = small
        return shapes

    @functools.cached_property
    def _crops(self) -> list[RandomResizedCrop]:
        make = functools.partial(
            RandomResizedCrop, ratio=self.ratio, interpolation=self.interpolation
        )
        large = make(self.size, area=self.area)
        small = make(self.small_size, area=self.small_area)
        return [large] * _LARGE + [small] * self.num_small

    def _views(self, crops: list[np.ndarray]) -> Crops:
        views = {"image": np.stack(crops[:_LARGE])}
        if self.num_small:
            views["small_crops"] = np.stack(crops[_LARGE:])
        return views
