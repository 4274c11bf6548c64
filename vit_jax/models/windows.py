"""Windows of a grid of patches, for the attention of Swin Transformers.

Letters: B images, N patches, W windows, M patches per window, D width, Y by X patches.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Grid = tuple[int, int]


class Windows(NamedTuple):
    """Windows of a block.

    Attributes:
      grid: rows and columns of patches of the image.
      size: rows and columns of patches of a window.
      shift: shift of the windows in rows and columns.
      pad_first: whether the grid is padded before it is shifted.
      masked: term added to the logits of patches that are not neighbours.
    """

    grid: Grid
    size: Grid
    shift: Grid
    pad_first: bool
    masked: float

    @property
    def padded(self) -> Grid:
        """The size of the grid after padding to a multiple of the window."""
        return tuple(-(-g // s) * s for g, s in zip(self.grid, self.size, strict=True))

    def split(self, x: Float[Array, "B N D"]) -> Float[Array, "B W M D"]:
        """Returns the patches of each window; padding has zeros."""
        B, _, D = x.shape
        x = x.reshape(B, *self.grid, D)
        more = [(0, p - g) for p, g in zip(self.padded, self.grid, strict=True)]
        back = tuple(-s for s in self.shift)
        if self.pad_first:
            x = _roll(pad(x, more), back)
        else:
            x = pad(_roll(x, back), more)
        (Y, X), (h, w) = self.padded, self.size
        x = x.reshape(B, Y // h, h, X // w, w, D).swapaxes(2, 3)
        return x.reshape(B, -1, h * w, D)

    def join(self, x: Float[Array, "B W M D"]) -> Float[Array, "B N D"]:
        """Returns the grid of patches from windows: the inverse of `split`."""
        B, D = x.shape[0], x.shape[-1]
        (Y, X), (h, w) = self.padded, self.size
        x = x.reshape(B, Y // h, X // w, h, w, D).swapaxes(2, 3).reshape(B, Y, X, D)
        y, z = self.grid
        if self.pad_first:
            x = _roll(x, self.shift)[:, :y, :z]
        else:
            x = _roll(x[:, :y, :z], self.shift)
        return x.reshape(B, -1, D)

    def patches(self) -> Int[Array, "W M"]:
        """Returns the index in the grid of each patch of a window; -1 is padding."""
        numbers = jnp.arange(1.0, self.grid[0] * self.grid[1] + 1)
        return self.split(numbers[None, :, None])[0, :, :, 0].astype(int) - 1

    def mask(self) -> Float[np.ndarray, "W M M"] | None:
        """Returns the term added to the logits of each window; None without a shift."""
        if not any(self.shift):
            return None
        rows, columns = (
            (np.arange(n) >= n - size).astype(int) + (np.arange(n) >= n - shift)
            for n, size, shift in zip(self.padded, self.size, self.shift, strict=True)
        )
        (Y, X), (h, w) = self.padded, self.size
        region = 3 * rows[:, None] + columns  # Patches of a region are neighbours.
        region = region.reshape(Y // h, h, X // w, w).swapaxes(1, 2).reshape(-1, h * w)
        apart = region[:, :, None] != region[:, None]
        return np.where(apart, np.float32(self.masked), np.float32(0))


def pad(x: Float[Array, "B Y X D"], more: Sequence[tuple[int, int]]) -> Array:
    """Pads rows and columns with zeros; `more` has (before, after) for both."""
    return jnp.pad(x, ((0, 0), *more, (0, 0))) if np.any(more) else x


def _roll(x, shift):
    return jnp.roll(x, shift, (1, 2)) if any(shift) else x
