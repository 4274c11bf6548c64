"""MLP-Mixer (arXiv:2105.01601): MLPs across patches and across features in turn.

Parameters are named as in the files of google-research/vision_transformer, except for
the patch embedding, which is "stem" there and has the name of the other networks here.
Letters: B images, Y by X pixels, C channels, N patches, D width, L classes.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models import kept, layers
from vit_jax.models.layers import (
    ACTIVATIONS,
    Dense,
    LayerNorm,
    PatchEmbedding,
    drop_path,
)
from vit_jax.models.network import NetworkConfig
from vit_jax.models.variants import overridden, parse_size


@dataclasses.dataclass(frozen=True)
class Size:
    """The numbers of a size (arXiv:2105.01601, table 1).

    Attributes:
      width: features per patch.
      depth: number of blocks.
      tokens_mlp_dim: hidden units of the MLPs across patches.
      channels_mlp_dim: hidden units of the MLPs across features.
    """

    width: int
    depth: int
    tokens_mlp_dim: int
    channels_mlp_dim: int


SIZES = {
    "S": Size(512, 8, 256, 2048),
    "B": Size(768, 12, 384, 3072),
    "L": Size(1024, 24, 512, 4096),
    "H": Size(1280, 32, 640, 5120),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig(NetworkConfig):
    """MLP-Mixers such as `Mixer-B/16`."""

    names: ClassVar[tuple[str, ...]] = (
        *(f"Mixer-{size}/{patch}" for size in "SBL" for patch in (16, 32)),
        "Mixer-H/14",
    )

    before_blocks = ("embedding",)
    after_blocks = ("pre_head_layer_norm", "head")

    variant: str = key("Mixer-B/16", 'Size and patch size, such as "Mixer-B/16".')
    width: int = key(0, "Features per patch; 0 is the value of the variant.")
    depth: int = key(0, "Number of blocks; 0 is the value of the variant.", below=1_000)
    tokens_mlp_dim: int = key(
        0, "Hidden units of the MLPs across patches; 0 is the value of the variant."
    )
    channels_mlp_dim: int = key(
        0, "Hidden units of the MLPs across features; 0 is the value of the variant."
    )
    activation: str = key(
        "gelu_tanh",
        'Activation of the MLPs; timm\'s networks use "gelu".',
        choices=tuple(ACTIVATIONS),
    )
    drop_path_rate: float = key(
        0.0,
        "Stochastic depth: drop rate of the last block; the rates increase linearly "
        "from 0 at the first block.",
        below=1,
        training_only=True,
    )

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return parse_size(self.variant, "Mixer", SIZES)[1]

    @property
    def size(self) -> Size:
        """The sizes of the variant, overridden by keys that are not 0."""
        return overridden(parse_size(self.variant, "Mixer", SIZES)[0], self)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.size.depth

    num_layers = num_blocks

    def layer_of(self, path: str) -> int:
        """See `NetworkConfig.layer_of`."""
        if block := re.match(r"MixerBlock_(\d+)/", path):
            return int(block[1]) + 1
        return super().layer_of(path)

    def build(self, num_classes: int, image_shape: tuple[int, int, int]) -> "MlpMixer":
        return MlpMixer(self, num_classes)

    def resize(
        self,
        params: Mapping,
        source: NetworkConfig,
        old_grid: tuple[int, int],
        grid: tuple[int, int],
    ) -> Mapping:
        """Resizes token-mixing MLPs to block-diagonal copies (arXiv:2105.01601).

        A grid with K times as many patches per side is treated as K by K images of the
        old size, each with a copy of the MLPs; the features are at first the mean over
        these images.
        """
        if grid == old_grid:
            return params
        hidden = params["MixerBlock_0"]["token_mixing"]["Dense_0"]["bias"].size
        factor, rest = divmod(grid[0], old_grid[0])
        copies = factor * factor
        if rest or not factor or grid[1] != factor * old_grid[1]:
            raise UserError(
                f"model.variant={self.variant!r} was trained on {_by(old_grid)} patches "
                "and can only be resized to the same multiple of both sides, not to "
                f"{_by(grid)}: change data.image_size"
            )
        if self.size.tokens_mlp_dim != copies * hidden:
            raise UserError(
                f"model.tokens_mlp_dim={self.size.tokens_mlp_dim}: the checkpoint has "
                f"{hidden} for {_by(old_grid)} patches, and {_by(grid)} patches need "
                f"{copies} times as many: set model.tokens_mlp_dim to {copies * hidden}"
            )
        # (i, j) is the index of each patch's image, (y, x) the patch's place in the
        # image.
        rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
        (i, y), (j, x) = (np.divmod(n, o) for n, o in zip((rows, columns), old_grid))
        order = np.lexsort((x, y, j, i))  # Patches, image after image.
        resized = dict(params)
        for name in params:
            if name.startswith("MixerBlock_"):
                mlp = _block_diagonal(params[name]["token_mixing"], copies, order)
                resized[name] = {**params[name], "token_mixing": mlp}
        return resized


def _by(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"


def _block_diagonal(mlp: Mapping, copies: int, order: np.ndarray) -> dict:
    """Returns a block-diagonal MLP of copies, with the patches in raster order."""
    first, second = mlp["Dense_0"], mlp["Dense_1"]
    back, identity = np.argsort(order), np.eye(copies, dtype=np.float32)
    return {
        "Dense_0": {
            "kernel": np.kron(identity, first["kernel"])[back],
            "bias": np.tile(first["bias"], copies),
        },
        "Dense_1": {
            "kernel": np.kron(identity, second["kernel"])[:, back],
            "bias": np.tile(second["bias"], copies)[back],
        },
    }


class MlpMixer(nn.Module):
    """An MLP-Mixer; initialisation fixes the number of patches.

    Attributes:
      config: keys of the network.
      num_classes: L; 0 for no classifier.
    """

    config: MixerConfig
    num_classes: int

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "B Y X C"],
        *,
        train: bool = False,
        classify: bool = True,
    ) -> dict[str, Float[Array, "..."]] | Float[Array, "B N D"]:
        """Classifies images.

        Args:
          images: normalised images.
          train: whether stochastic depth is active.
          classify: whether to classify; otherwise the features of the patches are
            returned, row by row.

        Returns:
          "logits" (B, L), unless L is 0, and "pre_logits" (B, D).
        """
        config, size = self.config, self.config.size
        x = PatchEmbedding(
            size.width, config.patch_size, config.dtype, name="embedding"
        )(images.astype(config.dtype))
        x = x.reshape(x.shape[0], -1, size.width)
        outputs = []
        for i in range(size.depth):
            rate = config.drop_path_rate * i / max(1, size.depth - 1)
            block = MixerBlock(
                size.tokens_mlp_dim,
                size.channels_mlp_dim,
                config.activation,
                rate if train else 0.0,
                config.dtype,
                name=f"MixerBlock_{i}",
            )
            x = block(x)
            outputs.append(x)
        norm = LayerNorm(dtype=config.dtype, name="pre_head_layer_norm")
        kept.keep(self, outputs, norm)
        x = norm(x)
        if not classify:
            return x
        features = x.astype(jnp.float32).mean(1)
        return layers.classify(features, self.num_classes, config.head_bias_init)


class MixerBlock(nn.Module):
    """An MLP across patches, then an MLP across features.

    Attributes:
      tokens_mlp_dim, channels_mlp_dim: hidden units of the two MLPs.
      activation: activation of both MLPs, a key of `layers.ACTIVATIONS`.
      drop_path_rate: fraction of the images that skip each MLP.
      dtype: dtype of the computation.
    """

    repeated: ClassVar[bool] = True  # See cost.py.

    tokens_mlp_dim: int
    channels_mlp_dim: int
    activation: str
    drop_path_rate: float
    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """Adds the outputs of both MLPs to the patches."""

        def add(x, branch):
            drawn = self.make_rng("dropout") if self.drop_path_rate else None
            return x + drop_path(branch, self.drop_path_rate, drawn)

        def mlp(hidden, name):
            return MixerMlp(hidden, self.activation, self.dtype, name=name)

        norm = LayerNorm(dtype=self.dtype, name="LayerNorm_0")
        across = jnp.swapaxes(norm(x), 1, 2)
        across = mlp(self.tokens_mlp_dim, "token_mixing")(across)
        x = add(x, jnp.swapaxes(across, 1, 2))
        norm = LayerNorm(dtype=self.dtype, name="LayerNorm_1")
        return add(x, mlp(self.channels_mlp_dim, "channel_mixing")(norm(x)))


class MixerMlp(nn.Module):
    """Two dense layers with an activation between them, initialised as in Google's code.

    Attributes:
      hidden: units of the first layer.
      activation: a key of `layers.ACTIVATIONS`.
      dtype: dtype of the computation.
    """

    hidden: int
    activation: str
    dtype: str

    @nn.compact
    def __call__(self, x: Float[Array, "B M F"]) -> Float[Array, "B M F"]:
        """Transforms the last axis."""
        y = Dense(self.hidden, dtype=self.dtype)(x)
        return Dense(x.shape[-1], dtype=self.dtype)(ACTIVATIONS[self.activation](y))
