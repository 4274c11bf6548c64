"""The interface of a network: a config dataclass that builds a Flax module."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.config import fields, loading
from vit_jax.errors import UserError
from vit_jax.models import kernels, positions, stacking
from vit_jax.models.layers import MODEL_AXES
from vit_jax.models.variants import FORMER_KEYS, ModelConfig

# Name of running means in Flax's collections and in `Params`.
STATE = "batch_stats"
# Arguments of `models.create` that are not keys of a network.
_OF_CREATE = {"num_classes", "image_size", "channels", "platform"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig(ModelConfig):
    """Base class of the config section `model`.

    A subclass may replace each attribute by a key, a constant or a property.

    Attributes:
      patch_size: side of a token in pixels.
      side_multiple: number that image height and width must be multiples of; None is
        `patch_size`.
      encoder_stride: side in pixels of the tokens that the module returns with the
        arguments `classify=False` and `edit_patches`, see `Model.encode`; 0 if it does
        not have these arguments.
      no_sequences: reason why the module does not support images as sequences of
        patches (patches.py), for messages; "" if it does.
      has_encoder: whether the network is a Vision Transformer, see intermediates.py.
      has_state: whether the module has running means, in the collection STATE. Those of a
        user's network are detected.
      stacked: whether parameters are in the layout of a scan, see stacking.py.
      prefix_tokens: names of the tokens before the patches.
      num_blocks: number of blocks that `layer_of` distinguishes.
      num_layers: number of layers whose features the module keeps, see
        layer_features.py; 0 if it does not keep features.
      before_blocks, after_blocks: first parts of the paths of parameters before and
        after all blocks.
      model_axes: pairs of a regular expression for parameter paths and the mesh axes of
        the leading dimensions of these parameters, for sharding over "model".
      names: published variants.
    """

    patch_size: ClassVar[int] = 1
    side_multiple: ClassVar[int | None] = None
    encoder_stride: ClassVar[int] = 0
    has_encoder: ClassVar[bool] = False
    has_state: ClassVar[bool] = False
    stacked: ClassVar[bool] = False
    prefix_tokens: ClassVar[tuple[str, ...]] = ()
    num_blocks: ClassVar[int] = 0
    num_layers: ClassVar[int] = 0
    before_blocks: ClassVar[tuple[str, ...]] = ()
    after_blocks: ClassVar[tuple[str, ...]] = ()
    model_axes: ClassVar[tuple] = MODEL_AXES
    names: ClassVar[tuple[str, ...]] = ()

    @property
    def no_sequences(self) -> str:
        return f"model.variant={self.variant!r} does not embed patches separately"

    @property
    def rounds_products(self) -> bool:
        """Whether operands of matrix products are bfloat16."""
        return "bfloat16" in (self.dtype, self.matmul_dtype)

    def matmul_precision(self) -> contextlib.AbstractContextManager:
        """Returns a context in which products are traced as `matmul_dtype` says."""
        if not self.matmul_dtype:
            return contextlib.nullcontext()
        return jax.default_matmul_precision(kernels.BFLOAT16_OPERANDS)

    def sized(self) -> "NetworkConfig":
        """Returns the config with keys that are 0 replaced by the variant's values."""
        return self

    def build(self, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        """Builds the network.

        Args:
          num_classes: number of classes; 0 for no classifier.
          image_shape: (height, width, channels) of the input.

        Returns:
          A Flax module, called as `module(images, train=...)` with normalised images
          (B, height, width, channels) in the dtype of the config. If `train` is True,
          it may use the rng "dropout" and change the collection "batch_stats", its only
          state.
          It returns a dict of float32 arrays: "logits" (B, num_classes), unless
          `num_classes` is 0, from a `Dense` named "head"; and "pre_logits" (B, width),
          the features for few-shot, k-NN and linear evaluations, which are optional if
          there are classes.
        """
        raise NotImplementedError(
            f"{type(self).__name__} lacks build(self, num_classes, image_shape)"
        )

    def reader(self, module: nn.Module, images: Any) -> nn.Module:
        """Returns the module for these images, which has the parameters of `module`.

        Args:
          module: result of `build`.
          images: an array, or images of any size (patches.py).

        Raises:
          UserError: the network does not support images of any size.
        """
        if hasattr(images, "shape"):
            return module
        raise UserError(
            f"images of any size are not supported with {self.no_sequences}: change it, "
            "or use images of one size"
        )

    def check_rows(self, rows: int, devices: int, platform: str) -> str:
        """Checks the number of images that pass through the network at once in training.

        Args:
          rows: number of images, or of views of images.
          devices: number of devices that the rows are split over.
          platform: platform of the devices.

        Returns:
          Note about a setting that cannot be applied to this number of rows, which
          continues a line about them: "... does not divide them"; "" if it can.

        Raises:
          UserError: the rows cannot be split over the devices.
        """
        return ""

    def layer_of(self, path: str) -> int | range:
        """Returns the layer of a parameter, for layer decay.

        Args:
          path: path as in checkpoints,
            "Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel".

        Returns:
          0 for parameters before the blocks, including positions; i + 1 for block i,
          and for inputs added before or within it; `num_blocks + 1` for parameters
          after the blocks. For a parameter with a leading axis of blocks, a range.

        Raises:
          UserError: no layer rule matches the parameter.
        """
        name = path.partition("/")[0]
        if name in self.before_blocks:
            return 0
        if name in self.after_blocks:
            return self.num_blocks + 1
        raise UserError(
            f"optim.layer_decay: no layer of model.variant={self.variant!r} contains "
            f"{path}: set optim.layer_decay to 0"
        )

    def resize(
        self,
        params: Mapping,
        source: "NetworkConfig",
        old_grid: tuple[int, int],
        grid: tuple[int, int],
    ) -> Mapping:
        """Resizes parameters for images of another size.

        By default position embeddings with the names of models/positions are resized,
        and all other parameters are returned unchanged.

        Args:
          params: parameters of the network of `source`, a nested dict of arrays.
          source: config that `params` were trained with, of the same class.
          old_grid: rows and columns of patches of `source`.
          grid: rows and columns of patches of this network.

        Raises:
          UserError: the parameters cannot be resized to this grid.
        """
        return positions.resize(params, old_grid, grid)

    def pool_layer(self, params: Mapping, x: jax.Array, *, norm: bool) -> jax.Array:
        """Pools the features of a layer to one vector per image, by default their mean.

        Args:
          params: parameters of the network.
          x: features of `Model.layer_features`, float32: (B, tokens, width), including
            prefix tokens, or (B, rows, columns, width).
          norm: whether to apply a norm after the pooling.
        """
        return x.reshape(len(x), -1, x.shape[-1]).mean(1)

    def check_grid(self) -> None:
        """Raises UserError if the tokens of the encoder are not a grid of patches."""

    @property
    def has_windows(self) -> bool:
        """Whether the network supports `window_attention`."""
        return type(self).window_attention is not NetworkConfig.window_attention

    def window_attention(
        self, module: nn.Module, params: Mapping, images: jax.Array
    ) -> tuple[dict[str, jax.Array], list["BlockWindows"]]:
        """Returns attention within windows; only networks with windows define it.

        Args:
          module: result of `build`.
          params: parameters of the module.
          images: normalised images (B, height, width, channels).

        Returns:
          The outputs of the module, and the attention of each block.
        """
        raise NotImplementedError(f"{type(self).__name__} has no attention in windows")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["patches", "weights"],
    meta_fields=["stage", "block", "shifted", "grid"],
)
@dataclasses.dataclass(frozen=True)
class BlockWindows:
    """Attention of a block within its windows.

    Letters: B images, W windows of M patches, H heads.

    Attributes:
      stage, block: index of the stage, and of the block within the stage.
      shifted: whether the windows are shifted.
      grid: rows and columns of patches of this stage.
      patches: indices in the grid of the patches of each window, (W, M); -1 is padding.
      weights: attention weights of each patch over the patches of its window, (B, W, H,
        M, M), which sum to 1.
    """

    stage: int
    block: int
    shifted: bool
    grid: tuple[int, int]
    patches: Any  # Arrays, or their shapes.
    weights: Any


