"""Losses over all pairs of images and captions of a batch, without a matrix of all pairs.

The devices form a ring. Each keeps its own rows, reduces their products with the columns
that it holds, and passes those columns to its neighbour, until every device has seen
all columns. So the memory of a device does not grow with the number of devices. The
backward pass sends the columns round once more, together with their gradients, and
computes the products again.

Letters: B images and captions of a batch, R rows and columns of a device, M columns of
a chunk, E width of the shared space.
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
    """How the logits of a row are reduced to a number.

    Attributes:
      start: result without columns.
      reduce: function of logits (R, M) that returns (R,).
      combine: function of two results (R,) that returns that of all their columns.
      weights: function of logits (R, M) and the results of their rows (R, 1) that
        returns the derivatives of the results by the logits, (R, M).
    """

    start: float
    reduce: Callable[[jax.Array], jax.Array]
    combine: Callable[[jax.Array, jax.Array], jax.Array]
    weights: Callable[[jax.Array, jax.Array], jax.Array]


LOG_SUM_EXP = Reduction(
    -jnp.inf,
    functools.partial(jax.nn.logsumexp, axis=1),
    jnp.logaddexp,
    lambda logits, total: jnp.exp(logits - total),
)
SUM_SOFTPLUS = Reduction(
    0.0,
    lambda logits: jax.nn.softplus(logits).sum(1),
    jnp.add,
    lambda logits, _: jax.nn.sigmoid(logits),
)
MAXIMUM = Reduction(
    -jnp.inf,
    lambda logits: logits.max(1),
    jnp.maximum,
    lambda logits, total: (logits == total).astype(logits.dtype),
)


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
    """Products of the rows and columns of a ring, reduced chunk by chunk."""

    how: Reduction
    chunk: int
    ring: _Ring

    def logits(self, rows, columns, scale, bias) -> Float[Array, "R M"]:
        return scale * _product(rows, columns.T) + bias

    def chunks(self, columns: Float[Array, "R E"]) -> Float[Array, "C M E"]:
        """Splits columns into chunks of the largest possible equal size."""
        R, most = len(columns), min(self.chunk, len(columns))
        M = next(m for m in range(most, 0, -1) if R % m == 0)
        return columns.reshape(R // M, M, -1)

    def forward(self, rows, columns, scale, bias) -> Float[Array, " R"]:
        how = self.how

        def take_chunk(total, part):
            reduced = how.reduce(self.logits(rows, part, scale, bias))
            return how.combine(total, reduced), None

        def visit(carry, _):
            total, columns = carry
            following = self.ring.passed(
                columns
            )  # Sent while the products are computed.
            total, _ = jax.lax.scan(take_chunk, total, self.chunks(columns))
            return (total, following), None

        start = jnp.full_like(rows[:, 0], how.start)
        (total, _), _ = jax.lax.scan(visit, (start, columns), length=self.ring.size)
        return total

    def backward(self, rows, columns, scale, bias, total, gradients):
        """Returns the gradients of rows, columns, scale and bias.

        Args:
          rows, columns, scale, bias: arguments of `forward`.
          total: its result, (R,).
          gradients: gradient of the result, (R,).
        """

        def take_chunk(carry, part):
            of_rows, of_scale, of_bias = carry
            products = _product(rows, part.T)
            logits = scale * products + bias
            weights = self.how.weights(logits, total[:, None]) * gradients[:, None]
            carry = (
                of_rows + scale * _product(weights, part),
                of_scale + jnp.sum(weights * products),
                of_bias + weights.sum(),
            )
            return carry, scale * _product(weights.T, rows)

        def visit(carry, _):
            sums, columns, of_columns = carry
            parts = self.chunks(columns)
            sums, added = jax.lax.scan(take_chunk, sums, parts)
            of_columns += added.reshape(of_columns.shape)
            return (sums, *self.ring.passed((columns, of_columns))), None

        zero = 0 * total[0]
        sums = jnp.zeros_like(rows), zero, zero
        start = sums, columns, jnp.zeros_like(columns)
        (sums, _, of_columns), _ = jax.lax.scan(visit, start, length=self.ring.size)
        of_rows, of_scale, of_bias = sums
        of_scale, of_bias = map(self.ring.summed, (of_scale, of_bias))
        return of_rows, of_columns, of_scale, of_bias


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


@jax.named_scope("contrastive")
def reduce_pairs(
    how: Reduction,
    chunk: int,
    rows: Float[Array, "B E"],
    columns: Float[Array, "B E"],
    scale: Float[Array, ""],
    bias: Float[Array, ""],
) -> Float[Array, " B"]:
    """Reduces the logits of each row with all columns: scale * rows @ columns.T + bias.

    Args:
      how: reduction of a row.
      chunk: upper limit of M, which is the largest divisor of R that does not exceed
        it.
      rows, columns: embeddings, split over the devices of the batch.
      scale, bias: factor and bias of the products.
    """
    mesh, axes = jax.sharding.get_abstract_mesh(), ()
    if not mesh.empty and nn.get_logical_axis_rules():
        (axes,) = nn.logical_to_mesh_axes(("batch",))
    ring = _Ring(axes, math.prod(mesh.shape[axis] for axis in axes))
    # The backward pass is traced later, without this mesh and these rules.
    return _reduce(_Pairs(how, chunk, ring), mesh, rows, columns, scale, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _reduce(pairs: _Pairs, mesh: AbstractMesh, rows, columns, scale, bias):
    return _on_each(pairs, mesh, pairs.forward, (rows, columns, scale, bias))


def _forward(pairs, mesh, rows, columns, scale, bias):
    total = _reduce(pairs, mesh, rows, columns, scale, bias)
    return total, (rows, columns, scale, bias, total)


def _backward(pairs, mesh, residuals, gradients):
    return _on_each(pairs, mesh, pairs.backward, (*residuals, gradients))


_reduce.defvjp(_forward, _backward)


def _on_each(
    pairs: _Pairs, mesh: AbstractMesh, function: Callable, arrays: tuple
) -> jax.Array | tuple:
    """Calls a method of `pairs` on every device of its ring."""
    if not pairs.ring.axes:
        return function(*arrays)
    split, whole = PartitionSpec(pairs.ring.axes), PartitionSpec()
    outputs = split if function == pairs.forward else (split, split, whole, whole)
    on_each = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=tuple(split if x.ndim else whole for x in arrays),
        out_specs=outputs,
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
) -> Float[Array, ""]:
    """Returns the mean of the cross-entropies from images to texts and back.

    Args:
      images, texts: unit-length embeddings of pairs.
      scale, bias: factor and bias of the similarities; the loss does not depend on the
        bias.
      chunk: upper limit of M, see `reduce_pairs`.
    """
    total = functools.partial(reduce_pairs, LOG_SUM_EXP, chunk)
    of_images = total(images, texts, scale, bias)
    of_texts = total(texts, images, scale, bias)
    matching = scale * jnp.sum(images * texts, axis=1) + bias
    return ((of_images + of_texts) / 2 - matching).mean()


def sigmoid(
    images: Float[Array, "B E"],
    texts: Float[Array, "B E"],
    scale: Float[Array, ""],
    bias: Float[Array, ""],
    *,
    chunk: int = CHUNK,
) -> Float[Array, ""]:
    """Returns the sum of an image's binary cross-entropies, averaged over images.

    Args:
      images, texts, scale, bias, chunk: arguments of `softmax`.
    """
    sums = reduce_pairs(SUM_SOFTPLUS, chunk, images, texts, scale, bias)
    # The term of a pair is softplus(-x), which is softplus(x) - x.
    matching = scale * jnp.sum(images * texts, axis=1) + bias
    return (sums - matching).mean()


LOSSES = {"softmax": softmax, "sigmoid": sigmoid}


def are_closest(
    images: Float[Array, "B E"], texts: Float[Array, "B E"], *, chunk: int = CHUNK
) -> Float[Array, " B"]:
    """Returns 1 for each image whose own text is the most similar of all, else 0."""
    images, texts = map(jax.lax.stop_gradient, (images, texts))
    one = jnp.ones([], images.dtype)
    best = reduce_pairs(MAXIMUM, chunk, images, texts, one, 0 * one)
    matching = jnp.sum(images * texts, axis=1)
    # Equality counts, because several images may have the same caption.
    return (matching >= best - 1e-6).astype(jnp.float32)
