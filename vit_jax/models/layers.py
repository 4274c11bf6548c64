"""Transformer layers of the Vision Transformer (arXiv:2010.11929, appendix A).

Parameters are named and shaped as in the published Google checkpoints.
Letters: B images, N tokens, H heads, K head width, D model width, F hidden width.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from vit_jax.models import attention
from vit_jax.models.pointwise import GELU, LayerNorm

# Collections of variables: weights of attention that are kept, and arrays that are added
# to them.
KEPT, ADDED = "intermediates", "perturbations"

_kernel_init = nn.initializers.xavier_uniform()
_bias_init = nn.initializers.normal(1e-6)


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
    def __call__(self, x: Float[Array, "*T M"]) -> Float[Array, "*T F"]:
        """Transforms each token by itself."""
        merged = math.prod(self.inputs), math.prod(self.outputs)

        def init(key, shape, dtype):
            return _kernel_init(key, merged, dtype).reshape(shape)

        kernel = self.param("kernel", init, self.inputs + self.outputs, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, self.outputs, jnp.float32)
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        bias = bias.reshape((1,) * (x.ndim - 1) + (-1,))
        return x @ kernel.reshape(merged) + bias


class MultiHeadAttention(nn.Module):
    """Multi-head attention of some tokens to others.

    Attributes:
      heads: number of heads; divides the width.
      dtype: of the computation.
      way: of attention, one of attention.WAYS.
      merge: see merge_tokens.
    """

    heads: int
    dtype: str = "float32"
    way: str = "einsum"
    merge: bool = True

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
            tokens = merge_tokens(tokens) if self.merge else tokens
            y = MergedDense((D,), split, self.dtype, name=name)(tokens)
            # Head-major: see attention.attend.
            y = jnp.swapaxes(y.reshape(B, N, self.heads, -1), 1, 2)
            return nn.with_logical_constraint(y, ("batch", "heads", "tokens", None))

        q = project("query", x)
        k, v = project("key", context), project("value", context)
        if self.is_mutable_collection(KEPT):
            # Someone looks inside, see `inside`; derivatives are of what is added.
            weights = self.perturb("weights", attention.weights(q, k, relative), ADDED)
            self.sow(KEPT, "weights", weights)
            y = jnp.einsum("bhnm,bhmk->bhnk", weights.astype(v.dtype), v)
        else:
            y = attention.attend(q, k, v, relative, way=self.way)
        y = jnp.swapaxes(y, 1, 2).reshape(x.shape)
        y = merge_tokens(y) if self.merge else y
        y = MergedDense(split, (D,), self.dtype, name="out")(y)
        return y.reshape(x.shape)


def merge_tokens(x: Float[Array, "B N D"]) -> Float[Array, "BN D"]:
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
      merge: see merge_tokens.
    """

    hidden: int
    dropout: float = 0.0
    gelu: str = "tanh"
    dtype: str = "float32"
    merge: bool = True

    @nn.compact
    def __call__(
        self, x: Float[Array, "B N D"], key: Key[Array, ""] | None = None
    ) -> Float[Array, "B N D"]:
        """Transforms each token by itself; dropout acts if there is a key."""
        shape, D = x.shape, x.shape[-1]
        first, second = (None, None) if key is None else jax.random.split(key)

        def dense(features, name):
            return nn.Dense(
                features,
                kernel_init=_kernel_init,
                bias_init=_bias_init,
                dtype=self.dtype,
                name=name,
            )

        def dropout(x, key):
            return nn.Dropout(self.dropout, deterministic=key is None)(x, rng=key)

        x = merge_tokens(x) if self.merge else x
        x = dense(self.hidden, "Dense_0")(x)
        between = () if self.merge else ("tokens",)
        x = nn.with_logical_constraint(x, ("batch", *between, "mlp"))
        x = dropout(GELU[self.gelu](x), first)
        x = dropout(dense(D, "Dense_1")(x), second)
        return x.reshape(shape)


class MapHead(nn.Module):
    """Multihead attention pooling (arXiv:2106.04560, section 3.2).

    A learned probe attends to the tokens; an MLP with a residual follows.

    Attributes:
      heads, hidden, gelu, dtype, merge: see MultiHeadAttention and Mlp.
      epsilon: of the LayerNorm.
    """

    heads: int
    hidden: int
    gelu: str = "tanh"
    epsilon: float = 1e-6
    dtype: str = "float32"
    merge: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B D"]:
        """Returns one vector an image."""
        B, _, D = x.shape
        probe = self.param("probe", _kernel_init, (1, 1, D), jnp.float32)
        # One query has few logits: any way of attention does.
        attend = MultiHeadAttention(
            self.heads,
            self.dtype,
            merge=self.merge,
            name="MultiHeadDotProductAttention_0",
        )
        x = attend(jnp.broadcast_to(probe.astype(x.dtype), (B, 1, D)), x)
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
