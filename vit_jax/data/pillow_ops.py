"""Pillow's operations on colours and places, by OpenCV where that is faster.

Each takes and returns uint8; OpenCV drops the axis of a single channel, so the result
may lack it. Letters: H and W height and width, C channels.
"""

import math
from collections.abc import Callable

import cv2
import numpy as np
from jaxtyping import UInt8

Image = UInt8[np.ndarray, "H W C"]

_FILL = 128  # Grey, where an operation leaves nothing.


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
    """Makes the values of each channel about equally common."""

    def table(counts):
        counts = counts.astype(np.int64)
        step = (counts.sum() - counts[np.flatnonzero(counts)[-1]]) // 255
        if not step:
            return np.arange(256)
        return (step // 2 + np.cumsum(counts) - counts) // step

    return _map_channels(image, table)


def invert(image: Image) -> np.ndarray:
    """Turns black into white."""
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
    """Moves away from grey; a factor of 0 is grey, 1 the image itself."""
    if image.shape[-1] == 1:
        return image
    grey = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    return _blend(cv2.cvtColor(grey, cv2.COLOR_GRAY2RGB), image, factor)


def contrast(image: Image, factor: float) -> np.ndarray:
    """Moves away from the mean grey."""
    means = cv2.mean(image)
    grey = means[0]
    if image.shape[-1] == 3:
        grey = 0.299 * means[0] + 0.587 * means[1] + 0.114 * means[2]
    grey = int(grey + 0.5)
    return _map(image, grey + factor * (np.arange(256) - grey))


def brightness(image: Image, factor: float) -> np.ndarray:
    """Moves away from black."""
    return _map(image, factor * np.arange(256))


def sharpness(image: Image, factor: float) -> np.ndarray:
    """Moves away from a blurred image; the outermost pixels stay."""
    if min(image.shape[:2]) < 3:
        return image
    kernel = np.ones((3, 3), np.float32) / 13
    kernel[1, 1] = 5 / 13
    smooth = cv2.filter2D(image, -1, kernel).reshape(image.shape)
    smooth[[0, -1]], smooth[:, [0, -1]] = image[[0, -1]], image[:, [0, -1]]
    return _blend(smooth, image, factor)


def rotate(image: Image, degrees: float) -> np.ndarray:
    """Turns about the centre, anticlockwise, to the nearest pixel."""
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
    """Puts grey over a square of side 2 * half about a pixel."""
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
    """Takes the pixel (x, y) from the nearest of source @ (x, y, 1)."""
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
