"""Learned vectors for row and column of each patch (arXiv:2010.11929, appendix D.4).

Letters: Y by X patches, D model width.
"""

import abc
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.positions.added import AddedPosition, on_grid
from vit_jax.models.resizing import is_square, resize_table

_TABLES = ("row_embedding", "column_embedding")


class RowsAndColumns(AddedPosition):
    """Learned vectors for rows and columns; prefix tokens have zeros.

    Attributes:
      parts: number of vectors that are concatenated to the model width.
    """

    parts: ClassVar[int] = 1

    @staticmethod
    @abc.abstractmethod
    def join(
        rows: Float[Array, "Y C"], columns: Float[Array, "X C"]
    ) -> Float[Array, "YX D"]:
        """Returns the vectors of the patches, row by row."""

    def embedding(self, param, places=None):
        width = self.config.width // self.parts
        init = initializers.TABLE[self.config.init].positions
        rows, columns = (
            param(name, init, (side, width), jnp.float32)
            for name, side in zip(_TABLES, self.grid, strict=True)
        )
        vectors = self.pad_prefix(self.join(rows, columns)[None])
        return vectors if places is None else self.resized(vectors, places)

    @staticmethod
    def resize(name, values, old_grid, grid, method):
        if name not in _TABLES:
            return values
        side = grid[_TABLES.index(name)]
        longer = max(grid) if is_square(method) else side
        if len(values) == side == longer:
            return values
        return resize_table(values, side, method=method, longer=longer)


class Learned2d(RowsAndColumns):
    """Concatenated vectors of column and row, each of half the width."""

    parts = 2
    join = staticmethod(on_grid)

    @staticmethod
    def check(config):
        check_width(config)


class Factorized(RowsAndColumns):
    """Sums of the vectors of row and column (NaViT, arXiv:2307.06304, section 2.1)."""

    @staticmethod
    def join(rows, columns):
        return (rows[:, None] + columns[None]).reshape(-1, rows.shape[-1])


def check_width(config) -> None:
    """Raises UserError if the width cannot be split into parts for row and column."""
    if config.width % 4:
        raise UserError(
            f"model.width={config.width} is not a multiple of 4, as needed for "
            f"model.posemb={config.posemb!r}: change model.width or model.posemb"
        )
