"""Opens the network of weights, for `load_model` and `load_flax`."""

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
from flax.traverse_util import flatten_dict

from vit_jax import models, weights
from vit_jax.api.models import check_names, network_keys, sides
from vit_jax.config import fields
from vit_jax.config.fields import key
from vit_jax.data.preprocess import FIELDS, Preprocess, checked_fields
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.weights import checkpoint_folders, surgery
from vit_jax.weights.pretrained import Pretrained


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsArguments:
    """Arguments of all functions that open weights."""

    source: str = key("", "Weights.")
    class_names: tuple[str, ...] = key((), "Class names in label order.")
    step: int = key(0, "Step of a checkpoint.")
    use_ema: bool = key(True, "Whether to use averaged parameters.")
    num_heads: int = key(0, "Number of attention heads.", below=2**31)
    architecture: str = key("", "timm's name of the network.")
    tell: Callable = key(print, "Function that receives each line of output.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkArguments(WeightsArguments):
    """Arguments of all functions that open weights as a network."""

    num_classes: int = key(0, "Number of classes.", below=2**31)
    token_merging: int = key(0, "Tokens merged per block.", below=2**31)


def open_network(
    source: str | os.PathLike,
    options: Mapping[str, object],
    *,
    image_size: int | Sequence[int] | None,
    num_classes: int | None,
    step: int | None,
    images: bool = True,
    **how: object,
) -> tuple[Pretrained, Preprocess]:
    """Opens weights with the options of a call.

    Args:
      source, image_size, num_classes, step: arguments of `load_model`.
      options: keys of the network by name; and with `images`, fields of `Preprocess`.
      images: whether `options` may have fields of `Preprocess`.
      **how: further arguments of `weights.open_weights`.

    Returns:
      The weights, whose `options` have these keys, and the preprocessing of images.

    Raises:
      UserError: the weights cannot be opened, or an argument does not fit them.
    """
    check_names(options)
    preprocess = checked_fields(options) if images else {}
    keys = {name: value for name, value in options.items() if name not in preprocess}
    if image_size is not None:
        preprocess |= {"image_size": sides(image_size), "cut": (0, 0)}
    pretrained, prepared = weights.open_weights(
        at_step(source, step), preprocess, with_task=True, **how
    )
    pretrained = _with_keys(pretrained, keys, FIELDS if images else ())
    if num_classes is not None:
        pretrained = surgery.replace_head(pretrained, num_classes)
    return pretrained, prepared


def _with_keys(
    pretrained: Pretrained, given: Mapping[str, object], other: Collection[str]
) -> Pretrained:
    """Returns weights whose network has other values for some keys.

    Raises:
      UserError: a key is unknown, or its value changes the shapes of parameters.
    """
    if not given:
        return pretrained
    variant = pretrained.options["variant"]
    known = fields.fields(models.VARIANTS.find(variant, "model")).keys() - {"variant"}
    if unknown := sorted(given.keys() - known):
        of_images = (
            f"one of {', '.join(sorted(other))} for images, nor " if other else ""
        )
        raise UserError(
            f"{unknown[0]}={given[unknown[0]]!r}: not {of_images}a key of {variant}: "
            f"{', '.join(sorted(known))}"
        )
    changed = network_keys(variant, given)
    options = pretrained.options | changed
    before, after = (
        flatten_dict(
            jax.eval_shape(stacking.unstack, models.create(**each).shapes), sep="/"
        )
        for each in (pretrained.options, options)
    )
    try:
        surgery.check_keys(before, after, None)
    except UserError as error:
        named = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        raise UserError(f"{named}: {error}; leave it out") from error
    return dataclasses.replace(pretrained, options=options)


def at_step(source: str | os.PathLike, step: int | None) -> str:
    """Returns the address of the weights at a step of a run."""
    if step is None:
        return os.fspath(source)
    return checkpoint_folders.at_step(source, step)
