"""Position embeddings: the paper's, and those of its ablation (appendix D.4).

Letters: B images, Y by X patches, E extra tokens in front, N = E + YX tokens, D width.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

KINDS = ("learned", "none", "learned2d", "relative", "sincos2d")
PLACES = ("stem", "every", "shared")

_init = nn.initializers.normal(0.02)


class AddPositions(nn.Module):
    """Adds to each token what tells its place.

    Attributes:
      kind: "learned": a vector a token. "learned2d": the vectors of its column and
        of its row, each of half the width, one after the other. "sincos2d": the same
        of fixed sines and cosines (arXiv:2104.02057, section 4.1). "none" and
        "relative": nothing. Extra tokens have no place in a grid: theirs is 0 in the
        2-D kinds.
      grid: Y and X.
      extra: E.
    """

    kind: str
    grid: tuple[int, int]
    extra: int

    @nn.compact
    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """Returns tokens that know their place."""
        _, N, D = x.shape
        if self.kind == "learned":
            embedding = self.param("pos_embedding", _init, (1, N, D), jnp.float32)
        elif self.kind == "learned2d":
            rows, columns = (
                self.param(f"{name}_embedding", _init, (side, D // 2), jnp.float32)
                for name, side in zip(("row", "column"), self.grid, strict=True)
            )
            embedding = self._with_extra(_on_grid(rows, columns))
        elif self.kind == "sincos2d":
            embedding = self._with_extra(sincos2d(self.grid, D))
        else:
            return x
        return x + embedding.astype(x.dtype)

    def _with_extra(self, embedding):
        return jnp.pad(embedding, ((self.extra, 0), (0, 0)))[None]


def sincos2d(grid: tuple[int, int], width: int) -> Float[Array, "YX D"]:
    """Returns fixed embeddings: sines and cosines of the column, then of the row.

    Args:
      grid: rows and columns.
      width: D, a multiple of 4.

    Source: MoCo v3 (arXiv:2104.02057, section 4.1), with wave lengths from 2 pi to
    20,000 pi as big_vision has them.
    """
    rates = 10_000.0 ** -jnp.linspace(0, 1, width // 4)
    rows, columns = (
        jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
        for angles in (jnp.outer(jnp.arange(side), rates) for side in grid)
    )
    return _on_grid(rows, columns)


def _on_grid(rows, columns):
    """Joins the vectors of its column and of its row for each cell, row by row."""
    Y, X = len(rows), len(columns)
    parts = columns[None], rows[:, None]
    parts = [jnp.broadcast_to(v, (Y, X, v.shape[-1])) for v in parts]
    return jnp.concatenate(parts, axis=-1).reshape(Y * X, -1)
