"""Pictures of images of any bands and depth, to look at.

Letters: H and W height and width, C bands, c channels of the picture.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Num, UInt8


def to_rgb(pixels: Num[np.ndarray, "H W C"]) -> UInt8[np.ndarray, "H W 3"]:
    """Returns the picture of `to_display` with three channels."""
    shown = to_display(pixels)
    return np.repeat(shown, 3 // shown.shape[-1], axis=-1)


def to_display(
    pixels: Num[np.ndarray, "H W C"], shown: Sequence[int] = ()
) -> UInt8[np.ndarray, "H W c"]:
    """Returns a picture of an image: grey for one or two bands, else the first three.

    `shown` are other bands, one or three, counted from 0. What is no photograph is scaled
    so that 2 % of the values are black and 2 % are white.
    """
    if pixels.dtype == np.uint8 and pixels.shape[-1] in (1, 3):
        return pixels[..., shown] if shown else pixels
    pixels = pixels[..., shown] if shown else pixels
    first = pixels[..., : 3 if pixels.shape[-1] > 2 else 1].astype(np.float32)
    low, high = np.percentile(first, (2, 98), axis=(0, 1))
    scaled = (first - low) / np.maximum(high - low, 1e-6)
    return (255 * scaled.clip(0, 1)).round().astype(np.uint8)
