"""Fits parameters to a model: head, position embeddings, patch size, channels.

Letters: C and c channels before and after, P side of a patch, D model width.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax.linen.initializers import zeros
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float

from vit_jax import models
from vit_jax.data.preprocess import Preprocess
from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models import Model, flexivit, initializers, resizing, stacking
from vit_jax.models.layers import CLASSIFIERS
from vit_jax.weights import rewriting
from vit_jax.weights.pretrained import POSITIONS, Pretrained

HEADS = ("keep", "new", "drop")

_PRE_LOGITS = ("pre_logits/kernel", "pre_logits/bias")
_KERNELS = tuple(f"{name}/kernel" for name in CLASSIFIERS)
_MAX_ROWS = 4  # If more parameters were resized, only their number is reported.
FIRST_KERNELS = ("root_block/conv_root/kernel", "conv_root/kernel", "embedding/kernel")


class FitRow(NamedTuple):
    """What fitting did to a parameter or to a group of parameters.

    Attributes:
      what: name of the parameter or group.
      action: description of the change.
      before: shape in the checkpoint; None if the checkpoint does not have it.
      after: shape in the model; None if the model does not have it.
    """

    what: str
    action: str
    before: tuple[int, ...] | None = None
    after: tuple[int, ...] | None = None


def fit(
    params: Mapping,
    model: Model,
    source: Model,
    *,
    head: str = "keep",
    head_bias_init: float = 0.0,
    posemb_resize: str = "",
    allow_mismatch: Sequence[str] | None = (),
    init: Callable[[], Mapping] | None = None,
    channels: str = "repeat",
) -> tuple[dict, list[FitRow]]:
    """Fits loaded parameters to a model.

    Args:
      params: loaded parameters, nested dict of arrays with one subtree per block.
      model: model that the parameters are fitted to.
      source: model that the parameters belong to.
      head: "keep"; "new" for a classifier initialised by `model.init` (with zeros in
        Google's networks) and a new layer before it; or "drop" for a model without
        classes.
      head_bias_init: initial bias of a new classifier.
      posemb_resize: method that resizes position embeddings, one of
        resizing.RESIZE_METHODS; "" for the source's method.
      allow_mismatch: regular expressions of names that may be missing, which then keep
        their initial values, or left over; None for commands without such a flag.
      init: function that returns the model's initial parameters; `model.init` with key
        0 if None.
      channels: method that fits the first kernel to images of other channels, see
        `convert_input_channels`; "new" draws the kernel.

    Returns:
      The fitted parameters; and a row for the parameters that were loaded unchanged,
      followed by one row for each exception.

    Raises:
      UserError: parameters are missing, left over or of another shape, or a pattern
        matches no parameter.
    """
    loaded = {k: np.asarray(v) for k, v in flatten_dict(params, sep="/").items()}
    # Checkpoints have one subtree per block.
    shapes = jax.eval_shape(stacking.unstack, model.shapes)
    given, wanted = dict(loaded), flatten_dict(shapes, sep="/")
    zero = initializers.of(model.config).head is zeros
    rows = [
        *_swap_head(given, wanted, head, head_bias_init, zero),
        *_resize(given, model, source, posemb_resize),
        *_fit_tokens(given, wanted),
        *_fit_input(given, wanted, channels, model.options.get("patch_resize", "")),
        *_fit_layer_scale(given, wanted),
    ]
    new = _PRE_LOGITS if head == "new" else ()
    new += FIRST_KERNELS if channels == "new" else ()
    new += () if zero or head == "keep" else _KERNELS
    fresh, more = check_keys(given, wanted, allow_mismatch, new=new)
    rows += more
    if fresh:
        draw = init or functools.partial(model.init, jax.random.key(0))
        given |= _draw(draw, fresh)
    for name, value in given.items():
        given[name] = value.astype(wanted[name].dtype, copy=False)

    same = sum(value is loaded.get(name) for name, value in given.items())
    rounded = sum(
        name in loaded and value.dtype.itemsize < loaded[name].dtype.itemsize
        for name, value in given.items()
    )
    first = [FitRow(f"{same} parameters", "loaded")]
    if rounded:
        first.append(
            FitRow(f"{rounded} parameters", "rounded to the model's precision")
        )
    return unflatten_dict(given, sep="/"), first + rows


def _draw(init: Callable[[], Mapping], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the initial values of some parameters."""

    def some():
        initial = flatten_dict(stacking.unstack(init()), sep="/")
        return {name: initial[name] for name in names}

    # Compiled, so that the other parameters, which may not fit a device, are not
    # computed.
    return jax.device_get(jax.jit(some)())


def _swap_head(
    given: dict, wanted: dict, head: str, bias: float, zero: bool
) -> list[FitRow]:
    """Removes the head from `given`, and adds a new one for "new".

    A kernel is added if it is `zero`; others are drawn with the other missing
    parameters.
    """
    if head not in HEADS:
        raise UserError(f"head={head!r} is not one of {', '.join(HEADS)}")
    if head == "keep":
        return []
    if head == "drop" and "head/kernel" in wanted:
        raise UserError(
            "head=drop is for a model without classes, but this one has "
            f"{wanted['head/kernel'].shape[-1]}: replace or keep the head"
        )
    rows = []
    for name in CLASSIFIERS:
        before, after = (
            tree[f"{name}/kernel"].shape if f"{name}/kernel" in tree else None
            for tree in (given, wanted)
        )
        for leaf in ("kernel", "bias"):
            given.pop(f"{name}/{leaf}", None)
            if after and (zero or leaf == "bias"):
                shape = wanted[f"{name}/{leaf}"]
                fill = bias if leaf == "bias" else 0.0
                given[f"{name}/{leaf}"] = np.full(shape.shape, fill, shape.dtype)
        if after:
            action = f"replaced by a {'linear layer of zeros' if zero else 'new one'}"
            rows.append(FitRow(name, action, before, after))
        elif before:
            rows.append(FitRow(name, "dropped", before))
    # The layer before a replaced classifier was trained for the old classes.
    if head == "new" or "pre_logits/kernel" not in wanted:
        kernel, _ = (given.pop(leaf, None) for leaf in _PRE_LOGITS)
        if kernel is not None and "pre_logits/kernel" not in wanted:
            rows.append(FitRow("pre_logits", "dropped with the head", kernel.shape))
    return rows


def _resize(given: dict, model: Model, source: Model, method: str) -> list[FitRow]:
    """Resizes parameters that depend on the grid, such as position embeddings."""
    if method not in ("", *resizing.RESIZE_METHODS):
        raise UserError(
            f"posemb_resize={method!r} is not one of {', '.join(resizing.RESIZE_METHODS)}"
        )
    if method and "posemb_resize" in source.options:
        source = source.replace(posemb_resize=method)
    resized = model.resize(unflatten_dict(given, sep="/"), source)
    before = dict(given)
    given |= flatten_dict(resized, sep="/")
    changed = [name for name in given if given[name] is not before[name]]
    how = source.options.get("posemb_resize", "linear")
    action = f"resized from {source.grid} to {model.grid}"
    action += f", {how}" if how != "linear" else ""
    if len(changed) > _MAX_ROWS:
        return [FitRow(f"{len(changed)} parameters", action)]
    return [
        FitRow(_label(name), action, before[name].shape, given[name].shape)
        for name in sorted(changed)
    ]


def _label(name: str) -> str:
    return "position embeddings" if name == POSITIONS else name


def _fit_tokens(given: dict, wanted: dict) -> list[FitRow]:
    """Adjusts the rows of the prefix tokens in position embeddings."""
    has, needs = (
        [t for t in rewriting.TOKENS if t in tree] for tree in (given, wanted)
    )
    rows = []
    for name in sorted(given.keys() & wanted.keys()):
        old = given[name]
        if not name.endswith("/pos_embedding") or old.ndim != 3 or has == needs:
            continue
        zero = np.zeros_like(old[:, :1])
        tokens = [old[:, [has.index(t)]] if t in has else zero for t in needs]
        given[name] = np.concatenate([*tokens, old[:, len(has) :]], axis=1)
        action = f"rows of {_names(has)} replaced by rows of {_names(needs)}"
        rows.append(FitRow(_label(name), action, old.shape, given[name].shape))
    return rows


def _names(tokens: list[str]) -> str:
    return " and ".join(tokens) or "no extra token"


def _fit_input(given: dict, wanted: dict, channels: str, resize: str) -> list[FitRow]:
    """Adjusts the first kernel to the model's channels and patch size."""
    name = next((n for n in FIRST_KERNELS if n in wanted), None)
    kernel = given.get(name)
    if np.ndim(kernel) != 4 or kernel.shape[0] != kernel.shape[1]:
        return []  # `check_keys` reports the missing kernel.
    rows, shape = [], wanted[name].shape
    if kernel.shape[2] != shape[2] and channels == "new":
        del given[name]  # It is drawn later.
        return []
    if kernel.shape[2] != shape[2]:
        given[name] = convert_input_channels(kernel, shape[2], channels)
        action = (
            f"input channels changed from {kernel.shape[2]} to {shape[2]} ({channels})"
        )
        rows.append(FitRow(name, action, kernel.shape, given[name].shape))
        kernel = given[name]
    # Only kernels on pixels are resized: the inputs of other kernels are not smooth.
    if name == "embedding/kernel" and kernel.shape[:2] != shape[:2]:
        given[name] = flexivit.resize_patch_kernel(kernel, shape[0], resize)
        action = (
            f"patches resized from {len(kernel)} to {shape[0]} (FlexiViT, {resize})"
        )
        rows.append(FitRow(name, action, kernel.shape, given[name].shape))
    return rows


def _fit_layer_scale(given: dict, wanted: dict) -> list[FitRow]:
    """Multiplies LayerScale in, or adds ones, if only checkpoint or model has it."""
    has, needs = (
        {name for name in tree if name.endswith(tuple(rewriting.SCALES))}
        for tree in (given, wanted)
    )
    if has and not needs:
        rewriting.multiply_layer_scale(given, has)
        return [FitRow("LayerScale", "multiplied into the layers before it")]
    if needs and not has:
        given |= {n: np.ones(wanted[n].shape, wanted[n].dtype) for n in needs}
        return [FitRow("LayerScale", "not in the checkpoint, set to ones")]
    return []


def check_keys(
    given: dict[str, np.ndarray],
    wanted: Mapping,
    allow_mismatch: Sequence[str] | None,
    *,
    new: Sequence[str] = (),
) -> tuple[list[str], list[FitRow]]:
    """Checks that names and shapes match, and removes left-over parameters.

    Args:
      given: arrays of the checkpoint by name; left-over parameters are removed from it.
      wanted: arrays or shapes of the model by name.
      allow_mismatch: argument of `fit`.
      new: names that are expected to be missing.

    Returns:
      The names that keep their initial values, and a row for each exception.

    Raises:
      UserError: names or shapes differ, or a pattern matches no parameter.
    """
    missing = sorted(wanted.keys() - given.keys())
    extra = sorted(given.keys() - wanted.keys())
    allowed = _allowed([*missing, *extra], allow_mismatch or ())
    allowed |= set(new)
    wrong = [
        f"{name} is {given[name].shape} in the checkpoint but "
        f"{wanted[name].shape} in the model"
        for name in sorted(given.keys() & wanted.keys())
        if given[name].shape != wanted[name].shape
    ]
    # A layer that lacks some of the checkpoint's parameters computes something else, so
    # init.allow_mismatch is suggested only if whole top-level layers are left over.
    has = {name.partition("/")[0] for name in wanted}
    inside = any(n.partition("/")[0] in has for n in extra if n not in allowed)
    strict = bool(wrong) or inside or allow_mismatch is None
    wrong += [f"{name} is missing" for name in missing if name not in allowed]
    wrong += [f"{name} is left over" for name in extra if name not in allowed]
    if wrong:
        shown = "; ".join(wrong[:4])
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        remedy = (
            "" if strict else "; to allow some, list them in config.init.allow_mismatch"
        )
        raise UserError(f"the checkpoint does not fit the model: {shown}{more}{remedy}")
    rows = [
        FitRow(
            name,
            f"{'new' if name in new else 'missing'}: as initialised",
            after=wanted[name].shape,
        )
        for name in missing
    ]
    rows += [FitRow(n, "left over: not used", given.pop(n).shape) for n in extra]
    return missing, rows


def _allowed(names: list[str], patterns: Sequence[str]) -> set[str]:
    """Returns the names that match a pattern; each pattern must match a name."""
    allowed = set()
    for pattern in patterns:
        try:
            matched = set(filter(re.compile(pattern).search, names))
        except re.error as error:
            raise UserError(
                f"init.allow_mismatch: {pattern!r} is not a regular expression: {error}"
            ) from error
        if not matched:
            raise UserError(
                f"init.allow_mismatch: {pattern!r} matches no parameter that is missing "
                f"or left over ({', '.join(names[:4]) or 'none'}): remove it"
            )
        allowed |= matched
    return allowed


def convert_input_channels(
    kernel: Float[np.ndarray, "P P C D"], channels: int, how: str = "repeat"
) -> Float[np.ndarray, "P P c D"]:
    """Converts the first kernel to images with another number of channels.

    Args:
      kernel: the kernel.
      channels: new number of channels, c.
      how: "repeat" repeats the kernel's channels in turn and scales them by C / c, as
        in timm, or sums them for one channel: if all channels are equal, the output is
        the same as before. "mean" gives every channel the mean over C, with the same
        scale. "first" keeps the first channels and adds zeros.
    """
    count, dtype = kernel.shape[2], kernel.dtype
    if how == "first":
        more = ((0, 0), (0, 0), (0, max(0, channels - count)), (0, 0))
        return np.pad(kernel[:, :, :channels], more)
    if how == "mean" or channels == 1:
        kernel = kernel.mean(axis=2, keepdims=True)
        return np.repeat(kernel * (count / channels), channels, axis=2).astype(dtype)
    numbers = np.arange(channels) % count
    return (kernel[:, :, numbers] * (count / channels)).astype(dtype)


def replace_head(pretrained: Pretrained, num_classes: int) -> Pretrained:
    """Returns a checkpoint with a new classifier, or with none for 0 classes.

    The tanh layer before the classifier was trained for the old classes and is removed.
    """
    options = pretrained.options | {"num_classes": num_classes}
    if "representation_layer" in options:
        options["representation_layer"] = False
    model = models.create(**options)
    params, _ = fit(
        pretrained.params,
        model,
        model,
        head="new" if num_classes else "drop",
        allow_mismatch=None,
    )
    return dataclasses.replace(
        pretrained, params=params, options=options, class_names=(), calibration=None
    )


def resize_patches(pretrained: Pretrained, preprocess: Preprocess) -> Pretrained:
    """Resizes the patch kernel to a preprocessing's patch size (models/flexivit.py).

    The grid of the positions stays, so that they are resized only once, to the images'.

    Raises:
      UserError: the network has no patches of pixels, or they do not fill the images.
    """
    source, side = models.create(**pretrained.options), preprocess.patch
    if side in (0, source.config.patch_size):
        return pretrained
    options, variant = dict(source.options), source.options["variant"]
    if not re.fullmatch(r"\w+/\d+", variant):
        raise UserError(
            f"patch={side}: {variant} has no patches of pixels that can be resized: "
            "choose a Vision Transformer, or leave it out"
        )
    if not preprocess.max_tokens and any(n % side for n in preprocess.image_size):
        size = "x".join(map(str, preprocess.image_size))
        raise UserError(
            f"patch={side} does not divide images of {size} pixels: choose another patch "
            "or image size"
        )
    if pretrained.format == "big_vision":
        # As in big_vision's FlexiViT, the code there that changes patch sizes.
        options["posemb_resize"] = "bilinear"
    options["patch_resize"] = preprocess.patch_resize or options["patch_resize"]
    if preprocess.max_tokens:  # For sequences the network resizes its kernel itself.
        return dataclasses.replace(pretrained, options=options)
    options["variant"] = f"{variant.split('/')[0]}/{side}"
    options["image_size"] = tuple(count * side for count in source.grid)
    model = models.create(**options)
    params, _ = fit(pretrained.params, model, source, allow_mismatch=None)
    return dataclasses.replace(pretrained, params=params, options=options)


def fit_network(pretrained: Pretrained, preprocess: Preprocess) -> tuple[Model, dict]:
    """Builds the network of a checkpoint for a preprocessing.

    Args:
      pretrained: checkpoint from `weights.open_pretrained`.
      preprocess: preprocessing, whose `image_size` and `patch` may differ from those of
        the checkpoint: position embeddings and patch kernel are resized. With
        `max_tokens` they are kept, since the network resizes them for each image.

    Returns:
      The network, and its parameters on the host.

    Raises:
      UserError: the network has no output for a whole image, or the preprocessing does
        not fit it.
    """
    pretrained = resize_patches(pretrained, preprocess)
    source = models.create(**pretrained.options)
    if source.config.has_encoder and source.options["pool"] == "none":
        raise UserError(
            f"{pretrained.source} classifies every token separately (pool=none), not "
            "the image: give a checkpoint with another head"
        )
    preprocess.check(source.image_shape[-1])
    model = source
    if not preprocess.max_tokens:
        model = source.at_size(preprocess.image_size)
    if count := pretrained.token_merging:
        if not hasattr(model.config, "token_merging"):
            raise UserError(
                f"token_merging={count}: {model.options['variant']} has no attention "
                "between all tokens: choose a Vision Transformer, or leave it out"
            )
        model = model.replace(token_merging=count)
    if preprocess.max_tokens and (why := model.config.no_sequences):
        raise UserError(
            f"max_tokens={preprocess.max_tokens} with {why}: choose a Vision Transformer "
            "without it, or leave max_tokens out"
        )
    sharding.check_memory(model.shapes)  # They are loaded to the host's memory first.
    params, _ = fit(pretrained.params, model, source, allow_mismatch=None)
    return model, params
