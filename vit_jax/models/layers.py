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
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Key, UInt32

from vit_jax.models import attention, flexivit, rotary

# Variable collections of attention weights, and of perturbations added to them.
INTERMEDIATES, PERTURBATIONS = "intermediates", "perturbations"

# Parameters of these layers, and of the two Dense layers of any MLP, that the axis "model"
# of a mesh splits: by heads and hidden units (Megatron-LM, arXiv:1909.08053, section 3).
# Nothing is exchanged between the two kernels of a pair, and their output is summed once.
MODEL_AXES = (
    (r"MultiHeadDotProductAttention_\d+/(query|key|value)/kernel$", (None, "model")),
    (r"MultiHeadDotProductAttention_\d+/(query|key|value)/bias$", ("model",)),
    (r"MultiHeadDotProductAttention_\d+/out/kernel$", ("model",)),
    (r"(^|/)relative_embedding(_\d+)?$", ("model",)),
    (r"(^|/)(Dense_0|gate)/kernel$", (None, "model")),
    (r"(^|/)(Dense_0|gate)/bias$", ("model",)),
    (r"(^|/)Dense_1/kernel$", ("model",)),
)

_kernel_init = nn.initializers.xavier_uniform()
_bias_init = nn.initializers.normal(1e-6)


# The derivatives keep the input alone. JAX's keep up to four arrays of its size, which a
# scan over blocks writes out one by one (docs/decisions.md). For the exact GELU JAX uses
# erfc, which takes 2.7 times as long on CPU (28 against 10 ms of a forward pass of S/16).
@jax.custom_vjp
def gelu_erf(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes the exact GELU (arXiv:1606.08415), in float32 for any dtype of `x`."""
    cdf = 0.5 * (1 + jax.lax.erf(x.astype(jnp.float32) * math.sqrt(0.5)))
    return (x * cdf).astype(x.dtype)


def _gelu_erf_backward(x, grad):
    x32 = x.astype(jnp.float32)
    # The flipped sign keeps XLA from storing the forward pass's error function, an array
    # as large as `x`, which costs more than computing it again.
    cdf = 0.5 * (1 - jax.lax.erf(x32 * -math.sqrt(0.5)))
    density = jnp.exp(-0.5 * x32 * x32) / math.sqrt(2 * math.pi)
    return ((grad * (cdf + x32 * density)).astype(x.dtype),)


gelu_erf.defvjp(lambda x: (gelu_erf(x), x), _gelu_erf_backward)


@jax.custom_vjp
def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes the GELU's approximation by a tanh, in float32 for any dtype of `x`."""
    x32 = x.astype(jnp.float32)
    inner = math.sqrt(2 / math.pi) * (x32 + 0.044715 * x32**3)
    return (x32 * (0.5 * (1 + jnp.tanh(inner)))).astype(x.dtype)


def _gelu_tanh_backward(x, grad):
    x32 = x.astype(jnp.float32)
    # With the flipped sign XLA does not store the forward pass's tanh.
    inner = -math.sqrt(2 / math.pi) * (x32 + 0.044715 * x32**3)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x32 * x32)
    tanh = jnp.tanh(inner)
    to_x = 0.5 * (1 - tanh) + 0.5 * x32 * (1 - tanh * tanh) * slope
    return ((grad * to_x).astype(x.dtype),)


gelu_tanh.defvjp(lambda x: (gelu_tanh(x), x), _gelu_tanh_backward)


# JAX's derivative would keep several arrays of the size of `x` and pass over them more
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
    variance = jnp.square(x32 - mean).mean(-1, keepdims=True)
    reciprocal = jax.lax.rsqrt(variance + epsilon)
    normal = (x32 - mean) * reciprocal
    y = normal * _spread(scale, x) + _spread(bias, x)
    return y.astype(x.dtype), (x, scale, mean, reciprocal)


def _layer_norm_backward(epsilon, kept, grad):
    x, scale, mean, reciprocal = kept
    # XLA would keep (x - mean) * reciprocal, an array as large as `x`, from the forward
    # pass.
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
        return layer_norm(x.astype(self.dtype), scale, bias, self.epsilon)


ACTIVATIONS = {
    "gelu_tanh": gelu_tanh,
    "gelu": gelu_erf,
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
}


def drop_path(
    x: Float[Array, "B N D"],
    rate: Float[Array, ""] | float,
    key: Key[Array, ""] | None,
) -> Float[Array, "B N D"]:
    """Drops the branch of random images and scales up the others (arXiv:1603.09382).

    Args:
      x: residual branch.
      rate: drop rate; an array in a scan over layers.
      key: random key; None drops nothing.
    """
    if key is None:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, (len(x), 1, 1))
    return x * jnp.where(kept, 1 / jnp.asarray(1 - rate), 0).astype(x.dtype)


