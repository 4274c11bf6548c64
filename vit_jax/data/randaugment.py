"""RandAugment (arXiv:1909.13719) as AugReg (arXiv:2106.10270) used it.

The operations, and what a magnitude means for them, are those that big_vision released
for that paper's configs (`pp/archive/autoaugment.py`); each operation is Pillow's.
Letters: H and W height and width, C channels.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from vit_jax.data import pillow_ops

Image = UInt8[np.ndarray, "H W C"]
Given = Any  # What a user wrote in a config; `__post_init__` checks it.

_SIDE = 224  # Distances in pixels are of an image of this side.


@dataclasses.dataclass(frozen=True)
class RandAugment:
    """Applies some random operations of the list, one after the other.

    Args:
      layers: how many; drawn with replacement.
      magnitude: strength that they share, 10 for the common one; 30 at most.
    """

    layers: Given = 2
    magnitude: Given = 10

    def __post_init__(self):
        if type(self.layers) is not int or self.layers < 0:
            raise ValueError(f"layers={self.layers!r} is not a whole number from 0 on")
        if not 0 <= self.magnitude <= 30:
            raise ValueError(f"magnitude={self.magnitude} is not within 0..30")

    def __call__(self, image: Image, rng: np.random.Generator) -> Image:
        for _ in range(self.layers):
            which, sign, *place = (rng.random() for _ in range(4))
            name = NAMES[int(which * len(NAMES))]
            image = operate(name, image, float(self.magnitude), sign < 0.5, place)
        return image


@dataclasses.dataclass(frozen=True)
class AugReg:
    """A level of AugReg: RandAugment here, and mixup after all other operations.

    Args:
      level: "none", "light1", "light2", "medium1", "medium2", "strong1" or "strong2".
    """

    level: Given

    def __post_init__(self):
        if self.level not in LEVELS:
            raise ValueError(f"level={self.level!r} is none of {', '.join(LEVELS)}")


class Level(NamedTuple):
    """What a level of AugReg sets; `layers` and `alpha` 0 are off."""

    layers: int
    magnitude: int
    alpha: float  # Of mixup.


# arXiv:2106.10270, section 3.4; big_vision's configs/vit_i1k.py. Dropout and stochastic
# depth vary apart from the levels there: both 0, or both 0.1.
LEVELS = {
    "none": Level(0, 0, 0.0),
    "light1": Level(2, 0, 0.0),  # Magnitude 0 is not nothing: colours fade to 10 %.
    "light2": Level(2, 10, 0.2),
    "medium1": Level(2, 15, 0.2),
    "medium2": Level(2, 15, 0.5),
    "strong1": Level(2, 20, 0.5),
    "strong2": Level(2, 20, 0.8),
}


def operate(
    name: str,
    image: Image,
    magnitude: float,
    negative: bool = False,
    place: Sequence[float] = (0.5, 0.5),
) -> Image:
    """Applies one operation of RandAugment.

    Args:
      name: one of `NAMES`.
      image: what to change; it is left as it is.
      magnitude: strength.
      negative: turn, shear or shift the other way.
      place: centre of a cutout, as fractions of height and width.

    Returns:
      An image of the same shape.
    """
    height, width, _ = image.shape
    level = magnitude / 10
    signed = -level if negative else level
    match name:
        case "autocontrast" | "equalize" | "invert":
            out = getattr(pillow_ops, name)(image)
        case "rotate":
            out = pillow_ops.rotate(image, 30 * signed)
        case "posterize":
            # TensorFlow cuts a shift by 8 bits to 7, so that the first bit stays.
            out = pillow_ops.posterize(image, min(max(int(4 * level), 1), 8))
        case "solarize":
            # The threshold wraps there, a uint8: at magnitudes 10 and 20 it is 0, so
            # everything is inverted (github.com/google-research/big_vision/issues/110).
            out = pillow_ops.solarize(image, int(256 * level) % 256)
        case "solarize_add":
            out = pillow_ops.solarize_add(image, int(110 * level))
        case "color" | "contrast" | "brightness" | "sharpness":
            out = getattr(pillow_ops, name)(image, 1.8 * level + 0.1)
        case "shear_x":
            out = pillow_ops.shear(image, 0.3 * signed, 0.0)
        case "shear_y":
            out = pillow_ops.shear(image, 0.0, 0.3 * signed)
        case "translate_x":
            out = pillow_ops.translate(image, 0, round(100 * signed * width / _SIDE))
        case "translate_y":
            out = pillow_ops.translate(image, round(100 * signed * height / _SIDE), 0)
        case "cutout":
            half = round(int(40 * level) * min(height, width) / _SIDE)
            out = pillow_ops.cutout(
                image, half, int(place[0] * height), int(place[1] * width)
            )
    return out.reshape(image.shape)  # OpenCV drops the axis of one channel.


NAMES = (
    *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize"),
    *("color", "contrast", "brightness", "sharpness", "shear_x", "shear_y"),
    *("translate_x", "translate_y", "cutout", "solarize_add"),
)
