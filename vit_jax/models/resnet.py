"""ResNets: the BiT baselines, and the stem of the hybrids.

Both have GroupNorm and standardised convolutions (BiT, arXiv:1912.11370, section 4.1).
Their names and constants differ as in the codebases of their published weights.
Letters: B images, Y by X pixels, C channels, L classes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models import kept, layers, variants
from vit_jax.models.network import NetworkConfig

_GROUPS = 32

Features = Float[Array, "B Y X C"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StemConfig(NetworkConfig):
    """Config keys of a ResNet, as a network or as a stem."""

    stage_depths: tuple[int, ...] = key(
        (0,),
        "Number of units of each stage; (0,) is the value of the variant.",
        below=1_000,
    )
    stem_width: int = key(
        0,
        "Features of the first convolution; 0 is the value of the variant.",
        below=2**31,
    )

    @property
    def reduction(self) -> int:
        """Stride of the last stage in pixels."""
        return 4 * 2 ** max(0, len(self.stage_depths) - 1)

    def check_stem(self) -> None:
        """Raises UserError if a ResNet cannot have these depths or this width."""
        if any(count < 1 for count in self.stage_depths):
            raise UserError(
                f"model.stage_depths={self.stage_depths}: set at least 1 unit per stage"
            )
        if self.stem_width % _GROUPS:
            raise UserError(
                f"model.stem_width={self.stem_width} is not a multiple of the {_GROUPS} "
                "groups of GroupNorm: change model.stem_width"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig(StemConfig):
    """ResNets such as `R50x1`"""

    side_multiple = 1  # ResNets support images of any size.

    zero_pool: bool = key(
        False,
        "Pad with zeros before the max pooling of the root.",
        reason="weights of BiT's original code (arXiv:1912.11370) and of timm",
    )

    @property
    def patch_size(self) -> int:
        """Stride of the last stage in pixels."""
        return self.reduction

    @property
    def num_layers(self) -> int:
        """Number of stages plus 1 for the first convolution."""
        return 1 + len(self.stage_depths)

    def sized(self) -> "ResNetConfig":
        """See `NetworkConfig.sized`."""
        return variants.with_numbers(self, variants.parse(self.variant).resnet)

    def build(self, num_classes: int, image_shape: tuple[int, int, int]) -> "ResNet":
        self.check_stem()
        return ResNet(self, num_classes)


class StdConv(nn.Module):
    """Convolution without bias whose kernel is standardised over each output channel.

    Attributes:
      features: number of output channels.
      kernel_size: side of the kernel in pixels.
      stride: stride in pixels.
      padding: padding on each side in pixels, or "SAME".
      epsilon: term added to the variance of the kernel, or to its standard deviation.
      of_deviation: whether epsilon is added to the standard deviation.
      dtype: dtype of the computation.
    """

    features: int
    kernel_size: int
    stride: int = 1
    padding: int | str = 0
    epsilon: float = 1e-10
    of_deviation: bool = False
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Features) -> Float[Array, "..."]:
        """Convolves features."""
        side = self.kernel_size
        kernel = self.param(
            "kernel",
            nn.initializers.lecun_normal(),
            (side, side, x.shape[-1], self.features),
            jnp.float32,
        )
        # Not in place, because parameters may be NumPy arrays of the caller.
        kernel = kernel - kernel.mean((0, 1, 2), keepdims=True)
        variance = jnp.square(kernel).mean((0, 1, 2), keepdims=True)
        if self.of_deviation:
            kernel = kernel / (jnp.sqrt(variance) + self.epsilon)
        else:
            kernel = kernel / jnp.sqrt(variance + self.epsilon)
        if side == 1:  # A product has faster gradients than a convolution.
            dtype = jnp.dtype(self.dtype)
            x = x[:, :: self.stride, :: self.stride].astype(dtype)
            return x @ kernel[0, 0].astype(dtype)
        padding = self.padding
        conv = nn.Conv(
            self.features,
            (side, side),
            strides=self.stride,
            padding=[(padding, padding)] * 2 if isinstance(padding, int) else padding,
            use_bias=False,
            dtype=self.dtype,
            parent=None,
        )
        return conv.apply({"params": {"kernel": kernel}}, x)


# JAX's derivative would read `x` more often.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def group_norm(
    x: Float[Array, "B Y X C"],
    scale: Float[Array, " C"],
    bias: Float[Array, " C"],
    epsilon: float,
) -> Float[Array, "B Y X C"]:
    """Normalises groups of channels (arXiv:1803.08494), in float32 for any dtype."""
    return _group_norm_forward(x, scale, bias, epsilon)[0]


def _per_channel(values: Float[Array, "B G"], x) -> Float[Array, "B C"]:
    return jnp.repeat(values, x.shape[-1] // _GROUPS, axis=1)


def _per_group(values: Float[Array, "B C"]) -> Float[Array, "B G"]:
    return values.reshape(values.shape[0], _GROUPS, -1).mean(-1)


def _group_norm_forward(x, scale, bias, epsilon):
    x32 = x.astype(jnp.float32)
    mean = _per_group(x32.mean((1, 2)))
    centered = x32 - _per_channel(mean, x)[:, None, None]
    # E[x^2] - E[x]^2 would be faster, but less accurate.
    rsqrt = jax.lax.rsqrt(_per_group(jnp.square(centered).mean((1, 2))) + epsilon)
    y = centered * (_per_channel(rsqrt, x) * scale[None])[:, None, None]
    y += bias[None, None, None]
    return y.astype(x.dtype), (x, scale, mean, rsqrt)


def _group_norm_backward(epsilon, kept, grad):
    x, scale, mean, rsqrt = kept
    x32, grad = x.astype(jnp.float32), grad.astype(jnp.float32)
    mean, rsqrt = _per_channel(mean, x), _per_channel(rsqrt, x)
    normed = (x32 - mean[:, None, None]) * rsqrt[:, None, None]
    pixels = x.shape[1] * x.shape[2]
    to_bias, to_scale = grad.sum((1, 2)), (grad * normed).sum((1, 2))
    # Means over each group: of the gradient of `normed`, and of its product with
    # `normed`.
    first = _per_channel(_per_group(to_bias * scale[None]), x) / pixels
    second = _per_channel(_per_group(to_scale * scale[None]), x) / pixels
    # With coefficients per channel, `x` and `grad` are read only once.
    slope = -rsqrt * rsqrt * second
    offset = -rsqrt * first - slope * mean
    to_x = (
        grad * (rsqrt * scale[None])[:, None, None]
        + x32 * slope[:, None, None]
        + offset[:, None, None]
    )
    return to_x.astype(x.dtype), to_scale.sum(0), to_bias.sum(0)


group_norm.defvjp(_group_norm_forward, _group_norm_backward)


class GroupNorm(nn.Module):
    """Group normalisation with the parameters of flax.linen.GroupNorm.

    Attributes:
      epsilon: term added to variances.
      scale_init: initialiser of the scale.
    """

    epsilon: float
    scale_init: nn.initializers.Initializer = nn.initializers.ones

    @nn.compact
    def __call__(self, x: Features) -> Features:
        """Normalises groups of channels."""
        shape = (x.shape[-1],)
        scale = self.param("scale", self.scale_init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        return group_norm(x, jnp.asarray(scale), jnp.asarray(bias), self.epsilon)


def max_pool(
    x: Features, borders: tuple[tuple[int, int], ...]
) -> Float[Array, "B y x C"]:
    """Pools the maximum of 3x3 pixels with a stride of 2.

    The gradient of XLA's pooling takes seven times as long on a CPU.

    Args:
      x: features.
      borders: padding in pixels, (above, below) and (left, right).
    """
    padded = jnp.pad(x, ((0, 0), *borders, (0, 0)), constant_values=-jnp.inf)
    high, wide = (side - 2 for side in padded.shape[1:3])
    nine = [
        padded[:, i : i + high : 2, j : j + wide : 2]
        for i in range(3)
        for j in range(3)
    ]
    return functools.reduce(jnp.maximum, nine)


class PreActivationUnit(nn.Module):
    """Bottleneck unit of BiT: GroupNorm and ReLU before each convolution.

    Attributes:
      features: width of the bottleneck, a quarter of the output's.
      stride: stride of the 3x3 convolution and of the projection.
      dtype: dtype of the computation.
    """

    repeated: ClassVar[bool] = True  # See cost.py.

    features: int
    stride: int = 1
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Features) -> Float[Array, "..."]:
        """Returns features at 1 / stride of the resolution."""
        conv = functools.partial(StdConv, dtype=self.dtype)
        norm = functools.partial(GroupNorm, 1e-5)

        y = nn.relu(norm(name="gn1")(x))
        if x.shape[-1] != 4 * self.features or self.stride != 1:
            x = conv(4 * self.features, 1, self.stride, name="conv_proj")(y)
        y = conv(self.features, 1, name="conv1")(y)
        y = nn.relu(norm(name="gn2")(y))
        y = conv(self.features, 3, self.stride, padding=1, name="conv2")(y)
        y = nn.relu(norm(name="gn3")(y))
        return x + conv(4 * self.features, 1, name="conv3")(y)


class Root(nn.Module):
    """First convolution and pooling of BiT.

    Attributes:
      features: number of output channels.
      zero_pool: whether max pooling pads with zeros (BiT's original code, timm) instead
        of -inf (big_vision).
      dtype: dtype of the computation.
    """

    features: int
    zero_pool: bool = False
    dtype: str = "float32"

    @nn.compact
    def __call__(
        self, images: Features
    ) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Returns features at half of the resolution, and pooled ones at a quarter."""
        x = conv = StdConv(self.features, 7, 2, 3, dtype=self.dtype, name="conv_root")(
            images
        )
        if self.zero_pool:
            x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        border = (0, 0) if self.zero_pool else (1, 1)
        return conv, max_pool(x, (border, border))


class Stage(nn.Module):
    """A sequence of units.

    Attributes:
      unit: constructor of a unit, with the arguments `stride` and `name`.
      count: number of units.
      stride: stride of the first unit; other units have a stride of 1.
      digits: number of digits in the names of units, "unit1" or "unit01".
    """

    unit: Callable
    count: int
    stride: int
    digits: int

    @nn.compact
    def __call__(self, x: Features) -> Float[Array, "..."]:
        """Returns features at 1 / stride of the resolution."""
        for i in range(self.count):
            name = f"unit{i + 1:0{self.digits}}"
            x = self.unit(stride=1 if i else self.stride, name=name)(x)
        return x


class ResNet(nn.Module):
    """Image classifier of BiT ("ResNet (BiT)" in arXiv:2010.11929, section 4.1).

    Attributes:
      config: keys of the network.
      num_classes: L; 0 for no classifier.
    """

    config: ResNetConfig
    num_classes: int

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "B Y X C"],
        *,
        train: bool = False,
        classify: bool = True,
    ) -> dict[str, Float[Array, "..."]] | Float[Array, "B y x D"]:
        """Classifies images.

        Args:
          images: normalised images.
          train: without effect, since no layer is random.
          classify: whether to classify; otherwise the last features are returned.

        Returns:
          "pre_logits" (B, D), the mean of the last features, and "logits" (B, L),
          unless L is 0; float32.
        """
        config = self.config
        width, dtype = config.stem_width, config.dtype
        root, x = Root(width, config.zero_pool, dtype, name="root_block")(images)
        outputs = [root]
        for i, count in enumerate(config.stage_depths):
            unit = functools.partial(PreActivationUnit, width * 2**i, dtype=dtype)
            x = Stage(unit, count, 2 if i else 1, 2, name=f"block{i + 1}")(x)
            outputs.append(x)
        group_norm = GroupNorm(1e-5, name="norm-pre-head")
        norm = lambda x: nn.relu(group_norm(x))
        kept.keep(self, outputs, norm, norm_all=False)
        x = norm(x)
        if not classify:
            return x
        pre_logits = x.astype(jnp.float32).mean((1, 2))
        return layers.classify(pre_logits, self.num_classes, config.head_bias_init)