def add_to_some(
    x: Float[Array, "B N D"],
    branch: Callable[[Array, Callable[[Array], Array]], Array],
    rate: float,
    group: int,
    key: Key[Array, ""],
) -> Float[Array, "B N D"]:
    """Adds a branch to random images, and does not compute it for the others.

    As in DINOv2 (arXiv:2304.07193, section 5): of each group the whole number of images
    below `(1 - rate) * group`, at least one, is kept, and their branch is scaled up.

    Args:
      x: residual stream.
      branch: residual branch, a function of the tokens of some images, and of a function
        that takes the rows of these images of any array with a row per image.
      rate: drop rate.
      group: images in a row that are drawn from; if B is no multiple, their greatest
        common divisor.
      key: random key.
    """
    size = math.gcd(len(x), group)
    kept = max(1, math.floor(size * (1 - rate) + 1e-9))
    order = jnp.argsort(jax.random.uniform(key, (len(x) // size, size)), axis=1)
    place = jnp.argsort(order, axis=1)[..., None, None]

    def take(rows):
        # Within groups, so that a batch that is split over devices stays where it is.
        groups = rows.reshape(-1, size, *rows.shape[1:])
        index = order[:, :kept].reshape(-1, kept, *(1,) * (rows.ndim - 1))
        return jnp.take_along_axis(groups, index, axis=1).reshape(-1, *rows.shape[1:])

    y = branch(take(x), take) * (size / kept)
    y = y.reshape(-1, kept, *y.shape[1:])
    y = jnp.take_along_axis(y, place.clip(0, kept - 1), axis=1)
    return x + jnp.where(place < kept, y, 0).reshape(x.shape)


def dropout(
    x: Float[Array, "*B N D"], rate: float, key: Key[Array, ""] | None
) -> Float[Array, "*B N D"]:
    """Drops random elements and scales up the others (Srivastava et al., 2014).

    Whether an element is kept is a hash of its place and the key, and does not depend on
    the sharding. JAX's own generator takes a tenth of a step of B/16 on an H100
    (docs/decisions.md).

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
    # Computed once a token, not once an element.
    rows = jax.lax.optimization_barrier(_hash(_hash(rows + words[0]) ^ words[1]))
    columns = jax.lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1)
    # The golden ratio's multiples are far apart in all bits.
    bits = _hash(rows + columns * jnp.uint32(0x9E3779B9))
    kept = bits >= jnp.uint32(round(rate * 2**32))
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def _hash(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Mixes all bits; a bijection, "lowbias32" of Wellons (nullprogram.com, 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


class PatchEmbedding(nn.Module):
    """Embeds square patches (arXiv:2010.11929, section 3.1).

    It has the parameters of a convolution, and is computed as a product of matrices: XLA
    for GPUs pads the convolution's three channels to eight (docs/decisions.md).

    Attributes:
      features: D.
      side: side of a patch in pixels; what is left at the right and bottom is not used.
      dtype: dtype of the computation.
      resize: how the kernel is resized for patches of another side, see flexivit.py.
      row_major: whether the result is laid out in the order of its axes. XLA for GPUs
        lays the tokens of all blocks out with the batch as the last axis otherwise,
        because of the position embedding that comes next.
    """

    features: int
    side: int
    dtype: str = "float32"
    resize: str = flexivit.DEFAULT
    row_major: bool = False

    @nn.compact
    def __call__(
        self, images: Float[Array, "B Y X C"], side: int | None = None
    ) -> Float[Array, "B y x D"]:
        """Embeds each patch separately.

        Args:
          images: images.
          side: side of a patch in pixels, to which the kernel is resized (flexivit.py), if
            it is not the attribute.
        """
        (B, Y, X, C), side, D = images.shape, side or self.side, self.features
        shape = (self.side, self.side, C, D)
        kernel = self.param(
            "kernel", nn.initializers.lecun_normal(), shape, jnp.float32
        )
        if side != self.side:
            kernel = flexivit.resize_patch_kernel(kernel, side, self.resize)
        bias = self.param("bias", nn.initializers.zeros, (D,), jnp.float32)
        images, kernel, bias = nn.dtypes.promote_dtype(
            images, kernel, bias, dtype=self.dtype
        )
        y, x = Y // side, X // side
        patches = images[:, : y * side, : x * side].reshape(B, y, side, x, side, C)
        patches = jnp.swapaxes(patches, 2, 3).reshape(B * y * x, -1)
        tokens = patches @ kernel.reshape(-1, D) + bias.reshape(1, D)
        tokens = tokens.reshape(B, y, x, D)
        return _in_row_major(tokens) if self.row_major else tokens


def _in_row_major(x: Float[Array, "B y x D"]) -> Float[Array, "B y x D"]:
    """Returns an array that XLA lays out in the order of its axes.

    XLA cannot split the constraint over devices, and would gather the whole batch on each
    of them: shard_map hands each device of a mesh its images.
    """
    layout = Layout(major_to_minor=tuple(range(x.ndim)))
    constrain = lambda x: with_layout_constraint(x, layout)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not nn.get_logical_axis_rules():
        return constrain(x)
    images = nn.logical_to_mesh_axes(("batch",))
    return jax.shard_map(constrain, mesh=mesh, in_specs=images, out_specs=images)(x)


class MergedDense(nn.Module):
    """Dense layer with multi-axis parameters, computed as a 2-D product.

    `nn.DenseGeneral` has the same parameters, but XLA's CPU derivative of its product
    copies every gradient three times (docs/decisions.md).

    Attributes:
      inputs: input axes of the kernel, of size M together.
      outputs: output axes of the kernel and axes of the bias, of size F together.
      dtype: dtype of the computation.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "*T M"]) -> Float[Array, "*T F"]:
        """Transforms each token separately."""
        merged = math.prod(self.inputs), math.prod(self.outputs)

        def init(key, shape, dtype):
            return _kernel_init(key, merged, dtype).reshape(shape)

        kernel = self.param("kernel", init, self.inputs + self.outputs, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, self.outputs, jnp.float32)
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        bias = bias.reshape((1,) * (x.ndim - 1) + (-1,))
        return x @ kernel.reshape(merged) + bias


class MultiHeadAttention(nn.Module):
    """Multi-head attention (arXiv:2010.11929, appendix A).

    Attributes:
      num_heads: number of heads, which divides the width.
      dtype: dtype of the computation.
      attention_impl: one of attention.IMPLEMENTATIONS.
      flatten: see flatten_tokens.
      qk_norm: whether queries and keys are normalised, head by head (arXiv:2302.05442).
      out_norm: whether the concatenated heads are normalised before the output layer
        (arXiv:2210.06423).
      norm: constructor of these norms, with the argument `name`.
    """

    num_heads: int
    dtype: str = "float32"
    attention_impl: str = "einsum"
    flatten: bool = True
    qk_norm: bool = False
    out_norm: bool = False
    norm: Callable[..., nn.Module] = LayerNorm

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B N D"],
        context: Float[Array, "B M D"],
        positions: attention.Positions | None = None,
        *,
        with_keys: bool = False,
    ) -> Float[Array, "B N D"] | tuple[Float[Array, "B N D"], Float[Array, "B H M K"]]:
        """Attends from every token of `x` to every token of `context`.

        Args:
          x: query tokens.
          context: key and value tokens; `x` for self-attention.
          positions: positions of the tokens, for self-attention.
          with_keys: whether to return the keys too; needs an einsum implementation.
        """
        (_, N, D), M = x.shape, context.shape[1]
        split = self.num_heads, D // self.num_heads
        positions = positions or attention.Positions()
        relative, bias, angles, lengths, segments = positions
        shown = self.is_mutable_collection(INTERMEDIATES)
        odd = (N % 2 or M % 2) and segments is None
        if self.attention_impl == "cudnn" and odd and not shown:
            # Padding the input is one copy; of queries, keys, values and the result it
            # would be four, and four of their gradients.
            lengths = jnp.full(len(x), M) if lengths is None else lengths
            x, context = attention.pad_tokens(x), attention.pad_tokens(context)
            angles = None if angles is None else attention.pad_tokens(angles)

        def project(name, tokens):
            B, N, _ = tokens.shape
            tokens = flatten_tokens(tokens) if self.flatten else tokens
            y = MergedDense((D,), split, self.dtype, name=name)(tokens)
            # Head-major: see attention.attend.
            y = jnp.swapaxes(y.reshape(B, N, self.num_heads, -1), 1, 2)
            return nn.with_logical_constraint(y, ("batch", "heads", "tokens", None))

        q = project("query", x)
        k, v = project("key", context), project("value", context)
        if self.qk_norm:
            q = self.norm(name="LayerNorm_query")(q)
            k = self.norm(name="LayerNorm_key")(k)
        if angles is not None:
            q, k = rotary.rotate(q, angles), rotary.rotate(k, angles)
        if shown:
            # intermediates.py reads the weights, and differentiates with respect to a
            # perturbation of them.
            weights = self.perturb(
                "weights",
                attention.weights(q, k, relative, lengths, bias, segments),
                PERTURBATIONS,
            )
            self.sow(INTERMEDIATES, "weights", weights)
            y = jnp.einsum("bhnm,bhmk->bhnk", weights.astype(v.dtype), v)
        else:
            how = relative, lengths, self.attention_impl, bias, segments
            y = attention.attend(q, k, v, *how)
        y = jnp.swapaxes(y, 1, 2).reshape(x.shape)
        y = self.norm(name="LayerNorm_out")(y) if self.out_norm else y
        y = flatten_tokens(y) if self.flatten else y
        y = MergedDense(split, (D,), self.dtype, name="out")(y)
        y = y.reshape(x.shape)[:, :N]
        return (y, k) if with_keys else y


