"""Attention of a Vision Transformer: maps, mean distance, rollout and relevance.

Letters: L layers, B images, H heads, N and M tokens, P patches, y by x patches of a
stage, Y by X pixels, C channels.
"""

import collections
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import Model, Params, intermediates, text
from vit_jax.models.patches import PatchSequences
from vit_jax.models.text_tower import TextTower

HEAD_FUSIONS = {"mean": jnp.mean, "max": jnp.max, "min": jnp.min}
# Values of `discard_from` in `rollout`: the weakest entries of each row, or of the
# matrix.
ROWS, MATRIX = "rows", "matrix"


def attention_maps(
    model: Model, params: Params, images: Float[Array, "B Y X C"] | PatchSequences
) -> Iterator[Float[Array, "B H N N"]]:
    """Returns an iterator over the attention of each layer, first layer first.

    A layer is computed when it is requested. Drop each map before requesting the next
    one, and only one layer's attention is in memory at a time.

    Args:
      model: a Vision Transformer or a hybrid.
      params: parameters of the model; blocks stacked or separate.
      images: normalised images.

    Returns:
      Float32 attention from each query (third axis) to each key (fourth axis); rows sum
      to 1.

    Raises:
      UserError: the model has no attention, or the images are sequences of patches.
    """
    # A generator's frame would keep the previous layer alive.
    return map(
        operator.attrgetter("attention"), intermediates.layers(model, params, images)
    )


def query_attention(
    model: Model,
    params: Params,
    images: Float[Array, "B Y X C"],
    *,
    layer: int,
    query: int = 0,
    head: int | None = None,
) -> Float[Array, "B N"]:
    """Returns the attention of one query token in one layer.

    Later layers are not computed.

    Args:
      model, params, images: arguments of `attention_maps`.
      layer: index from 0; negative indices count from the last layer.
      query: index of the token; prefix tokens precede the patches.
      head: index from 0; None averages over the heads.

    Raises:
      UserError: the model has no attention, or an index is out of range.
    """
    depth, num_heads = (model.options.get(name, 0) for name in ("depth", "num_heads"))
    num_tokens = model.num_prefix_tokens + math.prod(model.grid)
    maps = attention_maps(model, params, images)
    for name, value, first, count in (
        ("layer", layer, -depth, depth),
        ("query", query, 0, num_tokens),
        ("head", head or 0, 0, num_heads),
    ):
        if not first <= value < count:
            raise UserError(
                f"{name}={value}: out of range; choose a number from {first} to "
                f"{count - 1}"
            )
    weights = next(itertools.islice(maps, layer % depth, None))[:, :, query]
    return weights.mean(1) if head is None else weights[:, head]


@jax.jit
def weighted_query(
    attention: Float[Array, "B H N M"], weights: Float[Array | np.ndarray, " N"]
) -> Float[Array, "B H M"]:
    """Returns the mean attention of weighted query tokens.

    Args:
      attention: attention of a layer.
      weights: weight of each query; they sum to 1.
    """
    return jnp.einsum("n,bhnm->bhm", weights, attention, precision="highest")


@functools.partial(jax.jit, static_argnums=0)
def received_in_windows(
    model: Model, params: Params, images: Float[Array, "B Y X C"]
) -> dict[str, Float[Array, "B y x"]]:
    """Returns the attention that each patch receives within its window.

    It is averaged over the heads and over the blocks of a stage, and scaled to be 1
    where all patches of a window receive the same.

    Args:
      model: a network with windows.
      params: parameters of the model.
      images: normalised images.

    Returns:
      Maps by the name of the blocks: "stage 1", "stage 1 shifted", and so on.
    """
    maps = collections.defaultdict(list)
    for block in model.config.window_attention(model.module, params, images)[1]:
        gets = block.weights.mean(2).sum(2)
        count = math.prod(block.grid)
        # Padding is indexed after the last patch, and removed.
        patches = jnp.where(block.patches < 0, count, block.patches)
        values = jnp.zeros((len(gets), count + 1)).at[:, patches].set(gets)
        name = f"stage {block.stage + 1}{' shifted' if block.shifted else ''}"
        maps[name].append(values[:, :-1].reshape(-1, *block.grid))
    return {name: sum(values) / len(values) for name, values in maps.items()}