class PostActivationUnit(nn.Module):
    """Bottleneck unit of the hybrids' stem: GroupNorm after each convolution.

    Attributes:
      features, stride, dtype: see PreActivationUnit.
    """

    repeated: ClassVar[bool] = True  # See cost.py.

    features: int
    stride: int = 1
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Features) -> Float[Array, "..."]:
        """Returns features at 1 / stride of the resolution."""
        conv = functools.partial(_stem_conv, dtype=self.dtype)
        norm = functools.partial(GroupNorm, 1e-6)

        y = nn.relu(norm(name="gn1")(conv(self.features, 1, name="conv1")(x)))
        y = conv(self.features, 3, self.stride, name="conv2")(y)
        y = nn.relu(norm(name="gn2")(y))
        y = conv(4 * self.features, 1, name="conv3")(y)
        # With an initial scale of zero, the unit is the identity at first.
        y = norm(scale_init=nn.initializers.zeros, name="gn3")(y)
        if x.shape[-1] != 4 * self.features or self.stride != 1:
            x = conv(4 * self.features, 1, self.stride, name="conv_proj")(x)
            x = norm(name="gn_proj")(x)
        return nn.relu(x + y)


def stem(images: Features, config: StemConfig) -> Float[Array, "..."]:
    """Applies the ResNet in front of a hybrid's encoder.

    Call it in a compact method. The stem is not a module, because in published
    checkpoints its parameters are at the same level as the encoder.

    Args:
      images: normalised images.
      config: config of the hybrid.

    Returns:
      Features at 1/4 of the resolution, which each stage except the first halves.
    """
    width, dtype = config.stem_width, config.dtype
    x = _stem_conv(width, 7, 2, dtype=dtype, name="conv_root")(images)
    x = nn.relu(GroupNorm(1e-6, name="gn_root")(x))
    x = max_pool(x, tuple((side % 2, 1) for side in x.shape[1:3]))
    for i, count in enumerate(config.stage_depths):
        unit = functools.partial(PostActivationUnit, width * 2**i, dtype=dtype)
        x = Stage(unit, count, 2 if i else 1, 1, name=f"block{i + 1}")(x)
    return x


_stem_conv = functools.partial(StdConv, padding="SAME", epsilon=1e-5, of_deviation=True)
