"""RandAugment (arXiv:1909.13719) as used by AugReg (arXiv:2106.10270).

The operations and the meaning of magnitudes are those that big_vision released for the
configs of AugReg (`pp/archive/autoaugment.py`). Results of operations are Pillow's,
computed by OpenCV if that is faster. Letters: H and W height and width, C channels.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import UInt8

from vit_jax.config.fields import key
from vit_jax.data.transforms.base import Given, HostTransform

Image = UInt8[np.ndarray, "H W C"]

_SIDE = 224  # Distances in pixels are given for an image with this side.
_FILL = 128  # Grey level of pixels from outside of the image.


class Level(NamedTuple):
    """Settings of a level of AugReg; `layers=0` and `alpha=0` are off."""

    layers: int
    magnitude: int
    alpha: float  # Parameter of mixup.


# arXiv:2106.10270, section 3.4; big_vision's configs/vit_i1k.py. In the paper, dropout
# and stochastic depth vary independently of the levels: both 0, or both 0.1.
LEVELS = {
    "none": Level(0, 0, 0.0),
    "light1": Level(2, 0, 0.0),  # Magnitude 0 has an effect too: colours fade to 10 %.
    "light2": Level(2, 10, 0.2),
    "medium1": Level(2, 15, 0.2),
    "medium2": Level(2, 15, 0.5),
    "strong1": Level(2, 20, 0.5),
    "strong2": Level(2, 20, 0.8),
}


@dataclasses.dataclass(frozen=True)
class RandAugment(HostTransform):
    """Applies random operations of `NAMES`, one after the other."""

    on_colors = moves_pixels = True
    moves_masks = False

    layers: Given = key(2, "Number of operations, drawn with replacement.")
    magnitude: Given = key(10.0, "Strength of every operation.", at_most=30)

    def __call__(self, image: Image, rng: np.random.Generator) -> Image:
        for _ in range(self.layers):
            which, sign, *place = (rng.random() for _ in range(4))
            name = NAMES[int(which * len(NAMES))]
            image = operate(name, image, float(self.magnitude), sign < 0.5, place)
        return image


@dataclasses.dataclass(frozen=True)
class AugReg(HostTransform):
    """A level of AugReg: RandAugment here, and mixup after all other operations."""

    level: Given = key(
        dataclasses.MISSING, "Strength of augmentation.", choices=tuple(LEVELS)
    )

    def expand(self) -> tuple[str, str]:
        level = LEVELS[self.level]
        return (
            f"randaugment({level.layers}, {level.magnitude})" if level.layers else "",
            f"mixup({level.alpha})" if level.alpha else "",
        )


def operate(
    name: str,
    image: Image,
    magnitude: float,
    negative: bool = False,
    place: Sequence[float] = (0.5, 0.5),
) -> Image:
    """Returns the image after one operation of RandAugment.

    Args:
      name: operation, one of `NAMES`.
      image: image, uint8.
      magnitude: strength of the operation.
      negative: whether to rotate, shear or shift in the opposite direction.
      place: centre of a cutout, as fractions of height and width.
    """
    height, width, _ = image.shape
    level = magnitude / 10
    signed = -level if negative else level
    factor, shear = 1.8 * level + 0.1, 0.3 * signed
    values = np.arange(256)
    match name:
        case "autocontrast":
            out = _map_channels(image, _stretched)
        case "equalize":
            out = _map_channels(image, _equalized)
        case "invert":
            out = cv2.bitwise_not(image)
        case "rotate":
            out = _rotate(image, 30 * signed)
        case "posterize":
            # TensorFlow cuts a shift by 8 bits to 7, so that the first bit stays.
            bits = min(max(int(4 * level), 1), 8)
            out = np.bitwise_and(image, np.uint8(256 - 2 ** (8 - bits)))
        case "solarize":
            # The original's threshold is a uint8 and wraps: at magnitudes 10 and 20 it
            # is 0, so all values are inverted
            # (github.com/google-research/big_vision/issues/110).
            threshold = int(256 * level) % 256
            out = _map(image, np.where(values < threshold, values, 255 - values))
        case "solarize_add":
            added = values + int(110 * level)
            out = _map(image, np.where(values < 128, added, values))
        case "brightness":
            out = _map(image, factor * values)
        case "color":
            out = _color(image, factor)
        case "contrast":
            # In the original, the mean grey value is the sum of a histogram, the number
            # of pixels, divided by 256: 196 for an image of 224x224.
            grey = min(height * width // 256, 255)
            out = _map(image, grey + factor * (values - grey))
        case "sharpness":
            out = _sharpness(image, factor)
        # Sheared about the corner of the first pixel, not its centre, as Pillow does.
        case "shear_x":
            out = _warp(image, [[1, shear, shear / 2], [0, 1, 0]])
        case "shear_y":
            out = _warp(image, [[1, 0, 0], [shear, 1, shear / 2]])
        case "translate_x":
            out = _translate(image, 0, round(100 * signed * width / _SIDE))
        case "translate_y":
            out = _translate(image, round(100 * signed * height / _SIDE), 0)
        case "cutout":
            half = round(int(40 * level) * min(height, width) / _SIDE)
            out = _cutout(image, half, int(place[0] * height), int(place[1] * width))
    return out.reshape(image.shape)  # OpenCV drops the axis of one channel.


def _stretched(counts: np.ndarray) -> np.ndarray:
    """Returns the table that stretches values to 0..255, from their histogram."""
    present = np.flatnonzero(counts)
    low, high = int(present[0]), int(present[-1])
    if high == low:
        return np.arange(256)
    scale = 255 / (high - low)
    return np.arange(256) * scale - low * scale


def _equalized(counts: np.ndarray) -> np.ndarray:
    """Returns the table that equalizes a histogram."""
    counts = counts.astype(np.int64)
    step = (counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
    if not step:
        return np.arange(256)
    return (step // 2 + np.cumsum(counts) - counts) // step


def _color(image: Image, factor: float) -> np.ndarray:
    """Scales the difference from grey; a factor of 0 gives grey, 1 the same image."""
    if image.shape[-1] == 1:
        return image
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    return _blend(cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB), image, factor)


def _sharpness(image: Image, factor: float) -> np.ndarray:
    """Scales the difference from a blurred image; the outermost pixels do not change."""
    if min(image.shape[:2]) < 3:
        return image
    kernel = np.ones((3, 3), np.float32) / 13
    kernel[1, 1] = 5 / 13
    smooth = cv2.filter2D(image, -1, kernel).reshape(image.shape)
    smooth[[0, -1]], smooth[:, [0, -1]] = image[[0, -1]], image[:, [0, -1]]
    return _blend(smooth, image, factor)


def _rotate(image: Image, degrees: float) -> np.ndarray:
    """Rotates anticlockwise about the centre, to the nearest pixel."""
    height, width, _ = image.shape
    y, x = (height - 1) / 2, (width - 1) / 2
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return _warp(image, [[c, -s, x - c * x + s * y], [s, c, y - s * x - c * y]])


def _translate(image: Image, up: int, left: int) -> np.ndarray:
    height, width, _ = image.shape
    out = np.full_like(image, _FILL)
    rows = slice(max(up, 0), max(height + min(up, 0), 0))
    columns = slice(max(left, 0), max(width + min(left, 0), 0))
    part = image[rows, columns]
    top, begin = max(-up, 0), max(-left, 0)
    out[top : top + part.shape[0], begin : begin + part.shape[1]] = part
    return out


def _cutout(image: Image, half: int, row: int, column: int) -> np.ndarray:
    out = image.copy()
    out[max(row - half, 0) : row + half, max(column - half, 0) : column + half] = _FILL
    return out


def _map(image: Image, table: np.ndarray) -> np.ndarray:
    """Replaces each value by its entry in a table of 256, or of 256 per channel."""
    return cv2.LUT(image, np.clip(table, 0, 255).astype(np.uint8))


def _map_channels(image: Image, table: Callable) -> np.ndarray:
    """Maps each channel by a table made from its histogram."""
    histograms = (
        cv2.calcHist([image], [c], None, [256], (0, 256)).ravel()
        for c in range(image.shape[-1])
    )
    return _map(image, np.stack(list(map(table, histograms)), axis=-1)[None])


def _blend(other: np.ndarray, image: Image, factor: float) -> np.ndarray:
    """Returns other + factor * (image - other), clipped to 0..255 and rounded down."""
    # OpenCV rounds, while Pillow rounds down; -0.499 keeps integers unchanged in both.
    return cv2.addWeighted(image, factor, other, 1 - factor, -0.499)


def _warp(image: Image, source: list) -> np.ndarray:
    """Samples pixel (x, y) from the pixel nearest to source @ (x, y, 1)."""
    source = np.array(source, np.float64)
    source[:, 2] += 1e-4  # Halfway between pixels, the next one is used, as in Pillow.
    return cv2.warpAffine(
        image,
        source,
        image.shape[1::-1],
        flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=(_FILL,) * 3,
    )


NAMES = (
    *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize"),
    *("color", "contrast", "brightness", "sharpness", "shear_x", "shear_y"),
    *("translate_x", "translate_y", "cutout", "solarize_add"),
)
