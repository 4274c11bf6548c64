"""Costs of a model: parameters, multiply-accumulates, memory of activations.

All costs are counted in traced computations, without computing or allocating arrays.
"""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from vit_jax.errors import UserError
from vit_jax.models import network
from vit_jax.models.model import Model

# Primitives that run their inner computation once. Other primitives with products
# inside, except those handled below, are an error.
_CALLS = {"closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2"}
# Primitives with products that a trace does not show.
_OPAQUE = ("pallas_call", "ffi_call", "ragged_dot", "dot_product_attention")

# Batch size for counting memory. The sizes of arrays that grow with the batch, and only
# these, are multiples of it, because it is prime and larger than any other axis.
_BATCH = 1_000_003


def macs(function: Callable, *args) -> int:
    """Counts the multiply-accumulates of matrix products and convolutions, exactly.

    Products with the padding of a convolution, or with the zeros that a transposed
    convolution inserts, do not count, as in XLA's cost analysis. All steps of a scan
    count, the largest branch of a condition, and all devices of a `shard_map`.

    Args:
      function: function that `jax.make_jaxpr` can trace.
      *args: arguments of the function, trees of arrays or of jax.ShapeDtypeStruct.

    Raises:
      ValueError: there is a while loop with products, whose number of steps is unknown,
        or a primitive with products that a trace does not show.
    """
    return macs_of(jax.make_jaxpr(function)(*args).jaxpr)


def macs_of(jaxpr: core.Jaxpr) -> int:
    """Counts the multiply-accumulates of a traced computation; see `macs`."""
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: core.JaxprEqn) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _count_dot(equation)
    if name == "conv_general_dilated":
        return _count_conv(equation)
    if name.startswith(_OPAQUE):
        raise ValueError(f"{name}: the products inside cannot be counted")

    inner = [macs_of(jaxpr) for jaxpr in core.jaxprs_in_params(params)]
    if name in _CALLS or not any(inner):
        return sum(inner)
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "cond":
        return max(inner)
    if name == "shard_map":
        sizes = dict(params["mesh"].shape)
        devices = math.prod(sizes[axis] for axis in params["newly_manual_axes"])
        return sum(inner) * devices
    if name == "while":
        raise ValueError(
            "unbounded: the number of steps of a while loop with products is unknown"
        )
    raise ValueError(f"{name}: the number of times that its products run is unknown")


def _count_dot(equation: core.JaxprEqn) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return equation.outvars[0].aval.size * math.prod(left[i] for i in contracted)


def _count_conv(equation: core.JaxprEqn) -> int:
    params = equation.params
    image, kernel = (v.aval.shape for v in equation.invars)
    out = equation.outvars[0].aval.shape
    spec = params["dimension_numbers"]
    # Each output of each image sums over the inputs of its group.
    count = out[spec.out_spec[0]] * out[spec.out_spec[1]] * kernel[spec.rhs_spec[1]]
    axes = zip(
        (image[i] for i in spec.lhs_spec[2:]),
        (kernel[i] for i in spec.rhs_spec[2:]),
        (out[i] for i in spec.out_spec[2:]),
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        strict=True,
    )
    for side, taps, steps, stride, (before, _), spread, dilation in axes:
        count *= window_products(side, taps, steps, stride, before, spread, dilation)
    return count


