"""The Vision Transformer with everything that its keys and its images may ask for."""

import dataclasses

from vit_jax.models.any_size import AnySize, AnySizeConfig
from vit_jax.models.distilled import Distilled, DistilledConfig
from vit_jax.models.grouped_depth import GroupedDepthConfig
from vit_jax.models.merging import Merging, MergingConfig
from vit_jax.models.patch_dropout import PatchDropout, PatchDropoutConfig
from vit_jax.models.positions.relative_bias import RelativeBiasConfig
from vit_jax.models.positions.rotary import RotaryConfig
from vit_jax.models.repetition import RepeatedConfig, RepeatedEncoder
from vit_jax.models.vit_config import ViTConfig


class VariedTransformer(AnySize, Merging, PatchDropout, Distilled):
    """A Vision Transformer whose variations each do nothing unless asked for."""

    encoder_kind = RepeatedEncoder


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
    """All others, as `B/16`"""

    network = VariedTransformer
