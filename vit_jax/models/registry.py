"""Networks by name: `create` and the variants that there are."""

import dataclasses
from collections.abc import Sequence

from vit_jax.config import fields
from vit_jax.config.fields import Choice
from vit_jax.errors import UserError
from vit_jax.models import model, network, variants
from vit_jax.models.model import Model
from vit_jax.models.network import NetworkConfig

# The dataclass of `config.model`, chosen by the variant.
VARIANTS = Choice(
    types=variants.CONFIGS,
    default="B/16",
    text_key="variant",
    patterns=True,
    base=NetworkConfig,
)


def create(
    variant: str,
    *,
    num_classes: int,
    image_size: Sequence[int] = (224, 224),
    channels: int = 3,
    platform: str = "",
    **options,
) -> Model:
    """Builds a model by name.

    Args:
      variant: such as "B/16", "R50+B/16" or "R50x1"; `names` has them all. Or
        "module:Config", a `NetworkConfig` of a user's module.
      num_classes: width of the classifier; 0 is none.
      image_size: height and width of the input, in pixels.
      channels: of the input.
      platform: where it will run, "cpu", "gpu" or "tpu"; "" is JAX's default backend.
      **options: the keys of its config, as `vit.ViTConfig`. `width`, `depth` and the
        like replace the variant's numbers unless 0 or (0,).

    Returns:
      The model.

    Raises:
      UserError: unknown variant or option, an image side that is not a multiple of the
        patch, or numbers that do not fit each other.
    """
    kind = VARIANTS.find(variant, "model")
    taken = {"num_classes", "image_size", "channels", "platform"} & {
        *fields.fields(kind)
    }
    if taken:
        raise UserError(
            f"model.variant={variant!r} has a key {min(taken)!r}, which "
            "`models.create` takes for every network: rename the key"
        )
    config = network.read(kind, {"variant": variant, **options})
    config = dataclasses.replace(config, platform=platform)
    return model.build(config, num_classes, image_size, channels)


def names() -> tuple[str, ...]:
    """Returns every variant that is published."""
    return variants.NAMES + sum((k.names for k in variants.CONFIGS.values()), ())


def side_multiple(variant: str) -> int:
    """Returns what image sides must be multiples of; 1 if any will do.

    Raises:
      UserError: unknown variant.
    """
    config = network.read(VARIANTS.find(variant, "model"), {"variant": variant})
    return config.side_multiple or config.patch_size
