"""Lists and creates models by name."""

import dataclasses
import fnmatch
import math
import numbers
import re
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax import models
from vit_jax.config import arguments, fields
from vit_jax.config.fields import key
from vit_jax.data.config import MAX_CHANNELS, MAX_PIXELS, DataConfig
from vit_jax.errors import UserError

# Argument names of other libraries, each with its name here.
SYNONYMS = {
    "img_size": "image_size",
    "input_size": "image_size",
    "resolution": "image_size",
    "in_chans": "channels",
    "num_channels": "channels",
    "num_labels": "num_classes",
    "embed_dim": "width",
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "num_heads",
    "drop_path": "drop_path_rate",
    "drop_rate": "dropout",
    "patch_drop_rate": "patch_dropout",
    "global_pool": "pool",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments:
    pattern: str = key("", "Shell pattern of the names.")
    pretrained: bool = key(False, "Whether to list pretrained weights.")
    variant: str = key("", "Name of a network.")
    num_classes: int = key(0, "Number of classes.", below=2**31)
    channels: int = key(3, "Channels per image.", at_least=1, at_most=MAX_CHANNELS)


_checked = arguments.checked(_Arguments)


@_checked
def list_models(pattern: str = "*", *, pretrained: bool = False) -> list[str]:
    """Returns the names of the models whose sizes are published.

    Args:
      pattern: shell pattern; "*/16" matches the models with patches of 16 pixels.
      pretrained: whether to list pretrained weights instead, by the short names that
        `load_model` takes, such as "deit:Ti/16".

    Example:
      >>> import vit_jax
      >>> vit_jax.list_models("B/*")
      ['B/8', 'B/14', 'B/16', 'B/32']
      >>> vit_jax.list_models("deit:S*", pretrained=True)
      ['deit:S/16', 'deit:S/16-distilled']
    """
    if not pretrained:
        return fnmatch.filter(models.names(), pattern)
    from vit_jax.weights.hub import mirrors  # A network needs no weights.

    names = (name for family in mirrors.families() for name in mirrors.names(family))
    return fnmatch.filter(names, pattern)


@_checked
def create_model(
    variant: str,
    *,
    num_classes: int = 1_000,
    image_size: int | Sequence[int] = 224,
    channels: int = 3,
    **options,
) -> models.Model:
    """Builds a model: `init` draws its parameters, `apply` computes its outputs.

    Args:
      variant: a name in `list_models()`, or one of the same form, such as "S/8".
      num_classes: number of classes; 0 builds no classifier.
      image_size: side of the images in pixels, or (height, width).
      channels: number of channels of the images.
      **options: options of `vit_jax.models.create`.

    Raises:
      UserError: the variant or an option is unknown, or two values contradict each
        other.

    Example:
      >>> import jax, vit_jax
      >>> model = vit_jax.create_model("Ti/16", num_classes=10, image_size=64, depth=2)
      >>> params = model.init(jax.random.key(0))
      >>> model.apply(params, jax.numpy.zeros((2, 64, 64, 3)))["logits"].shape
      (2, 10)
    """
    if re.match(r"(vit|deit3?|swin(v2)?|mixer|resnetv2)_", variant):
        raise UserError(
            f"{variant!r} is a timm name: load_model('timm/{variant}') opens weights, "
            "and list_models() lists the names used here"
        )
    check_names(options)
    options |= network_keys(variant, options)
    how = {"image_size": sides(image_size), "channels": channels}
    return models.create(variant, num_classes=num_classes, **how, **options)


def check_names(given: Mapping[str, object]) -> None:
    """Raises UserError if an argument has the name that another library uses."""
    for name in SYNONYMS.keys() & given.keys():
        raise UserError(
            f"{name}={given[name]!r}: this argument is called {SYNONYMS[name]} here"
        )


def network_keys(variant: str, given: Mapping[str, object]) -> dict:
    """Checks the arguments that are keys of a network, and returns their values.

    Args:
      variant: name of the network.
      given: arguments by name, among them those keys.
    """
    kind = models.VARIANTS.find(variant, "model")
    about, defaults, taken = fields.fields(kind), fields.defaults(kind), {}
    for name in about.keys() & given.keys():
        value, rules = given[name], about[name]
        named = isinstance(value, str) and value in rules.names
        taken[name] = (
            value if named else arguments.take(name, rules, value, defaults[name])
        )
    return taken


def sides(image_size: int | Sequence[int]) -> tuple[int, int]:
    """Returns the height and width of images, checked like `data.image_size`.

    Args:
      image_size: side in pixels, or (height, width).
    """
    whole = fields.is_number(image_size, numbers.Integral)
    pair = (image_size, image_size) if whole else image_size
    if not isinstance(pair, Sequence | np.ndarray) or len(pair) != 2:
        raise UserError(
            f"image_size={image_size!r} is neither a side nor (height, width) in pixels"
        )
    about, default = fields.fields(DataConfig), fields.defaults(DataConfig)
    name = "image_size"
    taken = arguments.take(name, about[name], pair, default[name])
    if math.prod(taken) > MAX_PIXELS:
        raise UserError(
            f"image_size={image_size}: more than {MAX_PIXELS:,} pixels; choose a smaller "
            "size"
        )
    return taken
