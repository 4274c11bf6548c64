"""The encoder of the Vision Transformer: positions, blocks, and the final LayerNorm.

Parameters are named as in vit.py. Letters: B images, P prefix tokens, N tokens, H heads,
K head width, D model width, R offsets, V visible patches, Y by X patches.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models import attention, layer_features, rotary, stacking
from vit_jax.models.attention import Positions
from vit_jax.models.layers import (
    ACTIVATIONS,
    LayerNorm,
    LayerScale,
    Mlp,
    MultiHeadAttention,
    add_to_some,
    drop_path,
    dropout,
)
from vit_jax.models.network import NetworkConfig
from vit_jax.models.patches import Places
from vit_jax.models.posemb import RESIZE_METHODS, AddPositions, bias_of_grid

POSITION_KINDS = (
    *("learned", "learned2d", "factorized", "sincos2d", "sincos2d_mae"),
    *("relative", "none"),
)
POSITION_PLACES = ("stem", "every", "shared")
BIAS_PLACES = ("none", "every", "shared")
MLP_ACTIVATIONS = (*ACTIVATIONS, "swiglu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(NetworkConfig):
    """An encoder: the blocks of a Vision Transformer, a text tower or a decoder."""

    has_encoder = True

    width: int = key(0, "Features per token; 0 is the variant's.", below=2**31)
    # The deepest published encoder (DeepNet, arXiv:2203.00555). Each block takes half a
    # second to trace and compile, also with a scan, whose parameters are initialised one
    # by one.
    depth: int = key(0, "Encoder blocks; 0 is the variant's.", at_most=1_000)
    num_heads: int = key(
        0, "Attention heads per block; 0 is the variant's.", below=2**31
    )
    mlp_dim: int = key(
        0,
        "Hidden units of the MLP, of a gated one behind the gate; 0 is the variant's.",
        below=2**31,
    )
    posemb: str = key(
        "learned",
        'Position embeddings: "learned", "learned2d", "factorized", "sincos2d", '
        '"sincos2d_mae", "relative" or "none"; models/posemb.py.',
        choices=POSITION_KINDS,
    )
    posemb_placement: str = key(
        "stem",
        'Where positions are added: once ("stem"), separate ones in "every" layer, or '
        'the same in each layer ("shared"). "relative" takes "every" or "shared".',
        choices=POSITION_PLACES,
        only_if={
            "posemb": {
                "learned": "stem",
                "learned2d": "stem",
                "factorized": "stem",
                "sincos2d": "stem",
                "sincos2d_mae": "stem",
                "relative": "every",
            }
        },
    )
    posemb_resize: str = key(
        "linear",
        'How learned positions are resized for other image sizes: "linear" (Google), '
        '"bicubic" (timm, DINOv2 with registers), "bicubic_plain" (MAE), "bicubic_dino" '
        '(DINO, DINOv2), "bilinear" (SigLIP 2), "bilinear_plain" (timm\'s factorized '
        "ones); models/posemb.py.",
        choices=tuple(RESIZE_METHODS),
        only_if={"posemb": ("learned", "learned2d", "factorized")},
    )
    dropout: float = key(
        0.0,
        "Dropout rate after the position embeddings and each dense layer except query, "
        "key, value and the head.",
        below=1,
        training_only=True,
    )
    drop_path_rate: float = key(
        0.0,
        "Stochastic depth: drop rate of the last block.",
        below=1,
        training_only=True,
    )
    drop_path_schedule: str = key(
        "linear",
        'Drop rates of the other blocks: "linear" from 0 at the first block, or '
        '"constant" (DeiT III).',
        choices=("linear", "constant"),
        training_only=True,
    )
    drop_path_group: int = key(
        0,
        "Of so many images in a row, the branches are computed for the kept ones alone, "
        "a fixed number that differs from group to group (DINOv2); it saves products. A "
        'divisor of the images per device; needs the schedule "constant". 0: off.',
        training_only=True,
    )
    activation: str = key(
        "gelu_tanh",
        'Activation of the MLP: "gelu_tanh" (Google), "gelu" (exact: timm, Hugging '
        'Face), "quick_gelu" (CLIP) or "swiglu" (gated: DINOv2\'s g/14).',
        choices=MLP_ACTIVATIONS,
    )
    layer_scale_init: float = key(
        0.0,
        "Initial value of LayerScale, learnt factors after attention and MLP "
        "(arXiv:2103.17239); 0: no LayerScale.",
        training_only=True,
    )
    relative_bias: str = key(
        "none",
        "Learnt biases of attention by offset of two patches (BEiT): separate ones in "
        '"every" layer, or the same in each layer ("shared").',
        choices=BIAS_PLACES,
    )
    rope: str = key(
        "none",
        'Rotary position embeddings: "axial" (EVA-02), "centered" (DINOv3) or "mixed" '
        "(learnt directions, arXiv:2403.13298).",
        choices=rotary.KINDS,
    )
    rope_temperature: float = key(
        100.0, "Ratio of the longest wavelength to the shortest; EVA-02 has 10,000."
    )
    rope_reference: int = key(
        0,
        "Side in patches to which grids of another size are stretched; 0: no stretching.",
        below=10_000,
    )
    rope_shift: float = key(
        0.0,
        'In training, "centered" positions of each block are shifted by up to this; 0 is '
        "off.",
        training_only=True,
    )
    rope_jitter: float = key(
        1.0,
        "In training, each side of them is stretched by up to this factor or its "
        "inverse.",
        at_least=1,
        training_only=True,
    )
    rope_rescale: float = key(
        1.0,
        "In training, both sides of them are stretched alike by up to this factor or its "
        "inverse; DINOv3 has 2.",
        at_least=1,
        training_only=True,
    )
    pre_norm: bool = key(False, "A LayerNorm before the first block, as in CLIP.")
    post_norm: bool = key(
        False, "LayerNorms after the branches, not before them, as in Swin V2."
    )
    qk_norm: bool = key(False, "LayerNorms of queries and keys (arXiv:2302.05442).")
    attention_out_norm: bool = key(
        False,
        "A LayerNorm of the heads' results, as in EVA-02-CLIP (arXiv:2210.06423).",
    )
    mlp_norm: bool = key(False, "A LayerNorm of the MLP's hidden units, as in EVA-02.")
    final_norm: bool = key(True, "The LayerNorm after the last block.")
    rms_norm: bool = key(
        False,
        "RMSNorms (arXiv:1910.07467), without mean and bias, in place of all LayerNorms.",
    )
    layer_norm_eps: float = key(1e-6, "Epsilon of the LayerNorms.")
    scan: bool | None = key(
        False,
        "Run the blocks as a scan: compiles faster, needs more memory. None: except on "
        "GPUs without a remat_policy, where it moves half as many bytes again. `scan`, "
        "`remat_policy` and `attention_impl` change neither results nor checkpoints.",
        optional=True,
        changes_result=False,
    )
    remat_policy: str = key(
        "none",
        "What the backward pass computes again, see models/stacking.py.",
        choices=tuple(stacking.REMAT_POLICIES),
        changes_result=False,
    )
    attention_impl: str = key(
        "auto",
        '"auto", or "einsum", "cudnn" (NVIDIA GPUs), "splash" (TPUs).',
        choices=attention.NAMES,
        changes_result=False,
    )

    @property
    def stacked(self) -> bool:
        """Whether the blocks' parameters are in the layout of a scan."""
        if self.token_merging:
            return False  # Each block has fewer tokens.
        if self.scan is not None:
            return self.scan
        # What is recomputed one by one on a GPU is kept all the same (docs/decisions.md).
        on_gpu = (self.platform or jax.default_backend()) == "gpu"
        return not on_gpu or self.remat_policy != "none"

    @property
    def encoder_norm(self) -> bool:
        """Whether a LayerNorm ends the encoder."""
        return self.final_norm

    @property
    def norm(self) -> Callable[..., nn.Module]:
        """Constructor of a norm: `config.norm(name="LayerNorm_0")`."""
        kind = nn.RMSNorm if self.rms_norm else LayerNorm
        return functools.partial(kind, epsilon=self.layer_norm_eps, dtype=self.dtype)

    @property
    def merges_tokens(self) -> bool:
        """Whether dense layers get the tokens of all images, see layers.flatten_tokens."""
        return self.platform != "tpu"

    @property
    def relative(self) -> str:
        """Key of relative positions and its value, for messages; "" without them."""
        if self.posemb == "relative":
            return "model.posemb='relative'"
        if self.relative_bias != "none":
            return f"model.relative_bias={self.relative_bias!r}"
        return ""

    @property
    def jitters_rope(self) -> bool:
        """Whether rotary positions are random in training."""
        return (self.rope_shift, self.rope_jitter, self.rope_rescale) != (0, 1, 1)

    def drop_rates(self) -> list[float | None]:
        """Returns the rate of stochastic depth of each block."""
        if not self.drop_path_rate:
            # None, not zeros: XLA could not remove their random draws from a scan.
            return [None] * self.depth
        if self.drop_path_schedule == "constant":
            return [self.drop_path_rate] * self.depth
        last = max(1, self.depth - 1)
        return [self.drop_path_rate * i / last for i in range(self.depth)]

    def placed(self, num_tokens: int) -> "EncoderConfig":
        """Returns the config with the platform and its implementation of attention.

        Args:
          num_tokens: length of the sequence.

        Raises:
          UserError: keys contradict each other, or the platform or the network does not
            support `attention_impl`.
        """
        self._check()
        platform = self.platform or jax.default_backend()
        merging = f"token_merging={self.token_merging}" if self.token_merging else ""
        implementation = attention.choose(
            self.attention_impl,
            platform=platform,
            dtype=self.dtype,
            tokens=num_tokens,
            head_width=self.width // self.num_heads,
            relative=self.relative or merging,
        )
        return dataclasses.replace(
            self, platform=platform, attention_impl=implementation
        )

    def _check(self) -> None:
        if self.width % self.num_heads:
            raise UserError(
                f"model width {self.width} does not divide into {self.num_heads} heads: "
                "change model.width or model.num_heads"
            )
        if "2d" in self.posemb and self.width % 4:
            raise UserError(
                f"model width {self.width} is not a multiple of 4, as "
                f"posemb={self.posemb} needs: change model.width or model.posemb"
            )
        if self.rope != "none" and self.width // self.num_heads % 4:
            raise UserError(
                f"heads of {self.width // self.num_heads} features are not a multiple of "
                f"4, as rope={self.rope} needs: change model.num_heads or model.rope"
            )
        if self.jitters_rope and self.rope != "centered":
            raise UserError(
                f"model.rope={self.rope!r}: model.rope_shift, rope_jitter and rope_rescale "
                'change positions that are "centered": set model.rope to that, or leave '
                "them out"
            )
        if self.drop_path_group and self.drop_path_schedule != "constant":
            raise UserError(
                f"model.drop_path_group={self.drop_path_group}: every block must drop the "
                "same number of images: set model.drop_path_schedule='constant', or it to 0"
            )
        if self.posemb == "relative" and self.posemb_placement == "stem":
            raise UserError(
                "model.posemb_placement='stem' with model.posemb='relative', which acts "
                "in the attention of each layer: set it to 'every' or 'shared'"
            )


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
        return self.config.norm(name="encoder_norm")

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