def flatten_tokens(x: Float[Array, "B N D"]) -> Float[Array, "BN D"]:
    """Merges the image and token axes.

    XLA's CPU backward pass of a 3-D product is nearly twice as slow
    (docs/decisions.md).
    """
    return x.reshape(-1, x.shape[-1])


class LayerScale(nn.Module):
    """Multiplies each feature of a residual branch (arXiv:2103.17239, section 2).

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
    """Two dense layers with a GELU between them and dropout after each.

    With "swiglu" the first layer is multiplied with the SiLU of a third, "gate"
    (arXiv:2002.05202).

    Attributes:
      hidden: units of the first layer, and of the gate.
      dropout: dropout rate.
      activation: a key of ACTIVATIONS, or "swiglu".
      dtype: dtype of the computation.
      flatten: see flatten_tokens.
      norm: constructor of a norm of the hidden units (arXiv:2210.06423), or None.
    """

    hidden: int
    dropout: float = 0.0
    activation: str = "gelu_tanh"
    dtype: str = "float32"
    flatten: bool = True
    norm: Callable[..., nn.Module] | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "B N D"], key: Key[Array, ""] | None = None
    ) -> Float[Array, "B N D"]:
        """Transforms each token separately; a key activates dropout."""
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

        def to_hidden(x, name):
            axes = ("batch", "mlp") if self.flatten else ("batch", "tokens", "mlp")
            return nn.with_logical_constraint(dense(self.hidden, name)(x), axes)

        x = flatten_tokens(x) if self.flatten else x
        if self.activation == "swiglu":
            x = nn.silu(to_hidden(x, "gate")) * to_hidden(x, "Dense_0")
        else:
            x = ACTIVATIONS[self.activation](to_hidden(x, "Dense_0"))
        x = dropout(x, self.dropout, first)
        if self.norm:
            x = self.norm(name="LayerNorm_hidden")(x)
        x = dense(D, "Dense_1")(x)
        x = dropout(x, self.dropout, second)
        return x.reshape(shape)


class MapHead(nn.Module):
    """Multihead attention pooling (arXiv:2106.04560, section 3.2).

    A learned probe attends to the tokens; an MLP with a residual follows.

    Attributes:
      num_heads, hidden, activation, dtype, flatten: see MultiHeadAttention and Mlp.
      norm: constructor of the norm before the MLP.
    """

    num_heads: int
    hidden: int
    activation: str = "gelu_tanh"
    norm: Callable[..., nn.Module] = LayerNorm
    dtype: str = "float32"
    flatten: bool = True

    @nn.compact
    def __call__(
        self, x: Float[Array, "B N D"], bias: Float[Array, "B 1 K N"] | None = None
    ) -> Float[Array, "BK D"]:
        """Returns K vectors per sequence, or one without `bias`, of the attention logits."""
        (B, _, D), K = x.shape, 1 if bias is None else bias.shape[2]
        probe = self.param("probe", _kernel_init, (1, 1, D), jnp.float32)
        # One query has few logits, so the implementation does not matter.
        attend = MultiHeadAttention(
            self.num_heads,
            self.dtype,
            flatten=self.flatten,
            name="MultiHeadDotProductAttention_0",
        )
        probe = jnp.broadcast_to(probe.astype(x.dtype), (B, K, D))
        x = attend(probe, x, attention.Positions(bias=bias))
        y = self.norm(name="LayerNorm_0")(x)
        mlp = Mlp(
            self.hidden, activation=self.activation, dtype=self.dtype, name="MlpBlock_0"
        )
        return (x + mlp(y)).reshape(-1, D)


# Names of classifiers: of every network, and of the distillation token.
CLASSIFIERS = ("head", "head_dist")


def classify(
    pre_logits: Float[Array, "*B D"], num_classes: int, bias: float, name: str = "head"
) -> dict[str, Float[Array, "..."]]:
    """Applies a zero-initialised linear classifier; call it in a compact method.

    Args:
      pre_logits: features, float32.
      num_classes: L; 0 for no classifier.
      bias: initial bias.
      name: name of the parameters.

    Returns:
      "pre_logits", and "logits" (*B, L) unless `num_classes` is 0.
    """
    outputs = {"pre_logits": pre_logits}
    if num_classes:
        outputs["logits"] = nn.Dense(
            num_classes,
            kernel_init=nn.initializers.zeros,
            bias_init=nn.initializers.constant(bias),
            name=name,
        )(pre_logits)
    return outputs
