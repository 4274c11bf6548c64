"""What a model costs: parameters, multiply-accumulates, memory of its activations.

All of it is read off traced computations; nothing is computed, and no parameter is
ever made.
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

# Primitives that run what they hold once. Any other that holds a product is an error.
_CALLS = {"closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2"}
# Primitives that multiply where no trace shows it.
_OPAQUE = ("pallas_call", "ffi_call", "ragged_dot", "dot_product_attention")

# A batch that no other axis is a multiple of, so that it tells what grows with it: it is
# prime, and larger than other axes are.
_BATCH = 1_000_003


def macs(function: Callable, *args) -> int:
    """Counts the multiply-accumulates of a computation.

    Counted are those of matrix products and convolutions; of a convolution only the
    products of two numbers that are there, neither padding nor the zeros that a
    transposed one spreads its input with, as XLA's cost analysis has it. A scan counts
    for all its steps, a condition as its largest branch, `shard_map` for all devices.

    Args:
      function: what `jax.make_jaxpr` can trace.
      *args: its arguments, trees of arrays or of jax.ShapeDtypeStruct.

    Returns:
      Their number, exact.

    Raises:
      ValueError: a while loop, whose steps are not known, or a primitive of unknown
        contents multiplies.
    """
    return macs_of(jax.make_jaxpr(function)(*args).jaxpr)


def macs_of(jaxpr: core.Jaxpr) -> int:
    """Counts the multiply-accumulates of what is traced already; see `macs`."""
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
            "unbounded: a while loop multiplies, and how often it runs is not known"
        )
    raise ValueError(f"{name}: how often it runs its products is not known")


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
    """Counts a convolution's products along one axis, without padding and zeros.

    Args:
      side: length of the input.
      taps: length of the kernel.
      steps: length of the output.
      stride: of the window.
      before: padding in front of the input.
      spread: dilation of the input.
      dilation: of the kernel.
    """
    offsets = np.arange(taps) * dilation - before
    lowest = np.maximum(-(offsets // stride), 0)
    highest = np.minimum(((side - 1) * spread - offsets) // stride, steps - 1)
    total = 0
    # Whether a window meets an input or a zero between them repeats every `spread`.
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
    """Returns the length of the encoder's sequence, 0 for a network without one.

    Args:
      model: its class, distillation and register tokens count.
    """
    if not model.has_encoder:
        return 0
    return math.prod(model.grid) + model.num_prefix_tokens


def macs_per_image(model: Model) -> int:
    """Returns the multiply-accumulates of the forward pass of one image; see `macs`.

    Attention counts as einsums, also where a kernel does it, whose products no trace
    shows.

    Raises:
      UserError: its code multiplies where no trace shows it.
    """
    try:
        return _forward_macs(_of_products(model))
    except ValueError as error:
        raise UserError(
            f"model.variant={model.options['variant']!r}: its cost is not known: {error}"
        ) from error


def activation_bytes(model: Model, dtype: str | None = None) -> int:
    """Returns what the forward pass keeps for the backward pass, in bytes an image.

    Counted are the residuals of `jax.vjp` with respect to the parameters: the arrays
    that grow with the batch and that the traced forward pass (of training: with
    dropout, its masks) hands to the backward pass, each once, the image itself
    included where it is among them. Not counted are parameters and what is computed
    from them alone (casts, standardised kernels), gradients, optimiser state and
    buffers that live shorter. XLA keeps fewer where it computes cheap element-wise
    results again.

    Args:
      model: with or without a classifier.
      dtype: of the computation; None is the model's own.
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

    2 for each multiply-accumulate: one to multiply and one to add.

    Returns:
      Their number; None if the network's cost is not known, see `macs_per_image`.
    """
    try:
        return 2 * macs_per_image(model)
    except UserError:
        return None


def flops(forward: Callable[[Model], jax.Array], model: Model) -> int | None:
    """Returns the floating-point operations of a computation with a network.

    Args:
      forward: computes with the network it is given, on one image; it is traced.
      model: handed to it, with attention as einsums, which can be counted.

    Returns:
      2 for each multiply-accumulate; None where no trace shows them.
    """
    try:
        return 2 * macs(lambda: forward(_of_products(model)))
    except ValueError:
        return None


def training_flops(model: Model) -> int | None:
    """Returns the floating-point operations to train on one image; None if unknown.

    Three forward passes, since a backward pass counts as two (the convention of table 6
    of arXiv:2010.11929). What rematerialisation computes again does not count.
    """
    forward = forward_flops(model)
    return None if forward is None else 3 * forward


def training_exaflops(model: Model, images: int) -> float | None:
    """Returns the operations of a training run in 10^18, see `training_flops`.

    Args:
      model: what is trained.
      images: seen in training, each epoch's counted.

    Returns:
      Their number; None if the network's cost is not known, see `macs_per_image`.
    """
    flops = training_flops(model)
    return None if flops is None else 1e-18 * flops * images


def _of_products(model: Model) -> Model:
    """Returns the network with attention as einsums, which a trace shows."""
    return model.replace(attention_impl="einsum") if model.has_encoder else model


@functools.lru_cache(maxsize=16)
def _forward_macs(model: Model) -> int:
    args = _abstract(model, batch=1)
    with nn.intercept_methods(network.trace_once):
        return macs(model.apply, *args)


def _abstract(model: Model, batch: int) -> tuple[dict, jax.ShapeDtypeStruct]:
    """Returns parameters and images without contents."""
    images = jax.ShapeDtypeStruct((batch, *model.image_shape), jnp.float32)
    return model.shapes, images