def read(kind: type[NetworkConfig], given: Mapping[str, object]) -> NetworkConfig:
    """Builds the config of a network, with the sizes of its variant.

    Args:
      kind: dataclass of the config.
      given: `variant` and other keys. Keys without an effect in combination with the
        others, such as `class_token` with `pool="token"`, are ignored.

    Raises:
      UserError: a key is unknown, or a value is out of bounds.
    """
    known = fields.fields(kind)
    values = fields.defaults(kind) | given
    given = {
        name: value
        for name, value in given.items()
        if name not in FORMER_KEYS
        and (name not in known or fields.is_read(known[name], values))
    }
    return loading.complete(kind, given, "model.").sized()


def build(
    config: NetworkConfig, num_classes: int, image_shape: tuple[int, int, int]
) -> tuple[nn.Module, bool, bool]:
    """Builds a network; a user's network is also traced and checked.

    Args:
      config: result of `read`.
      num_classes: number of classes; 0 for no classifier.
      image_shape: (height, width, channels) of the input.

    Returns:
      The module, whether it returns "pre_logits", and whether it has running means.

    Raises:
      UserError: the height or width of images is not a multiple of the patch size, or a
        user's network raises an error or violates `NetworkConfig.build`.
    """
    variant = config.variant
    multiple = config.side_multiple or config.patch_size
    for side, pixels in zip(("height", "width"), image_shape):
        if pixels % multiple:
            raise UserError(
                f"image {side} {pixels} is not a multiple of the patch size {multiple} of "
                f"{variant}: set data.image_size to a multiple, such as "
                f"{max(1, round(pixels / multiple)) * multiple}"
            )
    if not fields.is_custom(variant):
        return config.build(num_classes, image_shape), True, config.has_state
    if taken := _OF_CREATE & {*fields.fields(type(config))}:
        raise UserError(
            f"model.variant={variant!r} has a key {min(taken)!r}, which is an argument of "
            "`models.create` for every network: rename the key"
        )
    with fields.guarded(f"model.variant={variant!r}"):
        module = config.build(num_classes, image_shape)
    if not isinstance(module, nn.Module):
        raise UserError(
            f"model.variant={variant!r}: `build` returned {module!r}: return a Flax module "
            "(flax.linen.Module)"
        )
    with fields.guarded(f"model.variant={variant!r}"):
        how = config.dtype, variant, config.stacked
        names = _check(module, num_classes, image_shape, *how)
    return module, "pre_logits" in names, STATE in shapes(module, image_shape)


