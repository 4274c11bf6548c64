"""Axial-ViT: attention along rows and columns in turn (arXiv:2010.11929, appendix D.6).

Each block of a Vision Transformer is replaced by two blocks with attention and an MLP.
In the first, patches attend to their row; in the second, to their column. The paper
does not specify two choices. Here the features are the mean of the patches, since a
class token does not have a row, and positions are learned and added once, as in the
paper's other models.
Letters: B images, Y by X pixels, C channels, N patches, D width, L classes.
"""

import dataclasses
import re
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models import kept, layers
from vit_jax.models.encoder import Block
from vit_jax.models.encoder_config import EncoderConfig
from vit_jax.models.layers import ACTIVATIONS, LayerNorm, PatchEmbedding
from vit_jax.models.network import NetworkConfig
from vit_jax.models.positions.added import Table
from vit_jax.models.positions.learned import Learned
from vit_jax.models.variants import SIZES, Size, overridden, parse_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxialConfig(NetworkConfig):
    """Axial-ViTs such as `Axial-B/16`, in the sizes of Vision Transformers."""

    names: ClassVar[tuple[str, ...]] = ("Axial-B/32", "Axial-B/16")

    before_blocks = ("embedding", "posembed_input")
    after_blocks = ("encoder_norm", "head")

    variant: str = key("Axial-B/16", 'Size and patch size, such as "Axial-B/16".')
    width: int = key(0, "Features per patch; 0 is the value of the variant.")
    depth: int = key(
        0, "Number of pairs of blocks; 0 is the value of the variant.", below=500
    )
    num_heads: int = key(0, "Attention heads per block; 0 is the value of the variant.")
    mlp_dim: int = key(0, "Hidden units of each MLP; 0 is the value of the variant.")
    activation: str = key(
        "gelu_tanh", "Activation of the MLPs.", choices=tuple(ACTIVATIONS)
    )
    dropout: float = key(
        0.0,
        "Dropout rate after each dense layer except query, key and value.",
        below=1,
        training_only=True,
    )

    @property
    def patch_size(self) -> int:
        """Side of a patch in pixels."""
        return parse_size(self.variant, "Axial", SIZES)[1]

    @property
    def size(self) -> Size:
        """The sizes of the variant, overridden by keys that are not 0."""
        return overridden(parse_size(self.variant, "Axial", SIZES)[0], self)

    @property
    def num_blocks(self) -> int:
        """Number of pairs of blocks."""
        return self.size.depth

    num_layers = num_blocks

    def layer_of(self, path: str) -> int:
        """See `NetworkConfig.layer_of`."""
        if block := re.match(r"(?:row|column)_block_(\d+)/", path):
            return int(block[1]) + 1
        return super().layer_of(path)

    def build(self, num_classes: int, image_shape: tuple[int, int, int]) -> "AxialViT":
        size = self.size
        if size.width % size.num_heads:
            raise UserError(
                f"model.width={size.width} is not a multiple of "
                f"model.num_heads={size.num_heads}: change one of them"
            )
        return AxialViT(self, num_classes)


class AxialViT(nn.Module):
    """An Axial-ViT.

    Attributes:
      config: keys of the network.
      num_classes: L; 0 for no classifier.
    """

    config: AxialConfig
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
          train: whether dropout is active.
          classify: whether to classify; otherwise the features of the patches are
            returned.

        Returns:
          "logits" (B, L), unless L is 0, and "pre_logits" (B, D).
        """
        config, size = self.config, self.config.size
        x = PatchEmbedding(
            size.width, config.patch_size, config.dtype, name="embedding"
        )(images.astype(config.dtype))
        _, Y, X, D = x.shape
        keys = [None] * 2 * size.depth
        if train and config.dropout:
            keys = list(jax.random.split(self.make_rng("dropout"), 2 * size.depth))
        encoder = EncoderConfig(
            width=size.width,
            num_heads=size.num_heads,
            mlp_dim=size.mlp_dim,
            dropout=config.dropout,
            activation=config.activation,
            dtype=config.dtype,
            attention_impl="einsum",
        )
        added = Table(Learned(encoder, (Y, X), 0), name="posembed_input")()
        x = x + added.reshape(1, Y, X, D).astype(x.dtype)
        outputs = []
        for i, drawn in enumerate(keys):
            block = Block(encoder, name=f"{('row', 'column')[i % 2]}_block_{i // 2}")
            # Each block attends along the last axis of patches, then swaps the two
            # axes.
            lines = block(x.reshape(-1, x.shape[2], D), None, None, drawn)
            x = jnp.swapaxes(lines.reshape(x.shape), 1, 2)
            outputs.append(x)
        norm = LayerNorm(dtype=config.dtype, name="encoder_norm")
        kept.keep(self, outputs[1::2], norm)
        x = norm(x)
        if not classify:
            return x
        features = x.astype(jnp.float32).mean((1, 2))
        return layers.classify(features, self.num_classes, config.head_bias_init)
