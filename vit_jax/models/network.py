"""The protocol of a network: a config dataclass that builds a Flax module."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.config import fields, loading
from vit_jax.errors import UserError
from vit_jax.models import posemb
from vit_jax.models.layers import MODEL_AXES
from vit_jax.models.variants import ModelConfig

STATE = (
    "batch_stats"  # Flax's collection of running means, also their name in `Params`.
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig(ModelConfig):
    """What `config.model` states of a network; the base of its keys.

    Attributes:
      patch_size: side in pixels of what becomes a token; this and the others may be
        replaced by a key of the name, a constant or a property.
      side_multiple: what the sides of images must be multiples of; None: of the patch.
      encoder_stride: side in pixels of the tokens that its module returns if called with
        `classify=False`, see `Model.encode`, and then also with `edit_patches`; 0 if it
        takes neither.
      has_encoder: whether it is a Vision Transformer, which intermediates.py looks into.
      stacked: whether its parameters are in the layout of a scan, see stacking.py.
      prefix_tokens: names of the tokens before those of the patches.
      num_blocks: blocks that `layer_of` tells apart; 0 if it knows none.
      before_blocks, after_blocks: first names of the parameters that make tokens of an
        image, and of those that come after all blocks.
      model_axes: regular expressions of paths of parameters, each with the axes of the
        mesh that split theirs over "model", the first ones of each.
      names: the variants that are published.
    """

    patch_size: ClassVar[int] = 1
    side_multiple: ClassVar[int | None] = None
    encoder_stride: ClassVar[int] = 0
    has_encoder: ClassVar[bool] = False
    stacked: ClassVar[bool] = False
    prefix_tokens: ClassVar[tuple[str, ...]] = ()
    num_blocks: ClassVar[int] = 0
    before_blocks: ClassVar[tuple[str, ...]] = ()
    after_blocks: ClassVar[tuple[str, ...]] = ()
    model_axes: ClassVar[tuple] = MODEL_AXES
    names: ClassVar[tuple[str, ...]] = ()

    def sized(self) -> "NetworkConfig":
        """Returns the config with the variant's numbers where it states none."""
        return self

    def build(self, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        """Returns the network.

        Args:
          num_classes: width of the classifier; 0 is none.
          image_shape: (height, width, channels) of the input.

        Returns:
          A Flax module, called as `module(images, train=...)` with images (B, height,
          width, channels), normalised, in the dtype of the config. If `train`, it may
          draw from the rng "dropout" and change its collection "batch_stats", its only
          state. It returns a dict of "logits" (B, num_classes), unless that is 0, from a
          `Dense` named "head", and of "pre_logits" (B, width), the features for
          few-shot, k-NN and linear evaluations, which it may leave out if there are
          classes; both float32.
        """
        raise NotImplementedError(
            f"{type(self).__name__} lacks build(self, num_classes, image_shape)"
        )

    def layer_of(self, path: str) -> int | range:
        """Returns the layer of a parameter, which layer decay goes by.

        Args:
          path: as in checkpoints, "Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel".

        Returns:
          0 of what makes tokens of an image, their positions included; i + 1 of block i,
          and of what is added before or within it; `num_blocks + 1` of all that comes
          after the blocks. A range for a parameter with a leading axis of blocks.

        Raises:
          UserError: it is none of the network's.
        """
        name = path.partition("/")[0]
        if name in self.before_blocks:
            return 0
        if name in self.after_blocks:
            return self.num_blocks + 1
        raise UserError(
            f"optim.layer_decay: {path} is of no layer of model.variant={self.variant!r}: "
            "set it to 0"
        )

    def resize(
        self,
        params: Mapping,
        source: "NetworkConfig",
        old_grid: tuple[int, int],
        grid: tuple[int, int],
    ) -> Mapping:
        """Returns parameters for images of another size, as fine-tuning begins with.

        By default position embeddings by the names of models/posemb.py are resized, and
        all others stay as they are.

        Args:
          params: of the network of `source` at `old_grid`, a nested dict of arrays.
          source: another config of this class.
          old_grid: its patches down and across, of `patch_size`.
          grid: those of the network of this config.

        Raises:
          UserError: there are none for that grid.
        """
        return posemb.resize_in_params(params, old_grid, grid)

    def window_attention(
        self, module: nn.Module, params: Mapping, images: jax.Array
    ) -> tuple[dict[str, jax.Array], list["BlockWindows"]]:
        """Returns attention within windows, for the explorer and for figures.

        A network that has none leaves this method as it is.

        Args:
          module: of `build`.
          params: its parameters.
          images: (B, height, width, channels), normalised.

        Returns:
          What the module returns for the images, and the attention of each block.
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
      stage, block: from 0, the block within its stage.
      shifted: whether the windows are.
      grid: patches down and across, each as long as two of the stage before.
      patches: (W, M), the number in the grid of each patch of a window; -1 is padding.
      weights: (B, W, H, M, M), from each patch to each, of sum 1.
    """

    stage: int
    block: int
    shifted: bool
    grid: tuple[int, int]
    patches: Any  # Arrays, or their shapes.
    weights: Any


def read(kind: type[NetworkConfig], stated: Mapping[str, object]) -> NetworkConfig:
    """Returns the config of a network, its variant's numbers included.

    Args:
      kind: dataclass of the config.
      stated: `variant`, and keys of the config. Those that others leave unread, as
        `class_token` with `pool="token"`, change nothing.

    Raises:
      UserError: unknown key, or value out of its bounds.
    """
    known = fields.fields(kind)
    values = fields.defaults(kind) | stated
    stated = {
        name: value
        for name, value in stated.items()
        if name not in known or fields.is_read(known[name], values)
    }
    return loading.complete(kind, stated, "model.").sized()


def build(
    config: NetworkConfig, num_classes: int, image_shape: tuple[int, int, int]
) -> tuple[nn.Module, bool, bool]:
    """Builds a network; one of a user's is traced to see what it returns.

    Args:
      config: of `read`.
      num_classes: width of the classifier; 0 is none.
      image_shape: (height, width, channels) of the input.

    Returns:
      The module, whether it returns "pre_logits", and whether it has a state.

    Raises:
      UserError: an image side that is not a multiple of the patch, the network's own code
        raised, or it is not as `NetworkConfig.build` says.
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
    with fields.guarded(f"model.variant={variant!r}"):
        module = config.build(num_classes, image_shape)
    if not isinstance(module, nn.Module):
        raise UserError(
            f"model.variant={variant!r}: its `build` returned {module!r}: return a Flax "
            "module (flax.linen.Module)"
        )
    with fields.guarded(f"model.variant={variant!r}"):
        names = _check(module, num_classes, image_shape, config.dtype, variant)
    return module, "pre_logits" in names, STATE in shapes(module, image_shape)


@functools.lru_cache(maxsize=16)
def shapes(module: nn.Module, image_shape: tuple[int, int, int]) -> dict:
    """Returns what a module's `init` makes for images, without contents."""
    return jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, *image_shape)))


