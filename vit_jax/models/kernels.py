"""Functions of arrays that are optimised for speed; comments state the gain of each.

Letters: B images, N tokens, D model width, Y by X patches.
"""

import functools
import math
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, UInt32


# The derivatives keep only the input. JAX's derivatives keep up to four arrays of its
# size, and a scan over blocks writes all of them to memory (docs/decisions.md). For the
# exact GELU JAX uses erfc, which takes 2.7 times as long on CPU (28 instead of 10 ms in
# a forward pass of S/16).
@jax.custom_vjp
def gelu_erf(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes the exact GELU (arXiv:1606.08415), in float32 for any dtype of `x`."""
    cdf = 0.5 * (1 + jax.lax.erf(x.astype(jnp.float32) * math.sqrt(0.5)))
    return (x * cdf).astype(x.dtype)


def _gelu_erf_backward(x, grad):
    x32 = x.astype(jnp.float32)
    # With the flipped sign, XLA cannot reuse the error function of the forward pass, an
    # array as large as `x`: storing it costs more than computing it again.
    cdf = 0.5 * (1 - jax.lax.erf(x32 * -math.sqrt(0.5)))
    density = jnp.exp(-0.5 * x32 * x32) / math.sqrt(2 * math.pi)
    return ((grad * (cdf + x32 * density)).astype(x.dtype),)


gelu_erf.defvjp(lambda x: (gelu_erf(x), x), _gelu_erf_backward)


@jax.custom_vjp
def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes the tanh approximation of the GELU, in float32 for any dtype of `x`."""
    x32 = x.astype(jnp.float32)
    inner = math.sqrt(2 / math.pi) * (x32 + 0.044715 * x32**3)
    return (x32 * (0.5 * (1 + jnp.tanh(inner)))).astype(x.dtype)


def _gelu_tanh_backward(x, grad):
    x32 = x.astype(jnp.float32)
    # With the flipped sign XLA does not store the tanh of the forward pass.
    inner = -math.sqrt(2 / math.pi) * (x32 + 0.044715 * x32**3)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x32 * x32)
    tanh = jnp.tanh(inner)
    to_x = 0.5 * (1 - tanh) + 0.5 * x32 * (1 - tanh * tanh) * slope
    return ((grad * to_x).astype(x.dtype),)


gelu_tanh.defvjp(lambda x: (gelu_tanh(x), x), _gelu_tanh_backward)


