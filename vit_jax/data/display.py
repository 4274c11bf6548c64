"""Converts images of any bands and depth to pictures that can be displayed.

Letters: H and W height and width, C bands, c channels of the picture.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Num, UInt8


def to_rgb(pixels: Num[np.ndarray, "H W C"]) -> UInt8[np.ndarray, "H W 3"]:
    """Returns an image as an RGB picture, scaled by `to_display`."""
    shown = to_display(pixels)
    return np.repeat(shown, 3 // shown.shape[-1], axis=-1)


def to_display(
    pixels: Num[np.ndarray, "H W C"], shown: Sequence[int] = ()
) -> UInt8[np.ndarray, "H W c"]:
    """Returns a picture of an image: grey for one or two bands, else the first three.

    Images that are not photographs are scaled so that 2 % of the values become black,
    and 2 % white.

    Args:
      pixels: image of any bands and depth.
      shown: bands to show instead, one or three, counted from 0.
    """
    if pixels.dtype == np.uint8 and pixels.shape[-1] in (1, 3):
        return pixels[..., shown] if shown else pixels
    pixels = pixels[..., shown] if shown else pixels
    first = pixels[..., : 3 if pixels.shape[-1] > 2 else 1].astype(np.float32)
    low, high = np.percentile(first, (2, 98), axis=(0, 1))
    scaled = (first - low) / np.maximum(high - low, 1e-6)
    return (255 * scaled.clip(0, 1)).round().astype(np.uint8)
