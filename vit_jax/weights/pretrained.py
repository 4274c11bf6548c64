"""A checkpoint of any format in this project's terms, and the preprocessing of images.

The preprocessing has the sizes and the rounding of timm's evaluation transform. Hugging
Face's image processors round an odd margin down (`Preprocess.crop_down`).
"""

import dataclasses
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from vit_jax import models
from vit_jax.data import decode, imagenet
from vit_jax.data.bands import WHITE, PixelFormat, doubt, is_cut, read
from vit_jax.data.config import DEPTHS, MAX_MEGAPIXELS, MAX_PIXELS, DataConfig
from vit_jax.data.sources.base import warn
from vit_jax.data.transforms import device
from vit_jax.data.transforms import host as host_transforms
from vit_jax.data.transforms.naflex import NaFlex, fitting_grid
from vit_jax.errors import UserError
from vit_jax.models import flexivit, patches, segmenter
from vit_jax.models.patches import PatchSequences

IMAGENET = {"mean": imagenet.MEAN, "std": imagenet.STD}

# Name of the learned position embeddings.
POSITIONS = "Transformer/posembed_input/pos_embedding"


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """Preprocessing of images for a model.

    The image is resized until it just covers `image_size / crop_fraction`, or with
    `squash` to exactly that size, and the centre is cropped to `image_size`. With `fill`
    it is resized until it just fits in, and the border has that colour. With `cut` the
    sizes are larger by as many pixels, which are removed from the end of the crop.

    Attributes:
      image_size: height and width of the model's input, in pixels.
      mean: subtracted per channel, as a fraction of 255.
      std: divisor per channel, applied after the mean.
      interpolation: filter of the resize, one of `host.INTERPOLATIONS`.
      crop_fraction: fraction of the resized side that the crop keeps.
      squash: whether resizing changes the aspect ratio instead of cropping.
      short_side: whether the short side of the image is resized to
        `min(image_size) / crop_fraction` independently of the shape of the crop. Only
        set for crops that are not square; for square ones it makes no difference.
      exif: whether files are rotated by their EXIF orientation tags; None if unknown:
        evaluations do not rotate them then, and `upright` does.
      crop_down: whether half a pixel of the margin above and beside the crop is rounded
        down as in transformers and big_vision, not to even as in torchvision.
      cut: rows at the bottom and columns on the right that fill no patch.
      fill: colour of the border, from 0 to 255 per channel; () without a border.
      pixels, bands: what is read of a file, see `data.pixels` and `data.bands`.
      max_tokens: most patches of an image, whose aspect is kept (`prepare_image`); 0 for
        images of `image_size`. Otherwise `image_size` is that of the position embeddings.
      patch: side of patches in pixels, see `surgery.resize_patches`; 0 for the network's.
      max_megapixels: size of the largest image to read, see `data.max_megapixels`.
      patch_resize: how the kernel of patches is resized to that side, one of
        `flexivit.METHODS`; "" for the network's `patch_resize`.
    """

    image_size: tuple[int, int]
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    interpolation: str = "bilinear"
    crop_fraction: float = 1.0
    squash: bool = False
    short_side: bool = False
    exif: bool | None = None
    crop_down: bool = False
    cut: tuple[int, int] = (0, 0)
    fill: tuple[int, ...] = ()
    pixels: str = DEPTHS[0]
    bands: tuple[int, ...] = ()
    max_tokens: int = 0
    patch: int = 0
    max_megapixels: float = MAX_MEGAPIXELS
    patch_resize: str = ""

    def form(self, channels: int) -> PixelFormat:
        """Returns what is read of a file for a model of so many channels."""
        return PixelFormat(channels, self.pixels, self.bands, self.max_megapixels)

    def data_keys(self) -> dict[str, object]:
        """Returns the keys of `config.data` by which images are read and normalised."""
        return {
            "mean": tuple(self.mean),
            "std": tuple(self.std),
            "pixels": self.pixels,
            "bands": self.bands,
        }


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A checkpoint under the names and options of this project.

    Attributes:
      params: nested dict of numpy arrays.
      options: arguments of `models.create` that build the network of the parameters:
        variant, num_classes, image_size, channels, pool, activation, ...
      format: "google", "big_vision", "bit", "timm", "hugging_face", "mae", "dino",
        "dinov2", "workdir" or "vit_jax".
      source: path or address of the checkpoint, for messages.
      preprocess: preprocessing of images; None if unknown.
      class_names: names in label order; empty if unknown.
      loss: "softmax", or "sigmoid" if every class has an independent probability.
      notes: a line for each thing that reading changed or dropped.
      task: `config.task` of the training; empty if unknown.
      task_params: parameters of the task beside the network, such as {"decoder": ...},
        nested dict of numpy arrays; empty without such, or if not requested.
      tokenizer: path or address of the text tower's tokenizer; empty if unknown.
      multi_label: whether an image may have several classes.
      architecture: timm's name of the network; empty if unknown.
      token_merging: tokens that each block merges, see models/merging.py; not read from
        the checkpoint.
    """

    params: dict
    options: dict
    format: str
    source: str
    preprocess: Preprocess | None = None
    class_names: tuple[str, ...] = ()
    loss: str = "softmax"
    notes: tuple[str, ...] = ()
    task: dict = dataclasses.field(default_factory=dict)
    task_params: dict = dataclasses.field(default_factory=dict)
    tokenizer: str = ""
    multi_label: bool = False
    architecture: str = ""
    token_merging: int = 0

    @property
    def num_classes(self) -> int:
        """Number of classes of the classifier, or of a head for masks."""
        head = self.task_params.get(segmenter.PARAMS)
        return head["head"]["bias"].size if head else self.options["num_classes"]


def upright(preprocess: Preprocess) -> Preprocess:
    """Returns a preprocessing that rotates files by EXIF, unless `exif` is False."""
    return dataclasses.replace(preprocess, exif=preprocess.exif is not False)


def prepare_image(
    data: bytes | Num[np.ndarray, "..."],
    preprocess: Preprocess,
    channels: int = 3,
    name: str = "",
) -> Num[np.ndarray, "h w c"] | PatchSequences:
    """Decodes, resizes and crops one image; normalisation happens on the device.

    EXIF orientation tags are ignored unless `preprocess.exif`, as in
    `PIL.Image.open(...).convert("RGB")`, the usual input of timm and Hugging Face.

    Args:
      data: content of an image file, or an array as of one, see `bands.read`.
      preprocess: bands, depth, size, interpolation and crop.
      channels: of the model.
      name: name of the image for warnings, see `warn_of_dark`.

    Returns:
      Pixels of `preprocess.image_size` and `preprocess.pixels`; with `max_tokens` patches
      and their grid, as NumPy arrays of one row.

    Raises:
      DamagedImage: the data are not a readable image, or it is too thin to resize.
    """
    image = read_image(data, preprocess, channels, name)
    if not preprocess.max_tokens:
        return resize_and_crop(image, preprocess)
    return to_patches(image, preprocess)


def to_patches(
    image: Num[np.ndarray, "H W C"], preprocess: Preprocess
) -> PatchSequences:
    """Returns an image, read at its own size, as a row of patches, with `max_tokens`."""
    found = naflex_of(preprocess)(image, np.random.default_rng(0))
    return PatchSequences(found["image"], found["grids"])


def network_input(
    images: Num[Array | np.ndarray, "B h w c"] | PatchSequences,
    preprocess: Preprocess | DataConfig,
    dtype: str,
) -> Float[Array, "B h w c"] | PatchSequences:
    """Returns a batch of prepared images as the network takes it: normalised.

    Args:
      images: outputs of `prepare_image`; they may be traced.
      preprocess: preprocessing, or `config.data`, for mean and standard deviation.
      dtype: of the network's computation.
    """

    def normalize(pixels):
        pixels = jnp.asarray(pixels)
        return device.normalize(pixels, preprocess.mean, preprocess.std).astype(dtype)

    return patches.map_pixels(normalize, images)


def naflex_of(preprocess: Preprocess) -> NaFlex:
    """Returns the transform that makes sequences of patches."""
    return NaFlex(
        preprocess.max_tokens, preprocess.patch, interpolation=preprocess.interpolation
    )


def whole(preprocess: Preprocess, size: tuple[int, int]) -> Preprocess:
    """Returns a preprocessing that resizes all of an image to a height and width."""
    usual = Preprocess(size, squash=True)
    kept = ("mean", "std", "interpolation", "exif", "pixels", "bands", "patch")
    kept += ("patch_resize", "max_megapixels")
    return dataclasses.replace(usual, **{k: getattr(preprocess, k) for k in kept})


def of_image(preprocess: Preprocess, size: tuple[int, int]) -> Preprocess:
    """Returns the preprocessing of an image by a network of its grid.

    Args:
      preprocess: preprocessing of any images.
      size: height and width of the image, in pixels.

    Returns:
      With `max_tokens` a resize to the patches that `prepare_image` cuts; otherwise the
      preprocessing itself.
    """
    if not preprocess.max_tokens:
        return preprocess
    grid = fitting_grid(*size, preprocess.max_tokens)
    return whole(preprocess, tuple(count * preprocess.patch for count in grid))


def read_image(
    data: bytes | Num[np.ndarray, "..."],
    preprocess: Preprocess,
    channels: int = 3,
    name: str = "",
) -> Num[np.ndarray, "H W c"]:
    """Decodes one image at its own size, see `prepare_image`."""
    form = preprocess.form(channels)
    warn_of_dark(data, form, name)
    return read(data, form, exif=bool(preprocess.exif))


def warn_of_dark(data: bytes | np.ndarray, form: PixelFormat, name: str) -> None:
    """Warns, once, of an image that is all but black to a network of 8 bits.

    Args:
      data: content of a file, or an array.
      form: what the network reads of it.
      name: name of the image.
    """
    if is_cut(data, form) and (text := doubt(data)):
        warn(
            f"{name or 'an image'} {text}; others may be too: scale their values to fill "
            "the range",
            about="dark images",
        )


def resize_and_crop(
    pixels: Num[np.ndarray, "H W C"], preprocess: Preprocess
) -> Num[np.ndarray, "h w C"]:
    """Resizes and crops one image, see `prepare_image`.

    Source: timm.data.create_transform, crop modes "center", "squash" and "border".
    """
    height, width = resized_size(pixels.shape[:2], preprocess)
    if height * width > MAX_PIXELS:
        raise decode.DamagedImage(
            f"has {pixels.shape[1]}x{pixels.shape[0]} pixels, which become "
            f"{width}x{height} before the crop, too many"
        )
    pixels = host_transforms.resize_all(
        pixels, (height, width), preprocess.interpolation
    )
    top, left = _corner((height, width), preprocess)
    shape = (*preprocess.image_size, pixels.shape[-1])
    # A border of a colour, from 0 to 255, where the crop reaches beyond the image.
    scale = WHITE.get(pixels.dtype.name, 255) // 255
    border = np.array(preprocess.fill or (0,), np.float32) * scale
    out = np.empty(shape, pixels.dtype)
    out[:] = border.astype(pixels.dtype)
    inside = pixels[max(top, 0) : top + shape[0], max(left, 0) : left + shape[1]]
    down, across = max(-top, 0), max(-left, 0)
    out[down : down + inside.shape[0], across : across + inside.shape[1]] = inside
    return out


def resized_size(size: tuple[int, int], preprocess: Preprocess) -> tuple[int, int]:
    """Returns the height and width after resizing and before cropping.

    Args:
      size: height and width of the image, in pixels.
      preprocess: preprocessing of the image.
    """
    sides = resize_sides(preprocess)
    if preprocess.fill:
        ratio = max(map(operator.truediv, size, sides))
        return tuple(max(1, round(side / ratio)) for side in size)
    if preprocess.squash:
        return sides
    return host_transforms.covering_size(size, sides, preprocess.interpolation)


def crop_box(
    size: tuple[int, int], preprocess: Preprocess
) -> tuple[float, float, float, float]:
    """Returns the box of an image that `prepare_image` crops.

    Args:
      size: height and width of the image, in pixels.
      preprocess: preprocessing of the image.

    Returns:
      Top, left, bottom and right, as fractions of the height and width. Rounding may
      place them up to a pixel outside the image, and a border further.
    """
    height, width = resized_size(size, preprocess)
    rows, columns = preprocess.image_size
    top, left = _corner((height, width), preprocess)
    return top / height, left / width, (top + rows) / height, (left + columns) / width


def _corner(size: tuple[int, int], preprocess: Preprocess) -> tuple[int, int]:
    """Returns the top and left of the crop in a resized image, in pixels."""

    def start(length, crop):
        if preprocess.fill and crop > length:
            return -((crop - length) // 2)
        return host_transforms.centre_crop_start(length, crop, preprocess.crop_down)

    top, left = map(start, size, crop_sides(preprocess))
    return top, left


def crop_sides(preprocess: Preprocess) -> tuple[int, int]:
    """Returns the height and width of the crop in pixels, including `cut`."""
    return tuple(map(operator.add, preprocess.image_size, preprocess.cut))


def resize_sides(preprocess: Preprocess) -> tuple[int, int]:
    """Returns the minimum height and width after resizing, before cropping."""
    sides = crop_sides(preprocess)
    if preprocess.short_side:
        sides = (min(sides),) * 2
    # Floored as in timm, except that 224 / (224 / 232) is 232 despite its last bit.
    return tuple(
        math.floor(side / preprocess.crop_fraction * (1 + 1e-12)) for side in sides
    )


def check_preprocess(preprocess: Preprocess, channels: int) -> None:
    """Raises UserError unless a preprocessing is valid for images of `channels`."""
    size = math.prod(preprocess.image_size)
    given = f"image_size={preprocess.image_size}"
    if preprocess.max_tokens:
        size = preprocess.max_tokens * preprocess.patch**2
        given = (
            f"max_tokens={preprocess.max_tokens} of {preprocess.patch} pixels a side"
        )
    if size > MAX_PIXELS:
        raise UserError(
            f"{given}: more than {MAX_PIXELS:,} pixels; choose a smaller one"
        )
    known = host_transforms.INTERPOLATIONS
    if preprocess.interpolation not in known:
        raise UserError(
            f"interpolation={preprocess.interpolation!r} is not one of "
            f"{', '.join(known)}: set --interpolation"
        )
    if preprocess.patch_resize not in ("", *flexivit.METHODS):
        raise UserError(
            f"patch_resize={preprocess.patch_resize!r} is not one of "
            f"{', '.join(flexivit.METHODS)}: set --patch_resize"
        )
    if not 0 < preprocess.crop_fraction <= 1:
        raise UserError(
            f"crop_pct={preprocess.crop_fraction} is not a fraction above 0 and up to 1: "
            "set --crop_pct"
        )
    for name, values in (("mean", preprocess.mean), ("std", preprocess.std)):
        if len(values) not in (1, channels):
            takes = f"{channels} channels: set --{name} to 1 or {channels} numbers"
            if channels == 1:
                takes = f"1 channel: set --{name} to 1 number"
            raise UserError(
                f"{name}={','.join(map(str, values))} has {len(values)} numbers, but the "
                f"model takes {takes}"
            )
        if not all(math.isfinite(value) for value in values):
            raise UserError(f"{name}={values} is not finite: set --{name}")
    if len(preprocess.fill) not in (0, 1, channels):
        raise UserError(
            f"fill={preprocess.fill}: the model takes {channels} channels; give 1 or "
            f"{channels} numbers"
        )
    if min(preprocess.std) <= 0:
        raise UserError(f"std={preprocess.std} is not above 0: set --std")


class Usual(NamedTuple):
    """Preprocessing that weights of a family usually have.

    Attributes:
      family: name in messages, such as "timm's DeiT".
      preprocess: preprocessing for the image size of a checkpoint.
    """

    family: str
    preprocess: Preprocess


def usual_preprocess(pretrained: Pretrained) -> Usual:
    """Returns the preprocessing to assume for weights without one.

    timm's families are recognised by the name of the file or architecture, because DeiT
    and timm's other ViTs have the same parameters. Fine-tuned MAEs have a class token
    beside the mean of the patches, and a separate norm of the mean.

    Returns:
      The whole image, bilinear, to [-1, 1], as in Hugging Face's ViTImageProcessor; for
      timm the values of most `default_cfgs` in version 1.0.31
      (vision_transformer.py, deit.py), and for MAE those of its main_finetune.py.
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
    # Networks fine-tuned at 384, or DeiT III from ImageNet-21k, see the whole image.
    whole = min(size) >= 384 or (deit and re.search("2[12]k", name))
    preprocess = Preprocess(
        size,
        interpolation="bicubic",
        crop_fraction=1.0 if whole else 0.9,
        **IMAGENET if deit else {},
    )
    return Usual("timm's DeiT" if deit else "timm's ViTs", preprocess)


