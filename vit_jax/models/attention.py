"""Implementations of scaled dot-product attention (arXiv:2010.11929, appendix A).

Letters: B images, H heads, N query and M key tokens, K head width, J its half, R
offsets.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from vit_jax.errors import UserError
from vit_jax.models import kernels

NAMES = ("auto", "einsum", "cudnn", "splash")  # Values of `model.attention_impl`.
# Implementations; "einsum16" keeps logits in the dtype of the computation.
IMPLEMENTATIONS = ("einsum", "einsum16", "cudnn", "splash")

# Smallest number of tokens for which "auto" chooses splash attention. According to the
# compiler it moves about as many bytes as einsums with bfloat16 logits at 577 tokens,
# and clearly fewer at 1,025 tokens (docs/decisions.md).
SPLASH_TOKENS = 577

# Limits of cuDNN, as checked by jax 0.10.2: bfloat16, and head widths that are
# multiples of 8 up to 128 (256 on Hopper and later).
CUDNN_DTYPES = ("bfloat16",)
CUDNN_HEAD_STEP, CUDNN_HEAD_LIMIT = 8, 128
CUDNN_TOKEN_STEP = 8

# Flash attention in bfloat16 needs Ampere or later (NVIDIA, cuDNN support matrix).
CUDNN_CAPABILITY = 8.0

_SPLASH_TILE = 128  # The tokens of a block must be a multiple of a TPU's lanes.
_SPLASH_LARGEST = 1024  # Larger blocks of tokens would not fit a chip's VMEM.


class Positions(NamedTuple):
    """Positions of a layer's tokens; each field may be None.

    Attributes:
      relative, bias: see `attend`.
      angles: rotations of queries and keys in radians, see `rotate`. B or H may be 1; B
        may be absent.
      lengths, segments: see `attend`.
    """

    relative: Float[Array, "H R K"] | None = None
    bias: Float[Array, "*BH #N #N"] | None = None
    angles: Float[Array, "*BH N J"] | None = None
    lengths: Int[Array, " B"] | None = None
    segments: Int[Array, "B N"] | None = None


def attend(
    query: Float[Array, "B H N K"],
    key: Float[Array, "B H M K"],
    value: Float[Array, "B H M K"],
    relative: Float[Array, "H R K"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    implementation: str = "einsum",
    bias: Float[Array, "*BH #N #M"] | None = None,
    segments: Int[Array, "B N"] | None = None,
) -> Float[Array, "B H N K"]:
    """Computes scaled dot-product attention, with the softmax in float32.

    Args:
      query, key, value: head-major arrays, because token-major einsums take four times
        as long on CPU.
      relative: embedding for each offset between the positions of query and key, from
        -(N - 1) to N - 1. Its products with the query are added to the logits
        (arXiv:2010.11929, appendix D.4). Needs M = N and an einsum implementation.
      lengths: number of valid keys per image, at least 1; later keys are masked.
      implementation: one of IMPLEMENTATIONS.
      bias: term added to the logits; every axis may be 1, and B may be absent. Needs an
        einsum implementation.
      segments: index of the segment of each token; tokens attend only to tokens of the
        same segment. Needs M = N; use it instead of `lengths`.
    """
    if implementation in ("einsum", "einsum16"):
        valid = _valid_keys(lengths, key.shape[2], segments)
        rounded = implementation == "einsum16"
        return attend_einsum(query, key, value, relative, valid, rounded, bias)
    if relative is not None or bias is not None:
        raise ValueError(
            f"implementation={implementation!r}: does not support relative positions: use "
            "'einsum'"
        )
    if implementation == "cudnn":
        return attend_cudnn(query, key, value, lengths, segments)
    return attend_splash(query, key, value, lengths, segments)


def rotate(
    x: Float[Array, "B H N K"], turned: Float[Array, "*BH N J"]
) -> Float[Array, "B H N K"]:
    """Rotates queries or keys.

    Args:
      x: queries or keys, head-major.
      turned: angles in radians, which are 0 for tokens without a position.
    """
    turned = turned if turned.ndim == x.ndim else turned[None]
    cos, sin = jnp.cos(turned), jnp.sin(turned)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    both = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(both, axis=-1).astype(x.dtype)


def choose(
    name: str,
    *,
    platform: str,
    dtype: str,
    tokens: int,
    head_width: int,
    relative: str,
) -> str:
    """Returns the implementation of attention for a platform.

    Args:
      name: one of NAMES; "auto" is the fastest implementation that the platform and the
        model support.
      platform: platform as in jax.Device.platform: "cpu", "gpu", "tpu", ...
      dtype: dtype of the computation.
      tokens: length of the encoder's sequence.
      head_width: features per head.
      relative: relative positions, for messages; "" for a model without them.

    Returns:
      One of IMPLEMENTATIONS.

    Raises:
      UserError: the platform or model does not support the choice.
    """
    if name not in NAMES:
        raise UserError(
            f"model.attention_impl={name!r} is unknown: choose one of {', '.join(NAMES)}"
        )
    obstacle = {
        "cudnn": _no_cudnn(platform, dtype, head_width, relative),
        "splash": _no_splash(platform, relative),
    }
    if name in obstacle:
        if obstacle[name]:
            raise UserError(
                f"model.attention_impl={name!r} {obstacle[name]}: set it to 'auto' or "
                "'einsum'"
            )
        return name
    if name == "auto" and not obstacle["cudnn"]:
        return "cudnn"
    many = dtype != "float32" and tokens >= SPLASH_TOKENS
    if name == "auto" and not obstacle["splash"] and many:
        return "splash"
    # CPUs multiply bfloat16 into float32 faster than into bfloat16.
    rounded = dtype != "float32" and platform != "cpu"
    return "einsum16" if rounded else "einsum"


def _no_cudnn(platform: str, dtype: str, head_width: int, relative: str) -> str:
    if platform not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU, but the platform is {platform!r}"
    if dtype not in CUDNN_DTYPES:
        return f"needs model.dtype='bfloat16', not {dtype!r}"
    if head_width % CUDNN_HEAD_STEP or head_width > CUDNN_HEAD_LIMIT:
        return (
            f"needs heads whose features are a multiple of {CUDNN_HEAD_STEP} up to "
            f"{CUDNN_HEAD_LIMIT}, not {head_width}"
        )
    return f"does not support {relative}" if relative else missing_for_cudnn()


def _no_splash(platform: str, relative: str) -> str:
    if platform != "tpu":
        return f"needs a TPU, but the platform is {platform!r}"
    return f"does not support {relative}" if relative else ""


def attend_einsum(
    query: Float[Array, "B H N K"],
    key: Float[Array, "B H M K"],
    value: Float[Array, "B H M K"],
    relative: Float[Array, "H R K"] | None = None,
    valid: Bool[Array, "B 1 #N M"] | None = None,
    rounded: bool = False,
    bias: Float[Array, "*BH #N #M"] | None = None,
) -> Float[Array, "B H N K"]:
    """Computes attention as two einsums and a softmax; see `attend`.

    The softmax sums in float32 for any dtype of the operands.

    Args:
      query, key, value, relative, bias: see `attend`.
      valid: whether a query may attend to a key; None: to all keys.
      rounded: whether the logits, the largest arrays of the network, are stored in the
        dtype of the operands instead of float32. Not used with `relative` or `bias`.
    """
    if relative is None and bias is None:
        precision = jax.config.jax_default_matmul_precision
        return _attend(query, key, value, valid, rounded, precision)
    mixing = _weights(query, key, relative, valid, bias).astype(value.dtype)
    return kernels.einsum("bhnm,bhmk->bhnk", mixing, value)


def weights(
    query: Float[Array, "B H N K"],
    key: Float[Array, "B H M K"],
    relative: Float[Array, "H R K"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    bias: Float[Array, "*BH #N #M"] | None = None,
    segments: Int[Array, "B N"] | None = None,
) -> Float[Array, "B H N M"]:
    """Returns the attention weights, float32, which sum to 1 over the keys.

    Args:
      query, key, relative, lengths, bias, segments: see `attend`.
    """
    valid = _valid_keys(lengths, key.shape[2], segments)
    return _weights(query, key, relative, valid, bias)


def _weights(query, key, relative, valid, bias):
    query = query * query.shape[-1] ** -0.5
    logits = _logits(query, key, jnp.float32)
    if relative is not None:
        offsets = jnp.einsum(
            "bhnk,hrk->bhnr", query, relative, preferred_element_type=jnp.float32
        )
        logits += _by_offset(offsets)
    if bias is not None:
        logits += bias if bias.ndim == logits.ndim else bias[None]
    return jax.nn.softmax(_mask(logits, valid))


def _valid_keys(lengths, M: int, segments=None) -> Bool[Array, "B 1 #N M"] | None:
    if segments is not None:
        return (segments[:, :, None] == segments[:, None])[:, None]
    if lengths is None:
        return None
    return (jnp.arange(M)[None] < lengths[:, None])[:, None, None]


def _mask(logits, valid):
    if valid is None:
        return logits
    return jnp.where(valid, logits, jnp.finfo(logits.dtype).min)


def _logits(query, key, dtype):
    """Returns the products of scaled queries with keys."""
    return kernels.einsum("bhnk,bhmk->bhnm", query, key, dtype=dtype)


# JAX's derivative would read and write the weights, the largest arrays of the
# network, more often (docs/decisions.md). JAX traces both passes of a derivative later,
# perhaps outside of `with jax.default_matmul_precision(precision)`.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(query, key, value, valid, rounded, precision):
    query = query * query.shape[-1] ** -0.5
    with jax.default_matmul_precision(precision):
        exponentials, sums = _exponentials(query, key, valid, rounded)
        # Divides the result instead of the weights, which are larger.
        mixing = exponentials.astype(value.dtype)
        mixed = kernels.einsum("bhnm,bhmk->bhnk", mixing, value)
    return (mixed / sums).astype(value.dtype)


def _exponentials(query, key, valid, rounded):
    """Returns the numerators and denominators of the softmax, float32."""
    dtype = query.dtype if rounded else jnp.float32
    logits = _mask(_logits(query, key, dtype), valid)
    largest = logits.max(-1, keepdims=True)
    exponentials = jnp.exp(logits.astype(jnp.float32) - largest.astype(jnp.float32))
    return exponentials, exponentials.sum(-1, keepdims=True)


def _attend_forward(query, key, value, valid, rounded, precision):
    query = query * query.shape[-1] ** -0.5
    with jax.default_matmul_precision(precision):
        exponentials, sums = _exponentials(query, key, valid, rounded)
        mixing = (exponentials / sums).astype(value.dtype)
        mixed = kernels.einsum("bhnm,bhmk->bhnk", mixing, value)
    mixed = checkpoint_name(mixed, "attention")
    return mixed, (query, key, value, mixing, mixed)


def _attend_backward(rounded, precision, kept, grad):
    with jax.default_matmul_precision(precision):
        return _gradients(rounded, kept, grad)


def _gradients(rounded, kept, grad):
    query, key, value, weights, mixed = kept
    scale = query.shape[-1] ** -0.5
    to_value = kernels.einsum("bhnm,bhnk->bhmk", weights, grad)
    dtype = query.dtype if rounded else jnp.float32
    to_weights = kernels.einsum("bhnk,bhmk->bhnm", grad, value, dtype=dtype)
    # The mean of the weights' gradient is computed from the output: K terms instead of
    # M.
    mean = (grad * mixed).astype(jnp.float32).sum(-1, keepdims=True)
    to_logits = (weights * (to_weights - mean)).astype(value.dtype)
    to_query = kernels.einsum("bhnm,bhmk->bhnk", to_logits, key) * scale
    to_key = kernels.einsum("bhnm,bhnk->bhmk", to_logits, query)
    return to_query, to_key, to_value, None


_attend.defvjp(_attend_forward, _attend_backward)


def _by_offset(x: Float[Array, "B H N R"]) -> Float[Array, "B H N N"]:
    """Returns entry n - m + N - 1 of row n in column m, without a gather.

    In reversed rows, the required entries start one place earlier in each further row.
    Padding by one column and splitting again into rows of the old length aligns them.
    """
    B, H, N, R = x.shape
    x = jnp.pad(x[..., ::-1], ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(B, H, -1)
    return x[..., N - 1 : N - 1 + N * R].reshape(B, H, N, R)[..., :N]


def missing_for_cudnn() -> str:
    """Returns why this machine's GPU does not support cuDNN attention, or ""."""
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        return ""  # There is no GPU here: the program is compiled for another machine.
    if "cuda" not in device.client.platform_version.lower():
        return f"needs an NVIDIA GPU, not {device.device_kind}"
    if float(device.compute_capability) < CUDNN_CAPABILITY:
        return (
            f"needs a GPU of compute capability {CUDNN_CAPABILITY} or more, but "
            f"{device.device_kind} has {device.compute_capability}"
        )
    return ""


