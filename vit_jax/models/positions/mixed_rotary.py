"""Rotary position embeddings with learned directions (RoPE-Mixed, arXiv:2403.13298).

Letters: B images, Y by X patches, N patches, H heads, K head width, J its half.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.models.positions.rotary import Rotary

if TYPE_CHECKING:
    from vit_jax.models.patches import Places


class MixedRotary(Rotary):
    """Angles from learned frequencies for rows and columns, in each block and head."""

    def by_block(self, module, places=None, keys=()):
        config = self.config
        K = config.width // config.num_heads

        def init(key, shape):
            turns = jax.random.uniform(key, (shape[0], shape[2]))
            return initial_frequencies(turns, K, config.rope_temperature)

        shape = (config.depth, 2, config.num_heads, K // 2)
        frequencies = module.param("rope_frequencies", init, shape)
        return [
            {"angles": self.pad_prefix(mixed_angles(layer, self.grid, places))}
            for layer in frequencies
        ]


def mixed_angles(
    frequencies: Float[Array, "2 H J"],
    grid: tuple[int, int],
    places: "Places | None" = None,
) -> Float[Array, "H N J"] | Float[Array, "B H N J"]:
    """Returns the angles of learned directions (RoPE-Mixed, arXiv:2403.13298).

    Args:
      frequencies: frequencies of a layer for rows and columns, in radians per patch.
      grid: rows and columns of patches, Y and X.
      places: places of patches in images of any size; None for patches of `grid`.
    """
    down, across = jnp.asarray(frequencies)[:, :, None]
    if places is not None:
        at = places.place[:, None, :, :, None].astype(jnp.float32)
        return at[..., 0, :] * down[None] + at[..., 1, :] * across[None]
    rows, columns = np.indices(grid, dtype=np.float32).reshape(2, 1, -1, 1)
    return rows * down + columns * across


def initial_frequencies(
    random: Float[Array, "depth H"], head_width: int, temperature: float
) -> Float[Array, "depth 2 H J"]:
    """Returns initial frequencies of RoPE-Mixed: two orthogonal directions per head.

    Args:
      random: directions as fractions of a full turn.
      head_width: features per head, K.
      temperature: see `rotary.angles`.
    """
    bands = temperature ** -jnp.linspace(0, 1, head_width // 4, endpoint=False)
    bands = bands.reshape(1, 1, -1)
    turns = 2 * jnp.pi * random[..., None]
    right = turns + jnp.pi / 2
    down, across = (
        jnp.concatenate([bands * of(turns), bands * of(right)], axis=-1)
        for of in (jnp.cos, jnp.sin)
    )
    return jnp.stack([down, across], axis=1)
