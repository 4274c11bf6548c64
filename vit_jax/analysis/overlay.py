"""Pictures without matplotlib: values of patches over images, and contact sheets.

Letters: Y by X patches, H by W pixels, S tiles, N tokens, C channels.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vit_jax.analysis import contact_sheet, embeddings
from vit_jax.analysis.loaded_model import LoadedModel, check_finite
from vit_jax.data import display
from vit_jax.data.preprocess import Preprocess
from vit_jax.models import Model, Params

# Colours of values from 0 to 1. Opacity grows with the value up to _MAX_ALPHA, so that
# the smallest values show the image itself.
_COLORMAP = np.array([(120, 28, 110), (213, 72, 60), (252, 165, 10), (252, 245, 150)])
_MAX_ALPHA = 0.8
_BRIGHTNESS = 0.75  # Brightness of the image under the colours.
_CROPPED_BRIGHTNESS = 0.35  # Brightness outside the model's crop.
_ROWS_PER_BLEND = 256  # Float copies take many times the memory of the image.


def upsample(
    values: Float[np.ndarray, " YX"], grid: tuple[int, int], size: tuple[int, int]
) -> Float[np.ndarray, "H W"]:
    """Resizes values of patches to pixels, bilinearly between patch centres.

    Args:
      values: one value per patch, in row-major order.
      grid: number of patches down and across.
      size: height and width of the result in pixels.
    """
    image = Image.fromarray(np.asarray(values, np.float32).reshape(grid))
    return np.array(image.resize(size[::-1], Image.Resampling.BILINEAR))


def rescale(values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Returns values rescaled from their minimum and maximum to [0, 1].

    Constant values become 0.

    Raises:
      UserError: a value is not finite.
    """
    values = np.asarray(values, np.float32)
    check_finite(values, "the overlay")
    minimum, spread = values.min(), np.ptp(values)
    return (values - minimum) / spread if spread > 0 else np.zeros_like(values)


def blend(
    image: UInt8[np.ndarray, "H W C"], values: Float[np.ndarray, "H W"]
) -> UInt8[np.ndarray, "H W 3"]:
    """Blends values over an image, from purple through orange to pale yellow.

    Args:
      image: image with any bands, see `display.to_display`.
      values: one value per pixel, from 0 (the image in grey) to 1; NaN marks pixels
        outside the crop, which are darkened.
    """
    image = display.to_display(image)
    blended = np.empty((*image.shape[:2], 3), np.uint8)
    for top in range(0, len(image), _ROWS_PER_BLEND):
        rows = slice(top, top + _ROWS_PER_BLEND)
        blended[rows] = _blend_rows(image[rows], values[rows])
    return blended


def _blend_rows(image, values) -> np.ndarray:
    grey = np.asarray(image, np.float32).mean(-1, keepdims=True)
    cropped = np.isnan(values)
    values = np.clip(np.where(cropped, 0, values), 0, 1)[..., None]
    values = values.astype(np.float32)
    stops = np.linspace(0, 1, len(_COLORMAP))
    colours = np.concatenate(
        [np.interp(values, stops, channel) for channel in _COLORMAP.T],
        axis=-1,
        dtype=np.float32,
    )
    alpha = _MAX_ALPHA * values
    mixed = (1 - alpha) * _BRIGHTNESS * grey + alpha * colours
    mixed = np.where(cropped[..., None], _CROPPED_BRIGHTNESS * grey, mixed)
    return mixed.round().clip(0, 255).astype(np.uint8)