def mean_attention_distance(
    maps: Iterable[Float[Array, "B H N N"]],
    grid: tuple[int, int],
    patch_size: int,
    num_prefix_tokens: int,
) -> Float[np.ndarray, "B L H"]:
    """Returns the mean attention distance of each head, in pixels.

    This is the distance between the centres of query and key patch, weighted by
    attention and averaged over the queries (arXiv:2010.11929, appendix D.7, figure 11).
    Prefix tokens count neither as queries nor as keys. The figure of the paper is the
    average over images.

    Args:
      maps: attention of each layer, see `attention_maps`.
      grid: number of patches down and across.
      patch_size: side of a patch in pixels.
      num_prefix_tokens: number of tokens before the patches.
    """
    distances = patch_distances(grid, patch_size)
    layers = []
    for weights in maps:
        layers.append(np.asarray(head_distances(weights, distances, num_prefix_tokens)))
        del weights  # Frees this layer's attention before the next is computed.
    return np.stack(layers, axis=1)


def patch_distances(grid: tuple[int, int], patch_size: int) -> Float[np.ndarray, "P P"]:
    """Returns the distances between the centres of all pairs of patches, in pixels."""
    rows, columns = np.indices(grid, np.float32).reshape(2, -1)
    return patch_size * np.hypot(rows[:, None] - rows, columns[:, None] - columns)


@functools.partial(jax.jit, static_argnums=2)
def head_distances(
    weights: Float[Array, "B H N N"],
    distances: Float[Array | np.ndarray, "P P"],
    num_prefix_tokens: int,
) -> Float[Array, "B H"]:
    """Returns the mean attention distance of each head of one layer, in pixels.

    Args:
      weights: attention of the layer.
      distances: result of `patch_distances`.
      num_prefix_tokens: number of tokens before the patches.
    """
    weights = weights[:, :, num_prefix_tokens:, num_prefix_tokens:]
    totals = weights.sum(-1)
    sums = jnp.einsum("bhnm,nm->bhn", weights, distances, precision="highest")
    # A query without attention to any patch has no distance; the mean skips it.
    valid = totals > 0
    means = jnp.where(valid, sums / jnp.where(valid, totals, 1), 0)
    return means.sum(-1) / jnp.maximum(valid.sum(-1), 1)


def rollout(
    maps: Iterable[Float[Array, "B H N N"]],
    head_fusion: str = "mean",
    discard_ratio: float = 0.0,
    discard_from: str = ROWS,
) -> Float[Array, "B N N"]:
    """Returns the attention rollout from the last layer to the input tokens.

    Each layer's heads are fused, the identity is added for the residual connection,
    rows are normalised, and the layers are multiplied (arXiv:2005.00928, section 3;
    used for figure 6 of arXiv:2010.11929).

    Args:
      maps: attention of each layer, first layer first; consumed one at a time.
      head_fusion: "mean", "max" or "min".
      discard_ratio: fraction in [0, 1) of the entries that is set to 0 before the
        identity is added, the smallest ones first.
      discard_from: "rows" discards this fraction of each row; "matrix" discards it from
        the whole matrix, except for its first entry, the class token's attention to
        itself. The latter copies jacobgil/vit-explain 1d68f22, which also divides
        columns, not rows, by the sums of rows.

    Returns:
      The share of each input token (third axis) in each output token (second axis);
      rows sum to 1 unless `discard_from` is "matrix".

    Raises:
      UserError: an option is out of range, or there are no maps.
    """
    check_rollout_options(head_fusion, discard_ratio, discard_from)
    result = None
    for weights in maps:
        how = head_fusion, discard_ratio, discard_from
        result = rollout_step(result, weights, *how)
        del weights  # Frees this layer's attention before the next is computed.
    if result is None:
        raise UserError("maps=[]: rollout needs at least one layer; pass its attention")
    return result


