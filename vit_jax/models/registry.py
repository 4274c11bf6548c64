"""Models as plain functions: what the rest of the code sees of Flax."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import fields, loading
from vit_jax.config.fields import Choice
from vit_jax.errors import UserError
from vit_jax.models import attention as attending
from vit_jax.models import (
    intermediates,
    network,
    posemb,
    resnet,
    rotary,
    stacking,
    variants,
    vit,
)
from vit_jax.models.intermediates import AttentionGradient, Layer
from vit_jax.models.network import BlockWindows, NetworkConfig

# The dataclass of `config.model`, chosen by the variant.
VARIANTS = Choice(
    types=variants.CONFIGS,
    default="B/16",
    text_key="variant",
    patterns=True,
    base=NetworkConfig,
)
Params = dict  # Nested: name to arrays or to further dicts.

# As the deepest Transformers published (DeepNet, arXiv:2203.00555). Blocks are traced
# and compiled one by one, at half a second each and more; under a scan too, since
# parameters are initialised one by one.
MAX_BLOCKS = 1_000


@dataclasses.dataclass(frozen=True)
class Model:
    """A network without its parameters.

    Attributes:
      module: the Flax module; nothing outside this package uses it.
      options: what `create` takes to build it again, defaults included.
      image_shape: (height, width, channels) of its input.
      patch_size: side of what becomes one token (or one of the last features), in pixels.
      encoder_stride: side in pixels of the tokens of `encode`, where patches can be
        edited; 0 for networks without them (ResNets and hybrids, and others).
      representations: whether `apply` returns "pre_logits".
    """

    module: nn.Module
    options: dict
    image_shape: tuple[int, int, int]
    patch_size: int
    encoder_stride: int = 0
    representations: bool = True

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        return tuple(math.ceil(side / self.patch_size) for side in self.image_shape[:2])

    @property
    def has_encoder(self) -> bool:
        """Whether it is a Vision Transformer or a hybrid, which `intermediates` needs."""
        return isinstance(self.module, vit.VisionTransformer)

    @property
    def portable_options(self) -> dict:
        """The options that change results, not those of the machine, as `scan`."""
        keys = fields.fields(VARIANTS.find(self.options["variant"], "model"))
        return {
            name: value
            for name, value in self.options.items()
            if name != "platform" and (name not in keys or keys[name].changes_result)
        }

    @property
    def stacked(self) -> bool:
        """Whether its parameters are in the layout of a scan, see stacking."""
        return self.has_encoder and self.module.scan

    @property
    def prefix_tokens(self) -> tuple[str, ...]:
        """Names of the tokens in front of the patches: "class token", "register 1"."""
        return getattr(self.module, "prefix_tokens", ())

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens in front of the patches."""
        return len(self.prefix_tokens)

    def init(self, key: jax.Array) -> Params:
        """Draws initial parameters, a nested dict of float32 arrays.

        They are the same with and without a scan, which has them stacked.
        """
        images = jnp.zeros((1, *self.image_shape))
        params = self.module.init(key, images)["params"]
        return stacking.stack(params) if self.stacked else params

    def apply(
        self,
        params: Params,
        images: jax.Array,
        *,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Classifies images.

        Args:
          params: as from `init`.
          images: (batch, height, width, channels), normalised floats.
          train: whether dropout and stochastic depth act.
          key: of their draws; needed with `train`.

        Returns:
          "logits" (batch, classes), unless there are no classes, and "pre_logits"
          (batch, width) if it has `representations`, float32.
        """
        rngs = {"dropout": key} if train else None
        return self.module.apply({"params": params}, images, train=train, rngs=rngs)

    def encode(
        self,
        params: Params,
        images: jax.Array,
        *,
        train: bool = False,
        key: jax.Array | None = None,
        edit_patches: Callable[[jax.Array], jax.Array] | None = None,
        visible: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the tokens of the encoder; for networks with an `encoder_stride`.

        Args:
          params, images, train, key: as of `apply`.
          edit_patches: changes the patch embeddings (batch, patches, width), before
            the positions are added.
          visible: indices (batch, V) of the patches that the encoder sees; all if
            None. With `has_encoder` and positions at the stem alone.

        Returns:
          (batch, prefix tokens + patches that are seen, width); of a network that merges
          patches, those at its end.
        """
        given = {"visible": visible, "edit_patches": edit_patches}
        more = {name: value for name, value in given.items() if value is not None}
        return self.module.apply(
            {"params": params},
            images,
            train=train,
            classify=False,
            rngs={"dropout": key} if train else None,
            **more,
        )

    @property
    def has_patch_features(self) -> bool:
        """Whether there are `patch_features`: not in every network of a user."""
        return "classify" in inspect.signature(type(self.module).__call__).parameters

    def patch_features(self, params: Params, images: jax.Array) -> jax.Array:
        """Returns the features of the patches after the last norm, without prefix tokens.

        Of a network that merges patches they are those at its end, of a ResNet the places
        of the last stage.

        Args:
          params, images: as of `apply`.

        Returns:
          (batch, rows, columns, width), float32.

        Raises:
          UserError: the module of a user's network takes no `classify`.
        """
        if not self.has_patch_features:
            raise UserError(
                f"{self.options['variant']} has no features of patches: its module takes "
                "no argument `classify`; docs/extending.md says what it does"
            )
        x = self.encode(params, images)
        if self.has_encoder:
            x = x[:, self.num_prefix_tokens :]
        if x.ndim == 3:  # Patches row by row.
            merged = -(-self.image_shape[0] // (self.encoder_stride or 1))
            rows = self.grid[0] if x.shape[1] == math.prod(self.grid) else merged
            x = x.reshape(len(x), rows, -1, x.shape[-1])
        return x.astype(jnp.float32)

    def at_size(self, image_size: Sequence[int]) -> "Model":
        """Returns the same network for images of another height and width.

        Raises:
          UserError: a side is not a multiple of the patch.
        """
        return create(**{**self.options, "image_size": tuple(image_size)})

    def resize(self, params: Params, source: "Model") -> Params:
        """Returns parameters of a network of the same config class for this grid.

        Args:
          params: of `source`.
          source: of another number of patches, perhaps; of any other network they are
            returned as they are, as those of ViTs, hybrids and ResNets.

        Raises:
          UserError: the network has no parameters for that grid.
        """
        kind, theirs = (
            VARIANTS.find(m.options["variant"], "model") for m in (self, source)
        )
        if kind is not theirs or not issubclass(kind, NetworkConfig):
            return params
        configs = self._config(), source._config()
        return configs[0].resize(params, configs[1], source.grid, self.grid)

    def _config(self) -> NetworkConfig:
        """Returns the config, of a network that has one."""
        kind = VARIANTS.find(self.options["variant"], "model")
        stated = {name: self.options[name] for name in fields.fields(kind)}
        return loading.complete(kind, stated, "model.")

    def resize_positions(self, params: Params, to: "Model") -> Params:
        """Returns the parameters for the network at another size of image.

        Position embeddings are resized as `options["posemb_resize"]` says; it can be
        traced and differentiated.

        Args:
          params: as from `init`.
          to: of `at_size`.

        Raises:
          UserError: relative positions, of which there is one for each offset; or a
            network of another kind with parameters for each place, as an MLP-Mixer.
        """
        if not self.has_encoder:
            resized = to.resize(params, self)
            shapes = (jax.eval_shape(m.init, jax.random.key(0)) for m in (self, to))
            if resized is params and len({str(shape) for shape in shapes}) > 1:
                raise UserError(
                    f"model.variant={self.options['variant']!r} has parameters for one "
                    "size of image alone: take another variant"
                )
            return resized
        if self.module.posemb == "relative":
            raise UserError(
                "model.posemb='relative' has positions for one size of image alone: take "
                "'learned'"
            )
        return posemb.resize_in_params(
            params,
            self.grid,
            to.grid,
            num_prefix_tokens=self.num_prefix_tokens - self.module.num_register_tokens,
            method=self.module.posemb_resize,
        )

    @property
    def has_windows(self) -> bool:
        """Whether there is `window_attention`."""
        kind = VARIANTS.find(self.options["variant"], "model")
        base = NetworkConfig.window_attention
        return getattr(kind, "window_attention", base) is not base

    def window_attention(
        self, params: Params, images: jax.Array
    ) -> tuple[dict[str, jax.Array], list[BlockWindows]]:
        """Returns outputs and attention, see `NetworkConfig.window_attention`."""
        return self._config().window_attention(self.module, params, images)

    def intermediates(self, params: Params, images: jax.Array) -> Iterator[Layer]:
        """Yields attention and tokens of each block, see intermediates.layers."""
        return intermediates.layers(self.module, params, images)

    def classify_tokens(
        self, params: Params, tokens: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns the outputs of `apply`, from the last tokens of `intermediates`."""
        return intermediates.classify_tokens(self.module, params, tokens)

    def gradients(
        self, params: Params, images: jax.Array, classes: jax.Array
    ) -> tuple[jax.Array, Iterator[AttentionGradient]]:
        """Differentiates logits by attention, see intermediates.attention_gradients."""
        return intermediates.attention_gradients(self.module, params, images, classes)


def create(
    variant: str,
    *,
    num_classes: int,
    image_size: Sequence[int] = (224, 224),
    channels: int = 3,
    platform: str = "",
    **options,
) -> Model:
    """Builds a model by name.

    Args:
      variant: such as "B/16", "R50+B/16" or "R50x1"; `variants.NAMES` has them all. Or
        "module:Config", a `NetworkConfig` of a user's module.
      num_classes: width of the classifier; 0 is none.
      image_size: height and width of the input, in pixels.
      channels: of the input.
      platform: where it will run, "cpu", "gpu" or "tpu"; "" is JAX's default backend.
      **options: `attention_impl`, one of attention.NAMES; `width`, `depth`, `num_heads`
        and `mlp_dim` of the encoder, `stage_depths` and `stem_width` of the ResNet,
        which replace the variant's numbers unless 0 or (0,); and the further attributes
        of `vit.VisionTransformer` or `resnet.ResNet`. Of other networks, the keys of
        their config.

    Returns:
      The model.

    Raises:
      UserError: unknown variant or option, an image side that is not a multiple of the
        patch, or numbers that do not fit each other.
    """
    kind = VARIANTS.find(variant, "model")
    if not issubclass(kind, NetworkConfig):
        return _create_published(
            variant, options, num_classes, tuple(image_size), channels, platform
        )
    data = {
        "num_classes": num_classes,
        "image_size": tuple(image_size),
        "channels": channels,
    }
    built = network.build(kind, {"variant": variant, **options}, **data)
    return Model(
        built.module,
        built.options | data | {"platform": platform},
        (*image_size, channels),
        built.patch_size,
        built.encoder_stride,
        built.representations,
    )


def _create_published(
    variant: str,
    options: dict,
    num_classes: int,
    image_size: tuple[int, int],
    channels: int,
    platform: str,
) -> Model:
    """Builds a Vision Transformer, a hybrid or a ResNet; arguments as of `create`.

    They take more than their configs have: what published files need.
    """
    parsed = variants.parse(variant)
    options = _numbers(parsed, options) | {"num_classes": num_classes}
    if options.get("depth", 0) + sum(options.get("stage_depths", ())) > MAX_BLOCKS:
        image = {"image_size": image_size, "channels": channels}
        raise UserError(_too_deep(variant, options, image))
    patch = parsed.patch_size
    if parsed.resnet:
        _check_stem(options["stage_depths"], options["stem_width"])
        patch *= 4 * 2 ** max(0, len(options["stage_depths"]) - 1)
    if parsed.size:
        network.check_sides(variant, image_size, patch)
        build = functools.partial(vit.VisionTransformer, patch_size=parsed.patch_size)
        known = _fields(vit.VisionTransformer) - {"patch_size"}
        known -= {"flatten"}  # It follows from the platform.
        known -= set() if parsed.resnet else {"stage_depths", "stem_width"}
    else:
        build, known = resnet.ResNet, _fields(resnet.ResNet)
    if unknown := sorted(options.keys() - known):
        raise UserError(
            f"model option {unknown[0]}={options[unknown[0]]!r} is not one of "
            f"{variant}; it takes {', '.join(sorted(known))}"
        )
    attention_impl = options.pop("attention_impl", "auto")
    module = build(**options)
    used = {name: getattr(module, name) for name in sorted(known)}
    used |= {"variant": variant, "image_size": image_size, "channels": channels}
    if parsed.size:
        used |= {"attention_impl": attention_impl, "platform": platform}
        _check_encoder(module)
        tokens = (
            math.prod(side // patch for side in image_size) + module.num_prefix_tokens
        )
        module = _placed(
            module, attention_impl, platform or jax.default_backend(), tokens
        )
    stride = patch if parsed.size and not parsed.resnet else 0
    return Model(module, used, (*image_size, channels), patch, stride)


def names() -> tuple[str, ...]:
    """Returns every variant that is published."""
    kinds = [k for k in variants.CONFIGS.values() if issubclass(k, NetworkConfig)]
    return variants.NAMES + sum((kind.names for kind in kinds), ())


def side_multiple(variant: str) -> int:
    """Returns what image sides must be multiples of; 1 if any will do.

    Raises:
      UserError: unknown variant.
    """
    kind = VARIANTS.find(variant, "model")
    if issubclass(kind, NetworkConfig):
        return loading.complete(kind, {"variant": variant}, "model.").patch_size
    if variants.parse(variant).size is None:  # A ResNet takes any image.
        return 1
    # No pixels are a multiple of every patch.
    return create(variant, num_classes=0, image_size=(0, 0)).patch_size


def _too_deep(variant: str, options: dict, image: dict) -> str:
    """Returns what a network of too many blocks would take."""
    from vit_jax.models import cost  # It measures what is created here.

    keys = {"depth": "model.depth", "stage_depths": "model.stage_depths"}
    stated = ", ".join(f"{keys[k]}={options[k]}" for k in keys if k in options)
    create_ = functools.partial(create, variant, **image)
    params, macs = cost.at_any_depth(create_, options)
    return (
        f"{stated}: more than {MAX_BLOCKS:,} blocks are not built, as each takes half a "
        f"second and more to trace and compile; the network would have {params:,} parameters "
        f"({4 * params / 1e9:,.1f} GB, {16 * params / 1e9:,.1f} GB with gradients and "
        f"Adam's moments) and take {macs / 1e9:,.1f} GMACs an image: lower "
        f"{' or '.join(keys[k] for k in keys if k in options)}"
    )


def _placed(
    module: vit.VisionTransformer, attention_impl: str, platform: str, tokens: int
) -> vit.VisionTransformer:
    """Returns the network as it is best computed on a platform."""
    implementation = attending.choose(
        attention_impl,
        platform=platform,
        dtype=module.dtype,
        tokens=tokens,
        head_width=module.width // module.num_heads,
        relative=_relative(module),
    )
    return module.clone(attention_impl=implementation, flatten=platform == "cpu")


def _relative(module: vit.VisionTransformer) -> str:
    """Returns the option that adds to the logits of attention, "" if none does."""
    if module.posemb == "relative":
        return "model.posemb='relative'"
    if module.relative_bias != "none":
        return f"model.relative_bias={module.relative_bias!r}"
    return ""


def _numbers(parsed: variants.Variant, options: dict) -> dict:
    """Returns the options with the variant's numbers where they state none."""
    numbers = {}
    for part in filter(None, (parsed.size, parsed.resnet)):
        numbers |= dataclasses.asdict(part)
    stated = {k: v for k, v in options.items() if k not in numbers or np.any(v)}
    numbers |= stated
    if "stage_depths" in numbers:
        numbers["stage_depths"] = tuple(
            numbers["stage_depths"]
        )  # From JSON it is a list.
    return numbers


def _fields(module: type[nn.Module]) -> set[str]:
    return {f.name for f in dataclasses.fields(module)} - {"parent", "name"}


def _check_stem(stage_depths: tuple[int, ...], stem_width: int) -> None:
    if any(count < 1 for count in stage_depths):
        raise UserError(
            f"model.stage_depths={stage_depths} must be at least 1 unit a stage"
        )
    if stem_width % 32:
        raise UserError(
            f"model.stem_width={stem_width} is not a multiple of the 32 groups of "
            "GroupNorm: change model.stem_width"
        )


def _check_encoder(module: vit.VisionTransformer) -> None:
    """Raises UserError unless the options fit each other."""
    for name, known in (
        ("pool", vit.POOLS),
        ("activation", vit.MLP_ACTIVATIONS),
        ("posemb", vit.POSITION_KINDS),
        ("posemb_placement", vit.POSITION_PLACES),
        ("posemb_resize", posemb.RESIZE_METHODS),
        ("remat_policy", stacking.REMAT_POLICIES),
        ("relative_bias", vit.BIAS_PLACES),
        ("rope", rotary.KINDS),
    ):
        if getattr(module, name) not in known:
            raise UserError(
                f"model.{name}={getattr(module, name)!r} is not one of "
                f"{', '.join(known)}"
            )
    if module.width % module.num_heads:
        raise UserError(
            f"model width {module.width} does not divide into "
            f"{module.num_heads} heads: change model.width or model.num_heads"
        )
    if "2d" in module.posemb and module.width % 4:
        raise UserError(
            f"model width {module.width} is not a multiple of 4, as "
            f"posemb={module.posemb} needs: change model.width or model.posemb"
        )
    if module.fc_norm and not module.final_norm:
        raise UserError(
            "model.fc_norm=True is where the final norm is, and model.final_norm=False "
            "says that there is none: set one of them to the other value"
        )
    if module.pool == "token_gap" and module.fc_norm:
        raise UserError(
            "model.fc_norm=True needs another pool than token_gap, which has no single "
            "token to normalise: set model.fc_norm=False"
        )
    if module.rope != "none" and module.width // module.num_heads % 4:
        raise UserError(
            f"heads of {module.width // module.num_heads} features are not a multiple of "
            f"4, as rope={module.rope} needs: change model.num_heads or model.rope"
        )
    if module.posemb == "relative" and module.posemb_placement == "stem":
        raise UserError(
            "model.posemb_placement='stem' has no meaning with posemb=relative, which acts in "
            "the attention of each layer: set it to 'every' or 'shared'"
        )
    if module.distillation and module.pool != "token":
        raise UserError(
            f"model.distillation=True needs pool=token, not {module.pool}: its token "
            "stands beside the class token"
        )
