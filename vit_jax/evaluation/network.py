"""A checkpoint as a network that is ready for images of a given preprocessing."""

import dataclasses
from collections.abc import Callable, Mapping

import jax

from vit_jax import models, weights
from vit_jax.errors import UserError
from vit_jax.parallel import capacity
from vit_jax.weights import surgery
from vit_jax.weights.pretrained import (
    Preprocess,
    Pretrained,
    check_preprocess,
    default_preprocess,
    describe_preprocess,
)

# As the library does it that the checkpoint is of.
_POSEMB_RESIZE = {"timm": "bicubic", "hugging_face": "bicubic"}


def open_weights(
    place: str,
    given: Mapping[str, object],
    *,
    average: bool,
    heads: int,
    tell: Callable[[str], None],
) -> tuple[Pretrained, Preprocess]:
    """Opens weights, and settles how images are prepared for them.

    Args:
      place, average, heads: as of `weights.open_pretrained`.
      given: fields of `Preprocess` in place of those that travelled with the weights.
      tell: gets a line on each thing that was guessed.

    Returns:
      The checkpoint and the preprocessing.

    Raises:
      UserError: nothing there, or not readable.
    """
    found = weights.open_pretrained(place, use_ema=average, num_heads=heads)
    for note in found.notes:  # Such as how many heads were guessed.
        tell(f"{place}: {note}")
    preprocess = dataclasses.replace(preprocessing_of(found), **given)
    stated = {"mean", "std", "interpolation", "crop_fraction"} <= given.keys()
    if not found.preprocess and not stated:
        tell(
            f"{place} does not tell how its images are prepared; assumed: "
            f"{describe_preprocess(preprocess)}"
        )
    return found, preprocess


def preprocessing_of(pretrained: Pretrained) -> Preprocess:
    """Returns the preprocessing that travelled with a checkpoint, or the usual one.

    Its size and channels are the network's.
    """
    options = pretrained.options
    size = tuple(options.get("image_size", (224, 224)))
    found = pretrained.preprocess or default_preprocess(
        pretrained.format, size, distillation=options.get("distillation", False)
    )
    # Equal numbers for three channels serve one as well.
    mean, std = (v[:1] if len(set(v)) == 1 else v for v in (found.mean, found.std))
    return dataclasses.replace(found, image_size=size, mean=mean, std=std)


def fit(pretrained: Pretrained, preprocess: Preprocess) -> tuple[models.Model, dict]:
    """Builds the network of a checkpoint for images of another size, if need be.

    Args:
      pretrained: what `weights.open_pretrained` returns.
      preprocess: its `image_size` is the network's; position embeddings are resized.

    Returns:
      The network, and its parameters on the host.

    Raises:
      UserError: it has no output for an image as a whole, or something does not fit.
    """
    source = models.create(**pretrained.options)
    if source.options.get("head") == "none":
        raise UserError(
            f"{pretrained.source} classifies every token by itself (head=none), not "
            "the image: give a checkpoint with another head"
        )
    check_preprocess(preprocess, source.image_shape[-1])
    model = models.create(**{**pretrained.options, "image_size": preprocess.image_size})
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    capacity.check(shapes)  # The host's memory holds them first.
    params, _ = surgery.fit(
        pretrained.params,
        shapes,
        grid=model.grid,
        old_grid=source.grid,
        head="keep",
        allow_mismatch=None,
        posemb_resize=_POSEMB_RESIZE.get(pretrained.format, "linear"),
    )
    return model, params
