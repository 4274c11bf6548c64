"""Sizes of networks, and a parser of variant strings such as "R50+B/16".

A variant is an encoder such as "B/16" (size, and side of a patch in pixels), a hybrid
such as "R50+B/16" (ResNet stem and encoder; the number is the side of a token in
pixels), an encoder with a convolutional stem such as "C+S/16", or a ResNet such as
"R50x1" (number of layers and width factor).
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from vit_jax.config.fields import Registry, key
from vit_jax.errors import UserError

T = TypeVar("T", bound="ModelConfig")
N = TypeVar("N")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Keys of `config.model` for every network; `CONFIGS` has the subclasses.

    Attributes:
      platform: platform that the network runs on, "cpu", "gpu" or "tpu"; "" is JAX's
        default backend. Not a key.
    """

    platform: str = ""

    variant: str = key(
        "B/16",
        'Network, size and patch size, such as "B/16", "R50+B/16" or "R50x1"; see '
        "vit_jax/models/variants.py.",
    )
    head_bias_init: float = key(
        0.0,
        "Initial bias of the classifier; -10 suits the sigmoid loss.",
        at_least=None,
        training_only=True,
    )
    dtype: str = key(
        "float32",
        "Dtype of the computation, for any dtype of images; parameters are float32.",
        choices=("float32", "bfloat16"),
    )
    matmul_dtype: str = key(
        "",
        "Dtype to which the operands of matrix products are rounded, while everything "
        'else is computed in `model.dtype`, and sums in float32; "" does not round.',
        reason="fast training on CPUs with AMX instructions; finetune sets it there",
        choices=("", "bfloat16"),
    )


# Keys of earlier versions, which files of weights and workdirs may contain. They only
# changed initial values.
FORMER_KEYS = ("token_init_std",)

# Regular expressions of variants -> dataclasses of the config section `model`; the
# first match is used.
CONFIGS = Registry(
    {
        r"Axial-.*": "vit_jax.models.axial:AxialConfig",
        r"Mixer-.*": "vit_jax.models.mixer:MixerConfig",
        r"Swin.*": "vit_jax.models.swin:SwinConfig",
        r"R\d+x\d+": "vit_jax.models.resnet:ResNetConfig",
        r"R.*\+.*": "vit_jax.models.hybrid:HybridConfig",
        r"C\+\w+/\d+": "vit_jax.models.conv_stem:ConvStemConfig",
        r"\w+/\d+": "vit_jax.models.varied:VariedConfig",
    }
)


@dataclasses.dataclass(frozen=True)
class Size:
    """The numbers of an encoder size.

    Attributes:
      width: features per token.
      depth: number of encoder blocks.
      num_heads: attention heads per block.
      mlp_dim: hidden units of the MLP.
    """

    width: int
    depth: int
    num_heads: int
    mlp_dim: int


@dataclasses.dataclass(frozen=True)
class ResNet:
    """The numbers of a ResNet, or of the stem of a hybrid.

    Attributes:
      stage_depths: number of bottleneck units of each stage; () is only the root.
      stem_width: features of the root; the bottlenecks of stage i have 2^i times as
        many.
    """

    stage_depths: tuple[int, ...]
    stem_width: int


@dataclasses.dataclass(frozen=True)
class Variant:
    """The contents of a variant string.

    Attributes:
      size: size of the encoder; None for a ResNet.
      patch_size: side of a patch, in pixels or in features of the stem.
      resnet: the stem or the whole network; None for a plain encoder.
    """

    size: Size | None
    patch_size: int
    resnet: ResNet | None


SIZES = {
    "Ti": Size(192, 12, 3, 768),  # DeiT (arXiv:2012.12877), table 1.
    "S": Size(384, 12, 6, 1536),  # DeiT, table 1.
    "B": Size(768, 12, 12, 3072),  # ViT (arXiv:2010.11929), table 1.
    "L": Size(1024, 24, 16, 4096),  # ViT, table 1.
    "So400m": Size(1152, 27, 16, 4304),  # SoViT-400m (arXiv:2305.13035).
    "H": Size(1280, 32, 16, 5120),  # ViT, table 1.
    "g": Size(1408, 40, 16, 6144),  # Scaling ViT (arXiv:2106.04560), table 2.
    "G": Size(1664, 48, 16, 8192),  # Scaling ViT, table 2.
}

# Units per stage (BiT, arXiv:1912.11370, after ResNet's table 1, arXiv:1512.03385).
RESNETS = {
    "R50": (3, 4, 6, 3),
    "R101": (3, 4, 23, 3),
    "R152": (3, 8, 36, 3),
    "R200": (3, 24, 36, 3),
}

