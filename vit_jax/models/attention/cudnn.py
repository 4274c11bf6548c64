"""Attention by cuDNN's flash attention, on NVIDIA GPUs.

Letters: B images, H heads, N query and M key tokens, K head width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# What cuDNN multiplies: bfloat16, and heads of a multiple of 8 up to 128 (256 on
# Hopper and later). As jax 0.10.2 checks it.
DTYPES = ("bfloat16",)
HEAD_STEP, HEAD_LIMIT = 8, 128


def attend(
    query: Float[Array, "B H N K"],
    key: Float[Array, "B H M K"],
    value: Float[Array, "B H M K"],
    lengths: Int[Array, " B"] | None = None,
    *,
    implementation: str = "cudnn",
) -> Float[Array, "B H N K"]:
    """Mixes the values; see `vit_jax.models.attention.attend`.

    Args:
      query, key, value, lengths: as there.
      implementation: of jax.nn.dot_product_attention; "xla" is its twin for any place.

    Returns:
      Mixed values.
    """
    # cuDNN takes tokens before heads; XLA drops the transposes that meet others.
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        key_value_seq_lengths=None if lengths is None else lengths.astype(jnp.int32),
        implementation=implementation,
    )
    return jnp.swapaxes(mixed, 1, 2)
