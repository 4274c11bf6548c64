"""Resampling of parameters to another grid, patch size or number of channels.

Every resize is linear and separable: a matrix for the rows and one for the columns.
Letters: D model width, C and c channels, P and p patch sides, before and after.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from vit_jax.errors import UserError


def positions(
    embedding: Float[np.ndarray, "1 N D"],
    old_grid: tuple[int, int],
    grid: tuple[int, int],
    *,
    tokens: int,
    method: str = "linear",
) -> Float[np.ndarray, "1 M D"]:
    """Resizes position embeddings in 2-D (arXiv:2010.11929, section 3.2).

    Args:
      embedding: of `tokens` extra tokens, then of the patches row by row.
      old_grid: rows and columns of its patches.
      grid: rows and columns wanted.
      tokens: extra tokens at the front, which keep their embedding.
      method: a key of MATRICES.

    Returns:
      Embedding of the same tokens and the new patches.

    Raises:
      UserError: the embedding is not of that many tokens and patches.
    """
    _, N, D = embedding.shape
    if N != tokens + math.prod(old_grid):
        raise UserError(
            f"position embedding has {N} rows, but {tokens} extra tokens and a grid of "
            f"{old_grid[0]}x{old_grid[1]} make {tokens + math.prod(old_grid)}"
        )
    patches = embedding[0, tokens:].reshape(*old_grid, D)
    down, across = (MATRICES[method](o, n) for o, n in zip(old_grid, grid, strict=True))
    patches = np.einsum("ij,jkd,lk->ild", down, patches, across, optimize=True)
    patches = patches.reshape(1, -1, D).astype(embedding.dtype)
    return np.concatenate([embedding[:, :tokens], patches], axis=1)


def table(
    embedding: Float[np.ndarray, "N D"], length: int, *, method: str = "linear"
) -> Float[np.ndarray, "M D"]:
    """Resizes the embeddings of rows or of columns in 1-D."""
    matrix = MATRICES[method](len(embedding), length)
    return (matrix @ embedding).astype(embedding.dtype)


def patch_kernel(
    kernel: Float[np.ndarray, "P P C D"], patch: int
) -> Float[np.ndarray, "p p C D"]:
    """Resizes a patch embedding so that it sees resized patches as before.

    The pseudo-inverse of the patches' bilinear resize (PI-resize, FlexiViT,
    arXiv:2212.08013, section 3.4): exact where patches grow, the least-squares best
    where they shrink.
    """
    # The resize of a square is a Kronecker product, and so is its pseudo-inverse.
    matrix = np.linalg.pinv(_bilinear(len(kernel), patch).T)
    resized = np.einsum("ij,jkcd,lk->ilcd", matrix, kernel, matrix, optimize=True)
    return resized.astype(kernel.dtype)


def input_channels(
    kernel: Float[np.ndarray, "P P C D"], channels: int
) -> Float[np.ndarray, "P P c D"]:
    """Makes the first kernel of RGB images one of grey images, or the reverse.

    Grey images then give what RGB images with three equal channels gave.

    Raises:
      UserError: not from 3 to 1 or from 1 to 3.
    """
    if (kernel.shape[2], channels) == (3, 1):
        return kernel.sum(axis=2, keepdims=True)
    if (kernel.shape[2], channels) == (1, 3):
        return np.repeat(kernel / 3, 3, axis=2).astype(kernel.dtype)
    raise UserError(
        f"the checkpoint is for images of {kernel.shape[2]} channels and the model for "
        f"{channels}: only 3 and 1 can be made of each other; set data.channels"
    )


def _linear_corners(old: int, new: int) -> Float[np.ndarray, "new old"]:
    """Returns the matrix that interpolates linearly, ends on ends.

    Source: google-research/vision_transformer's zoom of order 1.
    """
    if old == 1:
        return np.ones((new, 1))
    # A single new point takes the first, as scipy.ndimage.zoom does.
    return _triangle(np.linspace(0, old - 1, new), old)


def _bilinear(old: int, new: int) -> Float[np.ndarray, "new old"]:
    """Returns the matrix of a bilinear resize of pixels, not antialiased."""
    at = (np.arange(new) + 0.5) * old / new - 0.5
    return _triangle(np.clip(at, 0, old - 1), old)


def _triangle(at: Sequence[float] | np.ndarray, old: int) -> np.ndarray:
    """Returns each point's weights of its two neighbours out of `old`."""
    return np.maximum(0, 1 - np.abs(np.asarray(at)[:, None] - np.arange(old)))


def _bicubic_antialiased(old: int, new: int) -> Float[np.ndarray, "new old"]:
    """Returns the matrix of an antialiased bicubic resize of pixels.

    Source: torch.nn.functional.interpolate(mode="bicubic", antialias=True), which timm
    resizes position embeddings by; Pillow's BICUBIC is the same filter.
    """
    scale = old / new
    stretch = max(scale, 1.0)  # The filter grows with the step when shrinking.
    centres = (np.arange(new) + 0.5) * scale
    distance = np.abs(np.arange(old) + 0.5 - centres[:, None]) / stretch
    # Keys' cubic with a = -0.5.
    near = 1.5 * distance**3 - 2.5 * distance**2 + 1
    far = -0.5 * distance**3 + 2.5 * distance**2 - 4 * distance + 2
    weights = np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
    return weights / weights.sum(axis=1, keepdims=True)


MATRICES = {"linear": _linear_corners, "bicubic": _bicubic_antialiased}
