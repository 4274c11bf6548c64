"""DeiT's distillation token: a second token and classifier (arXiv:2012.12877, section 4).

Letters: B images, N tokens, D model width, L classes.
"""

import dataclasses

import numpy as np
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models import initializers, layers
from vit_jax.models.layers import CLASSIFIERS
from vit_jax.models.pooling import Weights
from vit_jax.models.vit import VisionTransformer
from vit_jax.models.vit_config import ViTConfig

_TOKEN = "dist"  # Name of the parameter.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistilledConfig(ViTConfig):
    """A Vision Transformer with an optional distillation token."""

    before_blocks = (*ViTConfig.before_blocks, _TOKEN)
    after_blocks = (*ViTConfig.after_blocks, CLASSIFIERS[1])

    distillation: bool = key(
        False,
        "Add the distillation token of DeiT (arXiv:2012.12877); the logits of both "
        "classifiers are averaged.",
    )

    @property
    def prefix_tokens(self) -> tuple[str, ...]:
        names = super().prefix_tokens
        added = ("distillation token",) * self.distillation
        return (*names[:1], *added, *names[1:])

    @property
    def variations(self) -> tuple[type[VisionTransformer], ...]:
        distilled = (Distilled,) if self.distillation else ()
        return (*distilled, *super().variations)

    def check(self) -> None:
        super().check()
        if self.distillation and self.pool != "token":
            raise UserError(
                f"model.distillation=True needs a class token, not "
                f"model.pool={self.pool!r}: set model.pool='token'"
            )


class Distilled(VisionTransformer):
    """A Vision Transformer that averages the logits of class and distillation token."""

    def prefix_tokens(self, D: int) -> list[Float[Array | np.ndarray, "1 _ D"]]:
        tokens = super().prefix_tokens(D)
        row = initializers.TABLE[self.config.init]
        tokens.insert(1, self.param(_TOKEN, row.class_token, (1, 1, D)))
        return tokens

    def classify(
        self, x: Float[Array, "B N D"], weights: Weights | None = None
    ) -> dict[str, Float[Array, "..."]]:
        """Computes the outputs from the tokens of the encoder, see `VisionTransformer`.

        Returns:
          "pre_logits" of the class token, and, unless L is 0, "logits" and the logits
          of both classifiers, "class_logits" and "distillation_logits".
        """
        config, L = self.config, self.num_classes
        x = self.features(x[:, :2])
        outputs, other = (
            layers.classify(x[:, i], L, config.head_bias_init, name, config.init)
            for i, name in enumerate(CLASSIFIERS)
        )
        if L:
            logits = outputs["logits"], other["logits"]
            outputs |= zip(("class_logits", "distillation_logits"), logits)
            outputs["logits"] = sum(logits) / 2
        return outputs
