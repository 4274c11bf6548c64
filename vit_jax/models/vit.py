"""The Vision Transformer (arXiv:2010.11929, section 3.1) and its hybrids.

Parameters are named and shaped as in the published Google checkpoints; under a scan as
described in stacking.py.
Letters: B images, Y by X pixels or patches, C channels, V visible patches, N tokens,
R registers, D model width, L classes.
"""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vit_jax.config.fields import key
from vit_jax.models import attention as attending
from vit_jax.models import resnet, rotary, stacking
from vit_jax.models.encoder import Block, Encoder
from vit_jax.models.layers import (
    ACTIVATIONS,
    CLASSIFIERS,
    LayerNorm,
    MapHead,
    classify,
)
from vit_jax.models.posemb import RESIZE_METHODS
from vit_jax.models.variants import CONFIGS, ModelConfig

POOLS = ("token", "gap", "token_gap", "map", "none")
POSITION_KINDS = (
    *("learned", "learned2d", "sincos2d", "sincos2d_mae"),
    *("relative", "none"),
)
POSITION_PLACES = ("stem", "every", "shared")
BIAS_PLACES = ("none", "every", "shared")
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
        'Classifier input: "token", "gap" (mean), "token_gap" (both, as DINOv2\'s linear '
        'classifiers) or "map" (attention).',
        choices=("token", "gap", "token_gap", "map"),
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
        "Learnt tokens without position in front of the patches, which all pools "
        'but "map" leave out (arXiv:2309.16588).',
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
        "Stochastic depth: drop rate of the last block.",
        below=1,
        formerly="model.stochastic_depth",
    )
    drop_path_schedule: str = key(
        "linear",
        '"linear": 0 at the first block; "constant": the same in all, as DeiT III.',
        choices=("linear", "constant"),
    )
    activation: str = key(
        "gelu_tanh",
        'Of the MLP: "gelu_tanh" (Google\'s), "gelu" (exact: timm, Hugging Face), '
        '"quick_gelu" (CLIP) or "swiglu" (gated: DINOv2\'s g/14).',
        choices=MLP_ACTIVATIONS,
        formerly="model.gelu",
    )
    layer_scale_init: float = key(
        0.0,
        "Initial LayerScale, the learnt factors behind attention and MLP "
        "(arXiv:2103.17239); 0: there are none.",
    )
    relative_bias: str = key(
        "none",
        'Learnt biases of attention by offset of two patches (BEiT): in "every" layer '
        'its own, or in each the same ("shared").',
        choices=BIAS_PLACES,
    )
    rope: str = key(
        "none",
        'Rotary position embeddings: "axial" (EVA-02), "centered" (DINOv3) or "mixed" '
        "(learnt directions, arXiv:2403.13298).",
        choices=rotary.KINDS,
    )
    rope_temperature: float = key(
        100.0, "Longest wave length by the shortest; EVA-02 has 10,000."
    )
    rope_reference: int = key(
        0,
        "Side in patches that a grid of another size is stretched to; 0: none.",
        below=10_000,
    )
    pre_norm: bool = key(False, "A LayerNorm before the first block, as CLIP.")
    post_norm: bool = key(
        False, "LayerNorms behind the branches, not before them, as Swin V2."
    )
    qk_norm: bool = key(False, "LayerNorms of queries and keys (arXiv:2302.05442).")
    attention_out_norm: bool = key(
        False, "A LayerNorm of the heads' results, as EVA-02-CLIP (arXiv:2210.06423)."
    )
    mlp_norm: bool = key(False, "A LayerNorm of the MLP's hidden units, as EVA-02.")
    final_norm: bool = key(True, "The LayerNorm after the last block.")
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
        "token_gap" (both, one after the other), "map" (attention pooling), or "none"
        (every token separately).
      class_token: whether there is a class token with another `pool`.
      distillation: whether a second token has a second classifier; the logits are the
        mean of both (DeiT, arXiv:2012.12877, section 4).
      num_register_tokens: learnt tokens without position in front of the patches
        (arXiv:2309.16588), which all pools but "map" leave out.
      representation_layer: whether there is a tanh layer of width D before the classifier
        (the paper's pretraining head).
      fc_norm: whether the final LayerNorm is after the pooling (timm's fc_norm).
      posemb: kind of position embedding, see posemb.AddPositions; "relative" adds keys in the
        attention.
      posemb_placement: where they are added: at the "stem", separately at "every" layer,
        or "shared" by all layers (arXiv:2010.11929, table 8). "relative" has no stem.
      posemb_resize: how learned ones are resized for images of another size, one of
        posemb.RESIZE_METHODS; the module does not read it.
      dropout: rate after every dense layer but query, key, value (and the two of the
        head), and after adding the position embeddings.
      drop_path_rate: drop rate of the last block.
      drop_path_schedule: "linear" falls to 0 at the first block, "constant" does not.
      head_bias_init: initial bias of the classifier.
      activation: one of MLP_ACTIVATIONS.
      layer_scale_init: of layers.LayerScale behind attention and MLP; 0 for none.
      relative_bias: whether there is a bias for each offset of two patches, and for the
        prefix tokens (arXiv:2106.08254): one of BIAS_PLACES.
      rope, rope_temperature, rope_reference: rotary position embeddings, see rotary.angles.
      pre_norm: whether there is a LayerNorm before the first block (arXiv:2103.00020).
      post_norm: whether LayerNorms are behind the branches of the blocks (arXiv:2111.09883).
      qk_norm, attention_out_norm: see layers.MultiHeadAttention.
      mlp_norm: whether the hidden units of the MLPs are normalised (arXiv:2303.11331).
      final_norm: whether there is a LayerNorm after the last block or, with fc_norm, after
        the pooling.
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
    drop_path_schedule: str = "linear"
    head_bias_init: float = 0.0
    activation: str = "gelu_tanh"
    layer_scale_init: float = 0.0
    relative_bias: str = "none"
    rope: str = "none"
    rope_temperature: float = 100.0
    rope_reference: int = 0
    pre_norm: bool = False
    post_norm: bool = False
    qk_norm: bool = False
    attention_out_norm: bool = False
    mlp_norm: bool = False
    final_norm: bool = True
    layer_norm_eps: float = 1e-6
    dtype: str = "float32"
    scan: bool = False
    remat_policy: str = "none"
    attention_impl: str = "einsum"
    flatten: bool = True

    @property
    def prefix_tokens(self) -> tuple[str, ...]:
        """Names of the tokens before the patches, in their order."""
        token = self.pool in ("token", "token_gap") or self.class_token
        names = ["class token"] if token else []
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
          distillation the class token's), and "logits" (B, L), float32; with pool
          "none" (B, N, D) and (B, N, L), and with "token_gap" (B, 2 D) and (B, L).
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
        names = ["cls"] if "class token" in self.prefix_tokens else []
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
            final_norm=self.final_norm and not self.fc_norm,
            depth=self.depth,
            num_heads=self.num_heads,
            posemb=self.posemb,
            posemb_placement=self.posemb_placement,
            dropout=self.dropout,
            drop_path_rate=self.drop_path_rate,
            drop_path_schedule=self.drop_path_schedule,
            pre_norm=self.pre_norm,
            relative_bias=self.relative_bias,
            rope=self.rope,
            rope_temperature=self.rope_temperature,
            rope_reference=self.rope_reference,
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
                for i, name in enumerate(CLASSIFIERS)
            )
            if self.num_classes:
                apart = outputs["logits"], other["logits"]
                outputs |= zip(("class_logits", "distillation_logits"), apart)
                outputs["logits"] = sum(apart) / 2
            return outputs
        if self.pool == "token":
            x = x[:, 0]
        elif self.pool in ("gap", "token_gap"):
            mean = x[:, self.num_prefix_tokens :].mean(axis=1)
            token = [x[:, 0]] if self.pool == "token_gap" else []
            x = jnp.concatenate([*token, mean], axis=-1)
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
        post_norm=module.post_norm,
        qk_norm=module.qk_norm,
        attention_out_norm=module.attention_out_norm,
        mlp_norm=module.mlp_norm,
        dtype=module.dtype,
        attention_impl=module.attention_impl,
        flatten=module.flatten,
    )
