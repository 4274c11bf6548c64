"""Resizing of uint8 images: sizes, the filter of Pillow, and a faster way close to it.

Letters: H and W height and width before, h and w after, C channels.
"""

import cv2
import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

Before = UInt8[np.ndarray, "H W C"]
After = UInt8[np.ndarray, "h w C"]
Box = tuple[float | int, float | int, float | int, float | int]

_FAST_UP_TO = 3  # Times smaller; beyond, three taps antialias too little.


def short_side_size(size: tuple[int, int], short: int) -> tuple[int, int]:
    """Returns the height and width of an image whose short side is made `short` pixels.

    The long side is rounded down, as by torchvision's Resize and so by timm.

    Args:
      size: height and width of the image, in pixels.
      short: short side of the result, in pixels.
    """
    least = min(size)
    return int(short * size[0] / least), int(short * size[1] / least)


def centre_crop_start(length: int, crop: int) -> int:
    """Returns the first row (or column) of the central `crop` of `length` pixels.

    Half a pixel rounds to even, as in torchvision's CenterCrop. Negative where the crop
    is larger.
    """
    return round((length - crop) / 2)


def resize_bilinear(image: Before, size: tuple[int, int]) -> After:
    """Resizes to (height, width) with Pillow's antialiased bilinear filter."""
    if image.shape[:2] == size:
        return image
    return resize_box(image, (0, 0, *image.shape[:2]), size)


def resize_box(image: Before, box: Box, size: tuple[int, int]) -> After:
    """Resizes a part with Pillow's antialiased bilinear filter.

    Args:
      image: to cut the part from.
      box: top, left, height and width in pixels, which may be fractions.
      size: height and width of the result.
    """
    top, left, height, width = box
    # Rounding may carry a fraction past the border by less than it matters.
    bottom, right = np.minimum((top + height, left + width), image.shape[:2]).tolist()
    grey = image.shape[-1] == 1
    # Pillow knows one or three channels, and one has no axis of its own.
    picture = Image.fromarray(image[..., 0] if grey else np.ascontiguousarray(image))
    picture = picture.resize(
        size[::-1], Image.Resampling.BILINEAR, box=(left, top, right, bottom)
    )
    out = np.array(picture)
    return out[..., None] if grey else out


def resize_fast(image: Before, size: tuple[int, int], antialias: bool = True) -> After:
    """Resizes about as `resize_bilinear` does, in a third of the time.

    Args:
      image: to resize.
      size: height and width of the result.
      antialias: false leaves out the low pass: faster still, and fine detail of an
        image that shrinks turns into noise.
    """
    if antialias:
        times = image.shape[0] / size[0], image.shape[1] / size[1]
        if max(times) > _FAST_UP_TO:
            return resize_bilinear(image, size)
        if max(times) > 1:
            down, across = map(_low_pass, times)
            border = cv2.BORDER_REPLICATE
            image = cv2.sepFilter2D(image, -1, across, down, borderType=border)
    out = cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR)
    return out.reshape(*size, -1)  # OpenCV drops an axis of one channel.


def _low_pass(times: float) -> Float32[np.ndarray, " taps"]:
    """Returns what, with the interpolation that follows, comes near the tent filter.

    Exact when the image keeps its size and when it is halved: there the two together
    weigh four pixels by 1, 3, 3, 1.
    """
    if times <= 1:
        return np.ones(1, np.float32)
    side = min((times - 1) / 4, 1 / 3)
    return np.array([side, 1 - 2 * side, side], np.float32)
