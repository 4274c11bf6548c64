"""Attention by splash attention, a Pallas kernel for TPUs that keeps no logits.

Letters: B images, H heads, N query and M key tokens, K head width.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jaxtyping import Array, Float, Int

_TILE = 128  # Tokens of a block are a multiple of the lanes of a TPU.
_LARGEST = 1024  # Tokens of a block at most, so that it fits the chip's VMEM.


def attend(
    query: Float[Array, "B H N K"],
    key: Float[Array, "B H M K"],
    value: Float[Array, "B H M K"],
    lengths: Int[Array, " B"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B H N K"]:
    """Mixes the values; see `vit_jax.models.attention.attend`.

    XLA cannot split a kernel over devices by itself: where the function is traced for a
    mesh, each device gets its images and heads.

    Args:
      query, key, value, lengths: as there.
      interpret: whether to run the kernel on any device, slowly; for tests.

    Returns:
      Mixed values.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if lengths is None:
        lengths = jnp.full(len(key), key.shape[2], jnp.int32)
    attend = functools.partial(_attend, interpret=interpret)
    if mesh.empty or not nn.get_logical_axis_rules():
        return attend(query, key, value, lengths)
    images = nn.logical_to_mesh_axes(("batch",))
    heads = nn.logical_to_mesh_axes(("batch", "heads"))
    split = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(heads, heads, heads, images),
        out_specs=heads,
        # A kernel does not say along which axes of the mesh its results differ.
        check_vma=False,
    )
    return split(query, key, value, lengths)


def _attend(query, key, value, lengths, interpret):
    N, M = query.shape[2], key.shape[2]
    padded = [-(-count // _TILE) * _TILE for count in (N, M)]
    query = _pad(query * query.shape[-1] ** -0.5, padded[0])
    key, value = _pad(key, padded[1]), _pad(value, padded[1])
    kernel = _kernel(query.shape[1], *padded, interpret)
    asking = jnp.zeros(padded[0], jnp.int32)

    def one(query, key, value, length):
        # Queries look at keys of their own segment.
        looked_at = (jnp.arange(padded[1]) >= length).astype(jnp.int32)
        return kernel(query, key, value, kernels.SegmentIds(asking, looked_at))

    return jax.vmap(one)(query, key, value, lengths)[:, :, :N]


def _pad(x, tokens: int):
    return jnp.pad(x, ((0, 0), (0, 0), (0, tokens - x.shape[2]), (0, 0)))


def _kernel(
    heads: int, queries: int, keys: int, interpret: bool
) -> kernels.SplashAttentionKernel:
    mask = masks.MultiHeadMask([masks.FullMask((queries, keys))] * heads)
    q, k = _block(queries), _block(keys)
    sizes = kernels.BlockSizes(
        block_q=q,
        block_kv=k,
        block_q_dkv=q,
        block_kv_dkv=k,
        use_fused_bwd_kernel=True,
    )
    return kernels.make_splash_mha(
        mask,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        # What a rematerialisation policy may keep of the forward pass.
        residual_checkpoint_name="attention",
        interpret=interpret,
    )


@functools.cache
def _block(tokens: int) -> int:
    """Returns the largest multiple of the tile that divides the tokens."""
    sizes = range(_TILE, min(tokens, _LARGEST) + 1, _TILE)
    return max(size for size in sizes if tokens % size == 0)
