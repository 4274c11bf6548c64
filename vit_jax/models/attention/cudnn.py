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
TOKEN_STEP = 8

# Of flash attention in bfloat16 (NVIDIA, cuDNN support matrix): Ampere and later.
_CAPABILITY = 8.0


def missing() -> str:
    """Says what this machine's GPUs lack for it; "" if nothing, or there are none."""
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        return ""  # The program is for another machine.
    if "cuda" not in device.client.platform_version.lower():
        return f"needs an NVIDIA GPU, not {device.device_kind}"
    if float(device.compute_capability) < _CAPABILITY:
        return (
            f"needs a GPU of compute capability {_CAPABILITY} or more, but "
            f"{device.device_kind} has {device.compute_capability}"
        )
    return ""


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
    (B, _, N, _), M = query.shape, key.shape[2]
    if lengths is None and (N % 2 or M % 2):
        lengths = jnp.full(B, M)
    asking = None if lengths is None else jnp.full(B, N, jnp.int32)
    # cuDNN takes tokens before heads; XLA drops the transposes that meet others.
    if lengths is not None:
        query, key, value = map(_pad, (query, key, value))
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        query_seq_lengths=asking,
        key_value_seq_lengths=None if lengths is None else lengths.astype(jnp.int32),
        implementation=implementation,
    )
    return jnp.swapaxes(mixed[:, :N], 1, 2)


def _pad(x):
    """Appends tokens: a derivative needs an even number of them."""
    more = -x.shape[2] % TOKEN_STEP
    return jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0)))
