"""Fitting given parameters to a model: the head and the position embeddings."""

import math

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float

from vit_jax.errors import UserError

_POSITIONS = ("Transformer", "posembed_input", "pos_embedding")


def fit(
    params: dict,
    expected: dict,
    *,
    grid: tuple[int, int],
    old_grid: tuple[int, int] | None = None,
    head: str = "replace",
    head_bias: float = 0.0,
) -> tuple[dict, list[str]]:
    """Makes loaded parameters those of a model.

    Position embeddings are resized to the model's grid (arXiv:2010.11929, section
    3.2). With `head="replace"` the whole head, `pre_logits` included, gives way to one
    zero-initialised linear layer.

    Args:
      params: loaded, nested dict of arrays.
      expected: the model's, nested dict of arrays or of their shapes.
      grid: the model's patches down and across.
      old_grid: those of the loaded position embeddings; a square if None.
      head: "replace" or "keep".
      head_bias: initial bias of a replaced head.

    Returns:
      The fitted parameters and a line for each thing that was changed.

    Raises:
      UserError: parameters that are missing, left over or of another shape, named with
        both shapes.
    """
    given, wanted = flatten_dict(params), flatten_dict(expected)
    notes = []
    if head == "replace":
        given = {k: v for k, v in given.items() if k[0] not in ("head", "pre_logits")}
        for key, value in wanted.items():
            if key[0] == "head":
                fill = head_bias if key[-1] == "bias" else 0.0
                given[key] = np.full(value.shape, fill, value.dtype)
        notes.append("head: replaced by a linear layer of zeros")

    have, want = given.get(_POSITIONS), wanted.get(_POSITIONS)
    if have is not None and want is not None:
        tokens = want.shape[1] - math.prod(grid)
        old_grid = old_grid or _square_grid(have.shape[1] - tokens)
        if old_grid != grid:
            given[_POSITIONS] = resize_position_embedding(
                np.asarray(have), old_grid, grid, tokens=tokens
            )
            notes.append(f"position embeddings: resized from {old_grid} to {grid}")

    _check(given, wanted)
    return unflatten_dict(given), notes


def resize_position_embedding(
    embedding: Float[np.ndarray, "1 N D"],
    old_grid: tuple[int, int],
    grid: tuple[int, int],
    *,
    tokens: int,
) -> Float[np.ndarray, "1 M D"]:
    """Resizes position embeddings in 2-D: linear, corners aligned.

    Args:
      embedding: of `tokens` extra tokens, then of the patches row by row.
      old_grid: rows and columns of its patches.
      grid: rows and columns wanted.
      tokens: extra tokens at the front, which keep their embedding.

    Returns:
      Embedding of the same tokens and the new patches.

    Raises:
      UserError: the embedding is not of that many tokens and patches.

    Source: google-research/vision_transformer resizes by a zoom of order 1.
    """
    _, N, D = embedding.shape
    if N != tokens + math.prod(old_grid):
        raise UserError(
            f"position embedding has {N} rows, but {tokens} extra tokens and a grid of "
            f"{old_grid[0]}x{old_grid[1]} make {tokens + math.prod(old_grid)}"
        )
    patches = embedding[0, tokens:].reshape(*old_grid, D)
    down, across = (_linear_map(o, n) for o, n in zip(old_grid, grid, strict=True))
    patches = np.einsum("ij,jkd,lk->ild", down, patches, across)
    patches = patches.reshape(1, -1, D).astype(embedding.dtype)
    return np.concatenate([embedding[:, :tokens], patches], axis=1)


def _linear_map(old: int, new: int) -> Float[np.ndarray, "new old"]:
    """Returns the matrix that interpolates `new` values from `old`, ends on ends."""
    if old == 1:
        return np.ones((new, 1))
    # A single new point takes the first, as scipy.ndimage.zoom does.
    at = np.linspace(0, old - 1, new)
    left = np.minimum(at.astype(int), old - 2)
    matrix = np.zeros((new, old))
    rows = np.arange(new)
    matrix[rows, left] = 1 - (at - left)
    matrix[rows, left + 1] = at - left
    return matrix


def _square_grid(patches: int) -> tuple[int, int]:
    side = math.isqrt(patches)
    if side * side != patches:
        raise UserError(
            f"position embeddings of {patches} patches are not a square grid: start "
            "from a workdir, which knows its grid"
        )
    return side, side


def _check(given: dict, wanted: dict) -> None:
    wrong = [
        f"{'/'.join(key)} is {given[key].shape} in the checkpoint but "
        f"{wanted[key].shape} in the model"
        for key in sorted(given.keys() & wanted.keys())
        if given[key].shape != wanted[key].shape
    ]
    wrong += [f"{'/'.join(k)} is missing" for k in sorted(wanted.keys() - given.keys())]
    wrong += [
        f"{'/'.join(k)} is left over" for k in sorted(given.keys() - wanted.keys())
    ]
    if wrong:
        shown = "; ".join(wrong[:4])
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise UserError(f"the checkpoint does not fit the model: {shown}{more}")
