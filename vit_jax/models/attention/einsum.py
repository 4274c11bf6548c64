"""Attention as two einsums and a softmax between them.

Letters: B images, H heads, N query and M key tokens, K head width, R offsets.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int


def attend(
    query: Float[Array, "B H N K"],
    key: Float[Array, "B H M K"],
    value: Float[Array, "B H M K"],
    relative: Float[Array, "H R K"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    rounded: bool = False,
) -> Float[Array, "B H N K"]:
    """Mixes the values; see `vit_jax.models.attention.attend`.

    The softmax's sums are in float32 whatever the operands are.

    Args:
      query, key, value, relative, lengths: as there.
      rounded: whether the logits, the largest arrays of the network, go to memory in
        the operands' dtype; otherwise in float32. With `relative` they are float32.

    Returns:
      Mixed values.
    """
    if relative is None:
        return _attend(query, key, value, _seen(lengths, key.shape[2]), rounded)
    mixing = weights(query, key, relative, lengths).astype(value.dtype)
    return jnp.einsum("bhnm,bhmk->bhnk", mixing, value)


def weights(
    query: Float[Array, "B H N K"],
    key: Float[Array, "B H M K"],
    relative: Float[Array, "H R K"] | None = None,
    lengths: Int[Array, " B"] | None = None,
) -> Float[Array, "B H N M"]:
    """Returns how much each query looks at each key: float32, of sum 1.

    Args:
      query, key, relative, lengths: see `vit_jax.models.attention.attend`.
    """
    query = query * query.shape[-1] ** -0.5
    logits = _logits(query, key, jnp.float32)
    if relative is not None:
        offsets = jnp.einsum(
            "bhnk,hrk->bhnr", query, relative, preferred_element_type=jnp.float32
        )
        logits += _by_offset(offsets)
    return jax.nn.softmax(_hide(logits, _seen(lengths, key.shape[2])))


def _seen(lengths, M: int) -> Bool[Array, "B 1 1 M"] | None:
    if lengths is None:
        return None
    return (jnp.arange(M)[None] < lengths[:, None])[:, None, None]


def _hide(logits, seen):
    if seen is None:
        return logits
    return jnp.where(seen, logits, jnp.finfo(logits.dtype).min)


def _logits(query, key, dtype):
    """Products of scaled queries with keys."""
    return jnp.einsum("bhnk,bhmk->bhnm", query, key, preferred_element_type=dtype)


# Its own derivative, because the one that JAX derives passes over the weights, the
# largest arrays of the network, more often (docs/decisions.md).
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query, key, value, seen, rounded):
    powers, sums = _powers(query * query.shape[-1] ** -0.5, key, seen, rounded)
    # What was mixed is smaller than the weights, so the division comes after.
    mixed = jnp.einsum("bhnm,bhmk->bhnk", powers.astype(value.dtype), value)
    return (mixed / sums).astype(value.dtype)


def _powers(query, key, seen, rounded):
    """Returns the softmax's numerators and denominators, float32."""
    dtype = query.dtype if rounded else jnp.float32
    logits = _hide(_logits(query, key, dtype), seen)
    largest = logits.max(-1, keepdims=True)
    powers = jnp.exp(logits.astype(jnp.float32) - largest.astype(jnp.float32))
    return powers, powers.sum(-1, keepdims=True)


def _attend_forward(query, key, value, seen, rounded):
    query = query * query.shape[-1] ** -0.5
    powers, sums = _powers(query, key, seen, rounded)
    mixing = (powers / sums).astype(value.dtype)
    mixed = jnp.einsum("bhnm,bhmk->bhnk", mixing, value)
    mixed = checkpoint_name(mixed, "attention")
    return mixed, (query, key, value, mixing, mixed)


def _attend_backward(rounded, kept, grad):
    query, key, value, weights, mixed = kept
    scale = query.shape[-1] ** -0.5
    to_value = jnp.einsum("bhnm,bhnk->bhmk", weights, grad)
    dtype = query.dtype if rounded else jnp.float32
    to_weights = jnp.einsum(
        "bhnk,bhmk->bhnm", grad, value, preferred_element_type=dtype
    )
    # The weights' mean of their own gradient, from what they gave: K terms, not M.
    mean = (grad * mixed).astype(jnp.float32).sum(-1, keepdims=True)
    to_logits = (weights * (to_weights - mean)).astype(value.dtype)
    to_query = jnp.einsum("bhnm,bhmk->bhnk", to_logits, key) * scale
    to_key = jnp.einsum("bhnm,bhnk->bhmk", to_logits, query)
    return to_query, to_key, to_value, None


_attend.defvjp(_attend_forward, _attend_backward)


def _by_offset(x: Float[Array, "B H N R"]) -> Float[Array, "B H N N"]:
    """Picks entry n - m + N - 1 of row n for column m, without a gather.

    In the reversed rows the entries wanted begin one place earlier in each row than in
    the row before; one column more makes that the same place of rows one shorter.
    """
    B, H, N, R = x.shape
    x = jnp.pad(x[..., ::-1], ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(B, H, -1)
    return x[..., N - 1 : N - 1 + N * R].reshape(B, H, N, R)[..., :N]
