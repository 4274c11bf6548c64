"""Transformer layers of the Vision Transformer (arXiv:2010.11929, appendix A).

Parameters are named and shaped as in the published Google checkpoints.
Letters: B images, N tokens, H heads, K head width, D model width, F hidden width.
"""

import functools
import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from vit_jax.models import attention, initializers, kernels
from vit_jax.models.kernels import dropout, flatten_tokens

# Flax collections for attention weights, and for perturbations added to them.
INTERMEDIATES, PERTURBATIONS = "intermediates", "perturbations"

# Parameters of these layers, and of the two Dense layers of any MLP, that are split
# along the mesh axis "model", by heads and hidden units (Megatron-LM, arXiv:1909.08053,
# section 3). There is no communication between the two kernels of a pair; the output of
# the second is summed once.
MODEL_AXES = (
    (r"MultiHeadDotProductAttention_\d+/(query|key|value)/kernel$", (None, "model")),
    (r"MultiHeadDotProductAttention_\d+/(query|key|value)/bias$", ("model",)),
    (r"MultiHeadDotProductAttention_\d+/out/kernel$", ("model",)),
    (r"(^|/)relative_embedding(_\d+)?$", ("model",)),
    (r"(^|/)(Dense_0|gate)/kernel$", (None, "model")),
    (r"(^|/)(Dense_0|gate)/bias$", ("model",)),
    (r"(^|/)Dense_1/kernel$", ("model",)),
)


class LayerNorm(nn.Module):
    """Layer normalisation with learned scale and bias.

    Attributes:
      epsilon: term added to the variance.
      dtype: dtype of the result.
      scale_init: initialiser of the scale.
    """

    epsilon: float = 1e-6
    dtype: str = "float32"
    scale_init: nn.initializers.Initializer = nn.initializers.ones

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalises each token."""
        shape = (x.shape[-1],)
        scale = self.param("scale", self.scale_init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        # Parameters read from a file may be NumPy arrays.
        scale, bias = jnp.asarray(scale), jnp.asarray(bias)
        return kernels.layer_norm(x.astype(self.dtype), scale, bias, self.epsilon)


ACTIVATIONS = {
    "gelu_tanh": kernels.gelu_tanh,
    "gelu": kernels.gelu_erf,
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
}


def drop_path(
    x: Float[Array, "B N D"],
    rate: Float[Array, ""] | float | None,
    key: Key[Array, ""] | None,
) -> Float[Array, "B N D"]:
    """Drops the branch of random images and scales up the others (arXiv:1603.09382).

    Args:
      x: residual branch.
      rate: drop rate, an array in a scan over layers; None drops nothing.
      key: random key; None drops nothing.
    """
    if rate is None or key is None:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, (len(x), 1, 1))
    return x * jnp.where(kept, 1 / jnp.asarray(1 - rate), 0).astype(x.dtype)


# `nn.Dense` with the products of kernels.py.
Dense = functools.partial(nn.Dense, dot_general=kernels.dot_general)


class PatchEmbedding(nn.Module):
    """Embeds square patches (arXiv:2010.11929, section 3.1).

    It has the parameters of a convolution, but is computed as a matrix product, because
    XLA for GPUs would pad the three channels of the convolution to eight
    (docs/decisions.md).

    Attributes:
      features: number of features D.
      side: side of a patch in pixels. Pixels at the right and bottom that do not fill a
        patch are not used.
      dtype: dtype of the computation.
      row_major: whether the memory layout of the result follows the order of its axes.
        Otherwise XLA for GPUs makes the batch the last axis of the tokens in all
        blocks, because of the position embedding that is added next.
      initial: row of initializers.TABLE.
    """

    features: int
    side: int
    dtype: str = "float32"
    row_major: bool = False
    initial: str = "google"

    @nn.compact
    def __call__(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B y x D"]:
        """Embeds each patch separately."""
        (B, Y, X, C), D = images.shape, self.features
        shape = (self.side, self.side, C, D)
        row = initializers.TABLE[self.initial].patches
        kernel = self.kernel(self.param("kernel", row.kernel, shape, jnp.float32))
        side, bias_init = len(kernel), row.bias(math.prod(shape[:-1]))
        bias = self.param("bias", bias_init, (D,), jnp.float32)
        images, kernel, bias = nn.dtypes.promote_dtype(
            images, kernel, bias, dtype=self.dtype
        )
        y, x = Y // side, X // side
        patches = images[:, : y * side, : x * side].reshape(B, y, side, x, side, C)
        patches = jnp.swapaxes(patches, 2, 3).reshape(B * y * x, -1)
        tokens = kernels.product(patches, kernel.reshape(-1, D)) + bias.reshape(1, D)
        tokens = tokens.reshape(B, y, x, D)
        return kernels.in_row_major(tokens) if self.row_major else tokens

    def kernel(
        self, kernel: Float[Array | np.ndarray, "S S C D"]
    ) -> Float[Array | np.ndarray, "s s C D"]:
        """Returns the kernel for the patches; NumPy arrays stay NumPy arrays."""
        return kernel


class MergedDense(nn.Module):
    """Dense layer with multi-axis parameters, computed as a 2-D product.

    `nn.DenseGeneral` has the same parameters, but XLA's CPU derivative of its product
    copies every gradient three times (docs/decisions.md).

    Attributes:
      inputs: sizes of the input axes of the kernel; their product is M.
      outputs: sizes of the output axes of the kernel and of the bias; their product is
        F.
      dtype: dtype of the computation.
      kernel_init: initialiser of the kernel as a matrix, (M, F).
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dtype: str = "float32"
    kernel_init: nn.initializers.Initializer = nn.initializers.xavier_uniform()

    @nn.compact
    def __call__(self, x: Float[Array, "*T M"]) -> Float[Array, "*T F"]:
        """Transforms each token separately."""
        merged = math.prod(self.inputs), math.prod(self.outputs)

        def init(key, shape, dtype):
            return self.kernel_init(key, merged, dtype).reshape(shape)

        kernel = self.param("kernel", init, self.inputs + self.outputs, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, self.outputs, jnp.float32)
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        bias = bias.reshape((1,) * (x.ndim - 1) + (-1,))
        return kernels.product(x, kernel.reshape(merged)) + bias


