"""Hybrids: a Vision Transformer on the features of a ResNet (arXiv:2010.11929, section 3.1)."""

import dataclasses
import re

import flax.linen as nn
from jaxtyping import Array, Float

from vit_jax.models import resnet, variants
from vit_jax.models.varied import VariedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(VariedConfig, resnet.StemConfig):
    """Hybrids such as `R50+B/16`"""

    encoder_stride = 0  # Features of the stem cannot be edited like patches.
    before_blocks = (*VariedConfig.before_blocks, "conv_root", "gn_root")

    @property
    def patch_size(self) -> int:
        """Side of a token in pixels."""
        return self.patch_side * self.reduction

    def layer_of(self, path: str) -> int | range:
        """See `NetworkConfig.layer_of`; the stem is layer 0."""
        return 0 if re.match(r"block\d+/", path) else super().layer_of(path)

    def sized(self) -> "HybridConfig":
        """See `NetworkConfig.sized`."""
        return variants.with_numbers(super().sized(), self.numbers.resnet)

    def build(self, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        self.check_stem()
        return super().build(num_classes, image_shape)

    def stem(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B y x D"]:
        """Returns the features of the ResNet; call it in a compact method."""
        return resnet.stem(images, self)
