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
from jaxtyping import Array, Float, Int

from vit_jax.errors import UserError
from vit_jax.models.patches import Places

_Embedding = Float[np.ndarray, "1 N D"] | Float[Array, "1 N D"]
Points = np.ndarray | Array  # Places, any shape.
Length = (
    np.ndarray | Array | int | float
)  # One number of points, or one for each place.
Weights = np.ndarray | Array  # (*places, old), of sum 1.
_INIT = nn.initializers.normal(0.02)


class AddPositions(nn.Module):
    """Adds position embeddings (arXiv:2010.11929, section 3.1 and appendix D.4).

    Attributes:
      kind: "learned": a vector per token. "learned2d": learned vectors of the column and
        of the row, each of half the width, concatenated. "sincos2d": the same with
        fixed sines and cosines (arXiv:2104.02057, section 4.1) of big_vision's
        wavelengths; "sincos2d_mae": of MAE's. "factorized": learned vectors of the column
        and of the row, added (NaViT, arXiv:2307.06304, section 2.1). "none" and "relative" add nothing. The 2-D
        kinds are 0 for prefix tokens.
      grid: Y and X.
      num_prefix_tokens: P.
      num_register_tokens: number of prefix tokens, the last ones, without a position.
    """

    kind: str
    grid: tuple[int, int]
    num_prefix_tokens: int
    num_register_tokens: int = 0

    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """Returns the tokens plus their position embeddings."""
        embedding = self.embedding(x.shape[-1])
        return x if embedding is None else x + embedding.astype(x.dtype)

    @nn.compact
    def embedding(
        self, D: int, places: Places | None = None, method: str = "linear"
    ) -> Float[Array | np.ndarray, "1 N D"] | Float[Array, "B N D"] | None:
        """Returns the position embeddings, None if the kind has none.

        Args:
          D: width.
          places: places of patches in images of any size, for which learned embeddings
            are resized; None for `grid`.
          method: how, a key of RESIZE_METHODS.
        """
        P, R = self.num_prefix_tokens, self.num_register_tokens
        if self.kind == "learned":
            shape = (1, P + math.prod(self.grid) - R, D)
            embedding = self.param("pos_embedding", _INIT, shape, jnp.float32)
            if R:
                before, after = jnp.split(embedding, [P - R], 1)
                none = jnp.zeros((1, R, D))
                embedding = jnp.concatenate([before, none, after], axis=1)
        elif self.kind in ("learned2d", "factorized"):
            width = D // 2 if self.kind == "learned2d" else D
            rows, columns = (
                self.param(f"{name}_embedding", _INIT, (side, width), jnp.float32)
                for name, side in zip(("row", "column"), self.grid, strict=True)
            )
            if self.kind == "learned2d":
                embedding = _on_grid(rows, columns)
            else:
                embedding = (rows[:, None] + columns[None]).reshape(-1, D)
            embedding = self._pad_prefix(embedding[None])
        elif self.kind.startswith("sincos2d"):
            if places is None:
                return self._pad_prefix(sincos2d(self.grid, D, self.kind)[None])
            return self._pad_prefix(sincos2d_at(places.place, D, self.kind))
        else:
            return None
        if places is None:
            return embedding
        # Not jnp.split: jax2onnx refuses one without prefix tokens.
        prefix, table = embedding[:, :P], embedding[:, P:]
        patches = at_places(table[0], self.grid, places, method)
        prefix = jnp.broadcast_to(prefix, (patches.shape[0], P, D))
        return jnp.concatenate([prefix, patches], axis=1)

    def _pad_prefix(self, embedding):
        return jnp.pad(embedding, ((0, 0), (self.num_prefix_tokens, 0), (0, 0)))


def at_places(
    table: Float[Array, "YX D"], grid: tuple[int, int], places: Places, method: str
) -> Float[Array, "B N D"]:
    """Returns the embeddings of patches in images of any size (arXiv:2502.14786).

    They are those of a table that is resized to the grid of each image.

    Args:
      table: embeddings of the patches of `grid`, row by row.
      grid: Y and X.
      places: places of the patches.
      method: a key of RESIZE_METHODS.
    """
    # As in `resize_positions`: DINO's resize to the same grid would not be the identity.
    same = (places.sides == np.asarray(grid)[None, None]).all(-1)[..., None]
    sides, weights = places.sides, []
    if _is_square(method):
        sides = jnp.broadcast_to(sides.max(-1, keepdims=True), sides.shape)
    for i, old in enumerate(grid):
        at = places.place[..., i]
        resized = RESIZE_METHODS[method](at, old, sides[..., i])
        weights.append(jnp.where(same, jax.nn.one_hot(at, old), resized))
    both = jnp.einsum("bni,bnj->bnij", *weights)
    both = both.reshape(*both.shape[:2], -1).astype(jnp.float32)
    # A product of matrices that is small beside those of a block.
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("bnm,md->bnd", both, jnp.asarray(table), precision=exact)


