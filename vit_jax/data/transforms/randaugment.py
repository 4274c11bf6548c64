"""RandAugment (arXiv:1909.13719) as AugReg (arXiv:2106.10270) used it.

The operations, and what a magnitude means for them, are those that big_vision released
for that paper's configs (`pp/archive/autoaugment.py`); each operation is Pillow's, done
by OpenCV where that is faster. The operations take and return uint8; OpenCV drops the
axis of a single channel, so that a result may lack it. Letters: H and W height and
width, C channels.
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

_SIDE = 224  # Distances in pixels are of an image of this side.
_FILL = 128  # Grey, where an operation leaves nothing.


class Level(NamedTuple):
    """Settings of a level of AugReg; `layers=0` and `alpha=0` are off."""

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


@dataclasses.dataclass(frozen=True)
class RandAugment(HostTransform):
    """Applies random operations of `NAMES`, one after the other.

    Args:
      layers: number of operations, drawn with replacement.
      magnitude: strength of every operation, at most 30; 10 is common.
    """

    layers: Given = key(2, "Number of operations.")
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

    level: Given = key(dataclasses.MISSING, "Strength.", choices=tuple(LEVELS))

    def expand(self) -> tuple[str, str]:
        """Returns the transforms that this one stands for: here, and at the end."""
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
            out = _BY_HISTOGRAM[name](image)
        case "rotate":
            out = rotate(image, 30 * signed)
        case "posterize":
            # TensorFlow cuts a shift by 8 bits to 7, so that the first bit stays.
            out = posterize(image, min(max(int(4 * level), 1), 8))
        case "solarize":
            # The threshold wraps there, a uint8: at magnitudes 10 and 20 it is 0, so
            # everything is inverted (github.com/google-research/big_vision/issues/110).
            out = solarize(image, int(256 * level) % 256)
        case "solarize_add":
            out = solarize_add(image, int(110 * level))
        case "color" | "contrast" | "brightness" | "sharpness":
            out = _BY_FACTOR[name](image, 1.8 * level + 0.1)
        case "shear_x":
            out = shear(image, 0.3 * signed, 0.0)
        case "shear_y":
            out = shear(image, 0.0, 0.3 * signed)
        case "translate_x":
            out = translate(image, 0, round(100 * signed * width / _SIDE))
        case "translate_y":
            out = translate(image, round(100 * signed * height / _SIDE), 0)
        case "cutout":
            half = round(int(40 * level) * min(height, width) / _SIDE)
            out = cutout(image, half, int(place[0] * height), int(place[1] * width))
    return out.reshape(image.shape)  # OpenCV drops the axis of one channel.


def autocontrast(image: Image) -> np.ndarray:
    """Stretches each channel to 0..255."""

    def table(counts):
        there = np.flatnonzero(counts)
        low, high = int(there[0]), int(there[-1])
        if high == low:
            return np.arange(256)
        scale = 255 / (high - low)
        return np.arange(256) * scale - low * scale

    return _map_channels(image, table)


def equalize(image: Image) -> np.ndarray:
    """Equalizes the histogram of each channel."""

    def table(counts):
        counts = counts.astype(np.int64)
        step = (counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
        if not step:
            return np.arange(256)
        return (step // 2 + np.cumsum(counts) - counts) // step

    return _map_channels(image, table)


def invert(image: Image) -> np.ndarray:
    """Inverts every value."""
    return cv2.bitwise_not(image)


def posterize(image: Image, bits: int) -> np.ndarray:
    """Keeps the highest bits of each value."""
    return np.bitwise_and(image, np.uint8(256 - 2 ** (8 - bits)))


def solarize(image: Image, threshold: int) -> np.ndarray:
    """Inverts values from the threshold on."""
    values = np.arange(256)
    return _map(image, np.where(values < threshold, values, 255 - values))


def solarize_add(image: Image, addition: int) -> np.ndarray:
    """Adds to the values below 128."""
    values = np.arange(256)
    return _map(image, np.where(values < 128, values + addition, values))


def color(image: Image, factor: float) -> np.ndarray:
    """Scales the difference from grey; a factor of 0 is grey, 1 the image itself."""
    if image.shape[-1] == 1:
        return image
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    return _blend(cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB), image, factor)


def contrast(image: Image, factor: float) -> np.ndarray:
    """Scales the difference from the mean grey."""
    means = cv2.mean(image)
    grey = means[0]
    if image.shape[-1] == 3:
        grey = 0.299 * means[0] + 0.587 * means[1] + 0.114 * means[2]
    grey = int(grey + 0.5)
    return _map(image, grey + factor * (np.arange(256) - grey))


def brightness(image: Image, factor: float) -> np.ndarray:
    """Scales the difference from black."""
    return _map(image, factor * np.arange(256))


def sharpness(image: Image, factor: float) -> np.ndarray:
    """Scales the difference from a blurred image; the outermost pixels stay."""
    if min(image.shape[:2]) < 3:
        return image
    kernel = np.ones((3, 3), np.float32) / 13
    kernel[1, 1] = 5 / 13
    smooth = cv2.filter2D(image, -1, kernel).reshape(image.shape)
    smooth[[0, -1]], smooth[:, [0, -1]] = image[[0, -1]], image[:, [0, -1]]
    return _blend(smooth, image, factor)


def rotate(image: Image, degrees: float) -> np.ndarray:
    """Rotates anticlockwise about the centre, to the nearest pixel."""
    height, width, _ = image.shape
    y, x = (height - 1) / 2, (width - 1) / 2
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return _warp(image, [[c, -s, x - c * x + s * y], [s, c, y - s * x - c * y]])


def shear(image: Image, along_x: float, along_y: float) -> np.ndarray:
    """Shifts rows by `along_x` a row and columns by `along_y` a column."""
    # About the corner, not the centre of the first pixel, as Pillow does.
    return _warp(image, [[1, along_x, along_x / 2], [along_y, 1, along_y / 2]])


def translate(image: Image, up: int, left: int) -> np.ndarray:
    """Shifts by whole pixels."""
    height, width, _ = image.shape
    out = np.full_like(image, _FILL)
    rows = slice(max(up, 0), max(height + min(up, 0), 0))
    columns = slice(max(left, 0), max(width + min(left, 0), 0))
    part = image[rows, columns]
    top, begin = max(-up, 0), max(-left, 0)
    out[top : top + part.shape[0], begin : begin + part.shape[1]] = part
    return out


def cutout(image: Image, half: int, row: int, column: int) -> np.ndarray:
    """Replaces a square of side 2 * half around a pixel by grey."""
    out = image.copy()
    out[max(row - half, 0) : row + half, max(column - half, 0) : column + half] = _FILL
    return out


def _map(image: Image, table: np.ndarray) -> np.ndarray:
    """Replaces each value by what a table of 256, or 256 a channel, holds for it."""
    return cv2.LUT(image, np.clip(table, 0, 255).astype(np.uint8))


def _map_channels(image: Image, table: Callable) -> np.ndarray:
    """Maps each channel by a table made from its histogram."""
    channels = range(image.shape[-1])
    tables = [
        table(cv2.calcHist([image], [c], None, [256], (0, 256)).ravel())
        for c in channels
    ]
    return _map(image, np.stack(tables, axis=-1)[None])


def _blend(other: np.ndarray, image: Image, factor: float) -> np.ndarray:
    """Returns other + factor * (image - other), cut to 0..255 and to whole numbers."""
    # OpenCV rounds where Pillow cuts off; whole numbers must stay the same in both.
    return cv2.addWeighted(image, factor, other, 1 - factor, -0.499)


def _warp(image: Image, source: list) -> np.ndarray:
    """Samples pixel (x, y) from the pixel nearest to source @ (x, y, 1)."""
    source = np.array(source, np.float64)
    source[:, 2] += 1e-4  # Halfway between two pixels, the next one, as in Pillow.
    return cv2.warpAffine(
        image,
        source,
        image.shape[1::-1],
        flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=(_FILL,) * 3,
    )


_BY_HISTOGRAM = {"autocontrast": autocontrast, "equalize": equalize, "invert": invert}
_BY_FACTOR = {
    "color": color,
    "contrast": contrast,
    "brightness": brightness,
    "sharpness": sharpness,
}
NAMES = (
    *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize"),
    *("color", "contrast", "brightness", "sharpness", "shear_x", "shear_y"),
    *("translate_x", "translate_y", "cutout", "solarize_add"),
)

TRANSFORMS = {"randaugment": RandAugment, "augreg": AugReg}