# (stem, side of a token in pixels) -> (units per stage, side of a patch in features of
# the stem). Sources: ViT, section 4.1, for R50; AugReg (arXiv:2106.10270), section 3.3,
# for the others. Despite its name, the published R+Ti/16 has tokens of 32 pixels: the
# root reduces the resolution by 4, and a patch has 8 features per side.
STEMS = {
    ("R50", 16): ((3, 4, 9), 1),  # The units of stage 4 are moved to stage 3.
    ("R50", 32): ((3, 4, 6, 3), 1),
    ("R26", 32): ((2, 2, 2, 2), 1),
    ("R", 16): ((), 8),
}

_ROOT_WIDTH = 64

# Every variant of the paper and of the published checkpoints.
NAMES = (
    *(f"{size}/{patch}" for size in SIZES for patch in (8, 14, 16, 32)),
    *("R50+B/32", "R50+B/16", "R50+L/32", "R50+L/16"),  # ViT, table 6.
    *("R26+S/32", "R26+B/32", "R+Ti/16"),  # AugReg, section 3.3.
    *("R50x1", "R50x2", "R101x1", "R152x1", "R152x2", "R152x4", "R200x3"),  # Table 6.
)


def parse(variant: str) -> Variant:
    """Parses a variant string.

    Args:
      variant: string such as "B/16", "R50+B/16" (or "R50x1+B/16") or "R152x4".

    Raises:
      UserError: the string has another form, or an unknown size, stem or depth.
    """
    if match := re.fullmatch(r"(R\d+)x(\d+)", variant):
        if match[1] in RESNETS and re.fullmatch("0*[1-9][0-9]?", match[2]):
            resnet = ResNet(RESNETS[match[1]], _ROOT_WIDTH * int(match[2]))
            return Variant(None, 1, resnet)
        raise UserError(
            f"model.variant={variant!r}: ResNets are {', '.join(RESNETS)}, each with a "
            "width factor from 1 to 99, such as 'R50x1'"
        )
    match = re.fullmatch(r"(?:(R\d*)(?:x1)?\+|C\+)?(\w+)/(\d+)", variant)
    if (
        not match
        or match[2] not in SIZES
        or not re.fullmatch("0*[1-9][0-9]{0,3}", match[3])
    ):
        raise UserError(
            f"model.variant={variant!r} is not SIZE/PATCH: choose a size out of "
            f"{', '.join(SIZES)} and a patch from 1 to 9999 pixels, such as 'B/16', a hybrid "
            "such as 'R50+B/16', or a ResNet such as 'R50x1'"
        )
    size, patch = SIZES[match[2]], int(match[3])
    if match[1] is None:
        return Variant(size, patch, None)
    if (match[1], patch) not in STEMS:
        known = ", ".join(f"{stem}+SIZE/{pixels}" for stem, pixels in STEMS)
        raise UserError(f"model.variant={variant!r}: hybrids are {known}")
    blocks, patch = STEMS[match[1], patch]
    return Variant(size, patch, ResNet(blocks, _ROOT_WIDTH))


def parse_size(variant: str, family: str, sizes: Mapping[str, N]) -> tuple[N, int]:
    """Parses FAMILY-SIZE/PATCH, such as "Mixer-B/16"; returns size and patch size.

    Raises:
      UserError: the variant has another form, or an unknown size.
    """
    match = re.fullmatch(rf"{family}-(\w+)/0*([1-9]\d{{0,3}})", variant)
    if not match or match[1] not in sizes:
        raise UserError(
            f"model.variant={variant!r} is not {family}-SIZE/PATCH: choose a size out of "
            f"{', '.join(sizes)} and a patch from 1 to 9999 pixels, such as '{family}-B/16'"
        )
    return sizes[match[1]], int(match[2])


def with_numbers(config: T, numbers: Size | ResNet) -> T:
    """Returns the config with every key that is 0 replaced by the variant's value."""
    missing = {
        field.name: getattr(numbers, field.name)
        for field in dataclasses.fields(numbers)
        if not np.any(getattr(config, field.name))
    }
    return dataclasses.replace(config, **missing)


def overridden(numbers: N, config: ModelConfig) -> N:
    """Returns a variant's numbers, overridden by keys of the config that are not 0."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(numbers)}
    given = {name: value for name, value in values.items() if np.any(value)}
    return dataclasses.replace(numbers, **given)
