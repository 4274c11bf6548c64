"""Patch dropout: training drops random patches (arXiv:2208.07220).

Letters: B images, N tokens, M patches, V patches that are kept, D model width.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models.vit import VisionTransformer
from vit_jax.models.vit_config import ViTConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchDropoutConfig(ViTConfig):
    """A Vision Transformer with optional patch dropout in training."""

    patch_dropout: float = key(
        0.0,
        "Fraction of the patches that training drops at random in each image, after "
        "positions are added.",
        reason="faster training (PatchDropout, arXiv:2208.07220)",
        below=1,
        training_only=True,
    )

    @property
    def variations(self) -> tuple[type[VisionTransformer], ...]:
        dropout = (PatchDropout,) if self.patch_dropout else ()
        return (*dropout, *super().variations)

    def check(self) -> None:
        super().check()
        if self.patch_dropout and self.relative:  # Positions of pairs need all patches.
            raise UserError(
                f"model.patch_dropout={self.patch_dropout} with {self.relative}, which "
                "needs all patches: set model.patch_dropout to 0"
            )


class PatchDropout(VisionTransformer):
    """A Vision Transformer that drops a fraction of the patches in training."""

    def encode(
        self,
        x: Float[Array, "B N D"],
        *,
        train: bool,
        visible: Int[Array, "B V"] | None,
    ) -> Float[Array, "B M D"]:
        """Returns the tokens of the encoder, see `VisionTransformer`."""
        if train and visible is None:
            count = x.shape[1] - len(self.config.prefix_tokens)
            key = self.make_rng("dropout")
            visible = draw(len(x), count, self.config.patch_dropout, key)
        return super().encode(x, train=train, visible=visible)


def draw(
    images: int, patches: int, fraction: float, key: Key[Array, ""]
) -> Int[Array, "B V"]:
    """Draws the patches to keep in each image, at least one, in random order."""
    kept = max(1, round(patches * (1 - fraction)))
    noise = jax.random.uniform(key, (images, patches))
    return jnp.argsort(noise, axis=1)[:, :kept]
