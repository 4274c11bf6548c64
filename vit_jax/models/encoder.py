"""The Transformer encoder: its blocks, one after the other or in a scan.

Parameters are named and shaped as in the published Google checkpoints; in a scan as
`stacking` says.
Letters: B images, N tokens, H heads, K head width, D model width, R offsets.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from vit_jax.models import remat, stacking
from vit_jax.models.layers import Mlp, MultiHeadAttention
from vit_jax.models.pointwise import LayerNorm, drop_path
from vit_jax.models.positions import AddPositions


class Block(nn.Module):
    """Pre-LayerNorm encoder block: attention, then MLP, each with a residual.

    Attributes:
      heads, hidden, dropout, gelu, dtype, way, merge: see MultiHeadAttention and Mlp.
      epsilon: of the LayerNorms.
    """

    heads: int
    hidden: int
    dropout: float = 0.0
    gelu: str = "tanh"
    epsilon: float = 1e-6
    dtype: str = "float32"
    way: str = "einsum"
    merge: bool = True

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
          rate: of stochastic depth of both branches, see pointwise.drop_path; None
            is none.
          key: of dropout and stochastic depth, which act if there is one.

        Returns:
          Tokens of the same shape.
        """
        keys = [None] * 4 if key is None else jax.random.split(key, 4)

        def norm(name, x):
            return LayerNorm(self.epsilon, self.dtype, name=name)(x)

        def add(x, branch, key):
            x = x + (branch if rate is None else drop_path(branch, rate, key))
            return nn.with_logical_constraint(x, ("batch", "tokens", "embed"))

        y = norm("LayerNorm_0", x)
        y = MultiHeadAttention(
            self.heads,
            self.dtype,
            self.way,
            self.merge,
            name="MultiHeadDotProductAttention_1",
        )(y, y, relative)
        y = nn.Dropout(self.dropout, deterministic=key is None)(y, rng=keys[0])
        x = add(x, y, keys[1])

        mlp = Mlp(
            self.hidden,
            self.dropout,
            self.gelu,
            self.dtype,
            self.merge,
            name="MlpBlock_3",
        )
        return add(x, mlp(norm("LayerNorm_2", x), keys[2]), keys[3])


class Layer(NamedTuple):
    """What a block is given besides its tokens.

    Attributes:
      position: to be added to the tokens first, or None.
      relative, rate, key: see Block.
    """

    position: Float[Array, "1 N D"] | None
    relative: Float[Array, "H R K"] | None
    rate: float | None
    key: Key[Array, ""] | None


def _run(block: Block, x: Float[Array, "B N D"], layer: Layer):
    """Applies a block, in the form of a scan's body."""
    if layer.position is not None:
        x = x + layer.position
    return block(x, layer.relative, layer.rate, layer.key), None


class Encoder(nn.Module):
    """Position embeddings, the blocks and the final LayerNorm.

    Attributes:
      block: makes a block, given its name.
      grid: patches down and across.
      extra: tokens in front of the patches.
      final_norm: whether the LayerNorm after the last block is there.
      others: as VisionTransformer.
    """

    block: Callable[..., Block]
    grid: tuple[int, int]
    extra: int
    final_norm: bool
    depth: int
    heads: int
    posemb: str
    posemb_at: str
    dropout: float
    stochastic_depth: float
    epsilon: float
    dtype: str
    scan: bool
    remat: str

    @nn.compact
    def __call__(
        self, x: Float[Array, "B N D"], *, train: bool = False
    ) -> Float[Array, "B N D"]:
        """Returns the normalised tokens of the last block."""
        x, layers = self._begin(x, train)
        if self.scan and not self.is_initializing():
            x = self._scan(x, layers)
        else:
            policy = "none" if self.is_initializing() else self.remat
            run = remat.wrap(_run, policy, in_scan=False)
            for i, layer in enumerate(layers):
                x, _ = run(self.block(name=f"{stacking.STACKED}_{i}"), x, layer)
        return self._end(x)

    def _begin(self, x, train):
        """Returns the tokens that reach the first block, and what blocks are given."""
        random = train and (self.dropout or self.stochastic_depth)
        keys = [None] * (1 + self.depth)
        if random:
            keys = jax.random.split(self.make_rng("dropout"), len(keys))
        key, *keys = keys
        layers = self._layers(x, keys)
        # Positions come before the first dropout.
        x = x if layers[0].position is None else x + layers[0].position
        layers[0] = layers[0]._replace(position=None)
        x = nn.Dropout(self.dropout, deterministic=not random)(x, rng=key)
        return nn.with_logical_constraint(x, ("batch", "tokens", "embed")), layers

    def _end(self, x):
        if not self.final_norm:
            return x
        return LayerNorm(self.epsilon, self.dtype, name="encoder_norm")(x)

    def _scan(self, x, layers):
        """Runs all blocks by one trace of one, over their stacked parameters."""
        if layers[-1].position is not None:
            zero = jnp.zeros_like(layers[-1].position)
            layers = [layers[0]._replace(position=zero), *layers[1:]]
        run = nn.scan(
            remat.wrap(_run, self.remat, in_scan=True),
            variable_axes={"params": 0},
            length=self.depth,
        )
        if self.dtype != "float32":
            run = nn.map_variables(run, "params", trans_in_fn=self._rounded)
        layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        return run(self.block(name=stacking.STACKED), x, layers)[0]

    def _rounded(self, params):
        """Rounds what products will round anyway.

        Before the scan, or it would stack the gradients in float32: of layers one by
        one XLA keeps those of the rounded parameters.
        """

        def round_one(path, leaf):
            exact = any("LayerNorm" in key.key for key in path)
            return leaf if exact else leaf.astype(self.dtype)

        return jax.tree.map_with_path(round_one, params)

    def _layers(self, x, keys) -> list[Layer]:
        """Returns what each block is given besides its tokens."""
        # No rates rather than zeros, whose draws XLA could not leave out of a scan.
        rates = [None] * self.depth
        if self.stochastic_depth:
            last = max(1, self.depth - 1)
            rates = [self.stochastic_depth * i / last for i in range(self.depth)]
        return [
            Layer(position, self._relative(x, i), rates[i], key)
            for i, (position, key) in enumerate(
                zip(self._positions(x), keys, strict=True)
            )
        ]

    def _positions(self, x) -> list:
        """Returns what is added to the tokens before each block, or None."""
        if self.posemb in ("none", "relative"):
            return [None] * self.depth

        def table(name):
            add = AddPositions(self.posemb, self.grid, self.extra, name=name)
            return add(jnp.zeros((1, *x.shape[1:]), x.dtype))

        if self.posemb_at == "every":
            return [table(f"posembed_{i}") for i in range(self.depth)]
        first = table("posembed_input")
        return [first] + [first if self.posemb_at == "shared" else None] * (
            self.depth - 1
        )

    def _relative(self, x, layer: int):
        """Returns a layer's key for each offset of two tokens, if it has them."""
        if self.posemb != "relative":
            return None
        name = "relative_embedding"
        if self.posemb_at == "every":
            name = f"{name}_{layer}"
        elif layer:
            return self.get_variable("params", name).astype(x.dtype)
        _, N, D = x.shape
        shape = (self.heads, 2 * N - 1, D // self.heads)
        init = nn.initializers.normal(0.02)
        return self.param(name, init, shape, jnp.float32).astype(x.dtype)