def trace_once(call: Callable, args: tuple, kwargs: dict, context) -> object:
    """Replaces a repeated unit by a cached `jit` of itself: an interceptor of Flax's methods.

    Tracing a model of 40 blocks takes seconds; equal blocks share one trace. The class of
    a unit says that it is one by `repeated = True`.
    """
    module = context.module
    # A unit at the root (it has no path) is the one inside the jit.
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


# A network is created several times in a command, and a trace may take seconds.
@functools.lru_cache(maxsize=16)
def _check(
    module: nn.Module,
    num_classes: int,
    image_shape: tuple[int, int, int],
    dtype: str,
    variant: str,
) -> frozenset[str]:
    """Traces a network and returns the names of its outputs.

    Raises:
      UserError: it has another state than running means, no classifier named "head", or
        other outputs.
    """
    said = f"model.variant={variant!r}: its module"
    variables = shapes(module, image_shape)
    if others := sorted(variables.keys() - {"params", STATE}):
        raise UserError(
            f"{said} has {', '.join(others)}: the state of a network is in its collection "
            f"{STATE!r}, as that of flax.linen.BatchNorm"
        )
    if "params" not in variables:
        raise UserError(f"{said} has no parameters: there is nothing to train")

    def apply(variables, images, key):
        rngs, changes = {"dropout": key}, [STATE]
        return module.apply(variables, images, train=True, rngs=rngs, mutable=changes)

    images = jax.ShapeDtypeStruct((2, *image_shape), dtype)
    with nn.intercept_methods(trace_once):
        key = jax.random.key(0)
        outputs, _ = jax.eval_shape(apply, variables, images, key)
    needed = "logits" if num_classes else "pre_logits"
    if not isinstance(outputs, Mapping) or needed not in outputs:
        raise UserError(f"{said} returned {outputs}: return a dict with {needed!r}")
    for name, wanted in (("logits", (2, num_classes)), ("pre_logits", (2, "width"))):
        found = outputs.get(name)
        if found is None:
            continue
        shape = (*found.shape[:1], "width") if name == "pre_logits" else found.shape
        if len(found.shape) != 2 or shape != wanted or found.dtype != jnp.float32:
            raise UserError(
                f"{said} returned {name!r} of shape {found.shape} and {found.dtype} for "
                f"2 images: make it {_shape(wanted)} and float32"
            )
    if num_classes and "kernel" not in variables["params"].get("head", {}):
        raise UserError(
            f"{said} has no Dense layer named 'head', which is what fine-tuning replaces: "
            "name its classifier so, as vit_jax.models.layers.classify does"
        )
    return frozenset(outputs)


def _shape(sizes: Sequence[object]) -> str:
    return f"({', '.join(map(str, sizes))})"
