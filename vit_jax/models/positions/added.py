"""Position embeddings that are added to tokens (arXiv:2010.11929, appendix D.4).

Letters: B images, N tokens, Y by X patches, D model width.
"""

import abc
from typing import TYPE_CHECKING

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.models import resizing
from vit_jax.models.positions.base import Param, Position

if TYPE_CHECKING:
    from vit_jax.models.patches import Places


# Parameters read from a file may be NumPy arrays.
Vectors = Float[Array, "#B N D"] | Float[np.ndarray, "1 N D"]


class AddedPosition(Position, abc.ABC):
    """Vectors that are added to tokens before the first block, or before each block."""

    @classmethod
    def in_blocks(cls, config):
        placement = config.posemb_placement
        return "" if placement == "stem" else f"model.posemb_placement={placement!r}"

    @abc.abstractmethod
    def embedding(self, param: Param, places: "Places | None" = None) -> Vectors:
        """Returns the vector of each token, which is 0 for tokens without a position.

        Args:
          param: function that creates a parameter, see `flax.linen.Module.param`.
          places: places of the patches in images of any size; None for patches of
            `grid`.
        """

    def by_block(self, module, places=None, keys=()):
        config = self.config

        def table(name):
            vectors = Table(self, name=f"posembed_{name}")(places)
            return {"added": vectors.astype(config.dtype)}

        if config.posemb_placement == "every":
            return [table(i) for i in range(config.depth)]
        first = table("input")
        others = first if config.posemb_placement == "shared" else {}
        return [first] + [others] * (config.depth - 1)

    def pad_prefix(
        self, patches: Float[Array | np.ndarray, "#B M D"]
    ) -> Float[Array, "#B N D"]:
        """Returns zeros for the prefix tokens, then the vectors of the patches."""
        return jnp.pad(patches, ((0, 0), (self.num_prefix_tokens, 0), (0, 0)))

    def resized(self, embedding: Vectors, places: "Places") -> Float[Array, "B M D"]:
        """Returns learned vectors of `grid` for the patches of images of any size.

        The result is as if the table were resized to the grid of each image by the
        method `model.posemb_resize` (arXiv:2502.14786).
        """
        P = self.num_prefix_tokens
        # jax2onnx does not support jnp.split if there are no prefix tokens.
        prefix, table = embedding[:, :P], embedding[:, P:]
        patches = _at_places(table[0], self.grid, places, self.config.posemb_resize)
        prefix = jnp.broadcast_to(prefix, (patches.shape[0], P, patches.shape[-1]))
        return jnp.concatenate([prefix, patches], axis=1)


class Table(nn.Module):
    """Module with the parameters of an `AddedPosition`."""

    position: AddedPosition

    @nn.compact
    def __call__(self, places: "Places | None" = None) -> Vectors:
        """Returns the vector of each token, see `AddedPosition.embedding`."""
        return self.position.embedding(self.param, places)


def _at_places(table, grid, places, method: str) -> Float[Array, "B M D"]:
    # As in learned.py, vectors for the same grid are not resized: DINO's method would
    # change them.
    same = (places.sides == np.asarray(grid)[None, None]).all(-1)[..., None]
    sides, weights = places.sides, []
    if resizing.is_square(method):
        sides = jnp.broadcast_to(sides.max(-1, keepdims=True), sides.shape)
    for i, old in enumerate(grid):
        at = places.place[..., i]
        resized = resizing.RESIZE_METHODS[method](at, old, sides[..., i])
        weights.append(jnp.where(same, jax.nn.one_hot(at, old), resized))
    both = jnp.einsum("bni,bnj->bnij", *weights)
    both = both.reshape(*both.shape[:2], -1).astype(jnp.float32)
    # Full precision costs little, since the product is small compared to those of a
    # block.
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("bnm,md->bnd", both, jnp.asarray(table), precision=exact)


def on_grid(
    rows: Float[Array | np.ndarray, "Y C"], columns: Float[Array | np.ndarray, "X C"]
) -> Float[Array, "YX D"]:
    """Concatenates the vectors of column and row of each patch, patches row by row."""
    Y, X = len(rows), len(columns)
    parts = columns[None], rows[:, None]
    parts = [jnp.broadcast_to(v, (Y, X, v.shape[-1])) for v in parts]
    return jnp.concatenate(parts, axis=-1).reshape(Y * X, -1)
