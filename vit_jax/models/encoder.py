"""The encoder of the Vision Transformer: positions, blocks, and the final LayerNorm.

Parameters are named as vit.py says. Letters: B images, P prefix tokens, N tokens, H heads,
K head width, D model width, R offsets, V visible patches.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from vit_jax.models import stacking
from vit_jax.models.layers import (
    LayerNorm,
    LayerScale,
    Mlp,
    MultiHeadAttention,
    drop_path,
)
from vit_jax.models.posemb import AddPositions


class Block(nn.Module):
    """Pre-LayerNorm encoder block: attention, then MLP, each with a residual.

    Attributes:
      num_heads, hidden, dropout, activation, dtype, attention_impl, flatten: see
        MultiHeadAttention and Mlp.
      layer_scale_init: see vit.VisionTransformer.
      layer_norm_eps: epsilon of the LayerNorms.
    """

    repeated: ClassVar[bool] = True  # See cost.py.

    num_heads: int
    hidden: int
    dropout: float = 0.0
    activation: str = "gelu_tanh"
    layer_scale_init: float = 0.0
    layer_norm_eps: float = 1e-6
    dtype: str = "float32"
    attention_impl: str = "einsum"
    flatten: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B N D"],
        relative: Float[Array, "H R K"] | None = None,
        rate: Float[Array, ""] | float | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B N D"]:
        """Transforms tokens.

        Args:
          x: tokens.
          relative: see attention.attend.
          rate: of stochastic depth in both branches, see layers.drop_path, or None.
          key: for dropout and stochastic depth, which are active if it is given.
        """
        keys = [None] * 4 if key is None else jax.random.split(key, 4)

        def norm(name, x):
            return LayerNorm(self.layer_norm_eps, self.dtype, name=name)(x)

        def add(x, branch, key, scale):
            if self.layer_scale_init:
                branch = LayerScale(self.layer_scale_init, name=scale)(branch)
            x = x + (branch if rate is None else drop_path(branch, rate, key))
            return nn.with_logical_constraint(x, ("batch", "tokens", "embed"))

        y = norm("LayerNorm_0", x)
        y = MultiHeadAttention(
            self.num_heads,
            self.dtype,
            self.attention_impl,
            self.flatten,
            name="MultiHeadDotProductAttention_1",
        )(y, y, relative)
        y = nn.Dropout(self.dropout, deterministic=key is None)(y, rng=keys[0])
        x = add(x, y, keys[1], "LayerScale_1")

        mlp = Mlp(
            self.hidden,
            self.dropout,
            self.activation,
            self.dtype,
            self.flatten,
            name="MlpBlock_3",
        )
        y = mlp(norm("LayerNorm_2", x), keys[2])
        return add(x, y, keys[3], "LayerScale_3")


class BlockInputs(NamedTuple):
    """Inputs of a block besides its tokens.

    Attributes:
      position: position embeddings added to the tokens first, or None.
      relative, rate, key: see Block.
    """

    position: Float[Array, "1 N D"] | None
    relative: Float[Array, "H R K"] | None
    rate: float | None
    key: Key[Array, ""] | None


def _run_block(block: Block, x: Float[Array, "B N D"], layer: BlockInputs):
    """Applies a block; has the signature of a scan body."""
    if layer.position is not None:
        x = x + layer.position
    return block(x, layer.relative, layer.rate, layer.key), None


class Encoder(nn.Module):
    """Position embeddings, the blocks and the final LayerNorm.

    Attributes:
      block: function from a name to a block.
      grid: rows and columns of patches.
      num_prefix_tokens: tokens before the patches.
      num_register_tokens: how many of them, the last, have no position.
      final_norm: whether there is a LayerNorm after the last block.
      others: see vit.VisionTransformer.
    """

    block: Callable[..., Block]
    grid: tuple[int, int]
    num_prefix_tokens: int
    final_norm: bool
    depth: int
    num_heads: int
    posemb: str
    posemb_placement: str
    dropout: float
    drop_path_rate: float
    layer_norm_eps: float
    dtype: str
    scan: bool
    remat_policy: str
    num_register_tokens: int = 0
    drop_path_schedule: str = "linear"

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
          visible: the patches to go on with after the positions, see
            vit.VisionTransformer.
        """
        x, layers = self._begin(x, train)
        if visible is not None:
            P = self.num_prefix_tokens
            patches = jnp.take_along_axis(x[:, P:], visible[..., None], axis=1)
            x = jnp.concatenate([x[:, :P], patches], axis=1)
        if self.scan and not self.is_initializing():
            x = self._scan(x, layers)
        else:
            policy = "none" if self.is_initializing() else self.remat_policy
            run = stacking.wrap_remat(_run_block, policy, in_scan=False)
            for i, layer in enumerate(layers):
                x, _ = run(self.block(name=f"{stacking.STACKED}_{i}"), x, layer)
        return self._end(x)

    def _begin(self, x, train):
        """Returns the input tokens of the first block, and the other inputs of all blocks."""
        random = train and (self.dropout or self.drop_path_rate)
        keys = [None] * (1 + self.depth)
        if random:
            keys = jax.random.split(self.make_rng("dropout"), len(keys))
        key, *keys = keys
        layers = self._layers(x, keys)
        # Positions are added before the first dropout.
        x = x if layers[0].position is None else x + layers[0].position
        layers[0] = layers[0]._replace(position=None)
        x = nn.Dropout(self.dropout, deterministic=not random)(x, rng=key)
        return nn.with_logical_constraint(x, ("batch", "tokens", "embed")), layers

    def _end(self, x):
        if not self.final_norm:
            return x
        return LayerNorm(self.layer_norm_eps, self.dtype, name="encoder_norm")(x)

    def _scan(self, x, layers):
        """Runs all blocks as a scan over stacked parameters."""
        if layers[-1].position is not None:
            zero = jnp.zeros_like(layers[-1].position)
            layers = [layers[0]._replace(position=zero), *layers[1:]]
        run = nn.scan(
            stacking.wrap_remat(_run_block, self.remat_policy, in_scan=True),
            variable_axes={"params": 0},
            length=self.depth,
        )
        if self.dtype != "float32":
            run = nn.map_variables(run, "params", trans_in_fn=self._rounded)
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        return run(self.block(name=stacking.STACKED), x, layers)[0]

    def _rounded(self, params):
        """Rounds the parameters of products to the dtype of the computation.

        Products round them anyway. Rounding before the scan keeps it from stacking
        gradients in float32.
        """

        def round_one(path, leaf):
            exact = any("LayerNorm" in key.key for key in path)
            return leaf if exact else leaf.astype(self.dtype)

        return jax.tree.map_with_path(round_one, params)

    def _layers(self, x, keys) -> list[BlockInputs]:
        """Returns the inputs of the blocks besides their tokens."""
        # None instead of zeros, whose draws XLA could not remove from a scan.
        rates = [None] * self.depth
        if self.drop_path_rate and self.drop_path_schedule == "constant":
            rates = [self.drop_path_rate] * self.depth
        elif self.drop_path_rate:
            last = max(1, self.depth - 1)
            rates = [self.drop_path_rate * i / last for i in range(self.depth)]
        return [
            BlockInputs(position, self._relative(x, i), rates[i], key)
            for i, (position, key) in enumerate(
                zip(self._positions(x), keys, strict=True)
            )
        ]

    def _positions(self, x) -> list:
        """Returns the position embeddings added before each block, or None."""
        if self.posemb in ("none", "relative"):
            return [None] * self.depth

        def table(name):
            add = AddPositions(
                self.posemb,
                self.grid,
                self.num_prefix_tokens,
                self.num_register_tokens,
                name=name,
            )
            return add(jnp.zeros((1, *x.shape[1:]), x.dtype))

        if self.posemb_placement == "every":
            return [table(f"posembed_{i}") for i in range(self.depth)]
        first = table("posembed_input")
        return [first] + [first if self.posemb_placement == "shared" else None] * (
            self.depth - 1
        )

    def _relative(self, x, layer: int):
        """Returns a layer's key for each offset of two tokens, if it has them."""
        if self.posemb != "relative":
            return None
        name = "relative_embedding"
        if self.posemb_placement == "every":
            name = f"{name}_{layer}"
        elif layer:
            return self.get_variable("params", name).astype(x.dtype)
        _, N, D = x.shape
        shape = (self.num_heads, 2 * N - 1, D // self.num_heads)
        init = nn.initializers.normal(0.02)
        return self.param(name, init, shape, jnp.float32).astype(x.dtype)
