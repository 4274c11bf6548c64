"""The Vision Transformer (arXiv:2010.11929, section 3.1) and its hybrids.

Parameters are named and shaped as in the published Google checkpoints.
Letters: B images, Y by X pixels, C channels, N tokens, D model width, L classes.
"""

import functools

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models import resnet
from vit_jax.models.encoder import Block, Encoder
from vit_jax.models.layers import MapHead, classify
from vit_jax.models.pointwise import LayerNorm

HEADS = ("token", "gap", "map", "none")


class VisionTransformer(nn.Module):
    """Image classifier.

    Attributes:
      classes: L; 0 is no classifier.
      patch: side of the square patches, in pixels or in features of the stem.
      width: D.
      depth: number of blocks.
      heads: attention heads a block.
      mlp_dim: hidden units of the MLPs.
      blocks: units of each stage of the ResNet stem.
      stem_width: features of the stem's root; 0 is no stem.
      head: what is classified: the "token" [class], "gap", the mean of the patches,
        "map", what attention pooling gives, or "none": every token by itself.
      class_token: whether there is a class token although another head is chosen.
      distillation: whether a second token has a second classifier; the logits are the
        mean of both (DeiT, arXiv:2012.12877, section 4).
      representation: whether a tanh layer of width D stands before the classifier
        (the paper's pretraining head).
      pooled_norm: whether the final LayerNorm comes after the pooling (timm's fc_norm).
      posemb: kind of position embedding, see positions.AddPositions; "relative" puts
        its keys into the attention.
      posemb_at: where they act: at the "stem", at "every" layer, or "shared", the same
        at every layer (arXiv:2010.11929, table 8). "relative" has no stem.
      dropout: rate after every dense layer but query, key, value (and the two of the
        head), and after adding the position embeddings.
      stochastic_depth: drop rate of the last block, falling linearly to 0 at the first.
      head_bias: initial bias of the classifier.
      gelu: "tanh" or "erf".
      epsilon: of the LayerNorms.
      dtype: of the computation; parameters and logits are float32.
      scan: whether the blocks run as one scan over stacked parameters, see stacking.
      remat: what blocks keep for the backward pass, a name of remat.POLICIES.
      way: of attention in the encoder, one of attention.WAYS.
      merge: see layers.merge_tokens.
    """

    classes: int
    patch: int
    width: int
    depth: int
    heads: int
    mlp_dim: int
    blocks: tuple[int, ...] = ()
    stem_width: int = 0
    head: str = "token"
    class_token: bool = False
    distillation: bool = False
    representation: bool = False
    pooled_norm: bool = False
    posemb: str = "learned"
    posemb_at: str = "stem"
    dropout: float = 0.0
    stochastic_depth: float = 0.0
    head_bias: float = 0.0
    gelu: str = "tanh"
    epsilon: float = 1e-6
    dtype: str = "float32"
    scan: bool = False
    remat: str = "none"
    way: str = "einsum"
    merge: bool = True

    @property
    def extra(self) -> int:
        """Number of tokens in front of the patches."""
        return (self.head == "token" or self.class_token) + self.distillation

    @nn.compact
    def __call__(
        self, images: Float[Array, "B Y X C"], *, train: bool = False
    ) -> dict[str, Float[Array, "..."]]:
        """Classifies images.

        Args:
          images: normalised; both sides are multiples of the patch.
          train: whether dropout and stochastic depth act (needs an rng "dropout").

        Returns:
          "pre_logits" (B, D), the features that few-shot evaluation uses (with
          distillation the class token's), and "logits" (B, L), float32; with head
          "none" (B, N, D) and (B, N, L).
        """
        x, grid = self._embed(images)
        return self._classify(self._encoder(Encoder, grid)(x, train=train))

    def _embed(self, images):
        """Returns the encoder's tokens, and the patches down and across."""
        x = images
        if self.stem_width:
            x = resnet.stem(x, self.blocks, self.stem_width, self.dtype)
        x = nn.Conv(
            self.width,
            (self.patch, self.patch),
            strides=(self.patch, self.patch),
            padding="VALID",
            dtype=self.dtype,
            name="embedding",
        )(x)
        B, *grid, D = x.shape
        x = x.reshape(B, -1, D)
        names = ["cls"] if self.head == "token" or self.class_token else []
        names += ["dist"] if self.distillation else []
        tokens = [self.param(n, nn.initializers.zeros, (1, 1, D)) for n in names]
        tokens = [jnp.broadcast_to(t.astype(x.dtype), (B, 1, D)) for t in tokens]
        return jnp.concatenate([*tokens, x], axis=1), tuple(grid)

    def _encoder(self, kind, grid):
        """Makes the encoder, or what has its parameters and does a part of it."""
        return kind(
            block=block_of(self),
            grid=grid,
            extra=self.extra,
            final_norm=not self.pooled_norm,
            depth=self.depth,
            heads=self.heads,
            posemb=self.posemb,
            posemb_at=self.posemb_at,
            dropout=self.dropout,
            stochastic_depth=self.stochastic_depth,
            epsilon=self.epsilon,
            dtype=self.dtype,
            scan=self.scan,
            remat=self.remat,
            name="Transformer",
        )

    def _classify(self, x):
        if self.distillation:
            x = self._features(x[:, :2])
            outputs, other = (
                classify(x[:, i], self.classes, self.head_bias, name)
                for i, name in enumerate(("head", "head_dist"))
            )
            if self.classes:
                outputs["logits"] = (outputs["logits"] + other["logits"]) / 2
            return outputs
        if self.head == "token":
            x = x[:, 0]
        elif self.head == "gap":
            x = x[:, self.extra :].mean(axis=1)
        elif self.head == "map":
            x = MapHead(
                self.heads,
                self.mlp_dim,
                self.gelu,
                self.epsilon,
                self.dtype,
                self.merge,
                name="MAPHead_0",
            )(x)
        return classify(self._features(x), self.classes, self.head_bias)

    def _features(self, x):
        """Returns what the classifier sees, float32."""
        if self.pooled_norm:
            x = LayerNorm(self.epsilon, self.dtype, name="fc_norm")(x)
        if self.representation:
            x = nn.tanh(nn.Dense(self.width, dtype=self.dtype, name="pre_logits")(x))
        return x.astype(jnp.float32)


def block_of(module: VisionTransformer) -> functools.partial:
    """Returns what makes a block of a network, given its name."""
    return functools.partial(
        Block,
        heads=module.heads,
        hidden=module.mlp_dim,
        dropout=module.dropout,
        gelu=module.gelu,
        epsilon=module.epsilon,
        dtype=module.dtype,
        way=module.way,
        merge=module.merge,
    )
