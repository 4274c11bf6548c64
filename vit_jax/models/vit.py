"""The Vision Transformer (arXiv:2010.11929, section 3.1).

Parameters are named and shaped as in the published Google checkpoints.
Letters: B images, Y by X pixels, C channels, N tokens, D model width, L classes.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.layers import Block


class Encoder(nn.Module):
    """Position embeddings, the blocks and the final LayerNorm.

    Attributes: as VisionTransformer.
    """

    depth: int
    heads: int
    mlp_dim: int
    dropout: float
    stochastic_depth: float
    gelu: str
    epsilon: float
    dtype: str

    @nn.compact
    def __call__(
        self, x: Float[Array, "B N D"], *, train: bool = False
    ) -> Float[Array, "B N D"]:
        """Returns the normalised tokens of the last block."""
        x = AddPositionEmbedding(name="posembed_input")(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        for i in range(self.depth):
            x = Block(
                heads=self.heads,
                hidden=self.mlp_dim,
                dropout=self.dropout,
                drop_path=self.stochastic_depth * i / max(1, self.depth - 1),
                gelu=self.gelu,
                epsilon=self.epsilon,
                dtype=self.dtype,
                name=f"encoderblock_{i}",
            )(x, train=train)
        return nn.LayerNorm(
            epsilon=self.epsilon, dtype=self.dtype, name="encoder_norm"
        )(x)


class AddPositionEmbedding(nn.Module):
    """Adds one learned vector a position, the class token's included."""

    @nn.compact
    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """Returns tokens that know their place."""
        _, N, D = x.shape
        embedding = self.param(
            "pos_embedding", nn.initializers.normal(0.02), (1, N, D), jnp.float32
        )
        return x + embedding.astype(x.dtype)


class VisionTransformer(nn.Module):
    """Image classifier.

    Attributes:
      classes: L.
      patch: side of the square patches, in pixels.
      width: D.
      depth: number of blocks.
      heads: attention heads a block.
      mlp_dim: hidden units of the MLPs.
      head: what is classified: the "token" [class], or "gap", the mean of the patches.
      representation: whether a tanh layer of width D stands before the classifier
        (the paper's pretraining head).
      dropout: rate after every dense layer but query, key, value (and the two of the
        head), and after adding the position embeddings.
      stochastic_depth: drop rate of the last block, falling linearly to 0 at the first.
      head_bias: initial bias of the classifier.
      gelu: "tanh" or "erf".
      epsilon: of the LayerNorms.
      dtype: of the computation; parameters and logits are float32.
    """

    classes: int
    patch: int
    width: int
    depth: int
    heads: int
    mlp_dim: int
    head: str = "token"
    representation: bool = False
    dropout: float = 0.0
    stochastic_depth: float = 0.0
    head_bias: float = 0.0
    gelu: str = "tanh"
    epsilon: float = 1e-6
    dtype: str = "float32"

    @nn.compact
    def __call__(
        self, images: Float[Array, "B Y X C"], *, train: bool = False
    ) -> dict[str, Float[Array, "..."]]:
        """Classifies images.

        Args:
          images: normalised; both sides are multiples of the patch.
          train: whether dropout and stochastic depth act (needs an rng "dropout").

        Returns:
          "pre_logits" (B, D), the features that few-shot evaluation uses, and
          "logits" (B, L), float32.
        """
        x = nn.Conv(
            self.width,
            (self.patch, self.patch),
            strides=(self.patch, self.patch),
            padding="VALID",
            dtype=self.dtype,
            name="embedding",
        )(images)
        x = x.reshape(len(x), -1, self.width)
        if self.head == "token":
            token = self.param("cls", nn.initializers.zeros, (1, 1, self.width))
            token = jnp.broadcast_to(token.astype(x.dtype), (len(x), 1, self.width))
            x = jnp.concatenate([token, x], axis=1)

        x = Encoder(
            depth=self.depth,
            heads=self.heads,
            mlp_dim=self.mlp_dim,
            dropout=self.dropout,
            stochastic_depth=self.stochastic_depth,
            gelu=self.gelu,
            epsilon=self.epsilon,
            dtype=self.dtype,
            name="Transformer",
        )(x, train=train)

        x = x[:, 0] if self.head == "token" else x.mean(axis=1)
        if self.representation:
            x = nn.tanh(nn.Dense(self.width, dtype=self.dtype, name="pre_logits")(x))
        pre_logits = x.astype(jnp.float32)
        logits = nn.Dense(
            self.classes,
            kernel_init=nn.initializers.zeros,
            bias_init=nn.initializers.constant(self.head_bias),
            name="head",
        )(pre_logits)
        return {"pre_logits": pre_logits, "logits": logits}
