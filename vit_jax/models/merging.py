"""Token merging at inference (ToMe, arXiv:2210.09461): similar patches become one token.

Between attention and MLP of each block, patches are split alternately into two sets.
The r patches of the first set that are most similar to a patch of the second are merged
into it: the result is the mean of their features, weighted by the sizes of the tokens.
The size of a token is the number of its original patches; attention counts a token as
often as its size. The parameters are those of the network without merging.

Letters: B images, P prefix tokens, N tokens, M tokens after merging, H heads, K head
width, D model width.
"""

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.errors import UserError
from vit_jax.models.attention import Positions
from vit_jax.models.encoder import BLOCK, Block, Encoder, split_over_devices
from vit_jax.models.layers import MultiHeadAttention
from vit_jax.models.vit import VisionTransformer
from vit_jax.models.vit_config import ViTConfig

Sizes = Float[Array, "B N"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergingConfig(ViTConfig):
    """A Vision Transformer with optional token merging.

    Attributes:
      token_merging: number of tokens that each block removes at inference by merging; 0
        is off. Not a key.
    """

    token_merging: int = 0

    @property
    def _merging(self) -> str:
        return f"token_merging={self.token_merging}" if self.token_merging else ""

    @property
    def variations(self) -> tuple[type[VisionTransformer], ...]:
        merging = (Merging,) if self.token_merging else ()
        return (*merging, *super().variations)

    @property
    def needs_logits(self) -> str:
        return super().needs_logits or self._merging

    @property
    def stacked(self) -> bool:
        # Each block has fewer tokens than the previous one, which a scan cannot have.
        return not self.token_merging and super().stacked

    def check_grid(self) -> None:
        if self.token_merging:
            raise UserError(
                f"{self._merging}: merged tokens are not a grid of patches, which is needed "
                "for features of layers, masks and attention: set token_merging to 0"
            )

    def check(self) -> None:
        super().check()
        obstacles = (kind.in_blocks(self) for kind in self.positions)
        obstacle = next(filter(None, obstacles), "")
        if self.token_merging and obstacle:
            raise UserError(
                f"{self._merging} with {obstacle}: merged tokens do not have positions in "
                "the blocks: set token_merging to 0"
            )


def merge(
    x: Float[Array, "B N D"],
    sizes: Sizes,
    keys: Float[Array, "B H N K"],
    count: int,
    num_prefix_tokens: int,
) -> tuple[Float[Array, "B M D"], Float[Array, "B M"]]:
    """Merges the most similar patches (arXiv:2210.09461, section 3 and appendix D).

    Args:
      x: tokens.
      sizes: number of patches in each token.
      keys: keys of the attention before the merging; their means over the heads are
        compared by cosine similarity.
      count: number r of tokens to remove, limited to half of the patches.
      num_prefix_tokens: number P of prefix tokens, which are not merged.

    Returns:
      The tokens and their sizes. The prefix tokens come first, then the patches of the
      first set that were not merged, in their order, then those of the second set.
    """
    P = num_prefix_tokens
    r = min(count, (x.shape[1] - P) // 2)
    # The first set has the even indices of the whole sequence, as in the original code.
    first, second = slice(P + P % 2, None, 2), slice(P + 1 - P % 2, None, 2)
    metric = keys.astype(jnp.float32).mean(1)
    metric /= jnp.linalg.norm(metric, axis=-1, keepdims=True)
    scores = jnp.einsum("bnk,bmk->bnm", metric[:, first], metric[:, second])
    order = jnp.argsort(-scores.max(-1), axis=1)
    merged, kept = order[:, :r], jnp.sort(order[:, r:], axis=1)
    target = jnp.take_along_axis(scores.argmax(-1), merged, axis=1)
    into = jax.nn.one_hot(target, scores.shape[2], axis=1)  # (B, second, r)

    def pick(values, places):
        return jnp.take_along_axis(values, places[..., None], axis=1)

    # Weighted sums of the features, with the weights as an additional feature.
    weights = sizes[..., None]
    sums = jnp.concatenate([x.astype(jnp.float32) * weights, weights], axis=-1)
    total = sums[:, second] + into @ pick(sums[:, first], merged)
    means = (total[..., :-1] / total[..., -1:]).astype(x.dtype)
    x = jnp.concatenate([x[:, :P], pick(x[:, first], kept), means], axis=1)
    weights = jnp.concatenate(
        [weights[:, :P], pick(weights[:, first], kept), total[..., -1:]], axis=1
    )
    return x, weights[..., 0]


class Merged(NamedTuple):
    """Weights of merged tokens, for `pooling.Weights`.

    Attributes:
      sizes: number of patches in each token; 1 for prefix tokens.
    """

    sizes: Sizes

    def means(self, patches: Float[Array, "B M D"]) -> Float[Array, "B D"]:
        """Returns the mean of the tokens after the prefix, weighted by their sizes."""
        sizes = self.sizes[:, self.sizes.shape[1] - patches.shape[1] :]
        weights = sizes / sizes.sum(1, keepdims=True)
        return (patches * weights[..., None].astype(patches.dtype)).sum(1)

    def logit_bias(self, num_prefix_tokens: int = 0) -> Float[Array, "B 1 1 N"]:
        """Returns the term for attention logits that weights tokens by their sizes."""
        return jnp.log(self.sizes)[:, None, None]


class KeyedAttention(MultiHeadAttention):
    """Attention that also returns its keys."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B N D"],
        context: Float[Array, "B M D"],
        positions: Positions,
    ) -> tuple[Float[Array, "B N D"], Float[Array, "B H M K"]]:
        """Returns the tokens, see `MultiHeadAttention`, and the keys of each head."""
        q, k, v = self.heads(x, context, positions.angles)
        return self.combine(self.attend(q, k, v, positions)), k


class MergingBlock(Block):
    """A block that merges `config.token_merging` patches between attention and MLP."""

    repeated = False  # Each block has fewer tokens than the previous one.
    attention_kind = KeyedAttention

    def __call__(
        self,
        x: Float[Array, "B N D"],
        sizes: Sizes,
        positions: Positions,
        num_prefix_tokens: int,
    ) -> tuple[Float[Array, "B M D"], Float[Array, "B M"]]:
        """Transforms and merges tokens; see `merge` for arguments and results."""
        y = self.norm1(x)
        y, keys = self.attention(y, y, positions)
        x = split_over_devices(x + self.scale1(self.post_norm1(y)))
        x, sizes = merge(x, sizes, keys, self.config.token_merging, num_prefix_tokens)
        return split_over_devices(x + self.transform(x, None)), sizes


class MergingEncoder(Encoder):
    """An encoder whose blocks each merge `config.token_merging` patches."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B N D"]
    ) -> tuple[Float[Array, "B M D"], Merged]:
        """Returns the normalised tokens of the last block, and their weights."""
        x, inputs = self.begin(x)
        sizes = jnp.ones(x.shape[:2])
        for i, given in enumerate(inputs):
            positions = given.positions
            if i:  # All sizes are 1 in the first block.
                positions = positions._replace(bias=Merged(sizes).logit_bias())
            block = MergingBlock(self.config, name=f"{BLOCK}_{i}")
            x, sizes = block(x, sizes, positions, self.num_prefix_tokens)
        return self.final_norm()(x), Merged(sizes)


class Merging(VisionTransformer):
    """A Vision Transformer that merges tokens at inference."""

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "B Y X C"],
        *,
        train: bool = False,
        classify: bool = True,
        **options,
    ) -> dict[str, Float[Array, "..."]] | Float[Array, "B N D"]:
        """Classifies images, or encodes their tokens; see `VisionTransformer`."""
        if train:
            return super().__call__(images, train=train, classify=classify, **options)
        if not classify or self.config.pool == "none":
            self.config.check_grid()
        x = self.embed(images, options.get("edit_patches"))
        return self.classify(*self.encoder(MergingEncoder)(x))
