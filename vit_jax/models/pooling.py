"""Pooling functions from the tokens of an encoder to the input of the classifier.

Letters: B images, N tokens, P prefix tokens, M patches, D model width, F features of
the result.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.models.attention import Positions
from vit_jax.models.layers import LayerNorm, Mlp, MultiHeadAttention


@runtime_checkable
class Weights(Protocol):
    """Weights of patches in a pooling, if they are not equal."""

    def means(self, patches: Float[Array, "B M D"]) -> Float[Array, "K D"]:
        """Returns the mean of the patches of each image."""

    def logit_bias(self, num_prefix_tokens: int) -> Float[Array, "B 1 _ N"]:
        """Returns the term for attention logits that weights the tokens."""


def class_token(config, x, weights=None):
    """Returns the class token."""
    return x[:, 0]


def mean(config, x, weights=None):
    """Returns the mean of the patches."""
    patches = x[:, len(config.prefix_tokens) :]
    return patches.mean(axis=1) if weights is None else weights.means(patches)


def class_token_and_mean(config, x, weights=None):
    """Returns class token and mean of the patches, concatenated, (B, 2 D)."""
    both = class_token(config, x), mean(config, x, weights)
    return jnp.concatenate(both, axis=-1)


def attention(config, x, weights=None):
    """Returns the attention pooling by a learned probe; call it in a compact method."""
    bias = None
    if weights is not None:
        bias = weights.logit_bias(len(config.prefix_tokens))
    return MapHead(
        config.num_heads,
        config.mlp_dim,
        config.activation,
        config.norm,
        config.dtype,
        config.merges_tokens,
        config.init,
        name="MAPHead_0",
    )(x, bias)


def every_token(config, x, weights=None):
    """Returns all tokens, (B, N, D)."""
    return x


# Functions from a `ViTConfig`, tokens (B, N, D) and `Weights` to features (B, F).
POOLS = {
    "token": class_token,
    "gap": mean,
    "token_gap": class_token_and_mean,
    "map": attention,
    "none": every_token,
}


def of_layer(config) -> Callable:
    """Returns the pooling for features of any layer, a function without parameters."""
    return POOLS[config.pool if config.pool in ("token", "token_gap") else "gap"]


class MapHead(nn.Module):
    """Multihead attention pooling (arXiv:2106.04560, section 3.2).

    A learned probe attends to the tokens, followed by an MLP with a residual
    connection.

    Attributes:
      num_heads, hidden, activation, dtype, flatten: see MultiHeadAttention and Mlp.
      norm: constructor of the norm before the MLP.
      initial: row of initializers.TABLE.
    """

    num_heads: int
    hidden: int
    activation: str = "gelu_tanh"
    norm: Callable[..., nn.Module] = LayerNorm
    dtype: str = "float32"
    flatten: bool = True
    initial: str = "google"

    @nn.compact
    def __call__(
        self, x: Float[Array, "B N D"], bias: Float[Array, "B 1 K N"] | None = None
    ) -> Float[Array, "BK D"]:
        """Pools the tokens of each sequence to K vectors.

        Args:
          x: tokens.
          bias: term added to the attention logits of each of K images; None for K = 1.
        """
        (B, _, D), K = x.shape, 1 if bias is None else bias.shape[2]
        drawn = nn.initializers.xavier_uniform()
        probe = self.param("probe", drawn, (1, 1, D), jnp.float32)
        # One query has few logits, so the implementation does not matter.
        attend = MultiHeadAttention(
            self.num_heads,
            self.dtype,
            flatten=self.flatten,
            initial=self.initial,
            name="MultiHeadDotProductAttention_0",
        )
        probe = jnp.broadcast_to(probe.astype(x.dtype), (B, K, D))
        x = attend(probe, x, Positions(bias=bias))
        y = self.norm(name="LayerNorm_0")(x)
        mlp = Mlp(
            self.hidden,
            activation=self.activation,
            dtype=self.dtype,
            initial=self.initial,
            name="MlpBlock_0",
        )
        return (x + mlp(y)).reshape(-1, D)