def gelu_tanh_of_product(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes `gelu_tanh` of a product of matrices that nothing else changes.

    On NVIDIA GPUs, XLA passes a bfloat16 product and its GELU to cuBLAS as one, which
    reads and writes `x` once less (docs/decisions.md).
    """
    is_fused = _platform() == "gpu" and x.dtype == jnp.bfloat16
    return _gelu_tanh_for_cublas(x) if is_fused else gelu_tanh(x)


@jax.custom_vjp
def _gelu_tanh_for_cublas(x):
    return nn.gelu(x)  # XLA recognises it in the dtype of `x` only.


_gelu_tanh_for_cublas.defvjp(
    lambda x: (_gelu_tanh_for_cublas(x), x), _gelu_tanh_backward
)


# JAX's derivative would keep several arrays of the size of `x` and read them more
# often on CPU (docs/decisions.md).
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"],
    epsilon: float,
) -> Float[Array, "*B D"]:
    """Normalises the last axis (arXiv:1607.06450), in float32 for any dtype of `x`."""
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _spread(values, x):
    return values.reshape((1,) * (x.ndim - 1) + values.shape)


def _layer_norm_forward(x, scale, bias, epsilon):
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    if x.dtype == jnp.float32:
        variance = jnp.square(x32 - mean).mean(-1, keepdims=True)
    else:
        # In this form one pass over `x` computes both means. The subtraction loses less
        # than the rounding of `x` to 16 bits.
        variance = jnp.square(x32).mean(-1, keepdims=True) - jnp.square(mean)
        variance = jnp.maximum(variance, 0)
    reciprocal = jax.lax.rsqrt(variance + epsilon)
    normal = (x32 - mean) * reciprocal
    y = normal * _spread(scale, x) + _spread(bias, x)
    return y.astype(x.dtype), (x, scale, mean, reciprocal)


def _layer_norm_backward(epsilon, kept, grad):
    x, scale, mean, reciprocal = kept
    # In the form (x - mean) * reciprocal, XLA would store this array, which is as large
    # as `x`, in the forward pass and reuse it here.
    normal = x.astype(jnp.float32) * reciprocal - mean * reciprocal
    grad = grad.astype(jnp.float32)
    rows = tuple(range(x.ndim - 1))
    to_scale, to_bias = (grad * normal).sum(rows), grad.sum(rows)
    grad = grad * _spread(scale, x)
    along = (grad * normal).mean(-1, keepdims=True)
    to_x = (grad - grad.mean(-1, keepdims=True) - normal * along) * reciprocal
    return to_x.astype(x.dtype), to_scale, to_bias


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def dropout(
    x: Float[Array, "*B N D"], rate: float, key: Key[Array, ""] | None
) -> Float[Array, "*B N D"]:
    """Drops random elements and scales up the others (Srivastava et al., 2014).

    A hash of the key and the element's index decides whether an element is kept, so the
    result does not depend on the sharding. JAX's random generator would take a tenth of
    a training step of B/16 on an H100 (docs/decisions.md).

    Args:
      x: any array.
      rate: drop rate, in [0, 1).
      key: random key; None drops nothing.
    """
    if key is None or not rate:
        return x
    words = jax.random.bits(key, (2,) + (1,) * x.ndim)
    rows = jnp.zeros((*x.shape[:-1], 1), jnp.uint32)
    for axis in range(x.ndim - 1):
        rows = rows * x.shape[axis]
        rows += jax.lax.broadcasted_iota(jnp.uint32, rows.shape, axis)
    # The barrier makes XLA compute this once per token, not once per element.
    rows = jax.lax.optimization_barrier(_hash(_hash(rows + words[0]) ^ words[1]))
    return (_drop_again if _platform() == "gpu" else _drop)(x, rows, rate)


def _drop(x, rows, rate):
    columns = jax.lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1)
    # Multiples of the golden ratio differ in many bits.
    bits = _hash(rows + columns * jnp.uint32(0x9E3779B9))
    kept = bits >= jnp.uint32(round(rate * 2**32))
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


# The derivative of this function computes the mask again, which GPUs then neither write
# nor read. On CPUs this takes longer (docs/decisions.md).
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _drop_again(x, rows, rate):
    return _drop(x, rows, rate)


def _drop_again_backward(rate, rows, grad):
    # Behind a barrier, XLA does not recognise the mask of the forward pass.
    return _drop(grad, jax.lax.optimization_barrier(rows), rate), None


_drop_again.defvjp(
    lambda x, rows, rate: (_drop(x, rows, rate), rows), _drop_again_backward
)


def _hash(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Mixes all bits by a bijection, "lowbias32" of Wellons (nullprogram.com, 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


# `jax.default_matmul_precision` under which CPUs round operands of products as well.
BFLOAT16_OPERANDS = "BF16_BF16_F32"


def product(
    x: Float[Array, "*T M"],
    kernel: Float[Array | np.ndarray, "M F"],
    dtype: DTypeLike | None = None,
) -> Float[Array, "*T F"]:
    """Multiplies tokens by a matrix, as `x @ kernel`; see `einsum`."""
    dtype = jnp.dtype(dtype or x.dtype)
    if not _uses_bfloat16(x):
        return jnp.matmul(x, kernel, preferred_element_type=dtype)
    y = _einsum("tm,mf->tf", dtype, x.reshape(-1, x.shape[-1]), kernel)
    return y.reshape(*x.shape[:-1], -1)


def dot_general(x, kernel, dimension_numbers, precision=None, **_):
    """Multiplies tokens by a matrix for `nn.Dense`; see `product`."""
    return product(x, kernel)


def einsum(
    equation: str, left: Array, right: Array, dtype: DTypeLike | None = None
) -> Array:
    """Multiplies matrices, or stacks of matrices, as `jnp.einsum`.

    On one CPU device, bfloat16 operands are multiplied with float32 sums. With AMX
    instructions this is about twice as fast as float32 (docs/decisions.md). Under
    `jax.default_matmul_precision(BFLOAT16_OPERANDS)`, float32 operands are rounded to
    bfloat16 before, here and in the derivative: XLA does this for GPUs and TPUs, but
    ignores that precision for CPUs.

    Args:
      equation: leading axes are equal in both operands and the result; of the other two
        axes of each, one is summed, and the result has that of `left` first.
      left, right: operands.
      dtype: dtype of the result; None is that of `left`.
    """
    dtype = jnp.dtype(dtype or left.dtype)
    if not _uses_bfloat16(left):
        return jnp.einsum(equation, left, right, preferred_element_type=dtype)
    return _einsum(equation, dtype, left, right)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _einsum(equation, dtype, left, right):
    return _einsum_forward(equation, dtype, left, right)[0]


def _einsum_forward(equation, dtype, left, right):
    # Rounded operands are kept for the derivative: they take half of the memory.
    operands = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
    # Empty arrays have the dtypes of the gradients.
    return _dot(equation, *operands).astype(dtype), (*operands, left[:0], right[:0])


def _einsum_backward(equation, dtype, kept, grad):
    left, right, of_left, of_right = kept
    a, b, result = equation.replace("->", ",").split(",")
    grad = grad.astype(jnp.bfloat16)
    # The first of the last two axes is that of the first operand.
    if a[-2] in result:
        to_left = _dot(f"{result},{b}->{a}", grad, right)
    else:
        to_left = _dot(f"{b},{result}->{a}", right, grad)
    if b[-1] in result:
        to_right = _dot(f"{a},{result}->{b}", left, grad)
    else:
        to_right = _dot(f"{result},{a}->{b}", grad, left)
    return to_left.astype(of_left.dtype), to_right.astype(of_right.dtype)


_einsum.defvjp(_einsum_forward, _einsum_backward)


def _dot(equation: str, left, right) -> Array:
    """Multiplies bfloat16 operands with float32 sums, in a program for one CPU device.

    XLA passes the product to a library with AMX instructions if the left operand is
    summed over its last axis and all memory layouts follow the order of the axes.
    Others it computes in float32, or fails (jaxlib 0.10.2).
    """
    a, b, result = equation.replace("->", ",").split(",")
    (summed,) = set(a) & set(b) - set(result)
    place, of_right = a.index(summed), b.index(summed)
    if place != left.ndim - 1:
        if right.shape[2 * left.ndim - 3 - of_right] < left.shape[-1]:
            # A copy of the narrower operand and one of the result take less time.
            swapped = result[:-2] + result[-1] + result[-2]
            return jnp.swapaxes(_dot(f"{b},{a}->{swapped}", right, left), -1, -2)
        left = jnp.swapaxes(left, -1, -2)
    leading = tuple(range(left.ndim - 2))
    product = jax.lax.dot_general(
        _as_row_major(left),
        _as_row_major(right),
        (((left.ndim - 1,), (of_right,)), (leading, leading)),
        precision=jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
    # In jax 0.10.2, a program that returns a value with such a constraint may return
    # other arrays in layouts that JAX does not know of. XLA removes the factor.
    return _as_row_major(product) * jnp.float32(1)


def _as_row_major(x):
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


@functools.cache
def has_amx() -> bool:
    """Returns whether the processor has AMX instructions for products of bfloat16."""
    try:
        return " amx_bf16" in pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:  # The system is not Linux.
        return False


def _uses_bfloat16(x: Array) -> bool:
    """Returns whether products in a program for one CPU have bfloat16 operands."""
    # XLA cannot split the constraints on layouts over devices.
    if _platform() != "cpu" or jax.sharding.get_abstract_mesh().size > 1:
        return False
    rounded = jax.config.jax_default_matmul_precision == BFLOAT16_OPERANDS
    return rounded or x.dtype == jnp.bfloat16


def _platform() -> str:
    """Returns the platform that a traced program is for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = device.platform if device else jax.default_backend()
    return "gpu" if platform == "cuda" else platform


def in_row_major(x: Float[Array, "B y x D"]) -> Float[Array, "B y x D"]:
    """Returns an array whose memory layout in XLA follows the order of its axes.

    XLA cannot split this constraint over devices, and would gather the whole batch on
    each device. So shard_map applies it to the images of each device of a mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not nn.get_logical_axis_rules():
        return _as_row_major(x)
    images = nn.logical_to_mesh_axes(("batch",))
    return jax.shard_map(_as_row_major, mesh=mesh, in_specs=images, out_specs=images)(x)


def flatten_tokens(x: Float[Array, "B N D"]) -> Float[Array, "BN D"]:
    """Merges the image and token axes.

    On CPU the backward pass of a product with 3-D arrays is nearly twice as slow
    (docs/decisions.md).
    """
    return x.reshape(-1, x.shape[-1])
