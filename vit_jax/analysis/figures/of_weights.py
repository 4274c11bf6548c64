"""Figures that need no images: filters, and the similarity of positions."""

import numpy as np
from jaxtyping import Float

from vit_jax.analysis import filters, positions
from vit_jax.analysis.figures import sheets
from vit_jax.analysis.figures.canvas import Picture
from vit_jax.analysis.subject import Subject

_COLUMNS = 7  # Of filters, as in the paper.


def filters_picture(subject: Subject) -> Picture:
    """Draws the first principal components of the filters that see pixels."""
    kernels = filters.kernels(subject.params)
    found, share = filters.components(kernels)
    tiles = filters.tiles(found)
    rgb = tiles if tiles.shape[-1] == 3 else tiles.mean(-1, keepdims=True).repeat(3, -1)
    drawn = sheets.sheet(
        list((255 * rgb).round().astype(np.uint8)),
        min(_COLUMNS, len(found)),
        title=f"{subject.name}: components of the first filters",
        captions=[f"{part:.1%}" for part in share],
        side=0.8,
    )
    data = {"components": found, "explained": share, "kernels": kernels}
    return Picture("filters", drawn, data)


def positions_picture(subject: Subject, layer: int = 0) -> Picture:
    """Draws how alike position embeddings are, as a grid of grids.

    Raises:
      UserError: there are none.
    """
    alike = positions.similarity(subject.model, subject.params, layer)
    Y, X, _, _ = alike.shape
    kind = subject.model.options["posemb"]
    drawn = sheets.heat(
        mosaic(alike),
        title=f"{subject.name}: similarity of positions ({kind})",
        x_label="column of the patch",
        y_label="row of the patch",
        label="cosine similarity",
        limits=(-1, 1),
        ticks=(_places(X, X), _places(Y, Y)),
        downwards=True,
    )
    return Picture("posemb", drawn, {"similarity": alike})


def mosaic(alike: Float[np.ndarray, "Y X Y X"]) -> Float[np.ndarray, "h w"]:
    """Lays a grid for each patch out where the patch is, NaN between them."""
    Y, X, _, _ = alike.shape
    apart = np.full((Y, Y + 1, X, X + 1), np.nan, np.float32)
    apart[:, :Y, :, :X] = alike.transpose(0, 2, 1, 3)
    return apart.reshape(Y * (Y + 1), X * (X + 1))[:-1, :-1]


def _places(count: int, side: int) -> tuple[list[float], list[str]]:
    """Returns where grids have their centres, and their numbers from 1; some of many."""
    chosen = range(0, count, -(-count // 16))
    return [i * (side + 1) + (side - 1) / 2 for i in chosen], [
        f"{i + 1}" for i in chosen
    ]
