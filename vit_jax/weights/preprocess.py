"""Images as a checkpoint wants them: the preprocessing that travels with weights.

Sizes and roundings are those of timm's evaluation transform, which Hugging Face's
image processors share but for half a pixel of an odd margin.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vit_jax.data import decode, resizing
from vit_jax.errors import UserError
from vit_jax.weights.pretrained import Preprocess

# Pillow antialiases all of them but nearest when it shrinks an image.
INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "area": Image.Resampling.BOX,
}

_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def prepare(
    data: bytes | UInt8[np.ndarray, "H W C"], preprocess: Preprocess, channels: int = 3
) -> UInt8[np.ndarray, "h w c"]:
    """Decodes, resizes and crops one image; the normalisation is the device's.

    Orientation tags of cameras are ignored, as `PIL.Image.open(...).convert("RGB")` in
    front of timm and Hugging Face does: a photograph held upright by its tag alone
    is seen lying by those models too.

    Args:
      data: content of an image file, or pixels.
      preprocess: size, interpolation and crop.
      channels: 3 for RGB, 1 for grey.

    Returns:
      Pixels of `preprocess.image_size`. Grey, palettes, CMYK, 16 bits and transparency
      are what `decode.decode` makes of them.

    Raises:
      DamagedImage: the bytes are no readable image, or one too thin to be resized.

    Source: timm.data.create_transform, crop modes "center" and "squash".
    """
    pixels = decode.decode(data, channels)
    height, width = resized(pixels.shape[:2], preprocess)
    if height * width > decode.MAX_PIXELS:
        raise decode.DamagedImage(
            f"has {pixels.shape[1]}x{pixels.shape[0]} pixels, which become "
            f"{width}x{height} before the crop, too many"
        )
    picture = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    if picture.size != (width, height):
        how = INTERPOLATIONS[preprocess.interpolation]
        picture = picture.resize((width, height), how)
    rows, columns = preprocess.image_size
    top, left = _corner((height, width), preprocess)
    out = np.array(picture.crop((left, top, left + columns, top + rows)))
    return out[..., None] if channels == 1 else out


def resized(size: tuple[int, int], preprocess: Preprocess) -> tuple[int, int]:
    """Returns height and width after resizing and before cropping.

    Args:
      size: height and width of the image, in pixels.
      preprocess: as of `prepare`.
    """
    rows, columns = edges(preprocess)
    if preprocess.squash:
        return rows, columns
    if rows == columns:
        return resizing.short_side_size(size, rows)
    height, width = size
    ratio = min(height / rows, width / columns)
    return round(height / ratio), round(width / ratio)


def box(
    size: tuple[int, int], preprocess: Preprocess
) -> tuple[float, float, float, float]:
    """Returns which part of an image `prepare` keeps.

    Args:
      size: height and width of the image, in pixels.
      preprocess: as of `prepare`.

    Returns:
      Top, left, bottom and right, as fractions of the height and width. They may lie
      beyond the image by the pixel that rounding took.
    """
    height, width = resized(size, preprocess)
    rows, columns = preprocess.image_size
    top, left = _corner((height, width), preprocess)
    return top / height, left / width, (top + rows) / height, (left + columns) / width


def _corner(size: tuple[int, int], preprocess: Preprocess) -> tuple[int, int]:
    """Returns top and left of the crop, in pixels of the resized image of `size`."""
    top, left = map(resizing.centre_crop_start, size, preprocess.image_size)
    return top, left


def edges(preprocess: Preprocess) -> tuple[int, int]:
    """Returns the height and width that are resized to, at least, before cropping."""
    sides = preprocess.image_size
    if preprocess.short_side:
        sides = (min(sides),) * 2
    # Floored as in timm; but 224 / (224 / 232) is 232, whatever its last bit says.
    return tuple(
        math.floor(side / preprocess.crop_fraction * (1 + 1e-12)) for side in sides
    )


def check(preprocess: Preprocess, channels: int) -> None:
    """Raises UserError unless a preprocessing has a meaning for images of `channels`."""
    if preprocess.interpolation not in INTERPOLATIONS:
        raise UserError(
            f"interpolation={preprocess.interpolation!r} is not one of "
            f"{', '.join(INTERPOLATIONS)}: set --interpolation"
        )
    if not 0 < preprocess.crop_fraction <= 1:
        raise UserError(
            f"crop={preprocess.crop_fraction} is not a fraction above 0 and up to 1: "
            "set --crop"
        )
    for name, values in (("mean", preprocess.mean), ("std", preprocess.std)):
        if len(values) not in (1, channels):
            raise UserError(
                f"{name}={','.join(map(str, values))} has {len(values)} numbers, but "
                f"the model takes {channels} channels: set --{name} to 1 or {channels}"
            )
        if not all(math.isfinite(value) for value in values):
            raise UserError(f"{name}={values} is not finite: set --{name}")
    if min(preprocess.std) <= 0:
        raise UserError(f"std={preprocess.std} is not above 0: set --std")


def assumed(
    format: str, image_size: tuple[int, int], *, distillation: bool = False
) -> Preprocess:
    """Returns the preprocessing of weights of which nothing says how they want it.

    Args:
      format: as of `Pretrained`.
      image_size: height and width, in pixels.
      distillation: whether it is DeiT with its second token, which normalises
        otherwise.

    Returns:
      The whole image, bilinear, to [-1, 1], as in Google's code and Hugging Face's
      ViTImageProcessor; for timm what most of its vision_transformer.py and deit.py
      state.
    """
    if format != "timm":
        return Preprocess(image_size, squash=True)
    more = _IMAGENET if distillation else {}
    return Preprocess(image_size, interpolation="bicubic", crop_fraction=0.9, **more)


def describe(preprocess: Preprocess) -> str:
    """Puts a preprocessing into words for one line."""
    height, width = preprocess.image_size
    crop = f"crop {preprocess.crop_fraction:g}"
    if preprocess.short_side:
        crop = f"short side {edges(preprocess)[0]}, centre crop"
    if preprocess.squash:
        crop = "whole image" + (f", {crop}" if preprocess.crop_fraction < 1 else "")
    mean, std = (
        ",".join(f"{value:g}" for value in values)
        for values in (preprocess.mean, preprocess.std)
    )
    return (
        f"{height}x{width}, {preprocess.interpolation}, {crop}, mean {mean}, std {std}"
    )


def broadcast(values: Sequence[float], channels: int) -> list[float]:
    """Returns a value a channel, where one may have stood for all."""
    return list(values) * (channels if len(values) == 1 else 1)
