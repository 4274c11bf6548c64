"""Kinds of positions by name; their modules are imported when they are needed."""

from collections.abc import Mapping

import jax

from vit_jax.config.fields import Registry
from vit_jax.models.positions.base import Position

_HERE = "vit_jax.models.positions"

# Values of `model.posemb`: positions that are added to tokens, or relative positions.
EMBEDDINGS = Registry(
    {
        "learned": f"{_HERE}.learned:Learned",
        "learned2d": f"{_HERE}.learned2d:Learned2d",
        "factorized": f"{_HERE}.learned2d:Factorized",
        "sincos2d": f"{_HERE}.sincos2d:Sincos2d",
        "sincos2d_mae": f"{_HERE}.sincos2d:Sincos2d",
        "relative": f"{_HERE}.relative:Relative",
        "none": Position,
    }
)
# Values of `model.rope`: positions that rotate queries and keys.
ROTARY = Registry(
    {
        "none": Position,
        "axial": f"{_HERE}.rotary:Rotary",
        "centered": f"{_HERE}.rotary:Rotary",
        "mixed": f"{_HERE}.mixed_rotary:MixedRotary",
    }
)
# Values of `model.relative_bias`: positions that add biases to attention logits.
BIASES = Registry(
    {
        "none": Position,
        "every": f"{_HERE}.relative_bias:RelativeBias",
        "shared": f"{_HERE}.relative_bias:RelativeBias",
    }
)


def resize(
    params: Mapping,
    old_grid: tuple[int, int],
    grid: tuple[int, int],
    *,
    method: str = "linear",
) -> Mapping:
    """Resizes the position parameters of a network to another grid.

    These parameters are "pos_embedding" (1, tokens, width), whose last tokens are the
    patches, "row_embedding", "column_embedding" and "relative_bias".

    Args:
      params: parameters of the network, with separate or stacked blocks; those of
        `Relative` cannot be resized.
      old_grid, grid, method: see `Position.resize`.
    """
    if old_grid == grid:
        return params
    tables = EMBEDDINGS, ROTARY, BIASES
    # Kinds with the same parameters share a function: a set calls it only once.
    resizes = {kind.resize for table in tables for kind in table.values()}

    def resize(keys, values):
        for function in resizes:
            values = function(keys[-1].key, values, old_grid, grid, method)
        return values

    return jax.tree.map_with_path(resize, params)
