"""Images of any size as sequences of patches (SigLIP 2, arXiv:2502.14786, section 2.4.2).

Letters: H and W height and width before, C channels, N patches of a sequence, S side of a
patch in pixels.
"""

import dataclasses

import numpy as np
from jaxtyping import Num

from vit_jax.config.fields import key
from vit_jax.data.transforms.base import Given, HostTransform, check_part
from vit_jax.data.transforms.host import INTERPOLATIONS, InceptionCrop, resize_box

GRIDS = "grids"  # Array of a batch: rows and columns of patches of each image.

Sequence = dict[str, Num[np.ndarray, "..."]]


@dataclasses.dataclass(frozen=True)
class NaFlex(HostTransform):
    """Resizes to the most patches that fit, the aspect kept, and cuts the image into them.

    The results are "image", the patches one below the other, row by row, and black padding,
    (max_tokens * patch, patch, C); and "grids", rows and columns of patches, (1, 2) int32. Sides
    are rounded up to whole patches, which stretches the image a little.

    Args:
      max_tokens: N, most patches of a sequence; of several numbers, as (64, 256), each batch
        draws one.
      patch: S, that of the network.
      area, ratio: of a random part to cut out first, see `InceptionCrop`; the whole image for
        an area of (1, 1).
      pack: images of a sequence, each of which gets its share of what the ones before have
        left; rows of "image" and "grids" are then fewer than labels.
    """

    numbers = (GRIDS,)

    max_tokens: Given = 256
    patch: Given = key(16, "Side of a patch in pixels.", at_least=1)
    area: Given = (1.0, 1.0)
    ratio: Given = (3 / 4, 4 / 3)
    flip: Given = key(False, "Flip left and right with probability 0.5.")
    pack: Given = key(1, "Images of a sequence.", at_least=1)
    interpolation: Given = key(
        "bilinear", "Filter of the resize.", choices=tuple(INTERPOLATIONS)
    )

    def __post_init__(self):
        super().__post_init__()
        check_part(self.area, self.ratio)
        for count in self.lengths:
            if type(count) is not int or count < self.pack:
                raise ValueError(
                    f"max_tokens={self.max_tokens!r}: give whole numbers of at least 1, "
                    f"and of at least pack={self.pack}"
                )

    @property
    def in_eval(self) -> bool:
        """Whether there are no random choices."""
        whole = tuple(self.area) == (1, 1) and not self.flip
        return whole and len(self.lengths) == self.pack == 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Numbers of patches, of which each batch draws one."""
        one = isinstance(self.max_tokens, int)
        return (self.max_tokens,) if one else tuple(self.max_tokens)

    @property
    def packs(self) -> int:
        """See `Transform`."""
        return self.pack

    def alternatives(self) -> list["NaFlex"]:
        """See `Transform`."""
        return [dataclasses.replace(self, max_tokens=count) for count in self.lengths]

    def of_share(self, left: int, images: int) -> "NaFlex":
        """Returns the transform of one of so many images that share what is left of N."""
        return dataclasses.replace(self, max_tokens=left // images, pack=1)

    def __call__(
        self, image: Num[np.ndarray, "H W C"], rng: np.random.Generator
    ) -> Sequence:
        box = (0, 0, *image.shape[:2])
        if tuple(self.area) != (1, 1):
            crop = InceptionCrop(area=self.area, ratio=self.ratio)
            box = crop.box(*image.shape[:2], rng)
        grid = fitting_grid(*box[2:], max(self.lengths))
        size = tuple(side * self.patch for side in grid)
        resized = resize_box(image, box, size, INTERPOLATIONS[self.interpolation])
        if self.flip and rng.random() < 0.5:
            resized = resized[:, ::-1]
        strip = np.zeros(self.output_shapes(image.shape[-1])["image"], image.dtype)
        patches = cut(resized, self.patch)
        strip[: len(patches)] = patches
        return {"image": strip, GRIDS: np.array([grid], np.int32)}

    def output_shapes(self, channels: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the results."""
        shape = (max(self.lengths) * self.patch, self.patch, channels)
        return {"image": shape, GRIDS: (self.pack, 2)}


def fitting_grid(height: int, width: int, most: int) -> tuple[int, int]:
    """Returns rows and columns of the most patches that an image fills, at most `most`.

    They are those of the largest scale at which both sides, rounded up to whole patches, have
    no more patches than that.

    Source: transformers' Siglip2ImageProcessor, which finds the scale by bisection.
    """
    grids = [
        grid
        for n in range(1, most + 1)
        # The scales at which one side is a whole number of patches.
        for grid in ((n, -(-width * n // height)), (-(-height * n // width), n))
        if grid[0] * grid[1] <= most
    ]
    return max(grids, key=sum)


def cut(image: Num[np.ndarray, "H W C"], side: int) -> Num[np.ndarray, "NS S C"]:
    """Cuts an image of whole patches into patches, one below the other, row by row."""
    (H, W, C), S = image.shape, side
    cells = image.reshape(H // S, S, W // S, S, C).swapaxes(1, 2)
    return cells.reshape(-1, S, C)


TRANSFORMS = {"naflex": NaFlex}
