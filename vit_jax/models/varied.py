"""The config keys of a Vision Transformer with all its variations."""

import dataclasses

from vit_jax.models.any_size import AnySizeConfig
from vit_jax.models.distilled import DistilledConfig
from vit_jax.models.grouped_depth import GroupedDepthConfig
from vit_jax.models.merging import MergingConfig
from vit_jax.models.patch_dropout import PatchDropoutConfig
from vit_jax.models.positions.relative_bias import RelativeBiasConfig
from vit_jax.models.positions.rotary import RotaryConfig
from vit_jax.models.repetition import RepeatedConfig
from vit_jax.models.vit_config import ViTConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariedConfig(
    AnySizeConfig,
    MergingConfig,
    PatchDropoutConfig,
    DistilledConfig,
    RepeatedConfig,
    GroupedDepthConfig,
    RotaryConfig,
    RelativeBiasConfig,
    ViTConfig,
):
    """Vision Transformers such as `B/16`"""
