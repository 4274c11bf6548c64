"""Learned attention biases for the offset of two patches (BEiT, arXiv:2106.08254).

Letters: P prefix tokens, N tokens, Y by X patches, H heads, R and S offsets.
"""

import dataclasses
import math

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.models.encoder_config import EncoderConfig
from vit_jax.models.positions import BIASES
from vit_jax.models.positions.base import Position
from vit_jax.models.resizing import resample, resize_grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeBiasConfig(EncoderConfig):
    """An encoder with optional attention biases that depend on offsets."""

    relative_bias: str = key(
        "none",
        "Learned attention biases that depend on the offset of two patches (BEiT): "
        '"none", separate biases in "every" layer, or "shared" biases in all layers.',
        choices=tuple(BIASES),
    )

    @property
    def positions(self) -> tuple[type[Position], ...]:
        return (*super().positions, BIASES[self.relative_bias])


class RelativeBias(Position):
    """A learned attention bias per head for each offset of rows and columns."""

    of_pairs = True

    @classmethod
    def describe(cls, config):
        return f"model.relative_bias={config.relative_bias!r}"

    def by_block(self, module, places=None, keys=()):
        config, (Y, X) = self.config, self.grid
        shape = (math.prod((2 * Y - 1, 2 * X - 1)) + 3, config.num_heads)

        def table(end):
            name = f"relative_bias{end}"
            values = module.param(name, nn.initializers.zeros, shape, jnp.float32)
            return jnp.asarray(values)

        if config.relative_bias == "every":
            tables = [table(f"_{i}") for i in range(config.depth)]
        else:
            tables = [table("")] * config.depth
        P = self.num_prefix_tokens
        return [{"bias": bias_of_grid(values, self.grid, P)} for values in tables]

    @staticmethod
    def resize(name, values, old_grid, grid, method):
        if not name.startswith("relative_bias"):
            return values
        return resize_bias(values, old_grid, grid)


def bias_of_grid(
    table: Float[Array, "R H"], grid: tuple[int, int], num_prefix_tokens: int
) -> Float[Array, "H N N"]:
    """Returns the attention bias of all pairs of tokens (arXiv:2106.08254).

    Args:
      table: biases of all offsets, starting with (1 - Y, 1 - X), row by row; then the
        bias from a prefix token to a patch, from a patch to a prefix token, and between
        prefix tokens.
      grid: rows and columns of patches, Y and X.
      num_prefix_tokens: number of tokens before the patches, P.
    """
    Y, X = grid
    y, x = np.indices(grid).reshape(2, -1)
    down = y[:, None] - y + Y - 1
    across = x[:, None] - x + X - 1
    places = down * (2 * X - 1) + across
    last, P = len(table) - 3, num_prefix_tokens
    places = np.pad(places, ((P, 0), (P, 0)))
    places[:P], places[P:, :P], places[:P, :P] = last, last + 1, last + 2
    return jnp.moveaxis(table[places], -1, 0)


def resize_bias_table(
    table: Float[np.ndarray, "R H"] | Float[Array, "R H"],
    old: tuple[int, int],
    new: tuple[int, int],
    method: str,
) -> Float[np.ndarray, "S H"] | Float[Array, "S H"]:
    """Resizes a table of attention biases to windows of another size.

    Args:
      table: biases of offsets from -(size - 1) to size - 1 along both axes, rows first.
      old, new: sizes of the windows in patches.
      method: "geometric" or "bicubic".
    """
    sides = [(2 * o - 1, 2 * n - 1) for o, n in zip(old, new, strict=True)]
    before, after = zip(*sides, strict=True)
    grid = table.reshape(*before, -1)
    if method == "geometric":
        resized = resample(grid, *(_geometric(*side) for side in sides))
    else:
        resized = resize_grid(grid, after, "bicubic_plain")
    return resized.reshape(-1, table.shape[-1])


def _geometric(old: int, new: int) -> Float[np.ndarray, "new old"]:
    """Returns the matrix that interpolates between geometrically increasing offsets.

    The factor of the increase, at most 1.5, maps the outermost old offset to the
    outermost new offset (BEiT's fine-tuning, arXiv:2106.08254, as in timm).
    """
    count, low, high = old // 2, 1.01, 1.5
    while high - low > 1e-6:
        factor = (low + high) / 2
        too_far = (factor**count - 1) / (factor - 1) > new // 2
        low, high = (low, factor) if too_far else (factor, high)
    positive = np.cumsum(factor ** np.arange(count))
    places = np.concatenate([-positive[::-1], [0], positive])
    wanted = np.arange(new) - new // 2
    return np.stack([np.interp(wanted, places, row) for row in np.eye(old)], axis=1)


def resize_bias(
    table: Float[np.ndarray, "R H"] | Float[Array, "R H"],
    old_grid: tuple[int, int],
    grid: tuple[int, int],
) -> Float[np.ndarray, "S H"] | Float[Array, "S H"]:
    """Resizes the table of `bias_of_grid` to another grid.

    Source: timm; its geometrically increasing offsets keep the biases of near patches.
    """
    if old_grid == grid:
        return table
    concatenate = np.concatenate if isinstance(table, np.ndarray) else jnp.concatenate
    offsets = resize_bias_table(table[:-3], old_grid, grid, "geometric")
    return concatenate([offsets, table[-3:]])
