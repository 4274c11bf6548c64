"""The encoder of the Vision Transformer: positions, blocks, and the final LayerNorm.

Parameters are named as vit.py says. Letters: B images, P prefix tokens, N tokens, H heads,
K head width, D model width, R offsets, V visible patches, Y by X patches.
"""

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from vit_jax.models import rotary, stacking
from vit_jax.models.attention import Positions
from vit_jax.models.layers import (
    LayerNorm,
    LayerScale,
    Mlp,
    MultiHeadAttention,
    drop_path,
)
from vit_jax.models.posemb import AddPositions, bias_of_grid


class Block(nn.Module):
    """Encoder block: attention, then MLP, each with a LayerNorm and a residual.

    Attributes:
      num_heads, hidden, dropout, activation, dtype, attention_impl, flatten: see
        MultiHeadAttention and Mlp.
      layer_scale_init, post_norm, qk_norm, attention_out_norm, mlp_norm: see
        vit.VisionTransformer.
      layer_norm_eps: epsilon of the LayerNorms.
    """

    repeated: ClassVar[bool] = True  # See cost.py.

    num_heads: int
    hidden: int
    dropout: float = 0.0
    activation: str = "gelu_tanh"
    layer_scale_init: float = 0.0
    layer_norm_eps: float = 1e-6
    post_norm: bool = False
    qk_norm: bool = False
    attention_out_norm: bool = False
    mlp_norm: bool = False
    dtype: str = "float32"
    attention_impl: str = "einsum"
    flatten: bool = True

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
          positions: that the attention knows.
          rate: of stochastic depth in both branches, see layers.drop_path, or None.
          key: for dropout and stochastic depth, which are active if it is given.
        """
        keys = [None] * 4 if key is None else jax.random.split(key, 4)

        def norm(name, x):
            return LayerNorm(self.layer_norm_eps, self.dtype, name=name)(x)

        def before(name, x):
            return x if self.post_norm else norm(name, x)

        def add(x, branch, key, name, scale):
            branch = norm(name, branch) if self.post_norm else branch
            if self.layer_scale_init:
                branch = LayerScale(self.layer_scale_init, name=scale)(branch)
            x = x + (branch if rate is None else drop_path(branch, rate, key))
            return nn.with_logical_constraint(x, ("batch", "tokens", "embed"))

        y = before("LayerNorm_0", x)
        y = MultiHeadAttention(
            self.num_heads,
            self.dtype,
            self.attention_impl,
            self.flatten,
            self.qk_norm,
            self.attention_out_norm,
            self.layer_norm_eps,
            name="MultiHeadDotProductAttention_1",
        )(y, y, positions)
        y = nn.Dropout(self.dropout, deterministic=key is None)(y, rng=keys[0])
        x = add(x, y, keys[1], "LayerNorm_0", "LayerScale_1")

        mlp = Mlp(
            self.hidden,
            self.dropout,
            self.activation,
            self.dtype,
            self.flatten,
            self.layer_norm_eps if self.mlp_norm else 0.0,
            name="MlpBlock_3",
        )
        y = mlp(before("LayerNorm_2", x), keys[2])
        return add(x, y, keys[3], "LayerNorm_2", "LayerScale_3")


class BlockInputs(NamedTuple):
    """Inputs of a block besides its tokens.

    Attributes:
      added: position embeddings added to the tokens first, or None.
      positions, rate, key: see Block.
    """

    added: Float[Array, "1 N D"] | None
    positions: Positions
    rate: float | None
    key: Key[Array, ""] | None


def _run_block(block: Block, x: Float[Array, "B N D"], layer: BlockInputs):
    """Applies a block; has the signature of a scan body."""
    if layer.added is not None:
        x = x + layer.added
    return block(x, layer.positions, layer.rate, layer.key), None


class _Rounded(NamedTuple):
    """A parameter of a product under a scan.

    Attributes:
      exact: its value, which takes no gradient.
      rounded: takes the gradient; the value is not read.
    """

    exact: Float[Array, "*S"]
    rounded: Float[Array, "*S"]


@jax.custom_vjp
def _with_gradient_of(value, other):
    """Returns `value`, whose gradient goes to `other` instead."""
    return value


_with_gradient_of.defvjp(
    lambda value, other: (value, None), lambda _, grad: (jnp.zeros_like(grad), grad)
)


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
    pre_norm: bool = False
    relative_bias: str = "none"
    rope: str = "none"
    rope_temperature: float = 100.0
    rope_reference: int = 0

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
            layers = [self._only(layer, visible) for layer in layers]
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
        x = x if layers[0].added is None else x + layers[0].added
        layers[0] = layers[0]._replace(added=None)
        x = nn.Dropout(self.dropout, deterministic=not random)(x, rng=key)
        if self.pre_norm:
            x = LayerNorm(self.layer_norm_eps, self.dtype, name="pre_norm")(x)
        return nn.with_logical_constraint(x, ("batch", "tokens", "embed")), layers

    def _end(self, x):
        if not self.final_norm:
            return x
        return LayerNorm(self.layer_norm_eps, self.dtype, name="encoder_norm")(x)

    def _scan(self, x, layers):
        """Runs all blocks as a scan over stacked parameters."""
        if layers[-1].added is not None:
            zero = jnp.zeros_like(layers[-1].added)
            layers = [layers[0]._replace(added=zero), *layers[1:]]
        run = _run_block
        if self.dtype != "float32":
            run = nn.map_variables(run, "params", trans_in_fn=self._round)
        run = nn.scan(
            stacking.wrap_remat(run, self.remat_policy, in_scan=True),
            variable_axes={"params": 0},
            length=self.depth,
        )
        if self.dtype != "float32":
            run = nn.map_variables(run, "params", trans_in_fn=self._split)
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        return run(self.block(name=stacking.STACKED), x, layers)[0]

    def _split(self, params):
        """Separates the parameters of products into values and what takes gradients.

        Products round their parameters to the dtype of the computation anyway. Rounded
        before the scan, parameters get gradients that it stacks in that dtype and not in
        float32. What products read is rounded in the scan, so that no rounded copy of all
        blocks is in memory; without rematerialisation the scan would keep one in any case.
        """

        def split_one(path, leaf):
            if any("LayerNorm" in key.key for key in path):
                return leaf
            rounded = leaf.astype(self.dtype)
            if self.remat_policy == "none":
                return rounded
            return _Rounded(jax.lax.stop_gradient(leaf), rounded)

        return jax.tree.map_with_path(split_one, params)

    def _round(self, params):
        """Returns the parameters of one block, those of products rounded."""

        def round_one(leaf):
            if not isinstance(leaf, _Rounded):
                return leaf
            # XLA moves a mere conversion out of the loop, to all blocks at once.
            kind = jnp.finfo(self.dtype)
            value = jax.lax.reduce_precision(leaf.exact, kind.nexp, kind.nmant)
            return _with_gradient_of(value.astype(self.dtype), leaf.rounded)

        return jax.tree.map(
            round_one, params, is_leaf=lambda leaf: isinstance(leaf, _Rounded)
        )

    def _layers(self, x, keys) -> list[BlockInputs]:
        """Returns the inputs of the blocks besides their tokens."""
        # None instead of zeros, whose draws XLA could not remove from a scan.
        rates = [None] * self.depth
        if self.drop_path_rate and self.drop_path_schedule == "constant":
            rates = [self.drop_path_rate] * self.depth
        elif self.drop_path_rate:
            last = max(1, self.depth - 1)
            rates = [self.drop_path_rate * i / last for i in range(self.depth)]
        angles = self._angles(x)
        return [
            BlockInputs(
                added,
                Positions(self._relative(x, i), self._bias(x, i), angles[i]),
                rates[i],
                key,
            )
            for i, (added, key) in enumerate(zip(self._added(x), keys, strict=True))
        ]

    def _only(self, layer: BlockInputs, visible) -> BlockInputs:
        """Returns the inputs of a block for the patches that are visible."""
        angles = layer.positions.angles
        if angles is None:
            return layer
        P = self.num_prefix_tokens
        patches = jnp.take_along_axis(
            angles[None, :, P:], visible[:, None, :, None], axis=2
        )
        prefix = jnp.broadcast_to(
            angles[None, :, :P], (*patches.shape[:2], P, patches.shape[3])
        )
        angles = jnp.concatenate([prefix, patches], axis=2)
        return layer._replace(positions=layer.positions._replace(angles=angles))

    def _angles(self, x) -> list:
        """Returns the angles that the queries and keys of each block are turned by."""
        if self.rope == "none":
            return [None] * self.depth
        K = x.shape[-1] // self.num_heads
        if self.rope == "mixed":
            shape = (self.depth, 2, self.num_heads, K // 2)

            def init(key, shape):
                turns = jax.random.uniform(key, (shape[0], shape[2]))
                return rotary.initial_frequencies(turns, K, self.rope_temperature)

            layers = self.param("rope_frequencies", init, shape)
            found = [rotary.mixed_angles(one, self.grid) for one in layers]
        else:
            numbers = K, self.rope_temperature, self.rope_reference
            found = [rotary.angles(self.rope, self.grid, *numbers)] * self.depth
        pad = ((0, 0), (self.num_prefix_tokens, 0), (0, 0))
        return [jnp.pad(one, pad) for one in found]

    def _bias(self, x, layer: int):
        """Returns what is added to the logits of a layer, if anything is."""
        if self.relative_bias == "none":
            return None
        name, (Y, X) = "relative_bias", self.grid
        if self.relative_bias == "every":
            name = f"{name}_{layer}"
        if layer and self.relative_bias == "shared":
            table = self.get_variable("params", name)
        else:
            shape = (math.prod((2 * Y - 1, 2 * X - 1)) + 3, self.num_heads)
            table = self.param(name, nn.initializers.zeros, shape, jnp.float32)
        return bias_of_grid(jnp.asarray(table), self.grid, self.num_prefix_tokens)

    def _added(self, x) -> list:
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
