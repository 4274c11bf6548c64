"""The Vision Transformer (arXiv:2010.11929, section 3.1).

Parameters are named and shaped as in the published Google checkpoints.
Letters: B images, Y by X pixels or patches, C channels, V visible patches, N tokens,
R registers, D model width, L classes.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vit_jax.models import initializers, layers
from vit_jax.models.encoder import ENCODER, Encoder
from vit_jax.models.pooling import Weights


class VisionTransformer(nn.Module):
    """A Vision Transformer for images of one size.

    Attributes:
      config: result of `ViTConfig.placed`.
      num_classes: L; 0 for no classifier.
      grid: rows and columns of patches that the network has positions for.
    """

    config: Any
    num_classes: int
    grid: tuple[int, int]

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "B Y X C"],
        *,
        train: bool = False,
        edit_patches: Callable[[Array], Array] | None = None,
        visible: Int[Array, "B V"] | None = None,
        classify: bool = True,
    ) -> dict[str, Float[Array, "..."]] | Float[Array, "B N D"]:
        """Classifies images, or encodes their tokens.

        Args:
          images: normalised images; height and width are multiples of the patch size.
          train: whether dropout and stochastic depth are active, which need the rng
            "dropout".
          edit_patches: function that changes the patch embeddings (B, YX, D), row by
            row, before positions are added.
          visible: indices of the patches of each image that the blocks process; None
            for all patches, which positions of pairs of tokens need.
          classify: whether to classify; otherwise the tokens of the encoder are
            returned, the prefix tokens first.

        Returns:
          A dict of float32 arrays: "pre_logits" (B, D), the features, and "logits" (B,
          L) unless L is 0. The shapes are (B, N, D) and (B, N, L) with pool "none", and
          (B, 2 D) and (B, L) with pool "token_gap".
        """
        x = self.embed(images, edit_patches)
        x = self.encode(x, train=train, visible=visible)
        return self.classify(x) if classify else x

    def embed(
        self,
        images: Float[Array, "B Y X C"],
        edit_patches: Callable[[Array], Array] | None = None,
    ) -> Float[Array, "B N D"]:
        """Returns the input tokens of the encoder; call it in a compact method."""
        return self.add_tokens(self.embed_patches(images), edit_patches)

    def add_tokens(
        self,
        patches: Float[Array, "B y x D"],
        edit_patches: Callable[[Array], Array] | None,
    ) -> Float[Array, "B N D"]:
        """Returns the learned tokens, then the embedded patches; see `__call__`."""
        B, *_, D = patches.shape
        x = patches.reshape(B, -1, D)
        x = edit_patches(x) if edit_patches else x
        tokens = [
            jnp.broadcast_to(t.astype(x.dtype), (B, *t.shape[1:]))
            for t in self.prefix_tokens(D)
        ]
        return jnp.concatenate([*tokens, x], axis=1)

    def embed_patches(
        self,
        images: Float[Array, "B Y X C"],
        kind: type[layers.PatchEmbedding] = layers.PatchEmbedding,
        **options: object,
    ) -> Float[Array, "B y x D"]:
        """Returns the embedding of each patch; call it in a compact method.

        Args:
          images: normalised images.
          kind: class of the embedding.
          options: additional attributes of this class.
        """
        config = self.config
        embedding = kind(
            config.width,
            config.patch_side,
            config.dtype,
            row_major=config.platform == "gpu",
            initial=config.init,
            name="embedding",
            **options,
        )
        return embedding(config.stem(images))

    def prefix_tokens(self, D: int) -> list[Float[Array | np.ndarray, "1 _ D"]]:
        """Returns the learned tokens that are put before the patches.

        Call it in a compact method.
        """
        config, tokens = self.config, []
        row = initializers.TABLE[config.init]
        if "class token" in config.prefix_tokens:
            tokens.append(self.param("cls", row.class_token, (1, 1, D)))
        if R := config.num_register_tokens:
            tokens.append(self.param("register_tokens", row.registers, (1, R, D)))
        return tokens

    def encode(
        self,
        x: Float[Array, "B N D"],
        *,
        train: bool,
        visible: Int[Array, "B V"] | None,
    ) -> Float[Array, "B M D"]:
        """Returns the tokens of the encoder; call it in a compact method."""
        return self.encoder(self.config.encoder)(x, train=train, visible=visible)

    def encoder(self, kind: type[Encoder], config: Any = None) -> Encoder:
        """Returns an encoder of this network; call it in a compact method.

        Args:
          kind: class of the encoder.
          config: config of the encoder; None for the config of the network.
        """
        P, R = len(self.config.prefix_tokens), self.config.num_register_tokens
        return kind(config or self.config, self.grid, P, R, name=ENCODER)

    def classify(
        self, x: Float[Array, "B N D"], weights: Weights | None = None
    ) -> dict[str, Float[Array, "..."]]:
        """Computes the outputs from the tokens of the encoder.

        Args:
          x: tokens of the encoder.
          weights: weights of the patches in the pooling; None for equal weights.
        """
        config = self.config
        x = config.pooling(config, x, weights)
        features, bias = self.features(x), config.head_bias_init
        return layers.classify(features, self.num_classes, bias, initial=config.init)

    def features(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns the classifier's input, float32; call it in a compact method."""
        config = self.config
        if config.fc_norm:
            x = config.norm(name="fc_norm")(x)
        if config.representation_layer:
            x = layers.Dense(config.width, dtype=config.dtype, name="pre_logits")(x)
            x = nn.tanh(x)
        return x.astype(jnp.float32)


@functools.cache
def varied(variations: tuple[type[VisionTransformer], ...]) -> type[VisionTransformer]:
    """Returns the class of a network with all these variations, the outermost first."""
    if not variations:
        return VisionTransformer
    return type("".join(kind.__name__ for kind in variations), variations, {})


def joined(
    kind: type[VisionTransformer], module: VisionTransformer
) -> VisionTransformer:
    """Returns the network of a module with one more variation, as the outermost."""
    kind = varied((kind, *module.config.variations))
    return kind(module.config, module.num_classes, module.grid)