class MultiHeadAttention(nn.Module):
    """Multi-head attention (arXiv:2010.11929, appendix A).

    Attributes:
      num_heads: number of heads; a divisor of the width.
      dtype: dtype of the computation.
      attention_impl: one of attention.IMPLEMENTATIONS.
      flatten: see kernels.flatten_tokens.
      qk_norm: whether queries and keys of each head are normalised (arXiv:2302.05442).
      out_norm: whether the concatenated heads are normalised before the output layer
        (arXiv:2210.06423).
      norm: constructor of norms, with the argument `name`.
      initial: row of initializers.TABLE.
    """

    num_heads: int
    dtype: str = "float32"
    attention_impl: str = "einsum"
    flatten: bool = True
    qk_norm: bool = False
    out_norm: bool = False
    norm: Callable[..., nn.Module] = LayerNorm
    initial: str = "google"

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B N D"],
        context: Float[Array, "B M D"],
        positions: attention.Positions | None = None,
    ) -> Float[Array, "B N D"]:
        """Attends from every token of `x` to every token of `context`.

        Args:
          x: query tokens.
          context: key and value tokens; `x` for self-attention.
          positions: positions of the tokens, for self-attention.
        """
        N, positions = x.shape[1], positions or attention.Positions()
        if self.attention_impl == "cudnn" and not self._shows_weights:
            x, context, positions = attention.pad_for_cudnn(x, context, positions)
        q, k, v = self.heads(x, context, positions.angles)
        return self.combine(self.attend(q, k, v, positions))[:, :N]

    @property
    def _shows_weights(self) -> bool:
        return self.is_mutable_collection(INTERMEDIATES)

    def heads(
        self,
        x: Float[Array, "B N D"],
        context: Float[Array, "B M D"],
        angles: Float[Array, "*BH N J"] | None,
    ) -> tuple[
        Float[Array, "B H N K"], Float[Array, "B H M K"], Float[Array, "B H M K"]
    ]:
        """Returns queries, keys and values of each head; call it in a compact method."""
        D = x.shape[-1]
        split = self.num_heads, D // self.num_heads
        row = initializers.TABLE[self.initial]

        def project(name, tokens):
            B, N, _ = tokens.shape
            tokens = flatten_tokens(tokens) if self.flatten else tokens
            y = MergedDense((D,), split, self.dtype, row.attention, name=name)(tokens)
            # Head-major: see attention.attend.
            y = jnp.swapaxes(y.reshape(B, N, self.num_heads, -1), 1, 2)
            return nn.with_logical_constraint(y, ("batch", "heads", "tokens", None))

        q = project("query", x)
        k, v = project("key", context), project("value", context)
        if self.qk_norm:
            q = self.norm(name="LayerNorm_query")(q)
            k = self.norm(name="LayerNorm_key")(k)
        if angles is not None:
            q, k = attention.rotate(q, angles), attention.rotate(k, angles)
        return q, k, v

    def attend(
        self,
        q: Float[Array, "B H N K"],
        k: Float[Array, "B H M K"],
        v: Float[Array, "B H M K"],
        positions: attention.Positions,
    ) -> Float[Array, "B H N K"]:
        """Returns the weighted means of the values for each query."""
        relative, bias, _, lengths, segments = positions
        if not self._shows_weights:
            how = relative, lengths, self.attention_impl, bias, segments
            return attention.attend(q, k, v, *how)
        # intermediates.py reads the weights, and computes gradients with respect to a
        # perturbation that is added to them.
        weights = self.perturb(
            "weights",
            attention.weights(q, k, relative, lengths, bias, segments),
            PERTURBATIONS,
        )
        self.sow(INTERMEDIATES, "weights", weights)
        return jnp.einsum("bhnm,bhmk->bhnk", weights.astype(v.dtype), v)

    def combine(self, y: Float[Array, "B H N K"]) -> Float[Array, "B N D"]:
        """Combines the results of all heads; call it in a compact method."""
        B, H, N, K = y.shape
        y = jnp.swapaxes(y, 1, 2).reshape(B, N, H * K)
        y = self.norm(name="LayerNorm_out")(y) if self.out_norm else y
        y = flatten_tokens(y) if self.flatten else y
        row = initializers.TABLE[self.initial]
        out = MergedDense((H, K), (H * K,), self.dtype, row.attention_out, name="out")
        y = out(y)
        return y.reshape(B, N, H * K)


