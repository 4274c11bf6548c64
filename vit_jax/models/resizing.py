"""Resizes grids of vectors, such as position embeddings, like several libraries.

Every method is a product with a matrix for the rows and a matrix for the columns, so it
can be differentiated, and runs on the host or within a jitted function.
Letters: Y by X points, H by W points of the result, D features.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Points = np.ndarray | Array  # Places, any shape.
# A number of points, the same for all places or one for each.
Length = np.ndarray | Array | int | float
Weights = np.ndarray | Array  # (*places, old), which sum to 1 over `old`.


def linear_corners(at: Points, old: int, new: Length) -> Weights:
    """Returns the weights of a linear interpolation with aligned corners.

    Source: google-research/vision_transformer, which uses a zoom of order 1.
    """
    xp = _numpy(at, new)
    # A single new point is the first old point, as in scipy.ndimage.zoom.
    return triangle(at * ((old - 1) / xp.maximum(new - 1, 1)), old)


def triangle(at: Points, old: int, reach: Length = 1.0) -> Weights:
    """Returns weights that decrease linearly to 0 at the distance `reach` from `at`."""
    xp = _numpy(at, reach)
    reach = reach[..., None] if np.ndim(reach) else reach
    return xp.maximum(0.0, 1 - xp.abs(_less(at, np.arange(old))) / reach)


def bilinear(at: Points, old: int, new: Length) -> Weights:
    """Returns the weights of an antialiased bilinear resize of pixels.

    Source: torch.nn.functional.interpolate(mode="bilinear", antialias=True), as used by
    SigLIP 2 to resize position embeddings; Pillow's BILINEAR is the same filter.
    """
    step = old / new
    # When an image shrinks, the filter is as wide as the step.
    weights = triangle((at + 0.5) * step - 0.5, old, _numpy(at, new).maximum(step, 1.0))
    return weights / weights.sum(-1, keepdims=True)


def bilinear_plain(at: Points, old: int, new: Length) -> Weights:
    """Returns the weights of a bilinear resize of pixels without antialiasing.

    Source: torch.nn.functional.interpolate(mode="bilinear"), as used by timm to
    resize factorized position embeddings, and by Swin V1 to resize its tables.
    """
    xp = _numpy(at, new)
    return triangle(xp.clip((at + 0.5) * (old / new) - 0.5, 0, old - 1), old)


def bicubic_antialiased(at: Points, old: int, new: Length) -> Weights:
    """Returns the weights of an antialiased bicubic resize of pixels.

    Source: torch.nn.functional.interpolate(mode="bicubic", antialias=True), as used by
    timm, and by DINOv2 with registers, to resize position embeddings; Pillow's BICUBIC
    is the same filter.
    """
    xp, step = _numpy(at, new), old / new
    stretch = xp.asarray(xp.maximum(step, 1.0))[..., None]
    distance = xp.abs(_less((at + 0.5) * step, np.arange(old) + 0.5))
    weights = _keys_cubic(distance / stretch, -0.5)
    return weights / weights.sum(-1, keepdims=True)


def bicubic_plain(at: Points, old: int, new: Length, shift: float = 0.0) -> Weights:
    """Returns the weights of a bicubic resize of pixels without antialiasing.

    Source: torch.nn.functional.interpolate(mode="bicubic"), as used by MAE and DeiT to
    resize position embeddings. `shift` is added to `new` in the step between points.
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
    """Returns jax.numpy if there is a JAX array, else NumPy, which has float64."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


_SQUARE = "_square"  # Suffix of methods that resize to a square and crop it.

# Functions (at, old, new) -> weights of the old points, for places `at` on a side of
# `new` points that had `old` points before.
RESIZE_METHODS = {
    "linear": linear_corners,
    "bilinear": bilinear,
    "bilinear_plain": bilinear_plain,
    "bicubic": bicubic_antialiased,
    "bicubic_plain": bicubic_plain,
    "bicubic_dino": bicubic_dino,
}
RESIZE_METHODS |= {f"{name}{_SQUARE}": each for name, each in RESIZE_METHODS.items()}


def is_square(method: str) -> bool:
    """Returns whether a method keeps the aspect, as timm's `pos_embed_ar_preserving`.

    Such a method resizes positions to a square of the longer side, and uses its first
    rows and columns.
    """
    return method.endswith(_SQUARE)


def resize_matrix(
    method: str, old: int, new: int, longer: int = 0
) -> Float[np.ndarray, "new old"]:
    """Returns the matrix that resizes a side, by a method of RESIZE_METHODS.

    Args:
      method: a key of RESIZE_METHODS.
      old, new: numbers of points of the side before and after.
      longer: number of points of the longer side of the result.
    """
    whole = max(new, longer) if is_square(method) else new
    return RESIZE_METHODS[method](np.arange(new), old, whole)


def resize_grid(
    grid: Float[np.ndarray, "Y X D"] | Float[Array, "Y X D"],
    size: Sequence[int],
    method: str,
) -> Float[np.ndarray, "H W D"] | Float[Array, "H W D"]:
    """Resizes a grid to (H, W) by a method of RESIZE_METHODS.

    The result is a NumPy array if the grid is one.
    """
    down, across = (
        resize_matrix(method, o, n, max(size))
        for o, n in zip(grid.shape[:2], size, strict=True)
    )
    return resample(grid, down, across)


def resample(
    grid: Float[np.ndarray, "Y X D"] | Float[Array, "Y X D"],
    down: Float[np.ndarray, "H Y"],
    across: Float[np.ndarray, "W X"],
) -> Float[np.ndarray, "H W D"] | Float[Array, "H W D"]:
    """Multiplies each axis of a grid by a matrix; NumPy arrays stay NumPy arrays."""
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
