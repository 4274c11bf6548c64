"""Fixed sines and cosines of column and row (MoCo v3, arXiv:2104.02057, section 4.1).

Letters: B images, N patches, Y by X patches, D model width.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vit_jax.models.positions.added import AddedPosition, on_grid
from vit_jax.models.positions.learned2d import check_width


class Sincos2d(AddedPosition):
    """Sines and cosines, with wavelengths chosen by `posemb`; 0 for prefix tokens."""

    @staticmethod
    def check(config):
        check_width(config)

    def embedding(self, param, places=None):
        kind, D = self.config.posemb, self.config.width
        if places is None:
            return self.pad_prefix(sincos2d(self.grid, D, kind)[None])
        return self.pad_prefix(sincos2d_at(places.place, D, kind))


def sincos2d_at(
    place: Int[Array, "B N 2"], width: int, kind: str
) -> Float[Array, "B N D"]:
    """Returns the embeddings of `sincos2d` for given rows and columns."""
    rates = _sincos_rates(width, kind).astype(np.float32)
    angles = place[..., ::-1, None] * rates[None, None, None]  # The column comes first.
    both = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return both.reshape(*place.shape[:2], width)


def sincos2d(
    grid: tuple[int, int], width: int, kind: str = "sincos2d"
) -> Float[Array, "YX D"]:
    """Returns fixed embeddings: sines and cosines of the column, then of the row.

    Args:
      grid: rows and columns of patches.
      width: model width D, a multiple of 4.
      kind: "sincos2d", with wavelengths from 2 pi to 20,000 pi (big_vision), or
        "sincos2d_mae", whose last wavelength is one step shorter (MoCo v3, MAE).

    Source: MoCo v3 (arXiv:2104.02057, section 4.1).
    """
    # Float64 makes MAE's tables equal to the last bit.
    rates = _sincos_rates(width, kind)
    rows, columns = (
        np.concatenate([np.sin(angles), np.cos(angles)], axis=1, dtype=np.float32)
        for angles in (np.outer(np.arange(side), rates) for side in grid)
    )
    return on_grid(rows, columns)


def _sincos_rates(width: int, kind: str) -> Float[np.ndarray, " rates"]:
    inclusive = kind == "sincos2d"
    return 1 / 10_000.0 ** np.linspace(0, 1, width // 4, endpoint=inclusive)