class LayerScale(nn.Module):
    """Scales the features of a residual branch (arXiv:2103.17239, section 2).

    Attributes:
      init: initial factor of all features.
    """

    init: float

    @nn.compact
    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """Scales each token."""
        fill = nn.initializers.constant(self.init)
        gamma = self.param("gamma", fill, x.shape[-1:], jnp.float32)
        return x * jnp.asarray(gamma, x.dtype).reshape(1, 1, -1)


class Mlp(nn.Module):
    """Two dense layers with an activation between them and dropout after each.

    With "swiglu" the output of the first layer is multiplied by the SiLU of a third
    layer, "gate" (arXiv:2002.05202).

    Attributes:
      hidden: number of units of the first layer, and of the gate.
      dropout: dropout rate.
      activation: a key of ACTIVATIONS, or "swiglu".
      dtype: dtype of the computation.
      flatten: see kernels.flatten_tokens.
      norm: constructor of a norm for the hidden units (arXiv:2210.06423), or None.
      initial: row of initializers.TABLE.
    """

    hidden: int
    dropout: float = 0.0
    activation: str = "gelu_tanh"
    dtype: str = "float32"
    flatten: bool = True
    norm: Callable[..., nn.Module] | None = None
    initial: str = "google"

    @nn.compact
    def __call__(
        self, x: Float[Array, "B N D"], key: Key[Array, ""] | None = None
    ) -> Float[Array, "B N D"]:
        """Transforms each token separately; a random key activates dropout."""
        shape, D = x.shape, x.shape[-1]
        first, second = (None, None) if key is None else jax.random.split(key)

        row = initializers.TABLE[self.initial]

        def dense(x, features, linear, name):
            return Dense(
                features,
                kernel_init=linear.kernel,
                bias_init=linear.bias(x.shape[-1]),
                dtype=self.dtype,
                name=name,
            )(x)

        def to_hidden(x, name):
            axes = ("batch", "mlp") if self.flatten else ("batch", "tokens", "mlp")
            x = dense(x, self.hidden, row.mlp, name)
            return nn.with_logical_constraint(x, axes)

        x = flatten_tokens(x) if self.flatten else x
        if self.activation == "swiglu":
            x = nn.silu(to_hidden(x, "gate")) * to_hidden(x, "Dense_0")
        else:
            drops = self.dropout and first is not None
            is_fused = self.activation == "gelu_tanh" and not drops
            activate = ACTIVATIONS[self.activation]
            activate = kernels.gelu_tanh_of_product if is_fused else activate
            x = activate(to_hidden(x, "Dense_0"))
        x = dropout(x, self.dropout, first)
        if self.norm:
            x = self.norm(name="LayerNorm_hidden")(x)
        x = dense(x, D, row.mlp_out, "Dense_1")
        x = dropout(x, self.dropout, second)
        return x.reshape(shape)


# Names of the classifier of every network, and of that of the distillation token.
CLASSIFIERS = ("head", "head_dist")


def classify(
    pre_logits: Float[Array, "*B D"],
    num_classes: int,
    bias: float,
    name: str = "head",
    initial: str = "google",
) -> dict[str, Float[Array, "..."]]:
    """Applies a linear classifier; call it in a compact method.

    Args:
      pre_logits: features, float32.
      num_classes: number of classes L; 0 for no classifier.
      bias: initial bias.
      name: name of the parameters.
      initial: row of initializers.TABLE.

    Returns:
      "pre_logits", and "logits" (*B, L) unless `num_classes` is 0.
    """
    outputs = {"pre_logits": pre_logits}
    if num_classes:
        outputs["logits"] = Dense(
            num_classes,
            kernel_init=initializers.TABLE[initial].head,
            bias_init=nn.initializers.constant(bias),
            name=name,
        )(pre_logits)
    return outputs
