"""Figures that need no images: filters, and the similarity of positions."""

import numpy as np
from jaxtyping import Float

from vit_jax.analysis import filters, positions
from vit_jax.analysis.figures import tiling
from vit_jax.analysis.figures.canvas import Picture
from vit_jax.analysis.subject import Subject

_COLUMNS = 7  # Of filters, as in the paper.
_CELLS = 1500  # Of a grid of grids, down or across: 15 inches.


def filters_picture(subject: Subject) -> Picture:
    """Draws the first principal components of the filters that see pixels."""
    kernels = filters.kernels(subject.params)
    found, share = filters.components(kernels)
    tiles = filters.tiles(found)
    rgb = tiles if tiles.shape[-1] == 3 else tiles.mean(-1, keepdims=True).repeat(3, -1)
    drawn = tiling.sheet(
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

    Of a large grid only some patches have one; the data has all.

    Raises:
      UserError: there are none, or they are not finite.
    """
    alike = positions.similarity(subject.model, subject.params, layer)
    rows, columns = map(drawn_of, alike.shape[:2])
    kind = subject.model.options["posemb"]
    drawn = tiling.heat(
        mosaic(alike[np.ix_(rows, columns)]),
        title=f"{subject.name}: similarity of positions ({kind})",
        x_label="column of the patch",
        y_label="row of the patch",
        label="cosine similarity",
        limits=(-1, 1),
        ticks=(_places(columns, alike.shape[1]), _places(rows, alike.shape[0])),
        downwards=True,
    )
    return Picture("posemb", drawn, {"similarity": alike})


def drawn_of(side: int) -> range:
    """Returns the rows, or columns, of patches whose grids there is room for."""
    every = 1
    while -(-side // every) * (side + 1) > max(_CELLS, side + 1):
        every += 1
    return range(0, side, every)


def mosaic(alike: Float[np.ndarray, "y x Y X"]) -> Float[np.ndarray, "h w"]:
    """Lays a grid for each of some patches out where the patch is, NaN between them."""
    y, x, Y, X = alike.shape
    apart = np.full((y, Y + 1, x, X + 1), np.nan, np.float32)
    apart[:, :Y, :, :X] = alike.transpose(0, 2, 1, 3)
    return apart.reshape(y * (Y + 1), x * (X + 1))[:-1, :-1]


def _places(drawn: range, side: int) -> tuple[list[float], list[str]]:
    """Returns where grids have their centres, and their numbers from 1; some of many."""
    chosen = range(0, len(drawn), -(-len(drawn) // 16))
    return [i * (side + 1) + (side - 1) / 2 for i in chosen], [
        f"{drawn[i] + 1}" for i in chosen
    ]
