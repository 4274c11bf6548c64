"""The protocol of a network: a config dataclass that builds a Flax module."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.config import fields, loading
from vit_jax.errors import UserError
from vit_jax.models import positions, stacking
from vit_jax.models.layers import MODEL_AXES
from vit_jax.models.variants import FORMER_KEYS, ModelConfig

STATE = "batch_stats"  # Flax's collection of running means, and their name in `Params`.
# Arguments of `models.create` beside the keys of a network.
_OF_CREATE = {"num_classes", "image_size", "channels", "platform"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig(ModelConfig):
    """Base of the keys of `config.model`.

    A subclass may replace each attribute by a key, a constant or a property.

    Attributes:
      patch_size: side of a token in pixels.
      side_multiple: number that image sides are multiples of; None is `patch_size`.
      encoder_stride: side in pixels of the tokens that the module returns if called with
        `classify=False` and `edit_patches`, see `Model.encode`; 0 if it takes neither.
      no_sequences: why the module does not take images as sequences of patches
        (patches.py), for messages; "" if it does.
      has_encoder: whether it is a Vision Transformer, see intermediates.py.
      stacked: whether parameters are in the layout of a scan, see stacking.py.
      prefix_tokens: names of the tokens before the patches.
      num_blocks: number of blocks that `layer_of` distinguishes.
      num_layers: number of layers whose features the module keeps, see
        layer_features.py; 0 if it keeps none.
      before_blocks, after_blocks: first names of parameters before and after all blocks.
      model_axes: pairs of a regular expression of parameter paths and the mesh axes of
        the leading dimensions of these parameters, for sharding over "model".
      names: published variants.
    """

    patch_size: ClassVar[int] = 1
    side_multiple: ClassVar[int | None] = None
    encoder_stride: ClassVar[int] = 0
    has_encoder: ClassVar[bool] = False
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
        return f"model.variant={self.variant!r}, whose tokens are not separate patches"

    def sized(self) -> "NetworkConfig":
        """Returns the config whose keys that are 0 have the variant's numbers instead."""
        return self

    def build(self, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        """Builds the network.

        Args:
          num_classes: width of the classifier; 0 for none.
          image_shape: (height, width, channels) of the input.

        Returns:
          A Flax module, called as `module(images, train=...)` with images (B, height,
          width, channels), normalised, in the dtype of the config. If `train`, it may
          use the rng "dropout" and change the collection "batch_stats", its only state.
          It returns a dict, float32: "logits" (B, num_classes), unless `num_classes` is
          0, from a `Dense` named "head"; and "pre_logits" (B, width), the features for
          few-shot, k-NN and linear evaluations, optional if there are classes.
        """
        raise NotImplementedError(
            f"{type(self).__name__} lacks build(self, num_classes, image_shape)"
        )

    def reader(self, module: nn.Module, images: Any) -> nn.Module:
        """Returns the module that takes these images, with the parameters of `module`.

        Args:
          module: output of `build`.
          images: an array, or images of any size (patches.py).

        Raises:
          UserError: the network does not take images of any size.
        """
        if hasattr(images, "shape"):
            return module
        raise UserError(
            f"images of any size with {self.no_sequences}: change it, or give images of "
            "one size"
        )

    def check_rows(self, rows: int, devices: int, platform: str) -> str:
        """Checks the number of images that pass through the network at once in training.

        Args:
          rows: number of images, or of views of images.
          devices: number of devices that share them.
          platform: platform of the devices.

        Returns:
          What is computed otherwise than the config asks for, as "..., so no branch is
          dropped", for a line about these rows; "" if nothing is.

        Raises:
          UserError: the devices cannot share them.
        """
        return ""

    def layer_of(self, path: str) -> int | range:
        """Returns the layer of a parameter, for layer decay.

        Args:
          path: path as in checkpoints,
            "Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel".

        Returns:
          0 before the blocks, positions included; i + 1 for block i, and for inputs added
          before or within it; `num_blocks + 1` after the blocks. A range for a parameter
          with a leading axis of blocks.

        Raises:
          UserError: the network has no such parameter.
        """
        name = path.partition("/")[0]
        if name in self.before_blocks:
            return 0
        if name in self.after_blocks:
            return self.num_blocks + 1
        raise UserError(
            f"optim.layer_decay: {path} belongs to no layer of model.variant="
            f"{self.variant!r}: set it to 0"
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
        and all other parameters stay unchanged.

        Args:
          params: parameters of the network of `source`, a nested dict of arrays.
          source: config of this class, with which `params` were trained.
          old_grid: patches down and across of `source`, of `patch_size`.
          grid: patches down and across of this config.

        Raises:
          UserError: parameters cannot be resized to that grid.
        """
        return positions.resize(params, old_grid, grid)

    def pool_layer(self, params: Mapping, x: jax.Array, *, norm: bool) -> jax.Array:
        """Returns one vector per image of the features of a layer, by default their mean.

        Args:
          params: parameters of the network.
          x: features of `Model.layer_features`, (B, tokens, width), prefix tokens
            included, or (B, rows, columns, width), float32.
          norm: whether a norm after the pooling is applied.
        """
        return x.reshape(len(x), -1, x.shape[-1]).mean(1)

    def check_grid(self) -> None:
        """Raises UserError if the tokens of the encoder do not stand in a grid."""

    @property
    def has_windows(self) -> bool:
        """Whether there is `window_attention`."""
        return type(self).window_attention is not NetworkConfig.window_attention

    def window_attention(
        self, module: nn.Module, params: Mapping, images: jax.Array
    ) -> tuple[dict[str, jax.Array], list["BlockWindows"]]:
        """Returns attention within windows; only networks with windows define it.

        Args:
          module: output of `build`.
          params: parameters of the module.
          images: (B, height, width, channels), normalised.

        Returns:
          The module's outputs, and the attention of each block.
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

    B images, W windows of M patches, H heads.

    Attributes:
      stage, block: index of the stage, and of the block within the stage.
      shifted: whether the windows are shifted.
      grid: patches of this stage, down and across.
      patches: (W, M), indices in the grid of the patches of a window; -1 is padding.
      weights: (B, W, H, M, M), attention of each patch over all, of sum 1.
    """

    stage: int
    block: int
    shifted: bool
    grid: tuple[int, int]
    patches: Any  # Arrays, or their shapes.
    weights: Any


def read(kind: type[NetworkConfig], given: Mapping[str, object]) -> NetworkConfig:
    """Builds the config of a network, with its variant's numbers.

    Args:
      kind: dataclass of the config.
      given: `variant` and other keys. Keys that have no effect beside the others, as
        `class_token` with `pool="token"`, are ignored.

    Raises:
      UserError: a key is unknown, or a value out of its bounds.
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
      config: output of `read`.
      num_classes: width of the classifier; 0 for none.
      image_shape: (height, width, channels) of the input.

    Returns:
      The module, whether it returns "pre_logits", and whether it has running means.

    Raises:
      UserError: an image side is not a multiple of the patch, or a user's network raises
        or breaks the contract of `NetworkConfig.build`.
    """
    variant = config.variant
    multiple = config.side_multiple or config.patch_size
    for side, pixels in zip(("height", "width"), image_shape):
        if pixels % multiple:
            raise UserError(
                f"image {side} {pixels} is not a multiple of the patch {multiple} of "
                f"{variant}: set data.image_size to one, such as "
                f"{max(1, round(pixels / multiple)) * multiple}"
            )
    if not fields.is_custom(variant):
        return config.build(num_classes, image_shape), True, False
    if taken := _OF_CREATE & {*fields.fields(type(config))}:
        raise UserError(
            f"model.variant={variant!r} has a key {min(taken)!r}, which "
            "`models.create` takes for every network: rename the key"
        )
    with fields.guarded(f"model.variant={variant!r}"):
        module = config.build(num_classes, image_shape)
    if not isinstance(module, nn.Module):
        raise UserError(
            f"model.variant={variant!r}: its `build` returned {module!r}: return a Flax "
            "module (flax.linen.Module)"
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
    """Calls modules with `repeated = True` through a cached `jit`: a Flax interceptor.

    Equal blocks share one trace; tracing 40 blocks takes seconds.
    """
    module = context.module
    # A unit without a path is at the root, which is the case inside the jit.
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
      UserError: it has state beside running means, other outputs, or no Dense "head".
    """
    prefix = f"model.variant={variant!r}: its module"
    variables = shapes(module, image_shape)
    if others := sorted(variables.keys() - {"params", STATE}):
        raise UserError(
            f"{prefix} has {', '.join(others)}: keep the state of a network in the "
            f"collection {STATE!r}, as flax.linen.BatchNorm does"
        )
    if "params" not in variables:
        raise UserError(f"{prefix} has no parameters: there is nothing to train")

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
