"""Keys of an encoder: sizes, positions, norms, regularisation and implementation."""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax

from vit_jax.config.fields import Registry, key
from vit_jax.errors import UserError
from vit_jax.models import attention, initializers, positions, stacking
from vit_jax.models.layers import ACTIVATIONS, LayerNorm
from vit_jax.models.network import NetworkConfig
from vit_jax.models.positions.base import PLACEMENTS, Position
from vit_jax.models.resizing import RESIZE_METHODS

# Classes of blocks; which one is a matter of the keys.
BLOCKS = Registry(
    {
        "plain": "vit_jax.models.encoder:Block",
        "grouped": "vit_jax.models.grouped_depth:GroupedBlock",
    }
)
MLP_ACTIVATIONS = (*ACTIVATIONS, "swiglu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(NetworkConfig):
    """An encoder: the blocks of a Vision Transformer, a text tower or a decoder."""

    has_encoder = True
    cls_norm = False  # A key of networks with a class token.

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
        '"sincos2d_mae", "relative" or "none"; models/positions.',
        choices=tuple(positions.EMBEDDINGS),
    )
    posemb_placement: str = key(
        "stem",
        'Where positions are added: once ("stem"), separate ones in "every" layer, or '
        'the same in each layer ("shared"). "relative" takes "every" or "shared".',
        choices=PLACEMENTS,
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
        'ones); as "bicubic_square", each to a square of the longer side, of which the '
        "first rows and columns are taken, so that positions keep their aspect (timm's "
        "NaFlexVit); models/resizing.py.",
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
    init: str = initializers.key()
    relative_bias: str = key(
        "none",
        "Learnt biases of attention by offset of two patches (BEiT): separate ones in "
        '"every" layer, or the same in each layer ("shared").',
        choices=tuple(positions.BIASES),
    )
    rope: str = key(
        "none",
        'Rotary position embeddings: "axial" (EVA-02), "centered" (DINOv3) or "mixed" '
        "(learnt directions, arXiv:2403.13298).",
        choices=tuple(positions.ROTARY),
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
    def positions(self) -> tuple[type[Position], ...]:
        """Kinds of positions of the tokens."""
        return positions.of(self)

    @property
    def block(self) -> type[nn.Module]:
        """Class of the blocks."""
        return BLOCKS["grouped" if self.drop_path_group else "plain"]

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
        """Whether dense layers get the tokens of all images, see kernels.flatten_tokens."""
        return self.platform != "tpu"

    @property
    def relative(self) -> str:
        """Key of positions of pairs of tokens and its value; "" without them."""
        of_pairs = (kind for kind in self.positions if kind.of_pairs)
        return next((kind.describe(self) for kind in of_pairs), "")

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
        for kind in self.positions:
            kind.check(self)
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
