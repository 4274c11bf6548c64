"""Computes attention, tokens and gradients inside a network, one block at a time.

Letters: B images, Y by X pixels, C channels, N tokens, H heads, D width, L classes.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vit_jax.errors import UserError
from vit_jax.models.encoder import BLOCK, ENCODER, Block, Encoder
from vit_jax.models.layers import INTERMEDIATES, PERTURBATIONS
from vit_jax.models.model import Model
from vit_jax.models.patches import PatchSequences
from vit_jax.models.vit import VisionTransformer, joined

Images = Float[Array, "B Y X C"] | PatchSequences  # Sequences raise a UserError.

# Names of the attention module of a block and of the attention-pooling head.
_ATTENTION, _POOLING = "MultiHeadDotProductAttention_1", "MAPHead_0"


class Layer(NamedTuple):
    """Intermediates of a block.

    Attributes:
      attention: weights of each query (third axis) over keys (fourth axis), which sum
        to 1.
      tokens: output of the block.
    """

    attention: Float[Array, "B H N N"]
    tokens: Float[Array, "B N D"]


class AttentionGradient(NamedTuple):
    """Attention of a block, and its effect on a logit.

    Attributes:
      attention: attention weights, see Layer.
      gradient: gradient of the logit with respect to the attention.
    """

    attention: Float[Array, "B H N N"]
    gradient: Float[Array, "B H N N"]


def layers(model: Model, params: Mapping, images: Images) -> Iterator[Layer]:
    """Runs a network block by block.

    All blocks share one compiled program, so the attention of only one layer is in
    memory. Attention is computed by an einsum with a float32 softmax for any
    `attention_impl`.

    Args:
      model: a Vision Transformer or a hybrid.
      params: parameters of the network, with stacked or separate blocks.
      images: normalised images.

    Returns:
      A lazy iterator over the blocks, which keeps only tokens in memory.

    Raises:
      UserError: the network does not have attention.
    """
    module = model.module
    _check(module, images)
    tokens, given = embed_images(module, _others(params), images)

    # Unlike a generator, `map` does not keep a reference to the last layer.
    def run(i):
        nonlocal tokens
        attention, tokens = run_block(module, _block(params, i), tokens, given[i])
        return Layer(attention, tokens.astype(jnp.float32))

    return map(run, range(len(given)))


def classify_tokens(
    model: Model, params: Mapping, tokens: Float[Array, "B N D"]
) -> dict[str, Float[Array, "..."]]:
    """Computes the outputs of `Model.apply` from the tokens after the last block.

    Args:
      model, params: see `layers`.
      tokens: tokens of the last Layer.

    Raises:
      UserError: the network does not have attention.
    """
    _check(model.module, None)
    tokens = tokens.astype(model.config.dtype)
    return _classify_tokens(model.module, _others(params), tokens)


def attention_gradients(
    model: Model, params: Mapping, images: Images, classes: Int[Array, " B"]
) -> tuple[Float[Array, "B N"], Iterator[AttentionGradient]]:
    """Computes the gradient of one logit per image with respect to the attention.

    Args:
      model, params, images: see `layers`.
      classes: class index per image.

    Returns:
      Two results. The first are the weights of the pooling over the tokens after the
      last
      block, which sum to 1: all on the class token, half on each token of DeiT, or
      equal for all patches. With attention pooling they are the positive part of
      attention times gradient, averaged over heads. The second is a lazy iterator over
      the blocks from last to first, which keeps the tokens of all blocks in memory, but
      the attention of only one.

    Raises:
      UserError: the network does not have attention or does not classify whole images,
        or a class is unknown.
    """
    module = model.module
    _check(module, images)
    pool = module.config.pool
    if not module.num_classes or pool == "none":
        raise UserError(
            f"a model with num_classes={module.num_classes} and pool={pool} has no logit per "
            "image: use a model that classifies images"
        )
    classes = np.asarray(classes)
    wrong = classes[(classes < 0) | (classes >= module.num_classes)]
    if wrong.size:
        raise UserError(
            f"class {wrong[0]} is not one of the {module.num_classes} classes of the model: "
            f"choose one from 0 to {module.num_classes - 1}"
        )
    others = _others(params)
    tokens, given = embed_images(module, others, images)
    entering = []
    for i, extras in enumerate(given):
        entering.append(tokens)
        tokens = run_block(module, _block(params, i), tokens, extras)[1]
    pooling, slope = head_vjp(module, others, tokens, classes)

    def differentiate(i):
        nonlocal slope
        block, x = _block(params, i), entering.pop()
        attention, gradient, slope = block_vjp(module, block, x, given[i], slope)
        return AttentionGradient(attention, gradient)

    return pooling, map(differentiate, reversed(range(len(given))))


def _check(module: nn.Module, images: object) -> None:
    if not isinstance(module, VisionTransformer):
        raise UserError(
            f"a {type(module).__name__} has no attention: use a Vision "
            "Transformer or a hybrid"
        )
    module.config.check_grid()
    if isinstance(images, PatchSequences):
        raise UserError(
            "attention is not available for sequences of patches: set max_tokens to 0, "
            "or draw attention with vit_jax.visualize or vit_jax.explore"
        )


def _others(params: Mapping) -> dict:
    """Returns the parameters outside the blocks."""
    encoder = {
        name: value
        for name, value in params[ENCODER].items()
        if not name.startswith(BLOCK)
    }
    return {**params, ENCODER: encoder}


def _block(params: Mapping, i: int) -> dict:
    encoder = params[ENCODER]
    if BLOCK in encoder:
        return jax.tree.map(lambda leaf: leaf[i], encoder[BLOCK])
    return encoder[f"{BLOCK}_{i}"]


class _BeginEncoder(Encoder):
    """The part of the encoder before the first block."""

    @nn.compact
    def __call__(self, x):
        x, inputs = self.begin(x)
        return x, [(given.added, given.positions) for given in inputs]


class _EndEncoder(Encoder):
    """The part of the encoder after the last block."""

    @nn.compact
    def __call__(self, x):
        return self.final_norm()(x)


class _Embedding(VisionTransformer):
    """The part of the network before the first block."""

    @nn.compact
    def __call__(self, images):
        return self.encoder(_BeginEncoder)(self.embed(images))


class _Classifier(VisionTransformer):
    """The part of the network after the last block."""

    @nn.compact
    def __call__(self, x):
        return self.classify(self.encoder(_EndEncoder)(x))


@functools.partial(jax.jit, static_argnums=0)
def embed_images(module, params, images):
    """Returns the tokens for the first block, and the positions for each block."""
    return joined(_Embedding, module).apply({"params": params}, images)


@functools.partial(jax.jit, static_argnums=0)
def run_block(module, params, x, given):
    """Returns the attention and output tokens of a block."""
    return _attend(module.config.block(module.config), params, x, given)


def _attend(block: Block, params, x, given, added=None):
    """Runs a block, with a perturbation added to its attention weights."""
    added_first, positions = given
    x = x if added_first is None else x + added_first
    variables = {"params": params}
    if added is not None:
        variables[PERTURBATIONS] = {_ATTENTION: {"weights": added}}
    x, kept = block.apply(variables, x, positions, mutable=[INTERMEDIATES])
    return kept[INTERMEDIATES][_ATTENTION]["weights"][0], x


@functools.partial(jax.jit, static_argnums=0)
def _classify_tokens(module, params, x):
    """Computes the outputs of the network from the tokens of the last block."""
    return joined(_Classifier, module).apply({"params": params}, x)


@functools.partial(jax.jit, static_argnums=0)
def head_vjp(module, params, x, classes):
    """Returns pooling weights, and the gradient of logits with respect to tokens."""
    end = joined(_Classifier, module)
    config, name = module.config, "MultiHeadDotProductAttention_0"
    B, N, _ = x.shape

    def logit(x, added):
        variables = {"params": params}
        if pools:
            variables[PERTURBATIONS] = {_POOLING: {name: {"weights": added}}}
        outputs, kept = end.apply(variables, x, mutable=[INTERMEDIATES])
        picked = jnp.take_along_axis(outputs["logits"], classes[:, None], axis=1)
        return picked.sum(), kept

    pools = config.pool == "map"
    added = jnp.zeros((B, config.num_heads, 1, N))
    (slope, gradient), kept = jax.grad(logit, (0, 1), has_aux=True)(x, added)
    if pools:
        weights = kept[INTERMEDIATES][_POOLING][name]["weights"][0]
        return nn.relu(weights * gradient).mean(1)[:, 0], slope
    first, last = 0, 1 + ("distillation token" in config.prefix_tokens)
    if config.pool in ("gap", "token_gap"):
        first, last = len(config.prefix_tokens), N
    places = jnp.arange(N)
    pooling = (first <= places) & (places < last)
    pooling = pooling / (last - first)
    if config.pool == "token_gap":
        pooling = (pooling + (places == 0)) / 2
    return jnp.broadcast_to(pooling, (B, N)), slope


@functools.partial(jax.jit, static_argnums=0)
def block_vjp(module, params, x, given, slope):
    """Returns a block's attention, and gradients of attention and input tokens."""
    block = module.config.block(module.config)

    def forward(x, added):
        attention, x = _attend(block, params, x, given, added)
        return x, attention

    B, N, _ = x.shape
    added = jnp.zeros((B, module.config.num_heads, N, N))
    _, back, attention = jax.vjp(forward, x, added, has_aux=True)
    slope, gradient = back(slope)
    return attention, gradient, slope