@functools.lru_cache(maxsize=16)
def shapes(module: nn.Module, image_shape: tuple[int, int, int]) -> dict:
    """Returns shapes and dtypes of the variables of a module."""
    return jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, *image_shape)))


def trace_once(call: Callable, args: tuple, kwargs: dict, context) -> object:
    """Flax interceptor that calls modules with `repeated = True` by a cached `jit`.

    Equal blocks share one trace, because tracing 40 blocks takes seconds.
    """
    module = context.module
    # Inside the jit the module is the root, without a path.
    if context.method_name != "__call__" or not module.path or kwargs.get("train"):
        return call(*args, **kwargs)
    if not getattr(module, "repeated", False):
        return call(*args, **kwargs)
    unit, variables = module.unbind()
    draws = module.has_rng("dropout")
    rngs = {"dropout": module.make_rng("dropout")} if draws else None
    return _apply(unit.clone(name=None), variables, args, rngs)


@functools.partial(jax.jit, static_argnums=0)
def _apply(
    unit: nn.Module, variables: dict, args: tuple, rngs: dict | None
) -> jax.Array:
    return unit.apply(variables, *args, rngs=rngs)


# Cached, because a command creates a network several times and a trace takes seconds.
@functools.lru_cache(maxsize=16)
def _check(
    module: nn.Module,
    num_classes: int,
    image_shape: tuple[int, int, int],
    dtype: str,
    variant: str,
    stacked: bool,
) -> frozenset[str]:
    """Traces a user's network and returns the names of its outputs.

    Raises:
      UserError: the network has state besides running means, has invalid outputs, or
        does not have a Dense layer "head".
    """
    prefix = f"model.variant={variant!r}: the module of the network"
    variables = shapes(module, image_shape)
    if others := sorted(variables.keys() - {"params", STATE}):
        raise UserError(
            f"{prefix} has {', '.join(others)}: keep the state of a network in the "
            f"collection {STATE!r}, as flax.linen.BatchNorm does"
        )
    if "params" not in variables:
        raise UserError(f"{prefix} has no parameters to train: add a layer")

    def apply(variables, images, key):
        rngs, changes = {"dropout": key}, [STATE]
        return module.apply(variables, images, train=True, rngs=rngs, mutable=changes)

    if stacked:
        variables = {**variables, "params": stacking.stack(variables["params"])}
    images = jax.ShapeDtypeStruct((2, *image_shape), dtype)
    with nn.intercept_methods(trace_once):
        key = jax.random.key(0)
        outputs, _ = jax.eval_shape(apply, variables, images, key)
    needed = "logits" if num_classes else "pre_logits"
    if not isinstance(outputs, Mapping) or needed not in outputs:
        raise UserError(f"{prefix} returned {outputs}: return a dict with {needed!r}")
    for name, width in (("logits", num_classes), ("pre_logits", "width")):
        out = outputs.get(name)
        if out is None:
            continue
        any_width = width == "width" and len(out.shape) == 2
        wanted = (2, out.shape[1] if any_width else width)
        if out.shape != wanted or out.dtype != jnp.float32:
            raise UserError(
                f"{prefix} returned {name!r} of shape {out.shape} and {out.dtype} for "
                f"2 images: make it (2, {width}) and float32"
            )
    if num_classes and "kernel" not in variables["params"].get("head", {}):
        raise UserError(
            f"{prefix} has no Dense layer named 'head', which fine-tuning replaces: "
            "rename its classifier, or use vit_jax.models.layers.classify"
        )
    return frozenset(outputs)
