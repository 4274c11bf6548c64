"""mmsegmentation's PhotoMetricDistortion, which its segmentation recipes use.

Grey levels are rounded to integers after each change, as in the original
(mmseg/datasets/transforms/transforms.py, PhotoMetricDistortion), so results are equal
to the bit; hue and saturation are OpenCV's.
"""

import dataclasses

import cv2
import numpy as np
from jaxtyping import UInt8

from vit_jax.config.fields import key
from vit_jax.data.transforms.base import Given, HostTransform, check_range

_HUES = 180  # Number of hues in OpenCV, in steps of two degrees.

Pixels = UInt8[np.ndarray, "H W C"]


@dataclasses.dataclass(frozen=True)
class PhotometricDistortion(HostTransform):
    """Changes brightness, contrast, saturation and hue, each with probability 0.5.

    Brightness comes first; contrast comes second or last, with equal probability.
    Saturation and hue of grey images do not change.

    Args:
      contrast, saturation: smallest and largest factor.
    """

    on_colors = True

    brightness: Given = key(32.0, "Largest number of grey levels to add or subtract.")
    contrast: Given = (0.5, 1.5)
    saturation: Given = (0.5, 1.5)
    hue: Given = key(
        18,
        "Largest rotation of the hue, in steps of two degrees; only the negative "
        "rotation reaches it.",
    )

    def __post_init__(self):
        super().__post_init__()
        check_range("contrast", self.contrast)
        check_range("saturation", self.saturation)

    def __call__(self, image: Pixels, rng: np.random.Generator) -> Pixels:
        def drawn(low, high):
            """Draws a number with probability 0.5, else returns None."""
            often, place = rng.random(), rng.random()
            return low + place * (high - low) if often < 0.5 else None

        brightness = drawn(-self.brightness, self.brightness)
        contrast_early = rng.random() < 0.5
        contrast, saturation = drawn(*self.contrast), drawn(*self.saturation)
        turn = drawn(-self.hue, self.hue)
        # Integer steps from -18 to 17, as in the original's `randint`.
        turn = None if turn is None else int(np.floor(turn))
        return distort(image, brightness, contrast, saturation, turn, contrast_early)


def distort(
    image: Pixels,
    brightness: float | None,
    contrast: float | None,
    saturation: float | None,
    hue: int | None,
    contrast_early: bool,
) -> Pixels:
    """Returns an image after given changes; a change that is None is left out.

    Args:
      image: image of 1 or 3 channels, red first.
      brightness: grey levels to add.
      contrast, saturation: factors.
      hue: steps of two degrees to add.
      contrast_early: whether contrast comes before saturation and hue instead of after.
    """
    image = _scaled(image, shift=brightness or 0.0)
    contrast = 1.0 if contrast is None else contrast
    if contrast_early:
        image = _scaled(image, contrast)
    # One after the other, because each change rounds the colours.
    if saturation is not None and image.shape[-1] == 3:
        image = _in_hsv(image, 1, _levels(saturation))
    if hue is not None and image.shape[-1] == 3:
        image = _in_hsv(image, 0, ((np.arange(256) + hue) % _HUES).astype(np.uint8))
    return image if contrast_early else _scaled(image, contrast)


def _levels(factor: float = 1.0, shift: float = 0.0) -> UInt8[np.ndarray, "256"]:
    """Returns the new value of each grey level, clipped to 0..255 and rounded down."""
    levels = np.arange(256, dtype=np.float32) * np.float32(factor) + np.float32(shift)
    return np.clip(levels, 0, 255).astype(np.uint8)


def _scaled(image: Pixels, factor: float = 1.0, shift: float = 0.0) -> Pixels:
    if (factor, shift) == (1.0, 0.0):
        return image
    return cv2.LUT(image, _levels(factor, shift)).reshape(image.shape)


def _in_hsv(image: Pixels, channel: int, table: UInt8[np.ndarray, "256"]) -> Pixels:
    """Maps one channel of an image's hue, saturation and value by a table."""
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    hsv[..., channel] = cv2.LUT(hsv[..., channel], table)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
