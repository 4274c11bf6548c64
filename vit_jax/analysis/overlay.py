"""Values of patches laid over an image, at the image's own resolution.

Letters: Y by X patches, H by W pixels.
"""

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vit_jax.analysis import finite
from vit_jax.weights import preprocess as preprocessing
from vit_jax.weights.pretrained import Preprocess

# Colours of values from 0 to 1, and how much they cover: the least values show the
# image itself.
_SHADES = np.array([(120, 28, 110), (213, 72, 60), (252, 165, 10), (252, 245, 150)])
_COVER = 0.8
_DIM = 0.75  # What is left of the image's brightness below.
_UNSEEN = 0.35  # Likewise where the network saw nothing.
_ROWS = 256  # Of pixels that are blended at once: floats take many times their bytes.


def upsample(
    map: Float[np.ndarray, " YX"], grid: tuple[int, int], size: tuple[int, int]
) -> Float[np.ndarray, "H W"]:
    """Enlarges a value a patch to a value a pixel, bilinear between patch centres.

    Args:
      map: values of the patches, row by row.
      grid: Y and X.
      size: H and W.
    """
    values = np.asarray(map, np.float32).reshape(grid)
    picture = Image.fromarray(values)
    return np.array(picture.resize(size[::-1], Image.Resampling.BILINEAR))


def scaled(map: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Returns values from 0 to 1, the least and the largest; 0 if all are alike.

    Raises:
      UserError: they are not finite.
    """
    map = np.asarray(map, np.float32)
    finite.check(map, "what is to be laid over an image")
    least, spread = map.min(), np.ptp(map)
    return (map - least) / spread if spread > 0 else np.zeros_like(map)


def blend(
    image: UInt8[np.ndarray, "H W C"], map: Float[np.ndarray, "H W"]
) -> UInt8[np.ndarray, "H W 3"]:
    """Lays values over an image, purple through orange to pale yellow.

    Args:
      image: RGB or grey.
      map: from 0, where the image is seen dimmed and grey, to 1; NaN where there is no
        value, which is dimmed further.
    """
    blended = np.empty((*image.shape[:2], 3), np.uint8)
    for top in range(0, len(image), _ROWS):
        rows = slice(top, top + _ROWS)
        blended[rows] = _blended(image[rows], map[rows])
    return blended


def _blended(image, map) -> np.ndarray:
    grey = np.asarray(image, np.float32).mean(-1, keepdims=True)
    unseen = np.isnan(map)
    values = np.clip(np.where(unseen, 0, map), 0, 1)[..., None]
    values = values.astype(np.float32)
    stops = np.linspace(0, 1, len(_SHADES))
    colour = np.concatenate(
        [np.interp(values, stops, channel) for channel in _SHADES.T],
        axis=-1,
        dtype=np.float32,
    )
    cover = _COVER * values
    mixed = (1 - cover) * _DIM * grey + cover * colour
    mixed = np.where(unseen[..., None], _UNSEEN * grey, mixed)
    return mixed.round().clip(0, 255).astype(np.uint8)


def on_image(
    image: UInt8[np.ndarray, "H W C"],
    map: Float[np.ndarray, " YX"],
    grid: tuple[int, int],
    preprocess: Preprocess,
) -> UInt8[np.ndarray, "H W 3"]:
    """Lays values of patches over the whole image that the network saw a crop of.

    Args:
      image: before it was prepared.
      map, grid: as of `upsample`; the values are scaled to all of 0 to 1.
      preprocess: with which it was prepared.

    Raises:
      UserError: the values are not finite.
    """
    top, left, height, width = region(image.shape[:2], preprocess)
    whole = np.full(image.shape[:2], np.nan, np.float32)
    # A crop may reach beyond the image by the pixel that rounding took.
    rows = slice(max(0, top), min(top + height, len(image)))
    columns = slice(max(0, left), min(left + width, image.shape[1]))
    seen = upsample(scaled(map), grid, (height, width))
    whole[rows, columns] = seen[
        rows.start - top : rows.stop - top, columns.start - left : columns.stop - left
    ]
    return blend(image, whole)


def region(size: tuple[int, int], preprocess: Preprocess) -> tuple[int, int, int, int]:
    """Returns where in an image the network looks: top, left, height and width.

    Args:
      size: height and width of the image before it is prepared, in pixels.
      preprocess: with which it is.
    """
    height, width = size
    top, left, bottom, right = preprocessing.box(size, preprocess)
    return (
        round(top * height),
        round(left * width),
        round((bottom - top) * height),
        round((right - left) * width),
    )
