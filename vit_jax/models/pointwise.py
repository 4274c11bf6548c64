"""What acts without a product: LayerNorm, GELU, and random drops of branches.

Letters: B images, N tokens, D model width.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key


# JAX's own goes through erfc, whose branches take 2.7 times as long on CPU (28 against
# 10 ms of a forward pass of S/16), and its derivative keeps more than the input.
@jax.custom_vjp
def gelu_erf(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Exact GELU (arXiv:1606.08415), computed in float32 whatever `x` is."""
    cdf = 0.5 * (1 + jax.lax.erf(x.astype(jnp.float32) * math.sqrt(0.5)))
    return (x * cdf).astype(x.dtype)


def _gelu_erf_backward(x, grad):
    x32 = x.astype(jnp.float32)
    # With the other sign, or XLA keeps the error function of the forward pass, an array
    # as large as `x`, which costs more than to compute it again.
    cdf = 0.5 * (1 - jax.lax.erf(x32 * -math.sqrt(0.5)))
    density = jnp.exp(-0.5 * x32 * x32) / math.sqrt(2 * math.pi)
    return ((grad * (cdf + x32 * density)).astype(x.dtype),)


gelu_erf.defvjp(lambda x: (gelu_erf(x), x), _gelu_erf_backward)


# Its own derivative, because the one that JAX derives keeps several arrays of the size
# of `x`, and on CPU passes over them more often (docs/decisions.md).
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"],
    epsilon: float,
) -> Float[Array, "*B D"]:
    """Normalises the last axis (arXiv:1607.06450), in float32 whatever `x` is."""
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _spread(values, x):
    return values.reshape((1,) * (x.ndim - 1) + values.shape)


def _layer_norm_forward(x, scale, bias, epsilon):
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    variance = jnp.square(x32 - mean).mean(-1, keepdims=True)
    reciprocal = jax.lax.rsqrt(variance + epsilon)
    normal = (x32 - mean) * reciprocal
    y = normal * _spread(scale, x) + _spread(bias, x)
    return y.astype(x.dtype), (x, scale, mean, reciprocal)


def _layer_norm_backward(epsilon, kept, grad):
    x, scale, mean, reciprocal = kept
    # Not (x - mean) * reciprocal, or XLA keeps that of the forward pass, an array as
    # large as `x`.
    normal = x.astype(jnp.float32) * reciprocal - mean * reciprocal
    grad = grad.astype(jnp.float32)
    rows = tuple(range(x.ndim - 1))
    to_scale, to_bias = (grad * normal).sum(rows), grad.sum(rows)
    grad = grad * _spread(scale, x)
    along = (grad * normal).mean(-1, keepdims=True)
    to_x = (grad - grad.mean(-1, keepdims=True) - normal * along) * reciprocal
    return to_x.astype(x.dtype), to_scale, to_bias


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


class LayerNorm(nn.Module):
    """Layer normalisation with learned scale and bias.

    Attributes:
      epsilon: added to the variance.
      dtype: of what is returned.
    """

    epsilon: float = 1e-6
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalises each token by itself."""
        shape = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        # Parameters may be arrays of NumPy, where they come from a file.
        scale, bias = jnp.asarray(scale), jnp.asarray(bias)
        return layer_norm(x.astype(self.dtype), scale, bias, self.epsilon)


GELU = {"tanh": lambda x: nn.gelu(x), "erf": gelu_erf}


def drop_path(
    x: Float[Array, "B N D"],
    rate: Float[Array, ""] | float,
    key: Key[Array, ""] | None,
) -> Float[Array, "B N D"]:
    """Drops whole images and scales up the others (arXiv:1603.09382).

    Args:
      x: a branch beside a residual connection.
      rate: at which it is dropped; a number of the device's in a scan over layers.
      key: of the draw; None drops nothing.

    Returns:
      The branch, or zeros.
    """
    if key is None:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, (len(x), 1, 1))
    return x * jnp.where(kept, 1 / jnp.asarray(1 - rate), 0).astype(x.dtype)
