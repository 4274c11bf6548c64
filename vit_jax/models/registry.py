"""Models as plain functions: what the rest of the code sees of Flax."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.models import variants
from vit_jax.models.vit import VisionTransformer

Params = dict  # Nested: name to arrays or to further dicts.


@dataclasses.dataclass(frozen=True)
class Model:
    """A network without its parameters.

    Attributes:
      module: the Flax module; nothing outside this package uses it.
      image_shape: (height, width, channels) of its input.
      patch: side of a patch, in pixels.
    """

    module: nn.Module
    image_shape: tuple[int, int, int]
    patch: int

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        return self.image_shape[0] // self.patch, self.image_shape[1] // self.patch

    def init(self, key: jax.Array) -> Params:
        """Draws initial parameters, a nested dict of float32 arrays."""
        images = jnp.zeros((1, *self.image_shape))
        return self.module.init(key, images)["params"]

    def apply(
        self,
        params: Params,
        images: jax.Array,
        *,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Classifies images.

        Args:
          params: as from `init`.
          images: (batch, height, width, channels), normalised floats.
          train: whether dropout and stochastic depth act.
          key: of their draws; needed with `train`.

        Returns:
          "logits" (batch, classes) and "pre_logits" (batch, width), float32.
        """
        rngs = {"dropout": key} if train else None
        return self.module.apply({"params": params}, images, train=train, rngs=rngs)


def create(
    variant: str, *, classes: int, image_size: tuple[int, int] = (224, 224), **options
) -> Model:
    """Builds a model by name.

    Args:
      variant: such as "B/16".
      classes: width of the classifier.
      image_size: height and width of the input, in pixels.
      **options: `channels` (3 unless given); `width`, `depth`, `heads` and `mlp_dim`,
        which replace the variant's numbers unless 0; and the further attributes of
        `vit_jax.models.vit.VisionTransformer`.

    Returns:
      The model.

    Raises:
      UserError: unknown variant, an image side that is not a multiple of the patch,
        or heads that do not divide the width.
    """
    size, patch = variants.parse(variant)
    numbers = dataclasses.asdict(size)
    for name in numbers:
        numbers[name] = options.pop(name, 0) or numbers[name]
    channels = options.pop("channels", 3)

    for side, pixels in zip(("height", "width"), image_size, strict=True):
        if pixels % patch:
            raise UserError(
                f"image {side} {pixels} is not a multiple of the patch {patch} of "
                f"{variant}: set data.image_size to one, such as "
                f"{max(1, round(pixels / patch)) * patch}"
            )
    if numbers["width"] % numbers["heads"]:
        raise UserError(
            f"model width {numbers['width']} does not divide into "
            f"{numbers['heads']} heads: change model.width or model.heads"
        )
    module = VisionTransformer(classes=classes, patch=patch, **numbers, **options)
    return Model(module, (*image_size, channels), patch)
