"""Transformer layers of the Vision Transformer (arXiv:2010.11929, appendix A).

Parameters are named and shaped as in the published Google checkpoints.
Letters: B images, N tokens, H heads, K head width, D model width, F hidden width.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models import attention

_kernel_init = nn.initializers.xavier_uniform()
_bias_init = nn.initializers.normal(1e-6)


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


class MergedDense(nn.Module):
    """Dense layer whose parameters have axes of their own and whose product has not.

    `nn.DenseGeneral` with the same parameters multiplies them as they are, and XLA's CPU
    derivative of that copies every gradient three times (docs/decisions.md).

    Attributes:
      inputs: axes of the kernel that are summed over, M values together.
      outputs: its other axes, those of the bias, F values together.
      dtype: of the computation.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "T M"]) -> Float[Array, "T F"]:
        """Transforms each token by itself."""
        merged = math.prod(self.inputs), math.prod(self.outputs)

        def init(key, shape, dtype):
            return _kernel_init(key, merged, dtype).reshape(shape)

        kernel = self.param("kernel", init, self.inputs + self.outputs, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, self.outputs, jnp.float32)
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        return x @ kernel.reshape(merged) + bias.reshape(1, -1)


class MultiHeadAttention(nn.Module):
    """Multi-head attention of some tokens to others.

    Attributes:
      heads: number of heads; divides the width.
      dtype: of the computation.
    """

    heads: int
    dtype: str = "float32"

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B N D"],
        context: Float[Array, "B M D"],
        relative: Float[Array, "H R K"] | None = None,
    ) -> Float[Array, "B N D"]:
        """Attends from every token of `x` to every token of `context`.

        Args:
          x: tokens that ask.
          context: tokens that are looked at; `x` itself for self-attention.
          relative: see attention.attend.

        Returns:
          What was found, for each token of `x`.
        """
        D = x.shape[-1]
        split = self.heads, D // self.heads

        def project(name, tokens):
            B, N, _ = tokens.shape
            y = MergedDense((D,), split, self.dtype, name=name)(_merge(tokens))
            # Head-major: see attention.attend.
            return jnp.swapaxes(y.reshape(B, N, self.heads, -1), 1, 2)

        q = project("query", x)
        k, v = project("key", context), project("value", context)
        y = jnp.swapaxes(attention.attend(q, k, v, relative), 1, 2)
        y = MergedDense(split, (D,), self.dtype, name="out")(y.reshape(-1, D))
        return y.reshape(x.shape)


def _merge(x: Float[Array, "B N D"]) -> Float[Array, "BN D"]:
    """Puts the tokens of all images into one axis.

    XLA's CPU backward pass of the 3-D product is nearly twice as slow
    (docs/decisions.md).
    """
    return x.reshape(-1, x.shape[-1])


class Mlp(nn.Module):
    """Two dense layers with a GELU between them and dropout after each.

    Attributes:
      hidden: units of the first layer.
      dropout: rate.
      gelu: flavour, a key of GELU.
      dtype: of the computation.
    """

    hidden: int
    dropout: float = 0.0
    gelu: str = "tanh"
    dtype: str = "float32"

    @nn.compact
    def __call__(
        self, x: Float[Array, "B N D"], *, train: bool = False
    ) -> Float[Array, "B N D"]:
        """Transforms each token by itself."""
        shape, D = x.shape, x.shape[-1]

        def dense(features, name):
            return nn.Dense(
                features,
                kernel_init=_kernel_init,
                bias_init=_bias_init,
                dtype=self.dtype,
                name=name,
            )

        x = _merge(x)
        x = GELU[self.gelu](dense(self.hidden, "Dense_0")(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        x = dense(D, "Dense_1")(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return x.reshape(shape)


class Block(nn.Module):
    """Pre-LayerNorm encoder block: attention, then MLP, each with a residual.

    Attributes:
      heads, hidden, dropout, gelu, dtype: see MultiHeadAttention and Mlp.
      drop_path: rate of stochastic depth (arXiv:1603.09382) of both branches.
      epsilon: of the LayerNorms.
    """

    heads: int
    hidden: int
    dropout: float = 0.0
    drop_path: float = 0.0
    gelu: str = "tanh"
    epsilon: float = 1e-6
    dtype: str = "float32"

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B N D"],
        relative: Float[Array, "H R K"] | None = None,
        *,
        train: bool = False,
    ) -> Float[Array, "B N D"]:
        """Returns tokens of the same shape."""

        def norm(name):
            return LayerNorm(self.epsilon, self.dtype, name=name)

        def drop_path(y):
            # One draw an image: the whole branch stays or goes.
            return nn.Dropout(
                self.drop_path, broadcast_dims=(1, 2), deterministic=not train
            )(y)

        y = norm("LayerNorm_0")(x)
        y = MultiHeadAttention(
            self.heads, self.dtype, name="MultiHeadDotProductAttention_1"
        )(y, y, relative)
        y = nn.Dropout(self.dropout, deterministic=not train)(y)
        x = x + drop_path(y)

        y = norm("LayerNorm_2")(x)
        y = Mlp(self.hidden, self.dropout, self.gelu, self.dtype, name="MlpBlock_3")(
            y, train=train
        )
        return x + drop_path(y)


class MapHead(nn.Module):
    """Multihead attention pooling (arXiv:2106.04560, section 3.2).

    A learned probe attends to the tokens; an MLP with a residual follows.

    Attributes:
      heads, hidden, gelu, epsilon, dtype: see Block.
    """

    heads: int
    hidden: int
    gelu: str = "tanh"
    epsilon: float = 1e-6
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B D"]:
        """Returns one vector an image."""
        B, _, D = x.shape
        probe = self.param("probe", _kernel_init, (1, 1, D), jnp.float32)
        x = MultiHeadAttention(
            self.heads, self.dtype, name="MultiHeadDotProductAttention_0"
        )(jnp.broadcast_to(probe.astype(x.dtype), (B, 1, D)), x)
        y = LayerNorm(self.epsilon, self.dtype, name="LayerNorm_0")(x)
        mlp = Mlp(self.hidden, gelu=self.gelu, dtype=self.dtype, name="MlpBlock_0")
        return (x + mlp(y))[:, 0]


def classify(
    pre_logits: Float[Array, "*B D"], classes: int, bias: float, name: str = "head"
) -> dict[str, Float[Array, "..."]]:
    """Applies the linear classifier, which starts at zero; call it in a compact method.

    Args:
      pre_logits: features, float32.
      classes: L; 0 is no classifier.
      bias: its initial bias.
      name: of its parameters.

    Returns:
      "pre_logits", and unless `classes` is 0 "logits" (*B, L).
    """
    outputs = {"pre_logits": pre_logits}
    if classes:
        outputs["logits"] = nn.Dense(
            classes,
            kernel_init=nn.initializers.zeros,
            bias_init=nn.initializers.constant(bias),
            name=name,
        )(pre_logits)
    return outputs