def window_products(
    side: int,
    taps: int,
    steps: int,
    stride: int,
    before: int,
    spread: int,
    dilation: int,
) -> int:
    """Counts the products of a convolution along one axis, without padding and zeros.

    Args:
      side: length of the input.
      taps: length of the kernel.
      steps: length of the output.
      stride: stride of the window.
      before: padding in front of the input.
      spread: dilation of the input.
      dilation: dilation of the kernel.
    """
    offsets = np.arange(taps) * dilation - before
    lowest = np.maximum(-(offsets // stride), 0)
    highest = np.minimum(((side - 1) * spread - offsets) // stride, steps - 1)
    total = 0
    # The pattern of inputs and inserted zeros under a window repeats every `spread`.
    for first in range(spread):
        meets = (first * stride + offsets) % spread == 0
        count = (highest - first) // spread - (lowest - 1 - first) // spread
        total += int((np.maximum(count, 0) * meets).sum())
    return total


def parameters(model: Model) -> int:
    """Returns the number of parameters."""
    params = {k: v for k, v in model.shapes.items() if k != network.STATE}
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def tokens(model: Model) -> int:
    """Returns the encoder's number of tokens with prefix tokens; 0 without encoder."""
    if not model.config.has_encoder:
        return 0
    return math.prod(model.grid) + model.num_prefix_tokens


def macs_per_image(model: Model) -> int:
    """Returns the multiply-accumulates of the forward pass of one image; see `macs`.

    Attention counts as einsums, even if a kernel computes it.

    Raises:
      UserError: the network has products that a trace does not show.
    """
    try:
        return _forward_macs(_of_products(model))
    except ValueError as error:
        raise UserError(
            f"model.variant={model.options['variant']!r}: its cost is unknown: {error}"
        ) from error


def activation_bytes(model: Model, dtype: str | None = None) -> int:
    """Returns the bytes per image that the forward pass keeps for the backward pass.

    It counts the residuals of `jax.vjp` with respect to the parameters that grow with
    the batch, each once: activations, dropout masks, and the image if it is kept. It
    does not count parameters, arrays that are computed only from parameters (casts,
    standardised kernels), gradients, optimiser state and short-lived buffers. XLA may
    keep less, since it recomputes cheap element-wise results.

    Args:
      model: network with or without a classifier.
      dtype: dtype of the computation; None is `model.config.dtype`.
    """
    model = model if dtype is None else model.replace(dtype=dtype)

    def pullback(params, images, key):
        def forward(params):
            return model.apply(params, images, train=True, key=key)

        return jax.vjp(forward, params)[1]

    args = *_abstract(model, _BATCH), jax.eval_shape(jax.random.key, 0)
    with nn.intercept_methods(network.trace_once):
        jaxpr = jax.make_jaxpr(pullback)(*args).jaxpr
    kept = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    sizes = [v.aval.size * v.aval.dtype.itemsize for v in kept]
    return sum(size for size in sizes if size % _BATCH == 0) // _BATCH


def forward_flops(model: Model) -> int | None:
    """Returns the floating-point operations of a forward pass on one image.

    A multiply-accumulate counts as 2. The result is None if the cost is unknown, see
    `macs_per_image`.
    """
    try:
        return 2 * macs_per_image(model)
    except UserError:
        return None


def flops(forward: Callable[[Model], jax.Array], model: Model) -> int | None:
    """Returns the floating-point operations of a computation with a network.

    A multiply-accumulate counts as 2. The result is None if the cost is unknown, see
    `macs`.

    Args:
      forward: function of a network that computes on one image; it is traced.
      model: argument of `forward`, whose attention is replaced by einsums.
    """
    try:
        return 2 * macs(lambda: forward(_of_products(model)))
    except ValueError:
        return None


def training_flops(model: Model, images: object = None) -> int | None:
    """Returns the floating-point operations to train on one image; None if unknown.

    Training counts as three forward passes, two of them for the backward pass (the
    convention of arXiv:2010.11929, table 6). Rematerialisation does not count, and
    neither do patches that patch dropout removes.

    Args:
      model: network.
      images: shapes of one row of the network's input; None for an image of its size.
    """
    if images is not None or getattr(model.config, "patch_dropout", 0):
        return 3 * 2 * _forward_macs(_of_products(model), train=True, images=images)
    forward = forward_flops(model)
    return None if forward is None else 3 * forward


def training_exaflops(model: Model, images: int) -> float | None:
    """Returns the exaFLOPs (10^18 operations) of a training run; see `training_flops`.

    Args:
      model: network that is trained.
      images: number of training images, summed over all epochs.
    """
    flops = training_flops(model)
    return None if flops is None else 1e-18 * flops * images


def _of_products(model: Model) -> Model:
    """Returns the network with attention as einsums, so that a trace shows products."""
    return model.replace(attention_impl="einsum") if model.config.has_encoder else model


@functools.lru_cache(maxsize=16)
def _forward_macs(model: Model, train: bool = False, images: object = None) -> int:
    params, image = _abstract(model, batch=1)
    images = image if images is None else images
    args = params, images, jax.eval_shape(jax.random.key, 0)

    def forward(params, images, key):
        return model.apply(params, images, train=train, key=key)

    with nn.intercept_methods(network.trace_once):
        return macs(forward, *args)


def _abstract(model: Model, batch: int) -> tuple[dict, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of parameters and images."""
    images = jax.ShapeDtypeStruct((batch, *model.image_shape), jnp.float32)
    return model.shapes, images