def overlay_patches(
    image: UInt8[np.ndarray, "H W C"],
    values: Float[np.ndarray, " YX"],
    grid: tuple[int, int],
    preprocess: Preprocess,
) -> UInt8[np.ndarray, "H W 3"]:
    """Blends values of patches over the original image, at its resolution.

    Args:
      image: image before preprocessing.
      values: one value per patch, in row-major order; rescaled to [0, 1].
      grid: number of patches down and across.
      preprocess: resize and crop of the model's input.

    Raises:
      UserError: a value is not finite.
    """
    top, left, height, width = crop_region(image.shape[:2], preprocess)
    whole = np.full(image.shape[:2], np.nan, np.float32)
    # Rounding may put an edge of the crop one pixel outside the image.
    rows = slice(max(0, top), min(top + height, len(image)))
    columns = slice(max(0, left), min(left + width, image.shape[1]))
    crop = upsample(rescale(values), grid, (height, width))
    whole[rows, columns] = crop[
        rows.start - top : rows.stop - top, columns.start - left : columns.stop - left
    ]
    return blend(image, whole)


def overlay_tokens(
    loaded: LoadedModel,
    image: UInt8[np.ndarray, "H W C"],
    tokens: Float[np.ndarray, " N"],
) -> UInt8[np.ndarray, "H W 3"]:
    """Blends values of a model's tokens over the original image, see `overlay_patches`."""
    patches = tokens[loaded.model.num_prefix_tokens :]
    return overlay_patches(image, patches, loaded.model.grid, loaded.preprocess)


def crop_region(
    size: tuple[int, int], preprocess: Preprocess
) -> tuple[int, int, int, int]:
    """Returns the region of an image that the model sees: top, left, height, width.

    Args:
      size: height and width of the original image in pixels.
      preprocess: resize and crop of the model.
    """
    height, width = size
    top, left, bottom, right = preprocess.crop_box(size)
    return (
        round(top * height),
        round(left * width),
        round((bottom - top) * height),
        round((right - left) * width),
    )


def token_sheet(
    model: Model,
    pixels: UInt8[np.ndarray, "H W C"],
    tokens: Float[np.ndarray, "S N"],
    captions: Sequence[str],
    columns: int,
) -> Image.Image:
    """Draws a contact sheet of token values over the prepared image.

    Args:
      model: the model.
      pixels: the image as prepared for the model.
      tokens: one row of values per tile; prefix tokens are dropped, and each row is
        rescaled to [0, 1].
      captions: one caption per tile.
      columns: tiles per row of the sheet.
    """
    size = pixels.shape[:2]
    values = [
        rescale(upsample(row[model.num_prefix_tokens :], model.grid, size))
        for row in np.asarray(tokens)
    ]
    tiles = np.stack([blend(pixels, of_tile) for of_tile in values])
    return contact_sheet.draw(tiles, [[text] for text in captions], columns)


def filter_sheet(params: Params, num_components: int, columns: int) -> Image.Image:
    """Draws a contact sheet of the principal components of the first filters.

    The captions are the fractions of explained variance.

    Args:
      params: parameters of any model.
      num_components: maximum number of components.
      columns: tiles per row of the sheet.
    """
    kernel = embeddings.first_kernel(params)
    components, explained = embeddings.principal_components(kernel, num_components)
    tiles = _to_uint8(embeddings.components_to_intensities(components))
    captions = [[f"{fraction:.0%}"] for fraction in explained]
    return contact_sheet.draw(tiles, captions, columns)


def position_sheet(model: Model, params: Params, columns: int) -> Image.Image:
    """Draws a contact sheet of the similarity of position embeddings.

    The tiles compare the patches at two corners and at the centre with all patches.
    Each tile is rescaled to [0, 1].

    Args:
      model: a model with position embeddings.
      params: parameters of the model.
      columns: tiles per row of the sheet.

    Raises:
      UserError: the model has no position embeddings.
    """
    similarity = embeddings.position_similarity(model, params)
    Y, X = model.grid
    patches = [(0, 0), (Y // 2, X // 2), (Y - 1, X - 1)]
    tiles = np.stack([rescale(similarity[patch]) for patch in patches])
    captions = [[f"row {row + 1}, column {column + 1}"] for row, column in patches]
    return contact_sheet.draw(_to_uint8(tiles[..., None]), captions, columns)


def _to_uint8(values: Float[np.ndarray, "S H W C"]) -> UInt8[np.ndarray, "S H W C"]:
    return np.round(255 * values).astype(np.uint8)
