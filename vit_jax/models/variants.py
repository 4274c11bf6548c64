"""Sizes of the networks, and how a variant string such as "R50+B/16" is read.

A variant is an encoder, "B/16" (size and patch side in pixels), a hybrid, "R50+B/16"
(ResNet stem, then the encoder; the number counts pixels a token), or a ResNet baseline,
"R50x1" (layers and width factor).
"""

import dataclasses
import re
from typing import TypeVar

import numpy as np

from vit_jax.config.fields import Registry, key
from vit_jax.errors import UserError

T = TypeVar("T", bound="ModelConfig")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What `config.model` states of every network.

    A network has a dataclass of its own, which `CONFIGS` names.

    Attributes:
      platform: where it will run, "cpu", "gpu" or "tpu", which no config states; "" is
        JAX's default backend.
    """

    platform: str = ""

    variant: str = key("B/16", '"B/16", "R50+B/16", "R50x1"; models/variants.py.')
    head_bias_init: float = key(
        0.0,
        "Initial bias of the classifier; -10 suits sigmoid.",
        at_least=None,
        training_only=True,
    )
    dtype: str = key(
        "float32",
        "Of the computation; parameters stay float32.",
        choices=("float32", "bfloat16"),
    )


# Form of the variants, a regular expression, to the dataclass of `config.model`; the first
# that matches.
CONFIGS = Registry(
    {
        r"Axial-.*": "vit_jax.models.axial:AxialConfig",
        r"Mixer-.*": "vit_jax.models.mixer:MixerConfig",
        r"Swin.*": "vit_jax.models.swin:SwinConfig",
        r"R\d+x\d+": "vit_jax.models.resnet:ResNetConfig",
        r"R.*\+.*": "vit_jax.models.vit:HybridConfig",
        r"\w+/\d+": "vit_jax.models.vit:ViTConfig",
    }
)


@dataclasses.dataclass(frozen=True)
class Size:
    """Numbers of one encoder size.

    Attributes:
      width: features a token.
      depth: encoder blocks.
      num_heads: attention heads a block.
      mlp_dim: hidden units of the MLP.
    """

    width: int
    depth: int
    num_heads: int
    mlp_dim: int


@dataclasses.dataclass(frozen=True)
class ResNet:
    """Numbers of a ResNet, or of one that is the stem of a hybrid.

    Attributes:
      stage_depths: bottleneck units of each stage; none leaves the root alone.
      stem_width: features of the root; stage i has bottlenecks of 2^i times as many.
    """

    stage_depths: tuple[int, ...]
    stem_width: int


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a variant string says.

    Attributes:
      size: of the encoder; None for a ResNet.
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

# Units a stage (BiT, arXiv:1912.11370, which takes ResNet's table 1, arXiv:1512.03385).
RESNETS = {
    "R50": (3, 4, 6, 3),
    "R101": (3, 4, 23, 3),
    "R152": (3, 8, 36, 3),
    "R200": (3, 24, 36, 3),
}

# Stem and pixels a token to units a stage and patch side on the stem's features: ViT,
# section 4.1, for R50; AugReg (arXiv:2106.10270), section 3.3, for the others. The
# root alone reduces by 4, so that its patch of 8 makes tokens of 32 pixels: the
# published R+Ti/16 is named so all the same.
STEMS = {
    ("R50", 16): ((3, 4, 9), 1),  # Stage 4 is removed, its units are in stage 3.
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
    """Reads a variant string.

    Args:
      variant: as "B/16", "R50+B/16" (or "R50x1+B/16") or "R152x4".

    Returns:
      Its numbers.

    Raises:
      UserError: not of these forms, or no such size, stem or depth.
    """
    if match := re.fullmatch(r"(R\d+)x(\d+)", variant):
        if match[1] in RESNETS and re.fullmatch("0*[1-9][0-9]?", match[2]):
            resnet = ResNet(RESNETS[match[1]], _ROOT_WIDTH * int(match[2]))
            return Variant(None, 1, resnet)
        raise UserError(
            f"model.variant={variant!r}: ResNets are {', '.join(RESNETS)}, each with a "
            "width factor from 1 to 99, as 'R50x1'"
        )
    match = re.fullmatch(r"(?:(R\d*)(?:x1)?\+)?(\w+)/(\d+)", variant)
    if (
        not match
        or match[2] not in SIZES
        or not re.fullmatch("0*[1-9][0-9]{0,3}", match[3])
    ):
        raise UserError(
            f"model.variant={variant!r} is not SIZE/PATCH with a size out of "
            f"{', '.join(SIZES)} and a patch from 1 to 9999 pixels, as 'B/16', nor a hybrid "
            "as 'R50+B/16', nor a ResNet as 'R50x1'"
        )
    size, patch = SIZES[match[2]], int(match[3])
    if match[1] is None:
        return Variant(size, patch, None)
    if (match[1], patch) not in STEMS:
        known = ", ".join(f"{stem}+SIZE/{pixels}" for stem, pixels in STEMS)
        raise UserError(f"model.variant={variant!r}: hybrids are {known}")
    blocks, patch = STEMS[match[1], patch]
    return Variant(size, patch, ResNet(blocks, _ROOT_WIDTH))


def with_numbers(config: T, numbers: Size | ResNet) -> T:
    """Returns a config of a network with a variant's numbers where it states none."""
    missing = {
        field.name: getattr(numbers, field.name)
        for field in dataclasses.fields(numbers)
        if not np.any(getattr(config, field.name))
    }
    return dataclasses.replace(config, **missing)
