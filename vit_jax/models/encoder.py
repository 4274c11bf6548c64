"""The encoder of the Vision Transformer: positions, blocks, and the final LayerNorm.

Parameters are named as in vit.py. Letters: B images, P prefix tokens, N tokens, H heads,
K head width, D model width, R offsets, V visible patches, Y by X patches.
"""

import functools
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from vit_jax.models import layer_features, rotary, stacking
from vit_jax.models.attention import Positions
from vit_jax.models.encoder_config import EncoderConfig
from vit_jax.models.layers import (
    LayerScale,
    Mlp,
    MultiHeadAttention,
    add_to_some,
    drop_path,
    dropout,
)
from vit_jax.models.patches import Places
from vit_jax.models.posemb import AddPositions, bias_of_grid


class Block(nn.Module):
    """Encoder block: attention, then MLP, each with a LayerNorm and a residual."""

    repeated: ClassVar[bool] = True  # See cost.py.

    config: EncoderConfig

    @nn.compact
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
          positions: positions of the tokens.
          rate: drop rate of both branches, see layers.drop_path, or None.
          key: random key that activates dropout and stochastic depth, or None.
        """
        keys = [None] * 4 if key is None else jax.random.split(key, 4)
        attention = functools.partial(self._attention, positions, keys[0])
        x = self._add(x, attention, rate, keys[1])
        return self._add(x, functools.partial(self._mlp, keys[2]), rate, keys[3])

    def _add(self, x, branch, rate, key):
        """Adds a branch, a function of tokens and of how some images are taken."""
        config, whole = self.config, lambda of_images: of_images
        if config.drop_path_group and rate is not None and key is not None:
            sizes = config.drop_path_rate, config.drop_path_group
            x = add_to_some(x, branch, *sizes, key)
        else:
            y = branch(x, whole)
            x = x + (y if rate is None else drop_path(y, rate, key))
        return nn.with_logical_constraint(x, ("batch", "tokens", "embed"))

    def _attention(self, positions, key, x, take, with_keys=False):
        config, name = self.config, "LayerNorm_0"
        if positions is not None:
            positions = _of_images(positions, take)
        y = self._before(name, x)
        y = MultiHeadAttention(
            config.num_heads,
            config.dtype,
            config.attention_impl,
            config.merges_tokens,
            config.qk_norm,
            config.attention_out_norm,
            config.norm,
            name="MultiHeadDotProductAttention_1",
        )(y, y, positions, with_keys=with_keys)
        y, keys = y if with_keys else (y, None)
        y = self._after(name, dropout(y, config.dropout, key), "LayerScale_1")
        return (y, keys) if with_keys else y

    def _mlp(self, key, x, take):
        config, name = self.config, "LayerNorm_2"
        y = Mlp(
            config.mlp_dim,
            config.dropout,
            config.activation,
            config.dtype,
            config.merges_tokens,
            config.norm if config.mlp_norm else None,
            name="MlpBlock_3",
        )(self._before(name, x), key)
        return self._after(name, y, "LayerScale_3")

    def _before(self, name, x):
        return x if self.config.post_norm else self.config.norm(name=name)(x)

    def _after(self, name, y, scale):
        y = self.config.norm(name=name)(y) if self.config.post_norm else y
        if not self.config.layer_scale_init:
            return y
        return LayerScale(self.config.layer_scale_init, name=scale)(y)


class BlockInputs(NamedTuple):
    """Inputs of a block besides its tokens.

    Attributes:
      added: position embeddings that are added to the tokens first, or None.
      positions, rate, key: see Block.
    """

    added: Float[Array, "1 N D"] | None
    positions: Positions
    rate: float | None
    key: Key[Array, ""] | None


def _of_images(positions: Positions, take: Callable) -> Positions:
    """Returns the positions of some images, of which `take` takes the rows."""
    per_image = {
        name: take(x)
        for name, x in positions._asdict().items()
        if x is not None and (name in ("lengths", "segments") or x.ndim == 4)
    }
    return positions._replace(**per_image)


def _run_block(block: Block, x: Float[Array, "B N D"], layer: BlockInputs):
    """Applies a block; has the signature of a scan body."""
    if layer.added is not None:
        x = x + layer.added
    return block(x, layer.positions, layer.rate, layer.key), None


def _only(x: Float[Array, "..."], visible: Int[Array, "*B V"], P: int) -> Array:
    """Returns P prefix tokens and the visible patches of x (*B, N, D); B may be 1 in x."""
    patches = jnp.take_along_axis(x[..., P:, :], visible[..., None], axis=-2)
    prefix = jnp.broadcast_to(
        x[..., :P, :], (*patches.shape[:-2], P, patches.shape[-1])
    )
    return jnp.concatenate([prefix, patches], axis=-2)


class Encoder(nn.Module):
    """Position embeddings, the blocks and the final LayerNorm.

    Attributes:
      grid: rows and columns of patches.
      num_prefix_tokens: P.
      num_register_tokens: number of prefix tokens, the last ones, without a position.
    """

    config: EncoderConfig
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
        places: Places | None = None,
        kept: Places | None = None,
    ) -> Float[Array, "B M D"]:
        """Returns the normalised tokens of the last block.

        Args:
          x: input tokens.
          train: whether dropout and stochastic depth are active.
          visible: indices of the patches that the blocks get, see
            vit.VisionTransformer.
          places: places of the patches in images of any size; None if they are `grid`.
          kept: places of the patches that the blocks get.
        """
        config = self.config
        x, layers = self._begin(x, train, places)
        if visible is not None:
            P = self.num_prefix_tokens
            x = _only(x, visible, P)
            layers = [self._only(layer, visible) for layer in layers]
        if kept is not None:
            layers = [self._masked(layer, kept) for layer in layers]
        if config.stacked and not self.is_initializing():
            block = Block(config, name=stacking.STACKED)
            if layers[-1].added is not None:  # `_begin` has added those of the first.
                zeros = jnp.zeros_like(layers[-1].added)
                layers = [layers[0]._replace(added=zeros), *layers[1:]]
            x = stacking.scan(_run_block, block, x, layers, config)
            return self._final_norm()(x)
        policy = "none" if self.is_initializing() else config.remat_policy
        run = stacking.wrap_remat(_run_block, policy, in_scan=False)
        outputs = []
        for i, layer in enumerate(layers):
            x, _ = run(Block(config, name=f"{stacking.STACKED}_{i}"), x, layer)
            outputs.append(x)
        norm = self._final_norm()
        layer_features.keep(self, outputs, norm)
        return norm(x)

    def _begin(self, x, train, places=None):
        """Returns the first block's tokens, and the other inputs of all blocks."""
        config = self.config
        random = config.dropout or config.drop_path_rate or config.jitters_rope
        random = train and random
        keys = [None] * (1 + self.config.depth)
        if random:
            keys = jax.random.split(self.make_rng("dropout"), len(keys))
        key, *keys = keys
        layers = self._layers(x, keys, places)
        # Positions are added before the first dropout.
        x = x if layers[0].added is None else x + layers[0].added
        layers[0] = layers[0]._replace(added=None)
        x = dropout(x, self.config.dropout, key)
        if self.config.pre_norm:
            x = self.config.norm(name="pre_norm")(x)
        return nn.with_logical_constraint(x, ("batch", "tokens", "embed")), layers

    def _final_norm(self) -> Callable[[Array], Array]:
        if not self.config.encoder_norm:
            return lambda x: x
        norm = self.config.norm(name="encoder_norm")
        if not self.config.cls_norm:
            return norm
        P, of_prefix = self.num_prefix_tokens, self.config.norm(name="cls_norm")
        return lambda x: jnp.concatenate([of_prefix(x[:, :P]), norm(x[:, P:])], axis=1)

    def _layers(self, x, keys, places) -> list[BlockInputs]:
        """Returns the inputs of the blocks besides their tokens."""
        rates = self.config.drop_rates()
        angles = self._angles(x, keys, places)
        return [
            BlockInputs(
                added,
                Positions(self._relative(x, i), self._bias(x, i), angles[i]),
                rates[i],
                key,
            )
            for i, (added, key) in enumerate(
                zip(self._added(x, places), keys, strict=True)
            )
        ]

    def _only(self, layer: BlockInputs, visible) -> BlockInputs:
        """Returns the inputs of a block for the visible patches."""
        added, angles, P = layer.added, layer.positions.angles, self.num_prefix_tokens
        if added is not None:
            added = _only(added, visible, P)
        if angles is not None:
            angles = angles if angles.ndim == 4 else angles[None]
            angles = _only(angles, visible[:, None], P)
        positions = layer.positions._replace(angles=angles)
        return layer._replace(added=added, positions=positions)

    def _masked(self, layer: BlockInputs, kept: Places) -> BlockInputs:
        """Returns the inputs of a block that keeps images apart, and padding out."""
        if kept.num_images > 1:
            mask = {"segments": kept.image}
        else:
            lengths = self.num_prefix_tokens + kept.valid.sum(1)
            mask = {"lengths": jnp.maximum(1, lengths)}
        return layer._replace(positions=layer.positions._replace(**mask))

    def _angles(self, x, keys, places) -> list:
        """Returns the rotary angles of each block, or None."""
        config = self.config
        if config.rope == "none":
            return [None] * config.depth
        K, temperature = x.shape[-1] // config.num_heads, config.rope_temperature
        if config.rope == "mixed":

            def init(key, shape):
                turns = jax.random.uniform(key, (shape[0], shape[2]))
                return rotary.initial_frequencies(turns, K, temperature)

            shape = (config.depth, 2, config.num_heads, K // 2)
            frequencies = self.param("rope_frequencies", init, shape)
            of_layer = functools.partial(rotary.mixed_angles, grid=self.grid)
            angles = [of_layer(layer, places=places) for layer in frequencies]
        else:
            angles = rotary.of_blocks(config, self.grid, K, keys, places)
        pad = ((self.num_prefix_tokens, 0), (0, 0))
        return [jnp.pad(layer, ((0, 0),) * (layer.ndim - 2) + pad) for layer in angles]

    def _bias(self, x, layer: int):
        """Returns a layer's bias of the attention logits, or None."""
        if self.config.relative_bias == "none":
            return None
        name, (Y, X) = "relative_bias", self.grid
        if self.config.relative_bias == "every":
            name = f"{name}_{layer}"
        if layer and self.config.relative_bias == "shared":
            table = self.get_variable("params", name)
        else:
            shape = (math.prod((2 * Y - 1, 2 * X - 1)) + 3, self.config.num_heads)
            table = self.param(name, nn.initializers.zeros, shape, jnp.float32)
        return bias_of_grid(jnp.asarray(table), self.grid, self.num_prefix_tokens)

    def _added(self, x, places) -> list:
        """Returns the position embeddings that are added before each block, or None."""
        if self.config.posemb in ("none", "relative"):
            return [None] * self.config.depth

        def table(name):
            add = AddPositions(
                self.config.posemb,
                self.grid,
                self.num_prefix_tokens,
                self.num_register_tokens,
                name=name,
            )
            method = self.config.posemb_resize
            return add.embedding(x.shape[-1], places, method).astype(x.dtype)

        if self.config.posemb_placement == "every":
            return [table(f"posembed_{i}") for i in range(self.config.depth)]
        first = table("posembed_input")
        return [first] + [
            first if self.config.posemb_placement == "shared" else None
        ] * (self.config.depth - 1)

    def _relative(self, x, layer: int):
        """Returns a layer's embedding of each offset of two tokens, or None."""
        if self.config.posemb != "relative":
            return None
        name = "relative_embedding"
        if self.config.posemb_placement == "every":
            name = f"{name}_{layer}"
        elif layer:
            return self.get_variable("params", name).astype(x.dtype)
        _, N, D = x.shape
        shape = (self.config.num_heads, 2 * N - 1, D // self.config.num_heads)
        init = nn.initializers.normal(0.02)
        return self.param(name, init, shape, jnp.float32).astype(x.dtype)
