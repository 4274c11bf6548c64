"""Position embeddings: adds them, and resizes them for images of another size.

Every method of resizing is a product with one matrix for rows and one for columns, so it
can be differentiated and runs on the host or within a jitted function.
Letters: B images, Y by X patches, P prefix tokens, N and M tokens, D model width.
"""

import math
from collections.abc import Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.errors import UserError

_Embedding = Float[np.ndarray, "1 N D"] | Float[Array, "1 N D"]
_INIT = nn.initializers.normal(0.02)


class AddPositions(nn.Module):
    """Adds position embeddings (arXiv:2010.11929, section 3.1 and appendix D.4).

    Attributes:
      kind: "learned": a vector per token. "learned2d": learned vectors of the column and
        of the row, each of half the width, concatenated. "sincos2d": the same with
        fixed sines and cosines (arXiv:2104.02057, section 4.1) of big_vision's
        wavelengths; "sincos2d_mae": of MAE's. "none" and "relative" add nothing. The 2-D
        kinds are 0 for prefix tokens.
      grid: Y and X.
      num_prefix_tokens: P.
      num_register_tokens: number of prefix tokens, the last ones, without a position.
    """

    kind: str
    grid: tuple[int, int]
    num_prefix_tokens: int
    num_register_tokens: int = 0

    @nn.compact
    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """Returns the tokens plus their position embeddings."""
        _, N, D = x.shape
        if self.kind == "learned":
            R = self.num_register_tokens
            embedding = self.param("pos_embedding", _INIT, (1, N - R, D), jnp.float32)
            if R:
                before, after = jnp.split(embedding, [self.num_prefix_tokens - R], 1)
                none = jnp.zeros((1, R, D))
                embedding = jnp.concatenate([before, none, after], axis=1)
        elif self.kind == "learned2d":
            rows, columns = (
                self.param(f"{name}_embedding", _INIT, (side, D // 2), jnp.float32)
                for name, side in zip(("row", "column"), self.grid, strict=True)
            )
            embedding = self._pad_prefix(_on_grid(rows, columns))
        elif self.kind.startswith("sincos2d"):
            embedding = self._pad_prefix(sincos2d(self.grid, D, self.kind))
        else:
            return x
        return x + embedding.astype(x.dtype)

    def _pad_prefix(self, embedding):
        return jnp.pad(embedding, ((self.num_prefix_tokens, 0), (0, 0)))[None]


def sincos2d(
    grid: tuple[int, int], width: int, kind: str = "sincos2d"
) -> Float[Array, "YX D"]:
    """Returns fixed embeddings: sines and cosines of the column, then of the row.

    Args:
      grid: rows and columns.
      width: D, a multiple of 4.
      kind: "sincos2d", with wavelengths from 2 pi to 20,000 pi (big_vision), or
        "sincos2d_mae", which ends one step before (MoCo v3, MAE).

    Source: MoCo v3 (arXiv:2104.02057, section 4.1).
    """
    inclusive = kind == "sincos2d"
    # Float64 makes MAE's tables equal to the last bit.
    rates = 1 / 10_000.0 ** np.linspace(0, 1, width // 4, endpoint=inclusive)
    rows, columns = (
        np.concatenate([np.sin(angles), np.cos(angles)], axis=1, dtype=np.float32)
        for angles in (np.outer(np.arange(side), rates) for side in grid)
    )
    return _on_grid(rows, columns)


def _on_grid(rows, columns):
    """Concatenates the vectors of the column and row of each cell, in row-major order."""
    Y, X = len(rows), len(columns)
    parts = columns[None], rows[:, None]
    parts = [jnp.broadcast_to(v, (Y, X, v.shape[-1])) for v in parts]
    return jnp.concatenate(parts, axis=-1).reshape(Y * X, -1)


def linear_corners(old: int, new: int) -> Float[np.ndarray, "new old"]:
    """Returns the matrix of a linear interpolation with aligned corners.

    Source: google-research/vision_transformer's zoom of order 1.
    """
    if old == 1:
        return np.ones((new, 1))
    # A single new point is the first old one, as in scipy.ndimage.zoom.
    return triangle(np.linspace(0, old - 1, new), old)


def triangle(at: Sequence[float] | np.ndarray, old: int) -> np.ndarray:
    """Returns the linear interpolation weights, (points, old), at positions `at`."""
    return np.maximum(0, 1 - np.abs(np.asarray(at)[:, None] - np.arange(old)))


def bicubic_antialiased(old: int, new: int) -> Float[np.ndarray, "new old"]:
    """Returns the matrix of an antialiased bicubic resize of pixels.

    Source: torch.nn.functional.interpolate(mode="bicubic", antialias=True), by which
    timm, and DINOv2 with registers, resize position embeddings; Pillow's BICUBIC is the
    same filter.
    """
    scale = old / new
    stretch = max(scale, 1.0)  # The filter grows with the step when shrinking.
    centres = (np.arange(new) + 0.5) * scale
    distance = np.abs(np.arange(old) + 0.5 - centres[:, None]) / stretch
    weights = _keys_cubic(distance, -0.5)
    return weights / weights.sum(axis=1, keepdims=True)


def bicubic_plain(
    old: int, new: int, shift: float = 0.0
) -> Float[np.ndarray, "new old"]:
    """Returns the matrix of a bicubic resize of pixels without antialiasing.

    Source: torch.nn.functional.interpolate(mode="bicubic"), by which MAE and DeiT resize
    position embeddings.

    Args:
      old, new: number of points before and after.
      shift: term added to `new` in the step between points.
    """
    at = (np.arange(new) + 0.5) * old / (new + shift) - 0.5
    taps = np.floor(at)[:, None] + np.arange(-1, 3)
    weights = _keys_cubic(np.abs(taps - at[:, None]), -0.75)
    matrix = np.zeros((new, old))
    rows = np.broadcast_to(np.arange(new)[:, None], taps.shape)
    np.add.at(matrix, (rows, taps.clip(0, old - 1).astype(int)), weights)
    return matrix


def bicubic_dino(old: int, new: int) -> Float[np.ndarray, "new old"]:
    """Returns the resize matrix of DINO, and of DINOv2 without registers.

    Source: facebookresearch/dino, which scales by (new + 0.1) / old.
    """
    return bicubic_plain(old, new, shift=0.1)


def _keys_cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Returns the weights of Keys' cubic at non-negative distances."""
    near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    far = a * distance**3 - 5 * a * distance**2 + 8 * a * distance - 4 * a
    return np.where(distance < 1, near, np.where(distance < 2, far, 0.0))


RESIZE_METHODS = {
    "linear": linear_corners,
    "bicubic": bicubic_antialiased,
    "bicubic_plain": bicubic_plain,
    "bicubic_dino": bicubic_dino,
}


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
      UserError: the embedding has another number of tokens.
    """
    _, N, D = embedding.shape
    rows = num_prefix_tokens + math.prod(old_grid)
    if N != rows:
        raise UserError(
            f"position embedding has {N} rows, but {num_prefix_tokens} extra tokens and "
            f"a grid of {old_grid[0]}x{old_grid[1]} make {rows}"
        )
    if old_grid == grid:
        return embedding
    down, across = (
        RESIZE_METHODS[method](o, n) for o, n in zip(old_grid, grid, strict=True)
    )
    patches = embedding[0, num_prefix_tokens:].reshape(*old_grid, D)
    patches = resample(patches, down, across).reshape(1, -1, D)
    in_numpy = isinstance(embedding, np.ndarray)
    concatenate = np.concatenate if in_numpy else jnp.concatenate
    return concatenate([embedding[:, :num_prefix_tokens], patches], axis=1)


def resample(
    grid: Float[np.ndarray, "Y X D"] | Float[Array, "Y X D"],
    down: Float[np.ndarray, "H Y"],
    across: Float[np.ndarray, "W X"],
) -> Float[np.ndarray, "H W D"] | Float[Array, "H W D"]:
    """Multiplies each axis of a grid by a matrix; NumPy stays NumPy."""
    if isinstance(grid, np.ndarray):
        resized = np.einsum("ij,jkd,lk->ild", down, grid, across, optimize=True)
        return resized.astype(grid.dtype)
    down, across = (jnp.asarray(m, grid.dtype) for m in (down, across))
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("ij,jkd,lk->ild", down, grid, across, precision=exact)


def resize_table(
    embedding: Float[np.ndarray, "N D"] | Float[Array, "N D"],
    length: int,
    *,
    method: str = "linear",
) -> Float[np.ndarray, "M D"] | Float[Array, "M D"]:
    """Resizes the position embeddings of rows or columns in 1-D."""
    matrix = RESIZE_METHODS[method](len(embedding), length)
    if not isinstance(embedding, np.ndarray):
        matrix = jnp.asarray(matrix, embedding.dtype)
    return (matrix @ embedding).astype(embedding.dtype)


def bias_of_grid(
    table: Float[Array, "R H"], grid: tuple[int, int], num_prefix_tokens: int
) -> Float[Array, "H N N"]:
    """Returns the attention bias of all pairs of tokens (arXiv:2106.08254).

    Args:
      table: biases of the offsets from (1 - Y, 1 - X) on, row by row; then the biases
        from a prefix token to a patch, from a patch to a prefix token, and between
        prefix tokens.
      grid: Y and X.
      num_prefix_tokens: P.
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
    """Resizes a table of attention biases by offset for windows of another size.

    Args:
      table: biases of offsets from -(size - 1) to size - 1 on both axes, rows first.
      old, new: sizes of the windows in patches.
      method: "geometric" or "bicubic".
    """
    resize = _geometric if method == "geometric" else bicubic_plain
    down, across = (resize(2 * o - 1, 2 * n - 1) for o, n in zip(old, new, strict=True))
    grid = table.reshape(2 * old[0] - 1, 2 * old[1] - 1, -1)
    return resample(grid, down, across).reshape(-1, table.shape[-1])


def _geometric(old: int, new: int) -> Float[np.ndarray, "new old"]:
    """Returns the matrix of a linear resize between geometrically growing offsets.

    The factor, at most 1.5, places the outermost old offset on the outermost new one
    (BEiT's fine-tuning, arXiv:2106.08254, as in timm).
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

    Source: timm, whose geometrically growing offsets keep the biases of near patches.
    """
    if old_grid == grid:
        return table
    concatenate = np.concatenate if isinstance(table, np.ndarray) else jnp.concatenate
    offsets = resize_bias_table(table[:-3], old_grid, grid, "geometric")
    return concatenate([offsets, table[-3:]])


def resize_in_params(
    params: Mapping,
    old_grid: tuple[int, int],
    grid: tuple[int, int],
    *,
    method: str = "linear",
) -> Mapping:
    """Resizes the position embeddings among a network's parameters to another grid.

    These are "pos_embedding" (1, tokens, width), whose last tokens are the patches,
    "row_embedding" and "column_embedding", and "relative_bias".

    Args:
      params: parameters, blocks one by one or stacked, without relative positions.
      old_grid, grid, method: see `resize_positions`.
    """
    if old_grid == grid:
        return params
    sides = dict(zip(("row_embedding", "column_embedding"), grid, strict=True))

    def resize(keys, x):
        name = keys[-1].key
        if name == "pos_embedding" and x.ndim == 3:
            P = x.shape[1] - math.prod(old_grid)
            if P >= 0:
                return resize_positions(
                    x, old_grid, grid, num_prefix_tokens=P, method=method
                )
        if name in sides and len(x) != sides[name]:
            return resize_table(x, sides[name], method=method)
        if name.startswith("relative_bias"):
            return resize_bias(x, old_grid, grid)
        return x

    return jax.tree.map_with_path(resize, params)