def check_rollout_options(
    head_fusion: str, discard_ratio: float, discard_from: str
) -> None:
    """Raises UserError if `rollout` does not accept these options."""
    for name, value, known in (
        ("head_fusion", head_fusion, HEAD_FUSIONS),
        ("discard_from", discard_from, (ROWS, MATRIX)),
    ):
        if value not in known:
            raise UserError(f"{name}={value!r}: unknown; choose {' or '.join(known)}")
    if not 0 <= discard_ratio < 1:
        raise UserError(
            f"discard_ratio={discard_ratio}: out of range; choose a fraction from 0 to "
            "below 1"
        )


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def rollout_step(
    result: Float[Array, "B N N"] | None,
    weights: Float[Array, "B H N N"],
    head_fusion: str = "mean",
    discard_ratio: float = 0.0,
    discard_from: str = ROWS,
) -> Float[Array, "B N N"]:
    """Returns the rollout extended by one layer.

    Args:
      result: rollout of the previous layers; None for the first layer.
      weights: attention of the layer.
      head_fusion, discard_ratio, discard_from: options of `rollout`.
    """
    fused = HEAD_FUSIONS[head_fusion](weights, axis=1)
    B, N, _ = fused.shape
    whole = discard_from == MATRIX
    entries = fused.reshape(B, 1, -1) if whole else fused
    if num_discarded := int(discard_ratio * entries.shape[-1]):
        ranks = jnp.argsort(jnp.argsort(entries, axis=-1), axis=-1)
        kept = ranks >= num_discarded
        kept = kept.at[:, 0, 0].set(True) if whole else kept
        fused = jnp.where(kept, entries, 0).reshape(B, N, N)
    fused += jnp.eye(N)[None]
    sums = fused.sum(-1)
    fused /= sums[:, None] if whole else sums[..., None]
    if result is None:
        return fused
    return jnp.matmul(fused, result, precision="highest")


def relevance(
    model: Model,
    params: Params,
    images: Float[Array, "B Y X C"],
    classes: Int[Array | np.ndarray, " B"],
) -> Float[Array, "B N"]:
    """Returns the relevance of each token to a class, by gradient times attention.

    Each layer adds the positive part of attention times its gradient with respect to
    the class logit, averaged over the heads (Chefer et al., arXiv:2103.15679,
    equations 5 and 6). The paper multiplies whole matrices. Only the row that the
    classifier reads is needed, so this propagates one row from the last layer down,
    with one layer's attention in memory.

    Args:
      model: a Vision Transformer or a hybrid, with a classifier.
      params: parameters of the model; blocks stacked or separate.
      images: normalised images.
      classes: one class index per image.

    Returns:
      Non-negative relevance of all tokens, including prefix tokens. For tokens that the
      classifier reads (the class token, or all patches under mean pooling), it includes
      their direct contribution.

    Raises:
      UserError: the model has no attention or no classifier of whole images, or a class
        does not exist.
    """
    row, blocks = intermediates.attention_gradients(
        model, params, images, jnp.asarray(classes)
    )
    for block in blocks:
        row = _propagate_relevance(row, block.attention, block.gradient)
        del block  # Frees this layer's arrays before the next are computed.
    return row


def relevance_to_text(
    model: Model,
    params: Params,
    images: Float[Array, "B Y X C"],
    tower: TextTower,
    words: str,
) -> Float[Array, "B N"]:
    """Returns the relevance of each token to a text, by gradient times attention.

    The text takes the place of a class in `relevance`. Its logit is the similarity of
    image and text. The gradients in all earlier layers are equal to those of a
    classifier with one class, whose kernel is the gradient of that similarity.

    Args:
      model: an image network without a classifier.
      params: parameters of the model.
      images: normalised images.
      tower: text tower of the model.
      words: the text.

    Raises:
      UserError: the model has no attention, or the tower has no tokenizer.
    """
    (goal,) = tower.embed([words])

    def similarity(features):
        embedded = text.embed_images(tower.params, features[None])
        return (embedded @ jnp.asarray(goal))[0]

    features = model.apply(params, images)["pre_logits"]
    slopes = jax.vmap(jax.grad(similarity))(features)
    classifier = models.create(**{**model.options, "num_classes": 1})
    rows = []
    for image, slope in zip(images, slopes, strict=True):
        head = {"kernel": slope[:, None], "bias": jnp.zeros(1)}
        label = jnp.zeros(1, jnp.int32)
        rows.append(relevance(classifier, {**params, "head": head}, image[None], label))
    return jnp.concatenate(rows)


@jax.jit
def _propagate_relevance(row, attention, gradient):
    weights = jax.nn.relu(attention * gradient).mean(1)
    return row + jnp.einsum("bn,bnm->bm", row, weights, precision="highest")
