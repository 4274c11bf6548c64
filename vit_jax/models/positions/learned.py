"""A learned vector per token (arXiv:2010.11929, section 3.1).

Letters: P prefix tokens, Y by X patches, N and M tokens, D model width.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.errors import UserError
from vit_jax.models import initializers
from vit_jax.models.positions.added import AddedPosition
from vit_jax.models.resizing import resize_grid

_Embedding = Float[np.ndarray, "1 N D"] | Float[Array, "1 N D"]


class Learned(AddedPosition):
    """A learned vector per token."""

    def embedding(self, param, places=None):
        P, R, D = self.num_prefix_tokens, self.num_register_tokens, self.config.width
        shape = (1, P + math.prod(self.grid) - R, D)
        init = initializers.TABLE[self.config.init].positions
        vectors = param("pos_embedding", init, shape, jnp.float32)
        if R:
            before, after = jnp.split(vectors, [P - R], 1)
            none = jnp.zeros((1, R, D))
            vectors = jnp.concatenate([before, none, after], axis=1)
        return vectors if places is None else self.resized(vectors, places)

    @staticmethod
    def resize(name, values, old_grid, grid, method):
        P = values.shape[1] - math.prod(old_grid) if values.ndim == 3 else -1
        if name != "pos_embedding" or P < 0:
            return values
        return resize_positions(
            values, old_grid, grid, num_prefix_tokens=P, method=method
        )


def resize_positions(
    embedding: _Embedding,
    old_grid: tuple[int, int],
    grid: tuple[int, int],
    *,
    num_prefix_tokens: int,
    method: str = "linear",
) -> Float[np.ndarray, "1 M D"] | Float[Array, "1 M D"]:
    """Resizes position embeddings in 2-D (arXiv:2010.11929, section 3.2).

    Args:
      embedding: embeddings of the prefix tokens, then of the patches row by row.
      old_grid: rows and columns of the patches in `embedding`.
      grid: rows and columns of the result.
      num_prefix_tokens: number of prefix tokens, whose embeddings are kept.
      method: a key of RESIZE_METHODS.

    Raises:
      UserError: the embedding does not fit the number of tokens.
    """
    _, N, D = embedding.shape
    rows = num_prefix_tokens + math.prod(old_grid)
    if N != rows:
        raise UserError(
            f"the position embedding has {N} rows, but {num_prefix_tokens} prefix tokens "
            f"and a grid of {old_grid[0]}x{old_grid[1]} patches need {rows}: check the "
            "image size of the checkpoint"
        )
    if old_grid == grid:
        return embedding
    patches = embedding[0, num_prefix_tokens:].reshape(*old_grid, D)
    patches = resize_grid(patches, grid, method).reshape(1, -1, D)
    in_numpy = isinstance(embedding, np.ndarray)
    concatenate = np.concatenate if in_numpy else jnp.concatenate
    return concatenate([embedding[:, :num_prefix_tokens], patches], axis=1)
