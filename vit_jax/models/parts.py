"""A network in parts, each a compiled program of its own.

What comes before the blocks, a block that shows its attention, what comes after the
blocks, and the derivatives of the last two. Parameters are those of the whole network.
Letters: B images, N tokens, H heads, D width.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.models.encoder import Block, Encoder
from vit_jax.models.layers import ADDED, KEPT
from vit_jax.models.vit import VisionTransformer, block_of

# Of a block, and of the head that pools.
_ATTENTION, _POOLING = "MultiHeadDotProductAttention_1", "MAPHead_0"


class _BeginEncoder(Encoder):
    """What comes before the first block."""

    @nn.compact
    def __call__(self, x):
        x, layers = self._begin(x, False)
        return x, [(layer.position, layer.relative) for layer in layers]


class _EndEncoder(Encoder):
    """What comes after the last block."""

    @nn.compact
    def __call__(self, x):
        return self._end(x)


class _Begin(VisionTransformer):
    """From images to the first block."""

    @nn.compact
    def __call__(self, images):
        x, grid = self._embed(images)
        return self._encoder(_BeginEncoder, grid)(x)


class _End(VisionTransformer):
    """From the last block to the outputs."""

    @nn.compact
    def __call__(self, x):
        # The grid is for positions, which are there already.
        return self._classify(self._encoder(_EndEncoder, (0, 0))(x))


def _as(kind: type[nn.Module], module: nn.Module) -> nn.Module:
    """Returns a module of another kind and the same attributes."""
    names = {field.name for field in dataclasses.fields(module)} - {"parent", "name"}
    return kind(**{name: getattr(module, name) for name in names})


@functools.partial(jax.jit, static_argnums=0)
def begin(module, params, images):
    """Returns the first block's tokens, and position and relative keys of each."""
    return _as(_Begin, module).apply({"params": params}, images)


@functools.partial(jax.jit, static_argnums=0)
def run(module, params, x, given):
    """Returns attention and tokens of a block."""
    return _attend(block_of(module)(), params, x, given)


def _attend(block: Block, params, x, given, added=None):
    """Runs a block, with something added to its attention."""
    position, relative = given
    x = x if position is None else x + position
    variables = {"params": params}
    if added is not None:
        variables[ADDED] = {_ATTENTION: {"weights": added}}
    x, kept = block.apply(variables, x, relative, mutable=[KEPT])
    return kept[KEPT][_ATTENTION]["weights"][0], x


@functools.partial(jax.jit, static_argnums=0)
def finish(module, params, x):
    """Returns the network's outputs from the last block's tokens."""
    return _as(_End, module).apply({"params": params}, x)


@functools.partial(jax.jit, static_argnums=0)
def look_back(module, params, x, classes):
    """Returns what the head looks at, and the logits' gradient at the last tokens."""
    end, name = _as(_End, module), "MultiHeadDotProductAttention_0"
    B, N, _ = x.shape

    def logit(x, added):
        variables = {"params": params}
        if pools:
            variables[ADDED] = {_POOLING: {name: {"weights": added}}}
        outputs, kept = end.apply(variables, x, mutable=[KEPT])
        picked = jnp.take_along_axis(outputs["logits"], classes[:, None], axis=1)
        return picked.sum(), kept

    pools = module.head == "map"
    added = jnp.zeros((B, module.heads, 1, N))
    (slope, gradient), kept = jax.grad(logit, (0, 1), has_aux=True)(x, added)
    if pools:
        weights = kept[KEPT][_POOLING][name]["weights"][0]
        return nn.relu(weights * gradient).mean(1)[:, 0], slope
    first, last = 0, 1 + module.distillation
    if module.head == "gap":
        first, last = module.extra, N
    places = jnp.arange(N)
    looked_at = (first <= places) & (places < last)
    return jnp.broadcast_to(looked_at / (last - first), (B, N)), slope


@functools.partial(jax.jit, static_argnums=0)
def pull(module, params, x, given, slope):
    """Returns a block's attention, the gradient there, and at the block's tokens."""
    block = block_of(module)()

    def forward(x, added):
        attention, x = _attend(block, params, x, given, added)
        return x, attention

    B, N, _ = x.shape
    added = jnp.zeros((B, module.heads, N, N))
    _, back, attention = jax.vjp(forward, x, added, has_aux=True)
    slope, gradient = back(slope)
    return attention, gradient, slope
