"""What position embeddings know of the grid (arXiv:2010.11929, figure 7 centre).

Letters: Y by X patches, N tokens, P patches, H heads, R offsets, K head width, D width.
"""

import numpy as np
from jaxtyping import Float

from vit_jax.analysis import finite
from vit_jax.errors import UserError
from vit_jax.models import Model, Params, positions, stacking


def similarity(
    model: Model, params: Params, layer: int = 0
) -> Float[np.ndarray, "Y X Y X"]:
    """Returns how alike the position embeddings of all pairs of patches are.

    Of "learned", "learned2d" and "sincos2d" it is the cosine of the angle between what
    is added to one patch and to the other. Of "relative" nothing is added, but patch n
    sees patch m by the key of the offset n - m: it is the cosine between that key and
    the one by which n sees itself, the mean of the heads.

    Args:
      model, params: the network.
      layer: from 0; it matters where each layer has embeddings of its own
        (posemb_at="every").

    Returns:
      Cosines: row and column of a patch, then of the one that it is compared with. 0
      where an embedding is.

    Raises:
      UserError: there are no position embeddings, no such layer, or they are not
        finite.
    """
    kind = model.options.get("posemb", "none")
    if kind == "none":
        raise UserError(
            f"{model.options['variant']} has no position embeddings (posemb=none): "
            "there is nothing to compare"
        )
    depth = model.options["depth"]
    if not 0 <= layer < depth:
        raise UserError(f"layer={layer} is not one of the {depth}: count from 0")
    relative = kind == "relative"
    found = (_keys if relative else table)(model, params, layer)
    finite.check(found, "the position embedding")
    compared = _by_offset(found, model) if relative else _cosines(found)
    return compared.reshape(*model.grid, *model.grid).astype(np.float32)


def table(model: Model, params: Params, layer: int = 0) -> Float[np.ndarray, "P D"]:
    """Returns what is added to each patch, row by row.

    Args:
      model, params, layer: as of `similarity`; not of relative positions.
    """
    every = model.options["posemb_at"] == "every"
    found = params[stacking.ENCODER].get(f"posembed_{layer if every else 'input'}", {})
    if model.options["posemb"] == "learned":
        return np.asarray(found["pos_embedding"], np.float64)[0, model.extra :]
    if model.options["posemb"] == "sincos2d":
        fixed = positions.sincos2d(model.grid, model.options["width"])
        return np.asarray(fixed, np.float64)
    (Y, X), half = model.grid, model.options["width"] // 2
    rows, columns = (
        np.asarray(found[f"{name}_embedding"], np.float64) for name in ("row", "column")
    )
    parts = columns[None], rows[:, None]
    parts = [np.broadcast_to(part, (Y, X, half)) for part in parts]
    return np.concatenate(parts, axis=-1).reshape(Y * X, -1)


def _keys(model, params, layer) -> Float[np.ndarray, "H R K"]:
    every = model.options["posemb_at"] == "every"
    name = "relative_embedding" + (f"_{layer}" if every else "")
    return np.asarray(params[stacking.ENCODER][name], np.float64)


def _by_offset(keys: Float[np.ndarray, "H R K"], model) -> Float[np.ndarray, "P P"]:
    middle = keys.shape[1] // 2  # Where a token sees itself.
    unit = _unit(keys)
    cosines = np.einsum("hrk,hk->hr", unit, unit[:, middle]).mean(0)
    patches = np.arange(model.grid[0] * model.grid[1])
    return cosines[patches[:, None] - patches + middle]


def _cosines(table: Float[np.ndarray, "P D"]) -> Float[np.ndarray, "P P"]:
    unit = _unit(table)
    return unit @ unit.T


def _unit(vectors):
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1)
