"""The Vision Transformer (arXiv:2010.11929, section 3.1) and its hybrids.

Parameters are named and shaped as in the published Google checkpoints; under a scan as
described in stacking.py.
Letters: B images, Y by X pixels or patches, C channels, P prefix tokens, N tokens,
H heads, K head width, D model width, R offsets, L classes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from vit_jax.config.fields import key
from vit_jax.models import attention as attending
from vit_jax.models import resnet, stacking
from vit_jax.models.layers import (
    ACTIVATIONS,
    LayerNorm,
    LayerScale,
    MapHead,
    Mlp,
    MultiHeadAttention,
    classify,
    drop_path,
)
from vit_jax.models.posemb import RESIZE_METHODS
from vit_jax.models.variants import CONFIGS, ModelConfig

POOLS = ("token", "gap", "map", "none")
POSITION_KINDS = (
    *("learned", "learned2d", "sincos2d", "sincos2d_mae"),
    *("relative", "none"),
)
POSITION_PLACES = ("stem", "every", "shared")
MLP_ACTIVATIONS = (*ACTIVATIONS, "swiglu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(ModelConfig):
    """All others, as `B/16`"""

    width: int = key(
        0, "Features a token, in place of the variant's own if not 0.", below=2**31
    )
    depth: int = key(0, "Encoder blocks, likewise.", below=2**31)
    num_heads: int = key(
        0,
        "Attention heads a block, likewise.",
        below=2**31,
        formerly="model.heads",
    )
    mlp_dim: int = key(
        0,
        "Hidden units of the MLP, likewise; of a gated one those behind the gate.",
        below=2**31,
    )
    pool: str = key(
        "token",
        'Classifier input: "token", "gap" (mean) or "map" (attention).',
        choices=("token", "gap", "map"),
        formerly="model.head",
    )
    class_token: bool = key(
        False,
        "Keep a class token beside the patches.",
        only_if={"pool": ("gap", "map")},
    )
    distillation: bool = key(
        False, "DeiT's second token, whose classifier is averaged in."
    )
    num_register_tokens: int = key(
        0,
        "Learnt tokens without position in front of the patches, which the pools "
        '"token" and "gap" leave out (arXiv:2309.16588).',
        below=1_000,
    )
    representation_layer: bool = key(
        False,
        "One tanh layer of the model's width before the head.",
        formerly="model.representation",
    )
    fc_norm: bool = key(
        False,
        "The final LayerNorm after the pooling, as timm's fc_norm.",
        formerly="model.pooled_norm",
    )
    posemb: str = key(
        "learned",
        'Position embeddings: "learned", "learned2d", "sincos2d", "sincos2d_mae", '
        '"relative" or "none".',
        choices=POSITION_KINDS,
    )
    posemb_placement: str = key(
        "stem",
        'Where they are added: once ("stem"), in "every" layer its own, or in each the '
        'same ("shared"). Of "relative" each layer has its own, or all the same.',
        choices=POSITION_PLACES,
        formerly="model.posemb_at",
        only_if={
            "posemb": {
                "learned": "stem",
                "learned2d": "stem",
                "sincos2d": "stem",
                "sincos2d_mae": "stem",
                "relative": "every",
            }
        },
    )
    posemb_resize: str = key(
        "linear",
        'How learned ones are resized for images of another size: "linear" (Google\'s), '
        '"bicubic" (timm\'s, DINOv2\'s with registers), "bicubic_plain" (MAE\'s), '
        "\"bicubic_dino\" (DINO's, DINOv2's); models/posemb.py.",
        choices=tuple(RESIZE_METHODS),
        only_if={"posemb": ("learned", "learned2d")},
    )
    dropout: float = key(
        0.0,
        "Its rate, after the position embeddings and each dense layer but those of "
        "query, key and value and of the head.",
        below=1,
    )
    drop_path_rate: float = key(
        0.0,
        "Drop rate of the last block; 0 at the first, linear.",
        below=1,
        formerly="model.stochastic_depth",
    )
    activation: str = key(
        "gelu_tanh",
        'Of the MLP: "gelu_tanh" (Google\'s), "gelu" (exact: timm, Hugging Face) or '
        '"swiglu" (gated: DINOv2\'s g/14).',
        choices=MLP_ACTIVATIONS,
        formerly="model.gelu",
    )
    layer_scale_init: float = key(
        0.0,
        "Initial LayerScale, the learnt factors behind attention and MLP "
        "(arXiv:2103.17239); 0: there are none.",
    )
    layer_norm_eps: float = key(
        1e-6, "Epsilon of the LayerNorms.", formerly="model.epsilon"
    )
    scan: bool = key(
        False,
        "One trace of a block for all: compiles faster, needs more memory. The results, "
        "parameters and checkpoints are the same with any value of this, of "
        "`remat_policy` and of `attention_impl`.",
        changes_result=False,
    )
    remat_policy: str = key(
        "none",
        "What a block computes again, from most memory to most computing; see "
        "models/stacking.py.",
        choices=tuple(stacking.REMAT_POLICIES),
        formerly="model.remat",
        changes_result=False,
    )
    attention_impl: str = key(
        "auto",
        '"auto", or "einsum", "cudnn" (NVIDIA GPUs), "splash" (TPUs).',
        choices=attending.NAMES,
        formerly="model.attention",
        changes_result=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(ViTConfig, resnet.StemConfig):
    """Hybrids, as `R50+B/16`"""


CONFIGS[r"R.*\+.*"] = HybridConfig
CONFIGS[r"\w+/\d+"] = ViTConfig

_position_init = nn.initializers.normal(0.02)


class VisionTransformer(nn.Module):
    """Image classifier.

    Attributes:
      num_classes: L; 0 is no classifier.
      patch_size: side of the square patches, in pixels or in features of the stem.
      width: D.
      depth: number of blocks.
      num_heads: attention heads per block.
      mlp_dim: hidden units of the MLPs.
      stage_depths: units per stage of the ResNet stem.
      stem_width: features of the stem's root; 0 is no stem.
      pool: input of the classifier: the class "token", "gap" (mean of the patches),
        "map" (attention pooling), or "none" (every token separately).
      class_token: whether there is a class token with another `pool`.
      distillation: whether a second token has a second classifier; the logits are the
        mean of both (DeiT, arXiv:2012.12877, section 4).
      num_register_tokens: learnt tokens without position in front of the patches
        (arXiv:2309.16588), which the pools "token" and "gap" leave out.
      representation_layer: whether there is a tanh layer of width D before the classifier
        (the paper's pretraining head).
      fc_norm: whether the final LayerNorm is after the pooling (timm's fc_norm).
      posemb: kind of position embedding, see AddPositions; "relative" adds keys in the
        attention.
      posemb_placement: where they are added: at the "stem", separately at "every" layer,
        or "shared" by all layers (arXiv:2010.11929, table 8). "relative" has no stem.
      posemb_resize: how learned ones are resized for images of another size, one of
        posemb.RESIZE_METHODS; the module does not read it.
      dropout: rate after every dense layer but query, key, value (and the two of the
        head), and after adding the position embeddings.
      drop_path_rate: drop rate of the last block, falling linearly to 0 at the first.
      head_bias_init: initial bias of the classifier.
      activation: one of MLP_ACTIVATIONS.
      layer_scale_init: of layers.LayerScale behind attention and MLP; 0 for none.
      layer_norm_eps: epsilon of the LayerNorms.
      dtype: of the computation; parameters and logits are float32.
      scan: whether the blocks run as one scan over stacked parameters, see stacking.
      remat_policy: one of stacking.REMAT_POLICIES.
      attention_impl: of the encoder, one of attention.IMPLEMENTATIONS.
      flatten: see layers.flatten_tokens.
    """

    num_classes: int
    patch_size: int
    width: int
    depth: int
    num_heads: int
    mlp_dim: int
    stage_depths: tuple[int, ...] = ()
    stem_width: int = 0
    pool: str = "token"
    class_token: bool = False
    distillation: bool = False
    num_register_tokens: int = 0
    representation_layer: bool = False
    fc_norm: bool = False
    posemb: str = "learned"
    posemb_placement: str = "stem"
    posemb_resize: str = "linear"
    dropout: float = 0.0
    drop_path_rate: float = 0.0
    head_bias_init: float = 0.0
    activation: str = "gelu_tanh"
    layer_scale_init: float = 0.0
    layer_norm_eps: float = 1e-6
    dtype: str = "float32"
    scan: bool = False
    remat_policy: str = "none"
    attention_impl: str = "einsum"
    flatten: bool = True

    @property
    def prefix_tokens(self) -> tuple[str, ...]:
        """Names of the tokens before the patches, in their order."""
        names = ["class token"] if self.pool == "token" or self.class_token else []
        names += ["distillation token"] if self.distillation else []
        registers = range(1, self.num_register_tokens + 1)
        return (*names, *(f"register {i}" for i in registers))

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches."""
        return len(self.prefix_tokens)

    @nn.compact
    def __call__(
        self,
        images: Float[Array, "B Y X C"],
        *,
        train: bool = False,
        edit_patches: Callable[[Array], Array] | None = None,
        visible: Int[Array, "B V"] | None = None,
        classify: bool = True,
    ) -> dict[str, Float[Array, "..."]] | Float[Array, "B N D"]:
        """Classifies images, or encodes their tokens.

        Args:
          images: normalised; both sides are multiples of the patch.
          train: whether dropout and stochastic depth are active (needs an rng
            "dropout").
          edit_patches: changes the patch embeddings (B, YX, D), row by row, before
            the positions are added, as by a mask token.
          visible: indices of the V patches of each image that the encoder sees; all of
            them if None. Positions must be added at the stem alone.
          classify: whether there is a classifier; without, the result are the tokens
            of the encoder, the prefix first.

        Returns:
          "pre_logits" (B, D), the features that few-shot evaluation uses (with
          distillation the class token's), and "logits" (B, L), float32; with head
          "none" (B, N, D) and (B, N, L).
        """
        x, grid = self._embed(images, edit_patches)
        x = self._encoder(Encoder, grid)(x, train=train, visible=visible)
        return self._classify(x) if classify else x

    def _embed(self, images, edit_patches=None):
        """Returns the input tokens of the encoder, and the grid of patches."""
        x = images
        if self.stem_width:
            x = resnet.stem(x, self.stage_depths, self.stem_width, self.dtype)
        x = nn.Conv(
            self.width,
            (self.patch_size, self.patch_size),
            strides=(self.patch_size, self.patch_size),
            padding="VALID",
            dtype=self.dtype,
            name="embedding",
        )(x)
        B, *grid, D = x.shape
        x = x.reshape(B, -1, D)
        x = edit_patches(x) if edit_patches else x
        names = ["cls"] if self.pool == "token" or self.class_token else []
        names += ["dist"] if self.distillation else []
        tokens = [self.param(n, nn.initializers.zeros, (1, 1, D)) for n in names]
        if R := self.num_register_tokens:
            init = nn.initializers.normal(1e-6)
            tokens.append(self.param("register_tokens", init, (1, R, D)))
        tokens = [
            jnp.broadcast_to(t.astype(x.dtype), (B, *t.shape[1:])) for t in tokens
        ]
        return jnp.concatenate([*tokens, x], axis=1), tuple(grid)

    def _encoder(self, kind, grid):
        """Returns the encoder, or a module with its parameters that does a part of it."""
        return kind(
            block=block_of(self),
            grid=grid,
            num_prefix_tokens=self.num_prefix_tokens,
            num_register_tokens=self.num_register_tokens,
            final_norm=not self.fc_norm,
            depth=self.depth,
            num_heads=self.num_heads,
            posemb=self.posemb,
            posemb_placement=self.posemb_placement,
            dropout=self.dropout,
            drop_path_rate=self.drop_path_rate,
            layer_norm_eps=self.layer_norm_eps,
            dtype=self.dtype,
            scan=self.scan,
            remat_policy=self.remat_policy,
            name="Transformer",
        )

    def _classify(self, x):
        if self.distillation:
            x = self._features(x[:, :2])
            outputs, other = (
                classify(x[:, i], self.num_classes, self.head_bias_init, name)
                for i, name in enumerate(("head", "head_dist"))
            )
            if self.num_classes:
                apart = outputs["logits"], other["logits"]
                outputs |= zip(("class_logits", "distillation_logits"), apart)
                outputs["logits"] = sum(apart) / 2
            return outputs
        if self.pool == "token":
            x = x[:, 0]
        elif self.pool == "gap":
            x = x[:, self.num_prefix_tokens :].mean(axis=1)
        elif self.pool == "map":
            x = MapHead(
                self.num_heads,
                self.mlp_dim,
                self.activation,
                self.layer_norm_eps,
                self.dtype,
                self.flatten,
                name="MAPHead_0",
            )(x)
        return classify(self._features(x), self.num_classes, self.head_bias_init)

    def _features(self, x):
        """Returns the features for the classifier, float32."""
        if self.fc_norm:
            x = LayerNorm(self.layer_norm_eps, self.dtype, name="fc_norm")(x)
        if self.representation_layer:
            x = nn.tanh(nn.Dense(self.width, dtype=self.dtype, name="pre_logits")(x))
        return x.astype(jnp.float32)


def block_of(module: VisionTransformer) -> functools.partial:
    """Returns the function from a name to a block of a network."""
    return functools.partial(
        Block,
        num_heads=module.num_heads,
        hidden=module.mlp_dim,
        dropout=module.dropout,
        activation=module.activation,
        layer_scale_init=module.layer_scale_init,
        layer_norm_eps=module.layer_norm_eps,
        dtype=module.dtype,
        attention_impl=module.attention_impl,
        flatten=module.flatten,
    )


class Block(nn.Module):
    """Pre-LayerNorm encoder block: attention, then MLP, each with a residual.

    Attributes:
      num_heads, hidden, dropout, activation, dtype, attention_impl, flatten: see
        MultiHeadAttention and Mlp.
      layer_scale_init: see VisionTransformer.
      layer_norm_eps: epsilon of the LayerNorms.
    """

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
      others: see VisionTransformer.
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
            VisionTransformer.
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
        if self.drop_path_rate:
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


class AddPositions(nn.Module):
    """Adds position embeddings (arXiv:2010.11929, section 3.1 and appendix D.4).

    Attributes:
      kind: "learned": a vector per token. "learned2d": learned vectors of the column and
        of the row, each of half the width, concatenated. "sincos2d": the same with
        fixed sines and cosines (arXiv:2104.02057, section 4.1), of big_vision's wave
        lengths; "sincos2d_mae": of MAE's. "none" and "relative": nothing. The 2-D kinds are 0 for prefix tokens.
      grid: Y and X.
      num_prefix_tokens: P.
      num_register_tokens: how many of them, the last, have no position of any kind.
    """

    kind: str
    grid: tuple[int, int]
    num_prefix_tokens: int
    num_register_tokens: int = 0

    @nn.compact
    def __call__(self, x: Float[Array, "B N D"]) -> Float[Array, "B N D"]:
        """Returns the tokens plus their position embeddings."""
        _, N, D = x.shape
        if self.kind == "learned":
            R = self.num_register_tokens
            embedding = self.param(
                "pos_embedding", _position_init, (1, N - R, D), jnp.float32
            )
            if R:
                before, after = jnp.split(embedding, [self.num_prefix_tokens - R], 1)
                none = jnp.zeros((1, R, D))
                embedding = jnp.concatenate([before, none, after], axis=1)
        elif self.kind == "learned2d":
            rows, columns = (
                self.param(
                    f"{name}_embedding", _position_init, (side, D // 2), jnp.float32
                )
                for name, side in zip(("row", "column"), self.grid, strict=True)
            )
            embedding = self._pad_prefix(_on_grid(rows, columns))
        elif self.kind.startswith("sincos2d"):
            embedding = self._pad_prefix(sincos2d(self.grid, D, self.kind))
        else:
            return x
        return x + embedding.astype(x.dtype)

    def _pad_prefix(self, embedding):
        return jnp.pad(embedding, ((self.num_prefix_tokens, 0), (0, 0)))[None]


def sincos2d(
    grid: tuple[int, int], width: int, kind: str = "sincos2d"
) -> Float[Array, "YX D"]:
    """Returns fixed embeddings: sines and cosines of the column, then of the row.

    Args:
      grid: rows and columns.
      width: D, a multiple of 4.
      kind: "sincos2d", with wave lengths from 2 pi to 20,000 pi, as big_vision has
        them, or "sincos2d_mae", which ends one step before, as MoCo v3 and MAE do.

    Source: MoCo v3 (arXiv:2104.02057, section 4.1).
    """
    inclusive = kind == "sincos2d"
    # In float64, so that MAE's tables are equal to the last bit.
    rates = 1 / 10_000.0 ** np.linspace(0, 1, width // 4, endpoint=inclusive)
    rows, columns = (
        np.concatenate([np.sin(angles), np.cos(angles)], axis=1, dtype=np.float32)
        for angles in (np.outer(np.arange(side), rates) for side in grid)
    )
    return _on_grid(rows, columns)


def _on_grid(rows, columns):
    """Concatenates the vectors of the column and row of each cell, in row-major order."""
    Y, X = len(rows), len(columns)
    parts = columns[None], rows[:, None]
    parts = [jnp.broadcast_to(v, (Y, X, v.shape[-1])) for v in parts]
    return jnp.concatenate(parts, axis=-1).reshape(Y * X, -1)
