"""The encoder of the Vision Transformer: positions, blocks, and the final LayerNorm.

Parameters are named as in vit.py. Letters: B images, N input tokens, M tokens that the
blocks process, D model width, V visible patches.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from vit_jax.models.attention import Positions
from vit_jax.models.kept import keep
from vit_jax.models.kernels import dropout
from vit_jax.models.layers import LayerScale, Mlp, MultiHeadAttention, drop_path
from vit_jax.models.positions.base import take, take_tokens

if TYPE_CHECKING:
    from vit_jax.models.patches import Places

# Names of the encoder in a network's parameters, and of its blocks, "encoderblock_0".
ENCODER, BLOCK = "Transformer", "encoderblock"


class Block(nn.Module):
    """Encoder block: attention, then an MLP, each with a norm and a residual.

    The parts are named as in the published checkpoints.

    Attributes:
      config: `EncoderConfig`, which imports this file.
    """

    repeated: ClassVar[bool] = True  # See cost.py.
    attention_kind: ClassVar[type[nn.Module]] = MultiHeadAttention

    config: Any

    def setup(self):
        config = self.config
        self.attention = self.attention_kind(
            config.num_heads,
            config.dtype,
            config.attention_impl,
            config.merges_tokens,
            config.qk_norm,
            config.attention_out_norm,
            config.norm,
            config.init,
            name="MultiHeadDotProductAttention_1",
        )
        self.mlp = Mlp(
            config.mlp_dim,
            config.dropout,
            config.activation,
            config.dtype,
            config.merges_tokens,
            config.norm if config.mlp_norm else None,
            config.init,
            name="MlpBlock_3",
        )
        norms = config.norm(name="LayerNorm_0"), config.norm(name="LayerNorm_2")
        self.norm1, self.norm2 = (_same, _same) if config.post_norm else norms
        self.post_norm1, self.post_norm2 = norms if config.post_norm else (_same, _same)
        self.scale1 = self.scale2 = _same
        if config.layer_scale_init:
            self.scale1 = LayerScale(config.layer_scale_init, name="LayerScale_1")
            self.scale2 = LayerScale(config.layer_scale_init, name="LayerScale_3")

    def __call__(
        self,
        x: Float[Array, "B N D"],
        positions: Positions | None = None,
        rate: Float[Array, ""] | float | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B N D"]:
        """Transforms tokens.

        Args:
          x: tokens.
          positions: positions of the tokens in attention.
          rate: drop rate of both branches, see layers.drop_path; None drops nothing.
          key: random key, which activates dropout and stochastic depth; or None.
        """
        keys = [None] * 4 if key is None else jax.random.split(key, 4)
        x = x + drop_path(self.attend(x, positions, keys[0]), rate, keys[1])
        x = split_over_devices(x)
        x = x + drop_path(self.transform(x, keys[2]), rate, keys[3])
        return split_over_devices(x)

    def attend(self, x, positions: Positions | None, key) -> Float[Array, "B N D"]:
        """Returns the output of the attention branch."""
        x = self.norm1(x)
        y = dropout(self.attention(x, x, positions), self.config.dropout, key)
        return self.scale1(self.post_norm1(y))

    def transform(self, x, key) -> Float[Array, "B N D"]:
        """Returns the output of the MLP branch, which transforms each token."""
        return self.scale2(self.post_norm2(self.mlp(self.norm2(x), key)))


def _same(x):
    return x


def split_over_devices(x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
    """Constrains the sharding of tokens to be split by images over a mesh."""
    return nn.with_logical_constraint(x, ("batch", "tokens", "embed"))


class BlockInputs(NamedTuple):
    """Inputs of a block besides its tokens.

    Attributes:
      added: position embeddings that are added to the tokens before the block, or None.
      positions, rate, key: see Block.
    """

    added: Float[Array, "#B N D"] | None
    positions: Positions
    rate: float | None
    key: Key[Array, ""] | None


def run_block(
    block: Block, x: Float[Array, "B N D"], given: BlockInputs
) -> Float[Array, "B N D"]:
    """Applies a block."""
    if given.added is not None:
        x = x + given.added
    return block(x, given.positions, given.rate, given.key)


class Encoder(nn.Module):
    """Position embeddings, the blocks and the final LayerNorm.

    Attributes:
      config: `EncoderConfig`.
      grid: rows and columns of patches.
      num_prefix_tokens: number of tokens before the patches, P.
      num_register_tokens: number of registers, the last prefix tokens, which do not
        have positions.
    """

    config: Any
    grid: tuple[int, int]
    num_prefix_tokens: int
    num_register_tokens: int = 0

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B N D"],
        *,
        train: bool = False,
        visible: Int[Array, "B V"] | None = None,
    ) -> Float[Array, "B M D"]:
        """Returns the normalised tokens of the last block.

        Args:
          x: input tokens.
          train: whether dropout and stochastic depth are active.
          visible: indices of the patches of each image that the blocks process; None
            for all patches.
        """
        x, inputs = self.begin(x, train=train, visible=visible)
        return self.run(x, inputs)

    def begin(
        self,
        x: Float[Array, "B N D"],
        *,
        train: bool = False,
        visible: Int[Array, "B V"] | None = None,
        places: "Places | None" = None,
    ) -> tuple[Float[Array, "B M D"], list[BlockInputs]]:
        """Returns the tokens for the first block, and the other inputs of all blocks.

        Call it in a compact method.

        Args:
          x, train, visible: see `__call__`.
          places: see `Position.by_block`.
        """
        config, P = self.config, self.num_prefix_tokens
        keys = [None] * (1 + config.depth)
        if train and config.is_random:
            keys = jax.random.split(self.make_rng("dropout"), len(keys))
        key, *keys = keys
        blocks = [{} for _ in keys]
        for kind in config.positions:
            position = kind(config, self.grid, P, self.num_register_tokens)
            given = position.by_block(self, places, keys)
            for block, of_kind in zip(blocks, given, strict=True):
                block |= of_kind
        # Positions are added before the first dropout.
        x = x + blocks[0].pop("added") if "added" in blocks[0] else x
        x = dropout(x, config.dropout, key)
        x = config.norm(name="pre_norm")(x) if config.pre_norm else x
        x = split_over_devices(x)
        if visible is not None:
            x = take_tokens(x, visible, P)
            blocks = [take(block, visible, P) for block in blocks]
        rates = config.drop_rates()
        return x, [
            BlockInputs(block.pop("added", None), Positions(**block), rate, key)
            for block, rate, key in zip(blocks, rates, keys, strict=True)
        ]

    def run(
        self, x: Float[Array, "B M D"], inputs: list[BlockInputs]
    ) -> Float[Array, "B M D"]:
        """Applies the blocks and the norm; call it in a compact method.

        For a scan over the blocks and rematerialisation, see repetition.py.
        """
        config, outputs = self.config, []
        for i, given in enumerate(inputs):
            block = config.block(config, name=f"{BLOCK}_{i}")
            x = self.run_block(block, x, given)
            outputs.append(x)
        norm = self.final_norm()
        keep(self, outputs, norm)
        return norm(x)

    def run_block(
        self, block: Block, x: Float[Array, "B M D"], given: BlockInputs
    ) -> Float[Array, "B M D"]:
        """Applies a block."""
        return run_block(block, x, given)

    def final_norm(self) -> Callable[[Array], Array]:
        """Returns the norm after the last block; call it in a compact method."""
        config, P = self.config, self.num_prefix_tokens
        if not config.encoder_norm:
            return _same
        norm = config.norm(name="encoder_norm")
        if not config.cls_norm:
            return norm
        of_prefix = config.norm(name="cls_norm")
        return lambda x: jnp.concatenate([of_prefix(x[:, :P]), norm(x[:, P:])], axis=1)
