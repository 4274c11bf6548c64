"""Scaled dot-product attention (arXiv:2010.11929, appendix A).

Letters: B images, H heads, N query and M key tokens, K head width, R offsets.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def attend(
    query: Float[Array, "B H N K"],
    key: Float[Array, "B H M K"],
    value: Float[Array, "B H M K"],
    relative: Float[Array, "H R K"] | None = None,
) -> Float[Array, "B H N K"]:
    """Mixes the values by the softmax of the scaled query-key products.

    Head-major operands, because the same einsum over token-major ones takes four
    times as long on CPU. The softmax is in float32 whatever the operands are.

    Args:
      query, key, value: of each head.
      relative: a key for each offset of a query's place from a key's, from -(N - 1)
        to N - 1; its products with the query are added to the logits (arXiv:2010.11929,
        appendix D.4). Needs M = N.

    Returns:
      Mixed values.
    """
    if relative is None:
        return _attend(query, key, value)
    query = query * query.shape[-1] ** -0.5
    offsets = jnp.einsum(
        "bhnk,hrk->bhnr", query, relative, preferred_element_type=jnp.float32
    )
    weights = jax.nn.softmax(_logits(query, key) + _by_offset(offsets))
    return jnp.einsum("bhnm,bhmk->bhnk", weights.astype(value.dtype), value)


def _logits(query, key):
    """Products of scaled queries with keys, float32 whatever they are."""
    return jnp.einsum("bhnk,bhmk->bhnm", query, key, preferred_element_type=jnp.float32)


# Its own derivative, because the one that JAX derives passes over the weights, the
# largest arrays of the network, more often (docs/decisions.md).
@jax.custom_vjp
def _attend(query, key, value):
    logits = _logits(query * query.shape[-1] ** -0.5, key)
    powers = jnp.exp(logits - logits.max(-1, keepdims=True))
    # What was mixed is smaller than the weights, so the division comes after.
    mixed = jnp.einsum("bhnm,bhmk->bhnk", powers.astype(value.dtype), value)
    return (mixed / powers.sum(-1, keepdims=True)).astype(value.dtype)


def _attend_forward(query, key, value):
    query = query * query.shape[-1] ** -0.5
    logits = _logits(query, key)
    weights = jax.nn.softmax(logits).astype(value.dtype)
    mixed = jnp.einsum("bhnm,bhmk->bhnk", weights, value)
    return mixed, (query, key, value, weights, mixed)


def _attend_backward(kept, grad):
    query, key, value, weights, mixed = kept
    scale = query.shape[-1] ** -0.5
    to_value = jnp.einsum("bhnm,bhnk->bhmk", weights, grad)
    to_weights = jnp.einsum(
        "bhnk,bhmk->bhnm", grad, value, preferred_element_type=jnp.float32
    )
    # The weights' mean of their own gradient, from what they gave: K terms, not M.
    mean = (grad * mixed).astype(jnp.float32).sum(-1, keepdims=True)
    to_logits = (weights * (to_weights - mean)).astype(value.dtype)
    to_query = jnp.einsum("bhnm,bhmk->bhnk", to_logits, key) * scale
    to_key = jnp.einsum("bhnm,bhnk->bhmk", to_logits, query)
    return to_query, to_key, to_value


_attend.defvjp(_attend_forward, _attend_backward)


def _by_offset(x: Float[Array, "B H N R"]) -> Float[Array, "B H N N"]:
    """Picks entry n - m + N - 1 of row n for column m, without a gather.

    In the reversed rows the entries wanted begin one place earlier in each row than in
    the row before; one column more makes that the same place of rows one shorter.
    """
    B, H, N, R = x.shape
    x = jnp.pad(x[..., ::-1], ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(B, H, -1)
    return x[..., N - 1 : N - 1 + N * R].reshape(B, H, N, R)[..., :N]