def sincos2d_at(
    place: Int[Array, "B N 2"], width: int, kind: str
) -> Float[Array, "B N D"]:
    """Returns the embeddings of `sincos2d` of rows and columns."""
    rates = _sincos_rates(width, kind).astype(np.float32)
    angles = place[..., ::-1, None] * rates[None, None, None]  # The column comes first.
    both = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return both.reshape(*place.shape[:2], width)


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
    # Float64 makes MAE's tables equal to the last bit.
    rates = _sincos_rates(width, kind)
    rows, columns = (
        np.concatenate([np.sin(angles), np.cos(angles)], axis=1, dtype=np.float32)
        for angles in (np.outer(np.arange(side), rates) for side in grid)
    )
    return _on_grid(rows, columns)


def _sincos_rates(width: int, kind: str) -> Float[np.ndarray, " rates"]:
    inclusive = kind == "sincos2d"
    return 1 / 10_000.0 ** np.linspace(0, 1, width // 4, endpoint=inclusive)


def _on_grid(rows, columns):
    """Concatenates the vectors of the column and row of each cell, in row-major order."""
    Y, X = len(rows), len(columns)
    parts = columns[None], rows[:, None]
    parts = [jnp.broadcast_to(v, (Y, X, v.shape[-1])) for v in parts]
    return jnp.concatenate(parts, axis=-1).reshape(Y * X, -1)


def linear_corners(at: Points, old: int, new: Length) -> Weights:
    """Returns the weights of a linear interpolation with aligned corners.

    Source: google-research/vision_transformer's zoom of order 1.
    """
    xp = _numpy(at, new)
    # A single new point is the first old one, as in scipy.ndimage.zoom.
    return triangle(at * ((old - 1) / xp.maximum(new - 1, 1)), old)


def triangle(at: Points, old: int, reach: Length = 1.0) -> Weights:
    """Returns weights that fall linearly to 0 at `reach` from the positions `at`."""
    xp = _numpy(at, reach)
    reach = reach[..., None] if np.ndim(reach) else reach
    return xp.maximum(0.0, 1 - xp.abs(_less(at, np.arange(old))) / reach)


def bilinear(at: Points, old: int, new: Length) -> Weights:
    """Returns the weights of an antialiased bilinear resize of pixels.

    Source: torch.nn.functional.interpolate(mode="bilinear", antialias=True), by which
    SigLIP 2 resizes position embeddings; Pillow's BILINEAR is the same filter.
    """
    step = old / new
    # The filter grows with the step when shrinking.
    weights = triangle((at + 0.5) * step - 0.5, old, _numpy(at, new).maximum(step, 1.0))
    return weights / weights.sum(-1, keepdims=True)


def bilinear_plain(at: Points, old: int, new: Length) -> Weights:
    """Returns the weights of a bilinear resize of pixels without antialiasing.

    Source: torch.nn.functional.interpolate(mode="bilinear"), by which timm resizes
    factorized position embeddings, and Swin V1 its tables.
    """
    xp = _numpy(at, new)
    return triangle(xp.clip((at + 0.5) * (old / new) - 0.5, 0, old - 1), old)


def bicubic_antialiased(at: Points, old: int, new: Length) -> Weights:
    """Returns the weights of an antialiased bicubic resize of pixels.

    Source: torch.nn.functional.interpolate(mode="bicubic", antialias=True), by which
    timm, and DINOv2 with registers, resize position embeddings; Pillow's BICUBIC is the
    same filter.
    """
    xp, step = _numpy(at, new), old / new
    stretch = xp.asarray(xp.maximum(step, 1.0))[..., None]
    distance = xp.abs(_less((at + 0.5) * step, np.arange(old) + 0.5))
    weights = _keys_cubic(distance / stretch, -0.5)
    return weights / weights.sum(-1, keepdims=True)


def bicubic_plain(at: Points, old: int, new: Length, shift: float = 0.0) -> Weights:
    """Returns the weights of a bicubic resize of pixels without antialiasing.

    Source: torch.nn.functional.interpolate(mode="bicubic"), by which MAE and DeiT resize
    position embeddings. `shift` is added to `new` in the step between points.
    """
    xp = _numpy(at, new)
    at = xp.asarray((at + 0.5) * (old / (new + shift)) - 0.5)
    weights = 0.0
    for offset in range(-1, 3):
        tap = xp.floor(at) + offset
        is_at = _less(xp.clip(tap, 0, old - 1), np.arange(old)) == 0
        weights = weights + is_at * _keys_cubic(xp.abs(tap - at), -0.75)[..., None]
    return weights


def bicubic_dino(at: Points, old: int, new: Length) -> Weights:
    """Returns the weights of the resize of DINO, and of DINOv2 without registers.

    Source: facebookresearch/dino, which scales by (new + 0.1) / old.
    """
    return bicubic_plain(at, old, new, shift=0.1)


def _less(at: Points, points: np.ndarray) -> Weights:
    """Returns the differences of places, any shape, from points, (*places, points)."""
    return at[..., None] - points.reshape((1,) * np.ndim(at) + (-1,))


def _keys_cubic(distance, a: float):
    """Returns the weights of Keys' cubic at non-negative distances."""
    where = _numpy(distance).where
    near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    far = a * distance**3 - 5 * a * distance**2 + 8 * a * distance - 4 * a
    return where(distance < 1, near, where(distance < 2, far, 0.0))


def _numpy(*arrays):
    """Returns jax.numpy if an array is of JAX, or else NumPy, for float64."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


_SQUARE = "_square"  # End of the methods that cut a square of the longer side.

# Functions of places on a side of `new` points, of the number `old` of points before, and of
# `new`, to the weights of the old points.
RESIZE_METHODS = {
    "linear": linear_corners,
    "bilinear": bilinear,
    "bilinear_plain": bilinear_plain,
    "bicubic": bicubic_antialiased,
    "bicubic_plain": bicubic_plain,
    "bicubic_dino": bicubic_dino,
}
RESIZE_METHODS |= {f"{name}{_SQUARE}": each for name, each in RESIZE_METHODS.items()}


def _is_square(method: str) -> bool:
    """Returns whether positions keep their aspect, as timm's `pos_embed_ar_preserving`.

    They are resized to a square of the longer side, and its first rows and columns taken.
    """
    return method.endswith(_SQUARE)


def resize_matrix(
    method: str, old: int, new: int, longer: int = 0
) -> Float[np.ndarray, "new old"]:
    """Returns the matrix that resizes a side, by a method of RESIZE_METHODS.

    Args:
      method: see RESIZE_METHODS.
      old, new: points of the side before and after.
      longer: points of the longer side of the result.
    """
    whole = max(new, longer) if _is_square(method) else new
    return RESIZE_METHODS[method](np.arange(new), old, whole)


def resize_grid(
    grid: Float[np.ndarray, "Y X D"] | Float[Array, "Y X D"],
    size: Sequence[int],
    method: str,
) -> Float[np.ndarray, "H W D"] | Float[Array, "H W D"]:
    """Resizes a grid to (H, W) by a method of RESIZE_METHODS; NumPy stays NumPy."""
    down, across = (
        resize_matrix(method, o, n, max(size))
        for o, n in zip(grid.shape[:2], size, strict=True)
    )
    return resample(grid, down, across)


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
    patches = embedding[0, num_prefix_tokens:].reshape(*old_grid, D)
    patches = resize_grid(patches, grid, method).reshape(1, -1, D)
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
    longer: int = 0,
) -> Float[np.ndarray, "M D"] | Float[Array, "M D"]:
    """Resizes the position embeddings of rows or columns, see `resize_matrix`."""
    matrix = resize_matrix(method, len(embedding), length, longer)
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
    sides = [(2 * o - 1, 2 * n - 1) for o, n in zip(old, new, strict=True)]
    before, after = zip(*sides, strict=True)
    grid = table.reshape(*before, -1)
    if method == "geometric":
        resized = resample(grid, *(_geometric(*side) for side in sides))
    else:
        resized = resize_grid(grid, after, "bicubic_plain")
    return resized.reshape(-1, table.shape[-1])


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
    wholes = dict.fromkeys(sides, max(grid)) if _is_square(method) else sides

    def resize(keys, x):
        name = keys[-1].key
        if name == "pos_embedding" and x.ndim == 3:
            P = x.shape[1] - math.prod(old_grid)
            if P >= 0:
                return resize_positions(
                    x, old_grid, grid, num_prefix_tokens=P, method=method
                )
        if name in sides and not len(x) == sides[name] == wholes[name]:
            return resize_table(x, sides[name], method=method, longer=wholes[name])
        if name.startswith("relative_bias"):
            return resize_bias(x, old_grid, grid)
        return x

    return jax.tree.map_with_path(resize, params)
