"""Networks by name, with plain functions of parameters instead of Flax modules."""

import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import fields
from vit_jax.errors import UserError
from vit_jax.models import initializers, layer_features, network, stacking, variants
from vit_jax.models.network import STATE, NetworkConfig
from vit_jax.models.patches import PatchSequences
from vit_jax.models.variants import CONFIGS

# Images of one size, or of any size.
Images = jax.Array | np.ndarray | PatchSequences
# Nested dicts of arrays. Running means of a network, such as those of BatchNorm, are
# under the name STATE.
Params = dict


def _with_its_precision(method: Callable) -> Callable:
    """Returns a method whose products are computed as the model's config says."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        with self.config.matmul_precision():
            return method(self, *args, **kwargs)

    return call


@dataclasses.dataclass(frozen=True)
class Model:
    """A network without its parameters.

    Attributes:
      config: keys of the config section `model`.
      num_classes: number of classes; 0 for no classifier.
      image_shape: (height, width, channels) of the input.
      module: Flax module, used only inside this package.
      representations: whether `apply` returns "pre_logits".
      stateful: whether there are running means, which `apply_and_update` updates.
    """

    config: NetworkConfig
    num_classes: int
    image_shape: tuple[int, int, int]
    module: nn.Module
    representations: bool
    stateful: bool

    @property
    def options(self) -> dict:
        """The arguments of `create` for this network, including defaults."""
        return {
            **{
                name: getattr(self.config, name)
                for name in fields.fields(type(self.config))
            },
            "num_classes": self.num_classes,
            "image_size": self.image_shape[:2],
            "channels": self.image_shape[2],
            "platform": self.config.platform,
        }

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of rows and columns of patches."""
        patch = self.config.patch_size
        return tuple(math.ceil(side / patch) for side in self.image_shape[:2])

    @property
    def portable_options(self) -> dict:
        """The options that change results, without those of a machine like `scan`."""
        keys = fields.fields(type(self.config))
        return {
            name: value
            for name, value in self.options.items()
            if name != "platform" and (name not in keys or keys[name].changes_result)
        }

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches."""
        return len(self.config.prefix_tokens)

    def init(self, key: jax.Array) -> Params:
        """Returns random initial parameters, a nested dict of float32 arrays.

        With a scan the values are the same, but stacked.
        """
        images = jnp.zeros((1, *self.image_shape))
        return self._params(self.initial(self.module.init(key, images)))

    def initial(self, variables: dict) -> dict:
        """Returns initial variables of `module` as `apply` of the module needs them.

        Last kernels of branches are scaled, and blocks get the layout of a scan.
        """
        params = initializers.scale_branches(variables["params"], self.config)
        return {**variables, "params": self._stack(params)}

    @property
    def shapes(self) -> Params:
        """Shapes and dtypes of the output of `init`."""
        variables = network.shapes(self.module, self.image_shape)
        return self._params({**variables, "params": self._stack(variables["params"])})

    def _stack(self, params: Params) -> Params:
        return stacking.stack(params) if self.config.stacked else params

    def _params(self, variables: dict) -> Params:
        params = variables["params"]
        return {**params, STATE: variables[STATE]} if self.stateful else params

    @_with_its_precision
    def apply(
        self,
        params: Params,
        images: Images,
        *,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Classifies images.

        Parameters and images are cast to the dtype of the computation, `config.dtype`.
        A warning is logged if this dtype has more bits than that of the parameters.

        Args:
          params: parameters, see `init`.
          images: normalised images, float (batch, height, width, channels); or
            sequences of patches, see patches.py, unless `config.no_sequences` is set.
          train: whether dropout and stochastic depth are active.
          key: random key, needed with `train`.

        Returns:
          A dict of float32 arrays: "logits" (batch, num_classes), unless `num_classes`
          is 0, and "pre_logits" (batch, width) if `representations` is True.
        """
        self.warn_of_fewer_bits(params, images)
        rngs = {"dropout": key} if train else None
        if self.stateful and train:
            return self.apply_and_update(params, images, key)[0]
        module = self.config.reader(self.module, images)
        return module.apply(self.variables(params), images, train=train, rngs=rngs)

    @_with_its_precision
    def apply_and_update(
        self, params: Params, images: Images, key: jax.Array
    ) -> tuple[dict[str, jax.Array], Params]:
        """Classifies images in training, and updates the running means of the network.

        Args:
          params, images, key: see `apply`.

        Returns:
          The outputs of `apply`, and the new value of `params[STATE]`, which is {}
          unless the network is `stateful`.
        """
        if not self.stateful:
            return self.apply(params, images, train=True, key=key), {}
        outputs, changed = self.config.reader(self.module, images).apply(
            self.variables(params),
            images,
            train=True,
            rngs={"dropout": key},
            mutable=[STATE],
        )
        return outputs, changed[STATE]

    def warn_of_fewer_bits(self, params: Params, images: Images) -> None:
        """Warns if parameters or images have fewer bits than the computation."""
        dtype = self.config.dtype
        for name, tree in (("params", params), ("images", images)):
            for given in {x.dtype for x in jax.tree.leaves(tree)}:
                if jnp.issubdtype(given, jnp.floating) and (
                    given.itemsize < jnp.dtype(dtype).itemsize
                ):
                    warnings.warn(
                        f"{name} are {given}, but the network computes in {dtype}; "
                        f"to compute in {given}, build it with dtype={given.name!r} "
                        "(load_flax, create_flax, load_model, create_model)",
                        stacklevel=3,
                    )

    def variables(self, params: Params) -> dict[str, Params]:
        """Returns the parameters as variable collections of Flax."""
        if not self.stateful:
            return {"params": params}
        rest = {name: value for name, value in params.items() if name != STATE}
        return {"params": rest, STATE: params[STATE]}

    @_with_its_precision
    def encode(
        self,
        params: Params,
        images: Images,
        *,
        train: bool = False,
        key: jax.Array | None = None,
        edit_patches: Callable[[jax.Array], jax.Array] | None = None,
        visible: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the tokens of the encoder; for networks with an `encoder_stride`.

        Args:
          params, images, train, key: see `apply`.
          edit_patches: function that changes the patch embeddings (batch, patches,
            width) before positions are added.
          visible: indices (batch, V) of the patches that the encoder processes; None
            for all patches. It needs `config.has_encoder`, and positions at the stem
            only.

        Returns:
          Tokens (batch, prefix tokens + patches, width). A network that merges patches
          returns the patches of the last stage.
        """
        self.warn_of_fewer_bits(params, images)
        given = {"visible": visible, "edit_patches": edit_patches}
        given = {name: value for name, value in given.items() if value is not None}
        return self.config.reader(self.module, images).apply(
            self.variables(params),
            images,
            train=train,
            classify=False,
            rngs={"dropout": key} if train else None,
            **given,
        )

    @property
    def has_patch_features(self) -> bool:
        """Whether `patch_features` is supported, which a user's network may not do."""
        return "classify" in inspect.signature(type(self.module).__call__).parameters

    def patch_features(self, params: Params, images: jax.Array) -> jax.Array:
        """Returns the features of the last layer's patches, see `layer_features`."""
        return self.layer_features(params, images)[0]

    @property
    def num_layers(self) -> int:
        """Number of layers of `layer_features`; 1 if it has only the last features."""
        return max(1, self.config.num_layers)

    @_with_its_precision
    def layer_features(
        self,
        params: Params,
        images: Images,
        layers: Sequence[int] = (-1,),
        *,
        norm: bool = True,
        tokens: str = "patches",
        reshape: bool = True,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """Returns features after layers, the same as timm's `forward_intermediates`.

        Layers are the blocks of a Vision Transformer, a hybrid or a Mixer, the pairs of
        blocks of an Axial-ViT, and the stages of a Swin Transformer before patches are
        merged. Layer 0 of a ResNet is the first convolution, before its pooling; the
        next layers are its stages. In a jitted function XLA removes computations that
        the chosen layers do not need.

        Args:
          params, images: see `apply`.
          layers: numbers of layers from 0; negative numbers count from the last layer.
          norm: whether to apply the network's final norm. For Swin Transformers and
            ResNets it is applied to the last layer only.
          tokens: "patches", "prefix" (class token and registers), "all" (both), or
            "pooled", one vector per image before `representation_layer`: the class
            token or the mean of the patches, as for the classifier, and the mean for
            attention pooling.
          reshape: whether patches are returned as a grid of rows and columns.
          key: random key of dropout and stochastic depth; None turns both off.

        Returns:
          A float32 array for each layer. With tokens="patches" its shape is (batch,
          rows, columns, width), or (batch, patches, width) without `reshape`; with
          "prefix" and "all" it is (batch, tokens, width), and with "pooled" (batch,
          width).

        Raises:
          UserError: the network does not have the layer or prefix tokens, or the module
            of a user's network does not have the argument `classify`.
        """
        self.warn_of_fewer_bits(params, images)
        return layer_features.compute(
            self,
            params,
            images,
            layers,
            norm=norm,
            tokens=tokens,
            reshape=reshape,
            key=key,
        )

    def at_size(self, image_size: Sequence[int]) -> "Model":
        """Builds the same network for images of another height and width.

        Raises:
          UserError: height or width is not a multiple of the patch size.
        """
        return build(self.config, self.num_classes, image_size, self.image_shape[2])

    def replace(self, **keys: object) -> "Model":
        """Builds the same network with different values for keys of its config."""
        config = dataclasses.replace(self.config, **keys)
        return build(
            config, self.num_classes, self.image_shape[:2], self.image_shape[2]
        )

    def resize(self, params: Params, source: "Model") -> Params:
        """Resizes parameters for another image size to this network's grid.

        The function can be traced and differentiated.

        Args:
          params: parameters of `source`.
          source: network with another grid. If its config has another class, the
            parameters are returned unchanged.

        Raises:
          UserError: the parameters cannot be resized to this grid.
        """
        if type(self.config) is not type(source.config):
            return params
        return self.config.resize(params, source.config, source.grid, self.grid)

    def check_sizes(self, other: "Model") -> None:
        """Checks that the parameters can be resized to another image size.

        Raises:
          UserError: the parameters only fit one image size.
        """
        resized = jax.eval_shape(lambda params: other.resize(params, self), self.shapes)
        if resized != other.shapes:
            raise UserError(
                f"model.variant={self.options['variant']!r} cannot be resized to another "
                "image size: choose another variant"
            )


def build(
    config: NetworkConfig, num_classes: int, image_size: Sequence[int], channels: int
) -> Model:
    """Builds a network from its config; see `network.build`.

    Args:
      config: result of `network.read`.
      num_classes: number of classes; 0 for no classifier.
      image_size: height and width of the input in pixels.
      channels: number of channels of the input.
    """
    image_shape = (*image_size, channels)
    return Model(
        config,
        num_classes,
        image_shape,
        *network.build(config, num_classes, image_shape),
    )


# The dataclass of the config section `model`, chosen by the variant.
VARIANTS = fields.Choice(
    types=CONFIGS,
    default="B/16",
    text_key="variant",
    patterns=True,
    base=NetworkConfig,
)


def create(
    variant: str,
    *,
    num_classes: int,
    image_size: Sequence[int] = (224, 224),
    channels: int = 3,
    platform: str = "",
    **options,
) -> Model:
    """Builds a network by name.

    Args:
      variant: published variant, such as "B/16", "R50+B/16" or "R50x1", see `names`; or
        "module:Config", a `NetworkConfig` in a user's module.
      num_classes: number of classes; 0 for no classifier.
      image_size: height and width of the input in pixels.
      channels: number of channels of the input.
      platform: "cpu", "gpu" or "tpu"; "" is JAX's default backend.
      **options: keys of the network's config, see `varied.VariedConfig`. Sizes such as
        `width` and `depth` replace those of the variant unless they are 0 or (0,).

    Raises:
      UserError: variant or option is unknown, the height or width of images is not a
        multiple of the patch size, or options contradict each other.
    """
    kind = VARIANTS.find(variant, "model")
    config = network.read(kind, {"variant": variant, **options})
    config = dataclasses.replace(config, platform=platform)
    return build(config, num_classes, image_size, channels)


def names() -> tuple[str, ...]:
    """Returns the names of all published variants."""
    return variants.NAMES + sum((k.names for k in CONFIGS.values()), ())


def side_multiple(variant: str) -> int:
    """Returns the number that image height and width must be multiples of.

    Raises:
      UserError: the variant is unknown.
    """
    config = network.read(VARIANTS.find(variant, "model"), {"variant": variant})
    return config.side_multiple or config.patch_size
