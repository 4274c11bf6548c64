"""Small grey pictures, which stand for images in all that follows."""

import io

import cv2
import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vit_jax.data import decode

SIDE = 64  # Pixels.
# Below this spread of grey values there is nothing to compare. Noise of JPEG is less.
_FLAT = 2.0

Thumbnail = UInt8[np.ndarray, "S S"]


def make(data: bytes | UInt8[np.ndarray, "H W C"]) -> Thumbnail:
    """Returns an image as SIDE x SIDE grey pixels, its aspect ratio given up.

    Args:
      data: content of an image file, or pixels.

    Raises:
      DamagedImage: as from `decode.decode`.
    """
    grey = _reduced(data) if isinstance(data, bytes) else None
    if grey is None:
        grey = _to_grey(decode.decode(data))
    shrinks = min(grey.shape) >= SIDE
    how = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    if not shrinks and max(grey.shape) > SIDE:  # Else the long side would alias.
        height, width = (min(side, SIDE) for side in grey.shape)
        grey = cv2.resize(grey, (width, height), interpolation=cv2.INTER_AREA)
    return cv2.resize(grey, (SIDE, SIDE), interpolation=how)


def is_flat(thumbnail: Thumbnail) -> bool:
    """Returns whether all pixels are about the same, as of a blank page."""
    return float(thumbnail.std()) < _FLAT


def _reduced(data: bytes) -> np.ndarray | None:
    """Decodes the brightness of a JPEG at a size that is at least SIDE, if it can."""
    try:
        image = Image.open(io.BytesIO(data))
        small = image.width * image.height <= decode.MAX_PIXELS
        if image.format != "JPEG" or image.mode not in ("L", "RGB") or not small:
            return None
        image.draft("L", (SIDE, SIDE))
        return np.asarray(image.convert("L"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        # `decode` tells why.
        return None


def _to_grey(pixels: np.ndarray) -> np.ndarray:
    return cv2.cvtColor(np.ascontiguousarray(pixels), cv2.COLOR_RGB2GRAY)
