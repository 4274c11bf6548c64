"""A Vision Transformer that takes images of any size, as sequences of patches.

See patches.py. Letters: B sequences, N tokens, M tokens that the blocks process (fewer
with patch dropout), D model width.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float, Int

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models import flexivit, patches
from vit_jax.models.flexivit import ResizedPatchEmbedding
from vit_jax.models.patches import PatchSequences, Places
from vit_jax.models.repetition import RepeatedEncoder
from vit_jax.models.vit import VisionTransformer, joined
from vit_jax.models.vit_config import ViTConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnySizeConfig(ViTConfig):
    """A Vision Transformer that takes images of any size.

    Attributes:
      asked_attention: `attention_impl` as set by the user, from which the
        implementation is chosen again for every length of sequences. Not a key.
    """

    asked_attention: str = "auto"

    patch_resize: str = key(
        flexivit.DEFAULT,
        "Method that resizes the kernel of the patch embedding for patches of another "
        'size: "bilinear_plain" (FlexiViT of big_vision) or "bicubic" (timm).',
        reason="FlexiViT (arXiv:2212.08013) of timm",
        choices=tuple(flexivit.METHODS),
    )

    @property
    def no_sequences(self) -> str:
        """See `NetworkConfig`."""
        if type(self).stem is not ViTConfig.stem:
            return super().no_sequences
        return self.needs_logits

    def reader(self, module: nn.Module, images: Any) -> nn.Module:
        if self.no_sequences or not isinstance(images, PatchSequences):
            return super().reader(module, images)
        return joined(AnySize, module)

    def placed(self, num_tokens: int) -> "AnySizeConfig":
        placed = super().placed(num_tokens)
        return dataclasses.replace(placed, asked_attention=self.attention_impl)


class AnySizeEncoder(RepeatedEncoder):
    """An encoder of sequences of patches."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B N D"],
        places: Places,
        kept: Places,
        *,
        train: bool,
        visible: Int[Array, "B V"] | None,
    ) -> Float[Array, "B M D"]:
        """Returns the normalised tokens of the last block.

        Args:
          x, train, visible: see `Encoder`.
          places: places of all patches.
          kept: places of the patches that the blocks process.
        """
        x, inputs = self.begin(x, train=train, visible=visible, places=places)
        # Attention must not mix images of a sequence, or include padding.
        mask = kept.mask(self.num_prefix_tokens)
        inputs = [
            given._replace(positions=given.positions._replace(**mask))
            for given in inputs
        ]
        return self.run(x, inputs)


class AnySize(VisionTransformer):
    """A Vision Transformer whose input is `PatchSequences` instead of images.

    Results have a row for each image. The patches of the input may have another size
    than the patches of the network.
    """

    @nn.compact
    def __call__(
        self,
        images: PatchSequences,
        *,
        train: bool = False,
        edit_patches: Callable[[Array], Array] | None = None,
        visible: Int[Array, "B V"] | None = None,
        classify: bool = True,
    ) -> dict[str, Float[Array, "..."]] | Float[Array, "B N D"]:
        """Classifies images, or encodes their tokens; see `VisionTransformer`."""
        if images.grids.shape[1] > 1 and (tokens := self.config.prefix_tokens):
            raise UserError(
                f"the images that are packed into one sequence would share one {tokens[0]}: "
                "set model.pool='gap' or 'map', or pack one image per sequence"
            )
        places = kept = images.places()
        x = self.embed_patches(
            images.pixels,
            ResizedPatchEmbedding,
            patch=images.patch_size,
            resize=self.config.patch_resize,
        )
        x = self.add_tokens(x, edit_patches)
        asked = self.config.asked_attention
        config = dataclasses.replace(self.config, attention_impl=asked)
        config = config.placed(x.shape[1])
        if train and config.patch_dropout and visible is None:
            key = self.make_rng("dropout")
            visible, count = patches.draw(places, config.patch_dropout, key)
            kept = places.take(visible, count)
        encoder = self.encoder(AnySizeEncoder, config)
        x = encoder(x, places, kept, train=train, visible=visible)
        return self.classify(x, kept) if classify else x
