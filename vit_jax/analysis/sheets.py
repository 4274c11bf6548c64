"""Contact sheets of what is found inside a model, as notebooks show them.

Letters: S tiles, N tokens, H by W pixels, C channels.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vit_jax.analysis import filters, overlay, positions
from vit_jax.models import Model, Params
from vit_jax.report import contact_sheet


def of_tokens(
    model: Model,
    pixels: UInt8[np.ndarray, "H W C"],
    tokens: Float[np.ndarray, "S N"],
    captions: Sequence[str],
    columns: int,
) -> Image.Image:
    """Lays a value a token over the image that the network saw, a tile for each row.

    Args:
      model: the network.
      pixels: the image as it was prepared for it.
      tokens: values, those of the tokens in front of the patches first, which are left
        out; each row is scaled from its least to its largest patch.
      captions: one a tile.
      columns: tiles of a row of the sheet.
    """
    size = pixels.shape[:2]
    maps = [
        overlay.scaled(overlay.upsample(row[model.extra :], model.grid, size))
        for row in np.asarray(tokens)
    ]
    tiles = np.stack([overlay.blend(pixels, values) for values in maps])
    return contact_sheet.draw(tiles, [[text] for text in captions], columns)


def of_filters(params: Params, count: int, columns: int) -> Image.Image:
    """Draws the principal components of the first filters, with their shares.

    Args:
      params: of any network.
      count: of components.
      columns: tiles of a row of the sheet.
    """
    components, shares = filters.components(filters.kernels(params), count)
    captions = [[f"{share:.0%}"] for share in shares]
    return contact_sheet.draw(_shades(filters.tiles(components)), captions, columns)


def of_positions(model: Model, params: Params, columns: int) -> Image.Image:
    """Draws how alike the position embedding of a patch is to those of all others.

    It does so for the patches at two corners and in the middle, each scaled from its
    least to its largest similarity.

    Args:
      model, params: the network.
      columns: tiles of a row of the sheet.

    Raises:
      UserError: the network has no position embeddings.
    """
    alike = positions.similarity(model, params)
    Y, X = model.grid
    places = [(0, 0), (Y // 2, X // 2), (Y - 1, X - 1)]
    tiles = np.stack([overlay.scaled(alike[place]) for place in places])
    captions = [[f"row {row + 1}, column {column + 1}"] for row, column in places]
    return contact_sheet.draw(_shades(tiles[..., None]), captions, columns)


def _shades(values: Float[np.ndarray, "S H W C"]) -> UInt8[np.ndarray, "S H W C"]:
    """Returns values from 0 to 1 as those of pixels."""
    return np.round(255 * values).astype(np.uint8)
