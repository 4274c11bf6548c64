"""The Vision Transformer with everything that its keys and its images may ask for."""

from typing import TYPE_CHECKING

from vit_jax.models import merging, patch_dropout
from vit_jax.models.any_size import AnySize
from vit_jax.models.merging import Merging
from vit_jax.models.patch_dropout import PatchDropout

if TYPE_CHECKING:
    from vit_jax.models.vit_config import ViTConfig


class VariedTransformer(AnySize, Merging, PatchDropout):
    """A Vision Transformer whose variations each do nothing unless asked for."""

    @staticmethod
    def check(config: "ViTConfig") -> None:
        """Raises UserError if a variation does not fit the other keys."""
        patch_dropout.check(config)
        merging.check(config)
