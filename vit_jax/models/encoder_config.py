"""Keys of an encoder: sizes, positions, norms, regularisation and implementation."""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models import attention, initializers, positions
from vit_jax.models.encoder import Block, Encoder
from vit_jax.models.layers import ACTIVATIONS, LayerNorm
from vit_jax.models.network import NetworkConfig
from vit_jax.models.positions.base import PLACEMENTS, Position
from vit_jax.models.resizing import RESIZE_METHODS

MLP_ACTIVATIONS = (*ACTIVATIONS, "swiglu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(NetworkConfig):
    """An encoder: the blocks of a Vision Transformer, a text tower or a decoder."""

    has_encoder = True
    cls_norm = False  # A key of networks with a class token.

    width: int = key(
        0, "Features per token; 0 is the value of the variant.", below=2**31
    )
    # The limit is the depth of the deepest published encoder (DeepNet,
    # arXiv:2203.00555). Each block takes half a second to trace and compile, even with
    # a scan, whose blocks are initialised separately.
    depth: int = key(
        0, "Number of encoder blocks; 0 is the value of the variant.", at_most=1_000
    )
    num_heads: int = key(
        0, "Attention heads per block; 0 is the value of the variant.", below=2**31
    )
    mlp_dim: int = key(
        0,
        "Hidden units of the MLP (for a gated MLP, after the gate); 0 is the value of "
        "the variant.",
        below=2**31,
    )
    posemb: str = key(
        "learned",
        'Position embeddings: "learned", "learned2d", "factorized", "sincos2d", '
        '"sincos2d_mae", "relative" or "none"; see vit_jax/models/positions.',
        choices=tuple(positions.EMBEDDINGS),
    )
    posemb_placement: str = key(
        "stem",
        'Layers at which position embeddings are added: only at the "stem", at "every" '
        'layer with separate embeddings, or at every layer with "shared" embeddings. '
        'With model.posemb="relative" it must be "every" or "shared".',
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
        "Method that resizes learned position embeddings for other image sizes: "
        '"linear" (Google), "bicubic" (timm, DINOv2 with registers), "bicubic_plain" '
        '(MAE), "bicubic_dino" (DINO, DINOv2), "bilinear" (SigLIP 2) or '
        '"bilinear_plain" (factorized embeddings of timm). With "_square" appended, '
        'such as "bicubic_square", a method resizes to a square of the longer side and '
        "uses its first rows and columns, which keeps the aspect ratio (timm's "
        "NaFlexVit). See vit_jax/models/resizing.py.",
        choices=tuple(RESIZE_METHODS),
        only_if={"posemb": ("learned", "learned2d", "factorized")},
    )
    dropout: float = key(
        0.0,
        "Dropout rate after the position embeddings and after each dense layer except "
        "query, key, value and the head.",
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
        'Stochastic depth: drop rates of the blocks. "linear" increases from 0 at the '
        'first block to `model.drop_path_rate` at the last, "constant" is the same in '
        "all blocks (DeiT III).",
        choices=("linear", "constant"),
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
        "Initial value of LayerScale (arXiv:2103.17239), learned factors after "
        "attention and after the MLP; 0 is off.",
        training_only=True,
    )
    init: str = initializers.key()
    pre_norm: bool = key(False, "Add a LayerNorm before the first block, as in CLIP.")
    post_norm: bool = key(
        False,
        "Apply LayerNorms after attention and after the MLP instead of before them.",
        reason="weights of timm's EVA and RPN networks",
    )
    qk_norm: bool = key(
        False, "Apply LayerNorms to queries and keys (arXiv:2302.05442)."
    )
    attention_out_norm: bool = key(
        False,
        "Add a LayerNorm between the attention heads and their output layer.",
        reason="weights of EVA-02-CLIP (arXiv:2210.06423)",
    )
    mlp_norm: bool = key(
        False,
        "Apply a LayerNorm to the hidden units of the MLP.",
        reason="weights of EVA-02 (arXiv:2303.11331)",
    )
    final_norm: bool = key(
        True,
        "Add a LayerNorm after the last block.",
        reason="weights of InternViT, which does not have this LayerNorm",
    )
    rms_norm: bool = key(
        False,
        "Replace all LayerNorms by RMSNorms (arXiv:1910.07467), which do not subtract "
        "the mean and do not have a bias.",
    )
    layer_norm_eps: float = key(1e-6, "Epsilon of the LayerNorms.")
    attention_impl: str = key(
        "auto",
        'Implementation of attention: "einsum", "cudnn" (NVIDIA GPUs), "splash" '
        '(TPUs), or "auto", the fastest one that the device and the model support.',
        reason="comparing the speed of implementations",
        choices=attention.NAMES,
        changes_result=False,
    )

    @property
    def positions(self) -> tuple[type[Position], ...]:
        """The kinds of positions of the tokens, see positions/base.py."""
        return (positions.EMBEDDINGS[self.posemb],)

    @property
    def block(self) -> type[nn.Module]:
        """The class of the blocks."""
        return Block

    @property
    def encoder(self) -> type[Encoder]:
        """The class of the encoder."""
        return Encoder

    @property
    def is_random(self) -> bool:
        """Whether the encoder draws random numbers in training."""
        return bool(self.dropout or self.drop_path_rate)

    @property
    def encoder_norm(self) -> bool:
        """Whether the encoder ends with a LayerNorm."""
        return self.final_norm

    @property
    def norm(self) -> Callable[..., nn.Module]:
        """The constructor of a norm, called as `config.norm(name="LayerNorm_0")`."""
        kind = nn.RMSNorm if self.rms_norm else LayerNorm
        return functools.partial(kind, epsilon=self.layer_norm_eps, dtype=self.dtype)

    @property
    def merges_tokens(self) -> bool:
        """Whether dense layers merge the axes of images and tokens.

        See kernels.flatten_tokens.
        """
        return self.platform != "tpu"

    @property
    def relative(self) -> str:
        """Key and value of positions of pairs of tokens; "" without such positions."""
        of_pairs = (kind for kind in self.positions if kind.of_pairs)
        return next((kind.describe(self) for kind in of_pairs), "")

    @property
    def needs_logits(self) -> str:
        """Key and value that need an attention that computes logits; "" if none."""
        return self.relative

    def drop_rates(self) -> list[float | None]:
        """Returns the drop rate of stochastic depth for each block."""
        if not self.drop_path_rate:
            # None, not zeros: XLA could not remove their random draws from a scan.
            return [None] * self.depth
        if self.drop_path_schedule == "constant":
            return [self.drop_path_rate] * self.depth
        last = max(1, self.depth - 1)
        return [self.drop_path_rate * i / last for i in range(self.depth)]

    def placed(self, num_tokens: int) -> "EncoderConfig":
        """Returns the config with the platform and the chosen attention implementation.

        Args:
          num_tokens: length of the sequence.

        Raises:
          UserError: keys contradict each other, or the platform or the network does not
            support `attention_impl`.
        """
        self.check()
        platform = self.platform or jax.default_backend()
        implementation = attention.choose(
            self.attention_impl,
            platform=platform,
            dtype=self.dtype,
            tokens=num_tokens,
            head_width=self.width // self.num_heads,
            relative=self.needs_logits,
        )
        return dataclasses.replace(
            self, platform=platform, attention_impl=implementation
        )

    def check(self) -> None:
        """Raises UserError if keys contradict each other."""
        if self.width % self.num_heads:
            raise UserError(
                f"model.width={self.width} is not a multiple of "
                f"model.num_heads={self.num_heads}: change one of them"
            )
        for kind in self.positions:
            kind.check(self)
