"""Attention rollout: how attention adds up over the layers (arXiv:2005.00928).

Letters: B images, H heads, N tokens.
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.errors import UserError

COMBINED = {"mean": jnp.mean, "max": jnp.max}  # How heads are.


def rollout(
    maps: Iterable[Float[Array, "B H N N"]], heads: str = "mean", discard: float = 0.0
) -> Float[Array, "B N N"]:
    """Follows attention from the last layer's tokens to the first layer's.

    Each layer's heads become one; the identity is added, for the residual connection;
    rows are normalised; and the layers are multiplied (arXiv:2005.00928, section 3; so
    made figure 6 of arXiv:2010.11929).

    Args:
      maps: attention, the first layer first; one at a time is used.
      heads: "mean" or "max".
      discard: of what each token looks at, the fraction that is looked at least and set
        to 0 before the identity is added; from 0 to below 1.

    Returns:
      For each token of the last layer (second axis) how much of each token of the
      first it has, of sum 1.

    Raises:
      UserError: unknown way to combine heads, no such fraction, or no layer.
    """
    check(heads, discard)
    result = None
    for weights in maps:
        result = step(result, weights, heads, discard)
        del weights  # Before the next layer's are there.
    if result is None:
        raise UserError("there is no layer to roll out: give the attention of some")
    return result


def check(heads: str, discard: float) -> None:
    """Raises UserError unless `rollout` takes these."""
    if heads not in COMBINED:
        raise UserError(f"heads={heads!r} is not one of {', '.join(COMBINED)}")
    if not 0 <= discard < 1:
        raise UserError(f"discard={discard} is not a fraction from 0 to below 1")


@functools.partial(jax.jit, static_argnums=(2, 3))
def step(
    result: Float[Array, "B N N"] | None,
    weights: Float[Array, "B H N N"],
    heads: str = "mean",
    discard: float = 0.0,
) -> Float[Array, "B N N"]:
    """Adds a layer to what the layers before it came to, None before the first."""
    mixed = COMBINED[heads](weights, axis=1)
    N = mixed.shape[-1]
    if least := int(discard * N):
        ranks = jnp.argsort(jnp.argsort(mixed, axis=-1), axis=-1)
        mixed = jnp.where(ranks < least, 0, mixed)
    mixed += jnp.eye(N)[None]
    mixed /= mixed.sum(-1, keepdims=True)
    if result is None:
        return mixed
    return jnp.matmul(mixed, result, precision="highest")
