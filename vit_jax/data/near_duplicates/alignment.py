"""Whether two images that look alike are the same: laid over each other, then compared.

Hashes of different photographs of like things come close by chance; their details do
not fit. Only fine structure is compared (a high-pass), so that light and dark in the
same places, as of a dandelion before a lawn, is not enough.
"""

import cv2
import numpy as np

from vit_jax.data.near_duplicates.hashing import Window
from vit_jax.data.near_duplicates.thumbnails import SIDE, Thumbnail

CORRELATION = 0.9  # From here on two images are near-duplicates.

_SIGMA = 4.0  # Of the high-pass, in pixels of a thumbnail.
_BLUR = 5  # Pixels; sharpening and compression change what is finer.
_STOP = (cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, 15, 1e-4)
# A corner that moves further from where the window has it, in pixels, is no crop.
_FURTHEST = 5.0
_CORNERS = np.array([[x, y, 1] for x in (0, SIDE) for y in (0, SIDE)]) - [0.5, 0.5, 0]


def correlation(part: Thumbnail, whole: Thumbnail, window: Window) -> float:
    """Returns how well `part` fits on the window of `whole`, from -1 to 1.

    Args:
      part: the image that may be a crop.
      whole: the other.
      window: where the crop about is.

    Returns:
      Correlation of the fine structure after an affine fit; 0 if nothing fits.

    Source: Evangelidis and Psarakis, Parametric Image Alignment Using Enhanced
    Correlation Coefficient Maximization, PAMI 2008 (OpenCV's `findTransformECC`).
    """
    top, bottom, left, right = window
    wide, high = right - left, bottom - top
    # From pixel centres of `part` to those of `whole`.
    start = np.array(
        [
            [wide, 0, left * SIDE + wide / 2 - 0.5],
            [0, high, top * SIDE + high / 2 - 0.5],
        ],
        np.float32,
    )
    try:
        found, fitted = cv2.findTransformECC(
            _fine(part),
            _fine(whole),
            start.copy(),
            cv2.MOTION_AFFINE,
            _STOP,
            None,
            _BLUR,
        )
    except cv2.error:  # It did not converge.
        return 0.0
    moved = np.abs(_CORNERS @ (fitted - start).T).max()
    return float(found) if moved <= _FURTHEST else 0.0


def _fine(thumbnail: Thumbnail) -> np.ndarray:
    pixels = thumbnail.astype(np.float32)
    return pixels - cv2.GaussianBlur(pixels, (0, 0), _SIGMA)
