"""The preprocessing of a checkpoint: the stored one, or the usual one of its family.

Values set by flags and arguments take precedence, see `preprocess_with`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vit_jax import models
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.models import flexivit
from vit_jax.weights.pretrained import IMAGENET, Pretrained

# Fields of `Preprocess` that apply to images of one size only.
_OF_ONE_SIZE = {"crop_fraction", "image_size", "squash"}


class Usual(NamedTuple):
    """The preprocessing that weights of a family usually need.

    Attributes:
      family: name of the family in messages, such as "timm's DeiT".
      preprocess: preprocessing for the image size of a checkpoint.
    """

    family: str
    preprocess: Preprocess


def usual_preprocess(pretrained: Pretrained) -> Usual:
    """Returns the preprocessing to assume for weights without one.

    timm's families are recognised by the name of the file or architecture, because DeiT
    and timm's other ViTs have the same parameters. Fine-tuned MAEs have a class token
    in addition to the mean of the patches, and a separate norm for the mean.

    Returns:
      For Hugging Face's ViTs the whole image, resized bilinearly and scaled to [-1, 1],
      as in ViTImageProcessor; for timm the values of most `default_cfgs` in version
      1.0.31 (vision_transformer.py, deit.py); for MAE the values of its
      main_finetune.py.
    """
    size = tuple(pretrained.options.get("image_size", (224, 224)))
    if pretrained.format != "timm":
        return Usual("Hugging Face's ViTs", Preprocess(size, squash=True))
    options = {"relative_bias": "none", "posemb": "learned", **pretrained.options}
    pooled = options.get("pool") == "gap" and options.get("fc_norm")
    plain = options["relative_bias"] == "none" and options["posemb"] == "learned"
    if pooled and plain and options.get("class_token"):
        crop = 224 / 256 if min(size) <= 224 else 1.0
        tuned = Preprocess(
            size, **IMAGENET, interpolation="bicubic", crop_fraction=crop
        )
        return Usual("MAE, fine-tuned", tuned)
    words = [*pretrained.source.split("/")[-2:], pretrained.architecture]
    name = "/".join(words).casefold()
    deit = "deit" in name or options.get("distillation", False)
    # Networks fine-tuned at 384, or DeiT III from ImageNet-21k, use the whole image.
    whole = min(size) >= 384 or (deit and re.search("2[12]k", name))
    preprocess = Preprocess(
        size,
        interpolation="bicubic",
        crop_fraction=1.0 if whole else 0.9,
        **IMAGENET if deit else {},
    )
    return Usual("timm's DeiT" if deit else "timm's ViTs", preprocess)


def with_patch(preprocess: Preprocess, options: Mapping) -> Preprocess:
    """Returns a preprocessing with the patch size of a network, if it uses sequences."""
    if not preprocess.max_tokens or preprocess.patch:
        return preprocess
    patch = models.create(**options).config.patch_size
    return dataclasses.replace(preprocess, patch=patch)


def preprocessing_of(pretrained: Pretrained) -> Preprocess:
    """Returns the preprocessing in a checkpoint, or the usual one of its format."""
    preprocess = pretrained.preprocess or usual_preprocess(pretrained).preprocess
    preprocess = with_patch(preprocess, pretrained.options)
    channels = models.create(**pretrained.options).image_shape[-1]
    mean, std = (_for_channels(v, channels) for v in (preprocess.mean, preprocess.std))
    return dataclasses.replace(preprocess, mean=mean, std=std)


def _for_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Returns values for three channels as values for any number of channels.

    Equal values become one number. Different values do too, as their mean, if the
    number of channels is another one: libraries keep the three values of RGB in that
    case.
    """
    if len(set(values)) == 1:
        return values[:1]
    if len(values) == 3 != channels:
        return (sum(values) / 3,)
    return values


def preprocess_with(
    pretrained: Pretrained,
    given: Mapping[str, object],
    tell: Callable[[str], None] = lambda line: None,
) -> Preprocess:
    """Returns a checkpoint's preprocessing with some fields replaced.

    Args:
      pretrained: checkpoint.
      given: fields of `Preprocess`.
      tell: function called with a line about resized patches, and about statistics of
        other channels.
    """
    current = preprocessing_of(pretrained)
    model = models.create(**pretrained.options)
    side, channels = model.config.patch_size, model.image_shape[-1]
    for name in ("mean", "std") if pretrained.preprocess else ():
        stored, used = (getattr(how, name) for how in (pretrained.preprocess, current))
        if name not in given and len(set(stored)) > len(used):
            tell(
                f"{name} of 3 channels: {used[0]:g} for the network's {channels} channels"
            )
    preprocess = current.replace(**given)
    if preprocess.patch_resize not in ("", *flexivit.METHODS):
        raise UserError(
            f"patch_resize={preprocess.patch_resize!r} is not one of "
            f"{', '.join(flexivit.METHODS)}: set --patch_resize"
        )
    preprocess = with_patch(preprocess, pretrained.options)
    if preprocess.max_tokens and (wrong := sorted(_OF_ONE_SIZE & given.keys())):
        raise UserError(
            f"{wrong[0]}={given[wrong[0]]} with max_tokens={preprocess.max_tokens}, which "
            "keeps the aspect ratio of images: leave it out, or set max_tokens to 0"
        )
    if current.max_tokens and "max_tokens" not in given:
        # Images keep their size when the patch size changes.
        most = current.max_tokens * current.patch**2 // preprocess.patch**2
        preprocess = dataclasses.replace(preprocess, max_tokens=max(1, most))
    if (new := given.get("patch") or side) != side:
        how = preprocess.patch_resize or model.options.get("patch_resize")
        line = f"kernel of patches of {side} pixels resized to {new} (FlexiViT)"
        if how in flexivit.METHODS:  # Networks with other methods get no hint.
            other = next(name for name in flexivit.METHODS if name != how)
            line += f" by {how}, as in {flexivit.METHODS[how]}"
            line += f" (in {flexivit.METHODS[other]} --patch_resize={other})"
        tell(f"{line}, positions to their grid")
    return preprocess
