"""A Vision Transformer as Linen's own layers give it, to compare with.

Built like the one of google-research/vision_transformer: `nn.LayerNorm`,
`nn.MultiHeadDotProductAttention` and `nn.Dense` on tokens (B, N, D), its plain cost.
Only the names of its layers are given, so that it takes our parameters.
"""

import flax.linen as nn
import jax.numpy as jnp


class Mlp(nn.Module):
    """Two dense layers with an exact GELU between them."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        y = nn.gelu(nn.Dense(self.hidden)(x), approximate=False)
        return nn.Dense(x.shape[-1])(y)


class Block(nn.Module):
    """Pre-LayerNorm encoder block."""

    num_heads: int
    hidden: int

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(name="LayerNorm_0")(x)
        attention = nn.MultiHeadDotProductAttention(
            self.num_heads, name="MultiHeadDotProductAttention_1"
        )
        x = x + attention(y, y)
        y = nn.LayerNorm(name="LayerNorm_2")(x)
        return x + Mlp(self.hidden, name="MlpBlock_3")(y)


class AddPositions(nn.Module):
    """Adds a learned embedding of each token's place."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(0.02)
        return x + self.param("pos_embedding", init, (1, *x.shape[1:]))


class Encoder(nn.Module):
    """Position embeddings, blocks, final LayerNorm."""

    depth: int
    num_heads: int
    hidden: int

    @nn.compact
    def __call__(self, x):
        x = AddPositions(name="posembed_input")(x)
        for i in range(self.depth):
            x = Block(self.num_heads, self.hidden, name=f"encoderblock_{i}")(x)
        return nn.LayerNorm(name="encoder_norm")(x)


class VisionTransformer(nn.Module):
    """Classifier on the class token; images (B, Y, X, C) to logits (B, classes)."""

    num_classes: int
    patch: int
    width: int
    depth: int
    num_heads: int
    mlp_dim: int

    @nn.compact
    def __call__(self, images):
        side = (self.patch, self.patch)
        x = nn.Conv(self.width, side, strides=side, padding="VALID", name="embedding")(
            images
        )
        x = x.reshape(len(x), -1, self.width)
        cls = self.param("cls", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate([jnp.tile(cls, (len(x), 1, 1)), x], axis=1)
        x = Encoder(self.depth, self.num_heads, self.mlp_dim, name="Transformer")(x)
        return nn.Dense(self.num_classes, name="head")(x[:, 0])