def attend_cudnn(
    query: Float[Array, "B H N K"],
    key: Float[Array, "B H M K"],
    value: Float[Array, "B H M K"],
    lengths: Int[Array, " B"] | None = None,
    segments: Int[Array, "B N"] | None = None,
    *,
    implementation: str = "cudnn",
) -> Float[Array, "B H N K"]:
    """Computes attention by cuDNN's flash attention, on NVIDIA GPUs; see `attend`.

    Args:
      query, key, value, lengths, segments: see `attend`.
      implementation: argument of jax.nn.dot_product_attention; "xla" runs anywhere.
    """
    (B, _, N, _), M = query.shape, key.shape[2]
    mask = None
    if segments is not None:
        # Padding is a separate segment, so it attends only to padding.
        more = ((0, 0), (0, -N % CUDNN_TOKEN_STEP))
        mask = _valid_keys(None, M, jnp.pad(segments, more, constant_values=-1))
    elif lengths is None and (N % 2 or M % 2):
        lengths = jnp.full(B, M)
    query_lengths = None if lengths is None else jnp.full(B, N, jnp.int32)
    # cuDNN needs tokens before heads; XLA removes transposes that cancel out.
    if lengths is not None or mask is not None:
        query, key, value = map(pad_tokens, (query, key, value))
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=None if lengths is None else lengths.astype(jnp.int32),
        implementation=implementation,
    )
    return jnp.swapaxes(mixed[:, :N], 1, 2)


