"""Perceptual hashes: the signs of an image's lowest cosine frequencies.

Resizing, recompression and the loss of colour hardly touch these. Cropping does, so
that an image is hashed whole and through windows of it; mirroring is the index's part.
Source: "pHash" (C. Zauner, Implementation and Benchmarking of Perceptual Image Hash
Functions, 2010); here 128 frequencies by their distance from zero, and the windows.
Letters: N images, S side of a thumbnail, W windows.
"""

import functools

import numpy as np
from jaxtyping import UInt8

from vit_jax.data.near_duplicates.thumbnails import SIDE

BITS = 128
_FREQUENCIES = 16  # A side, of which the lowest BITS are kept.
_PART = 0.92  # Side of a window: crops by 10 % in area (0.95) and in sides (0.9).

# Top, bottom, left and right as fractions of the image.
Window = tuple[float, float, float, float]
WHOLE: Window = (0.0, 1.0, 0.0, 1.0)
_OFFSETS = (0.0, (1 - _PART) / 2, 1 - _PART)
WINDOWS: tuple[Window, ...] = (
    WHOLE,
    *((y, y + _PART, x, x + _PART) for y in _OFFSETS for x in _OFFSETS),
)


def hashes(
    thumbnails: UInt8[np.ndarray, "N S S"], windows: tuple[Window, ...]
) -> UInt8[np.ndarray, "N W 16"]:
    """Hashes images through windows.

    Args:
      thumbnails: of the images.
      windows: parts of an image that are hashed as if they were all of it.

    Returns:
      BITS bits each, eight a byte.
    """
    pixels = thumbnails.astype(np.float32)
    found = np.empty((len(pixels), len(windows), BITS // 8), np.uint8)
    for number, (top, bottom, left, right) in enumerate(windows):
        down, across = _cosines(top, bottom), _cosines(left, right)
        waves = np.matmul(np.matmul(down, pixels), across.T)
        signs = waves.reshape(len(pixels), -1)[:, _lowest()] > 0
        found[:, number] = np.packbits(signs, axis=1)
    return found


@functools.cache
def _cosines(start: float, stop: float) -> np.ndarray:
    """Returns cosine waves (frequency, pixel) over a part of an axis, 0 outside.

    A pixel that the part's edge cuts counts by its share inside.
    """
    edges = np.arange(SIDE + 1) / SIDE
    first, last = (np.clip(e, start, stop) for e in (edges[:-1], edges[1:]))
    middle = ((first + last) / 2 - start) / (stop - start)
    waves = np.cos(np.pi * np.arange(_FREQUENCIES)[:, None] * middle[None])
    return (waves * (last - first)).astype(np.float32)


@functools.cache
def _lowest() -> np.ndarray:
    """Returns which frequencies are kept; the mean is not: it is always positive."""
    rows, columns = np.mgrid[:_FREQUENCIES, :_FREQUENCIES]
    return np.argsort((rows**2 + columns**2).ravel(), kind="stable")[1 : BITS + 1]