def with_patch(preprocess: Preprocess, options: Mapping) -> Preprocess:
    """Returns a preprocessing whose sequences have the patch of a network's options."""
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
    """Returns numbers per channel of three-channel images for any number of channels.

    Equal ones become one number, and so do others, as their mean, for images of other
    channels: libraries keep the three of a network that was built for others.
    """
    if len(set(values)) == 1:
        return values[:1]
    if len(values) == 3 != channels:
        return (sum(values) / 3,)
    return values


def describe_preprocess(preprocess: Preprocess) -> str:
    """Returns a description of a preprocessing in one line."""
    height, width = preprocess.image_size
    crop = f"crop {preprocess.crop_fraction:g}"
    if preprocess.short_side:
        crop = f"short side {resize_sides(preprocess)[0]}, centre crop"
    if preprocess.squash:
        crop = "whole image" + (f", {crop}" if preprocess.crop_fraction < 1 else "")
    if any(preprocess.cut):
        crop += ", cut at the end"
    if preprocess.fill:
        crop = f"whole image, {crop}, border {','.join(map(str, preprocess.fill))}"
    mean, std = (
        ",".join(f"{value:g}" for value in values)
        for values in (preprocess.mean, preprocess.std)
    )
    size = f"{height}x{width}"
    if preprocess.max_tokens:
        size, crop = f"up to {preprocess.max_tokens} patches", "the aspect kept"
    return f"{size}, {preprocess.interpolation}, {crop}, mean {mean}, std {std}"


def per_channel(values: Sequence, channels: int) -> list:
    """Returns one value per channel, repeating a single value."""
    return list(values) * (channels if len(values) == 1 else 1)