def pad_for_cudnn(
    x: Float[Array, "B N D"], context: Float[Array, "B M D"], positions: Positions
) -> tuple[Float[Array, "B P D"], Float[Array, "B Q D"], Positions]:
    """Pads odd numbers of tokens; returns tokens, context and positions with a mask.

    Padding the input takes one copy. Padding queries, keys, values and the result would
    take four copies, and four more for their gradients.
    """
    M = context.shape[1]
    if positions.segments is not None or not (x.shape[1] % 2 or M % 2):
        return x, context, positions
    lengths, angles = positions.lengths, positions.angles
    lengths = jnp.full(len(x), M) if lengths is None else lengths
    x, context = pad_tokens(x), pad_tokens(context)
    angles = None if angles is None else pad_tokens(angles)
    return x, context, positions._replace(angles=angles, lengths=lengths)


def pad_tokens(x: Float[Array, "*B N D"]) -> Float[Array, "*B M D"]:
    """Appends tokens of zeros: cuDNN's derivative needs an even number of tokens."""
    more = -x.shape[-2] % CUDNN_TOKEN_STEP
    return jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, more), (0, 0)))


def attend_splash(
    query: Float[Array, "B H N K"],
    key: Float[Array, "B H M K"],
    value: Float[Array, "B H M K"],
    lengths: Int[Array, " B"] | None = None,
    segments: Int[Array, "B N"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B H N K"]:
    """Computes attention by splash attention, a Pallas kernel for TPUs.

    The kernel does not store logits. XLA cannot split a kernel over devices, so
    shard_map gives each device of a mesh its images and heads.

    Args:
      query, key, value, lengths, segments: see `attend`.
      interpret: whether to run the kernel slowly on any device, for tests.
    """
    mesh = jax.sharding.get_abstract_mesh()
    (B, _, N, _), M = query.shape, key.shape[2]
    if segments is not None:
        parts = segments, segments
    else:
        # Queries are in segment 0, so they attend only to keys in segment 0.
        valid = _valid_keys(jnp.full(B, M) if lengths is None else lengths, M)
        parts = jnp.zeros((B, N), jnp.int32), 1 - valid[:, 0, 0].astype(jnp.int32)
    attend = functools.partial(_splash, interpret=interpret)
    if mesh.empty or not nn.get_logical_axis_rules():
        return attend(query, key, value, *parts)
    images = nn.logical_to_mesh_axes(("batch",))
    heads = nn.logical_to_mesh_axes(("batch", "heads"))
    split = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(heads, heads, heads, images, images),
        out_specs=heads,
        # The kernel does not declare along which mesh axes its results differ.
        check_vma=False,
    )
    return split(query, key, value, *parts)


def _splash(query, key, value, query_parts, key_parts, interpret):
    # Pallas takes 0.2 s to import, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as kernels,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    (_, H, N, K), M = query.shape, key.shape[2]
    queries, keys = (-(-count // _SPLASH_TILE) * _SPLASH_TILE for count in (N, M))
    q, k = _splash_block(queries), _splash_block(keys)
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([masks.FullMask((queries, keys))] * H),
        block_sizes=kernels.BlockSizes(
            block_q=q,
            block_kv=k,
            block_q_dkv=q,
            block_kv_dkv=k,
            use_fused_bwd_kernel=True,
        ),
        head_shards=1,
        q_seq_shards=1,
        # Name for rematerialisation policies.
        residual_checkpoint_name="attention",
        interpret=interpret,
    )
    query = _pad(query * K**-0.5, 2, queries)
    key, value = _pad(key, 2, keys), _pad(value, 2, keys)
    query_parts = _pad(query_parts, 1, queries)
    key_parts = _pad(key_parts, 1, keys, fill=-1)  # A segment without queries.

    def attend_image(query, key, value, query_parts, key_parts):
        return kernel(query, key, value, kernels.SegmentIds(query_parts, key_parts))

    mixed = jax.vmap(attend_image)(query, key, value, query_parts, key_parts)
    return mixed[:, :, :N]


def _pad(x, axis: int, length: int, fill: int = 0):
    more = [(0, 0)] * x.ndim
    more[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, more, constant_values=fill)


@functools.cache
def _splash_block(tokens: int) -> int:
    """Returns the largest multiple of the tile that divides the tokens."""
    sizes = range(_SPLASH_TILE, min(tokens, _SPLASH_LARGEST) + 1, _SPLASH_TILE)
    return max(size for size in sizes if tokens % size == 0)
