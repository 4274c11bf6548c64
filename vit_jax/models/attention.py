"""Scaled dot-product attention (arXiv:2010.11929, appendix A).

Letters: B images, H heads, N query and M key tokens, K head width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def attend(
    query: Float[Array, "B H N K"],
    key: Float[Array, "B H M K"],
    value: Float[Array, "B H M K"],
) -> Float[Array, "B H N K"]:
    """Mixes the values by the softmax of the scaled query-key products.

    Head-major operands, because the same einsum over token-major ones takes four
    times as long on CPU. The softmax is in float32 whatever the operands are.
    """
    scale = query.shape[-1] ** -0.5
    logits = jnp.einsum(
        "bhnk,bhmk->bhnm", query * scale, key, preferred_element_type=jnp.float32
    )
    weights = jax.nn.softmax(logits).astype(value.dtype)
    return jnp.einsum("bhnm,bhmk->bhnk", weights, value)
