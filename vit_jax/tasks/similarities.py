"""Losses over all pairs of images and captions of a batch, without a matrix of all pairs.

The devices form a ring. Each keeps the embeddings of its images, compares them with the
captions that it holds, and passes those captions to its neighbour, until every device
has seen all captions. So the memory of a device does not grow with the number of
devices. The backward pass sends the captions round once more, together with their
gradients, and computes the similarities again.

Letters: B images and captions of a batch, R of a device, C chunks of M captions, E
width of the shared space.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float

CHUNK = 4_096  # Default of `task.chunk`.


class Reduction(NamedTuple):
    """How the logits of an image, or of a caption, are reduced to a number.

    Attributes:
      start: result without logits.
      reduce: function of logits (R, M) and an axis that returns the results.
      combine: function of the results of two sets of logits that returns that of both.
      weights: function of logits (R, M) and results that broadcast against them, which
        returns the derivatives of the results by the logits.
      of_captions: whether the loss needs the results of captions.
    """

    start: float
    reduce: Callable[[jax.Array, int], jax.Array]
    combine: Callable[[jax.Array, jax.Array], jax.Array]
    weights: Callable[[jax.Array, jax.Array], jax.Array]
    of_captions: bool


LOG_SUM_EXP = Reduction(
    -jnp.inf,
    jax.nn.logsumexp,
    jnp.logaddexp,
    lambda logits, total: jnp.exp(logits - total),
    of_captions=True,
)
# The softplus of a pair counts once, for its image.
SUM_SOFTPLUS = Reduction(
    0.0,
    lambda logits, axis: jax.nn.softplus(logits).sum(axis),
    jnp.add,
    lambda logits, _: jax.nn.sigmoid(logits),
    of_captions=False,
)


class Reduced(NamedTuple):
    """Reduced logits of each image and caption, and the largest product of an image.

    `captions` is only meaningful with `Reduction.of_captions`.
    """

    images: Float[Array, " B"]
    captions: Float[Array, " B"]
    best: Float[Array, " B"]


class _Ring(NamedTuple):
    """The mesh axes that split a batch, and the number of devices along them."""

    axes: tuple[str, ...]
    size: int

    def passed(self, tree):
        """Returns the arrays that the previous device of the ring holds."""
        if self.size == 1:
            return tree
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, pairs), tree)

    def summed(self, x: jax.Array) -> jax.Array:
        """Returns the sum over all devices of the ring."""
        return jax.lax.psum(x, self.axes) if self.size > 1 else x


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """Products of the images and captions of a ring, reduced chunk by chunk."""

    how: Reduction
    chunk: int
    ring: _Ring

    def chunks(self, x: Float[Array, "R ..."]) -> Float[Array, "C M ..."]:
        """Splits an array into chunks of the largest possible equal size."""
        R = len(x)
        M = next(m for m in range(min(self.chunk, R), 0, -1) if R % m == 0)
        return x.reshape(R // M, M, *x.shape[1:])

    def forward(self, images, captions, scale, bias) -> Reduced:
        how, chunks = self.how, self.chunks

        def take_chunk(carry, chunk):
            of_images, best = carry
            captions, of_captions = chunk
            products = _product(images, captions.T)
            logits = scale * products + bias
            of_images = how.combine(of_images, how.reduce(logits, 1))
            if how.of_captions:
                of_captions = how.combine(of_captions, how.reduce(logits, 0))
            return (of_images, jnp.maximum(best, products.max(1))), of_captions

        def visit(carry, _):
            sums, captions, of_captions = carry
            following = self.ring.passed(captions)  # While products are computed.
            parts = chunks(captions), chunks(of_captions)
            sums, reduced = jax.lax.scan(take_chunk, sums, parts)
            of_captions = reduced.reshape(of_captions.shape)
            if how.of_captions:
                of_captions = self.ring.passed(of_captions)
            return (sums, following, of_captions), None

        start = jnp.full_like(images[:, 0], how.start)
        carry = (start, jnp.full_like(start, -jnp.inf)), captions, start
        carry, _ = jax.lax.scan(visit, carry, length=self.ring.size)
        (of_images, best), _, of_captions = carry
        return Reduced(of_images, of_captions, best)

    def backward(self, images, captions, scale, bias, totals, gradients):
        """Returns the gradients of images, captions, scale and bias.

        Args:
          images, captions, scale, bias: arguments of `forward`.
          totals: its result.
          gradients: gradients of the result; that of `best` is ignored.
        """
        how, chunks = self.how, self.chunks

        def take_chunk(carry, chunk):
            of_images, of_scale, of_bias = carry
            captions, total, gradient = chunk
            products = _product(images, captions.T)
            logits = scale * products + bias
            weights = how.weights(logits, totals.images[:, None])
            weights *= gradients.images[:, None]
            if how.of_captions:
                weights += how.weights(logits, total[None]) * gradient[None]
            carry = (
                of_images + scale * _product(weights, captions),
                of_scale + jnp.sum(weights * products),
                of_bias + weights.sum(),
            )
            return carry, scale * _product(weights.T, images)

        def visit(carry, _):
            sums, sent, of_captions = carry
            following = self.ring.passed(sent)
            sums, added = jax.lax.scan(take_chunk, sums, tuple(map(chunks, sent)))
            of_captions += added.reshape(of_captions.shape)
            return (sums, following, self.ring.passed(of_captions)), None

        zero = jnp.zeros_like(scale)
        sums = jnp.zeros_like(images), zero, zero
        sent = captions, totals.captions, gradients.captions
        carry = sums, sent, jnp.zeros_like(captions)
        (sums, _, of_captions), _ = jax.lax.scan(visit, carry, length=self.ring.size)
        of_images, of_scale, of_bias = sums
        of_scale, of_bias = map(self.ring.summed, (of_scale, of_bias))
        return of_images, of_captions, of_scale, of_bias


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


@jax.named_scope("contrastive")
def reduce_pairs(
    how: Reduction,
    chunk: int,
    images: Float[Array, "B E"],
    captions: Float[Array, "B E"],
    scale: Float[Array, ""],
    bias: Float[Array, ""],
) -> Reduced:
    """Reduces the logits of all pairs: scale * images @ captions.T + bias.

    Args:
      how: reduction of an image's or a caption's logits.
      chunk: upper limit of M, which is the largest divisor of R that does not exceed
        it.
      images, captions: embeddings, split over the devices of the batch.
      scale, bias: factor and bias of the products.
    """
    mesh, axes = jax.sharding.get_abstract_mesh(), ()
    if not mesh.empty and nn.get_logical_axis_rules():
        (axes,) = nn.logical_to_mesh_axes(("batch",))
    ring = _Ring(axes, math.prod(mesh.shape[axis] for axis in axes))
    # The backward pass is traced later, without this mesh and these rules.
    return _reduce(_Pairs(how, chunk, ring), mesh, images, captions, scale, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _reduce(pairs: _Pairs, mesh: AbstractMesh, images, captions, scale, bias):
    return _on_each(pairs, mesh, pairs.forward, (images, captions, scale, bias))


def _forward(pairs, mesh, images, captions, scale, bias):
    reduced = _reduce(pairs, mesh, images, captions, scale, bias)
    return reduced, (images, captions, scale, bias, reduced)


def _backward(pairs, mesh, residuals, gradients):
    with jax.named_scope("contrastive"):
        return _on_each(pairs, mesh, pairs.backward, (*residuals, gradients))


_reduce.defvjp(_forward, _backward)


def _on_each(
    pairs: _Pairs, mesh: AbstractMesh, function: Callable, arrays: tuple
) -> Reduced | tuple:
    """Calls a method of `pairs` on every device of its ring."""
    if not pairs.ring.axes:
        return function(*arrays)
    split, whole = PartitionSpec(pairs.ring.axes), PartitionSpec()
    on_each = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=jax.tree.map(lambda x: split if x.ndim else whole, arrays),
        out_specs=split if function == pairs.forward else (split, split, whole, whole),
        check_vma=False,  # `backward` sums over the devices itself.
    )
    return on_each(*arrays)


def softmax(
    images: Float[Array, "B E"],
    texts: Float[Array, "B E"],
    scale: Float[Array, ""],
    bias: Float[Array, ""],
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, ""], Float[Array, " B"]]:
    """Returns the mean of the cross-entropies from images to texts and back.

    Args:
      images, texts: unit-length embeddings of pairs.
      scale, bias: factor and bias of the similarities; the loss does not depend on the
        bias.
      chunk: upper limit of M, see `reduce_pairs`.

    Returns:
      The loss; and for each image 1 if its text is the most similar of all, else 0.
    """
    reduced = reduce_pairs(LOG_SUM_EXP, chunk, images, texts, scale, bias)
    matching = jnp.sum(images * texts, axis=1)
    losses = (reduced.images + reduced.captions) / 2 - (scale * matching + bias)
    return losses.mean(), _is_best(matching, reduced)


def sigmoid(
    images: Float[Array, "B E"],
    texts: Float[Array, "B E"],
    scale: Float[Array, ""],
    bias: Float[Array, ""],
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, ""], Float[Array, " B"]]:
    """Returns the sum of an image's binary cross-entropies, averaged over images.

    Args:
      images, texts, scale, bias, chunk: arguments of `softmax`.

    Returns:
      See `softmax`.
    """
    reduced = reduce_pairs(SUM_SOFTPLUS, chunk, images, texts, scale, bias)
    matching = jnp.sum(images * texts, axis=1)
    # The term of a pair is softplus(-x), which is softplus(x) - x.
    losses = reduced.images - (scale * matching + bias)
    return losses.mean(), _is_best(matching, reduced)


def _is_best(matching: Float[Array, " B"], reduced: Reduced) -> Float[Array, " B"]:
    # Equality counts, because several images may have the same caption.
    return jax.lax.stop_gradient(matching >= reduced.best - 1e-6).astype(jnp.float32)


LOSSES = {"softmax": softmax, "sigmoid": sigmoid}
