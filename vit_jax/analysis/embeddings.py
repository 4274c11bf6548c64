"""Patch and position embeddings: principal components and similarities.

Letters: K components, Y by X pixels of a filter or patches of the grid, C channels,
D filters or width, N tokens, P patches, H heads, R offsets, F head width.
"""

import math

import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Float

from vit_jax.analysis.loaded_model import check_finite
from vit_jax.errors import UserError
from vit_jax.models import Model, Params, positions
from vit_jax.models.encoder import ENCODER
from vit_jax.models.positions.added import Table
from vit_jax.weights.surgery import FIRST_KERNELS

NUM_COMPONENTS = 28  # Number of components in figure 7 of the paper.


def first_kernel(params: Params) -> Float[np.ndarray, "Y X C D"]:
    """Returns the convolution kernel that is applied to the pixels.

    It is the patch embedding of a Vision Transformer, and the root convolution of a
    ResNet or hybrid.

    Args:
      params: parameters of any model.

    Raises:
      UserError: the model has no such convolution.
    """
    arrays = flatten_dict(params, sep="/")
    kernel = next((arrays[name] for name in FIRST_KERNELS if name in arrays), None)
    if np.ndim(kernel) != 4:
        raise UserError(
            "no convolution named 'embedding' or 'conv_root' is applied to the pixels: "
            "there are no filters to draw"
        )
    return np.asarray(kernel, np.float32)


def principal_components(
    kernel: Float[np.ndarray, "Y X C D"], num_components: int = NUM_COMPONENTS
) -> tuple[Float[np.ndarray, "K Y X C"], Float[np.ndarray, " K"]]:
    """Returns the principal components of filters (arXiv:2010.11929, figure 7 left).

    Args:
      kernel: filters.
      num_components: maximum number of components.

    Returns:
      Components of norm 1, by descending variance, with the sign that makes their
      largest entry positive; and the fraction of the variance that each explains.

    Raises:
      UserError: the filters are not finite.
    """
    check_finite(kernel, "the first kernel")
    flat = kernel.reshape(-1, kernel.shape[-1]).T.astype(np.float64)
    flat -= flat.mean(0)
    _, singular_values, rows = np.linalg.svd(flat, full_matrices=False)
    variance = singular_values**2
    explained = variance / variance.sum() if variance.any() else variance
    rows = rows[:num_components]
    largest = np.take_along_axis(rows, abs(rows).argmax(1)[:, None], axis=1)
    rows = rows * np.where(largest < 0, -1, 1)
    components = rows.reshape(len(rows), *kernel.shape[:3]).astype(np.float32)
    return components, explained[:num_components].astype(np.float32)


def components_to_intensities(
    components: Float[np.ndarray, "K Y X C"],
) -> Float[np.ndarray, "K Y X C"]:
    """Returns components scaled to [0, 1] each, with 0 at mid-grey (0.5)."""
    largest = abs(components).max(axis=(1, 2, 3), keepdims=True)
    return 0.5 + 0.5 * components / np.where(largest > 0, largest, 1)


def position_similarity(
    model: Model, params: Params, layer: int = 0
) -> Float[np.ndarray, "Y X Y X"]:
    """Returns the similarity of the position embeddings of all pairs of patches.

    It is the cosine similarity of the embeddings that are added to the two patches
    (arXiv:2010.11929, figure 7 centre). Relative embeddings are not added to patches:
    for them it is the cosine similarity between the embedding of the offset from one
    patch to the other and the embedding of offset 0, averaged over the heads.

    Args:
      model: a Vision Transformer or a hybrid.
      params: parameters of the model.
      layer: index from 0, for models whose layers have different embeddings
        (posemb_placement="every").

    Returns:
      Cosines, indexed by row and column of one patch, then of the other; 0 for an
      embedding of norm 0.

    Raises:
      UserError: the model has no position embeddings, the layer does not exist, or an
        embedding is not finite.
    """
    kind = model.options["posemb"] if model.config.has_encoder else "none"
    if kind == "none":
        raise UserError(
            f"posemb=none: {model.options['variant']} has no position embeddings to "
            "compare; give a model that has them"
        )
    depth = model.options["depth"]
    if not 0 <= layer < depth:
        raise UserError(
            f"layer={layer}: out of range; choose a number from 0 to {depth - 1}"
        )
    if kind == "relative":
        embeddings = _relative_embeddings(model, params, layer)
    else:
        embeddings = _absolute_embeddings(model, params, layer)
    check_finite(embeddings, "the position embedding")
    norms = np.linalg.norm(embeddings, axis=-1, keepdims=True)
    unit = embeddings / np.where(norms > 0, norms, 1)
    if kind == "relative":
        zero_offset = unit.shape[1] // 2
        cosines = np.einsum("hrf,hf->hr", unit, unit[:, zero_offset]).mean(0)
        patches = np.arange(math.prod(model.grid))
        similarity = cosines[patches[:, None] - patches + zero_offset]
    else:
        similarity = unit @ unit.T
    return similarity.reshape(*model.grid, *model.grid).astype(np.float32)


def _absolute_embeddings(model, params, layer) -> Float[np.ndarray, "P D"]:
    """Returns the embedding that is added to each patch, in row-major order."""
    options, P = model.options, model.num_prefix_tokens
    name = f"posembed_{layer if options['posemb_placement'] == 'every' else 'input'}"
    registers = options.get("num_register_tokens", 0)
    kind = positions.EMBEDDINGS[options["posemb"]]
    added = Table(kind(model.config, model.grid, P, registers))
    variables = {"params": params[ENCODER].get(name, {})}
    return np.asarray(added.apply(variables)[0, P:], np.float64)


def _relative_embeddings(model, params, layer) -> Float[np.ndarray, "H R F"]:
    """Returns the embedding of each offset between patches."""
    per_layer = model.options["posemb_placement"] == "every"
    name = "relative_embedding" + (f"_{layer}" if per_layer else "")
    return np.asarray(params[ENCODER][name], np.float64)
