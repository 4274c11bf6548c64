"""Describes how evaluation images are prepared, for runs, weights and flags.

A `Preprocess` is made from `config.data` of a run or from the files of another
library's weights, and flags change it. In all cases the host transforms of a
`data.eval_transform` prepare the images, as in evaluations during training.

Sizes and rounding are those of timm's evaluation transform. Hugging Face's image
processors and big_vision round an odd margin down (`Preprocess.crop_down`).
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Num

from vit_jax.config import arguments, fields
from vit_jax.data.bands import PixelFormat, doubt, is_cut, read
from vit_jax.data.config import DEPTHS, MAX_MEGAPIXELS, MAX_PIXELS
from vit_jax.data.decode import DamagedImage
from vit_jax.data.sources.base import warn
from vit_jax.data.transforms import parse
from vit_jax.data.transforms.base import HostTransform, pair
from vit_jax.data.transforms.borders import ResizeLong
from vit_jax.data.transforms.host import (
    INTERPOLATIONS,
    CentralCrop,
    Resize,
    ResizeSmall,
    TooSmall,
)
from vit_jax.data.transforms.naflex import NaFlex, fitting_grid
from vit_jax.data.transforms.naflex import Sequence as PatchSequence
from vit_jax.errors import UserError

# Fields that describe how an image is resized and cropped.
_RESIZING = (
    *("interpolation", "crop_fraction", "squash", "short_side", "crop_down", "cut"),
    *("fill", "max_tokens"),
)
# Fields that `whole` keeps.
_OF_PIXELS = ("mean", "std", "interpolation", "exif", "pixels", "bands", "patch")
_OF_PIXELS += ("patch_resize", "max_megapixels")
# Bounds of fields that a caller sets; `Preprocess.check` checks the other fields.
_BOUNDS = {
    "max_tokens": fields.Key(help="", below=2**31),
    "patch": fields.Key(help="", below=2**31),
    "max_megapixels": fields.Key(help="", above=0),
    "cut": fields.Key(help=""),
    "fill": fields.Key(help="", at_most=255, like=(0,)),
    "bands": fields.Key(help="", like=(0,)),
    "pixels": fields.Key(help="", choices=DEPTHS),
}
_FREE = fields.Key(help="", at_least=None)


@dataclasses.dataclass(frozen=True)
class Preprocess:
    """Preprocessing of images for a model.

    The image is resized until it just covers `image_size / crop_fraction`, or with
    `squash` to exactly that size, and the centre is cropped to `image_size`. With
    `fill` it is resized until it just fits into that size, and the border has that
    colour. With `cut` the sizes are larger by that number of pixels, which are removed
    from the end of the crop.

    Attributes:
      image_size: height and width of the model's input, in pixels.
      mean: mean per channel that is subtracted, as a fraction of 255.
      std: divisor per channel, applied after `mean`.
      interpolation: filter of the resize, one of `host.INTERPOLATIONS`.
      crop_fraction: fraction of the resized side that the crop keeps.
      squash: whether resizing changes the aspect ratio instead of cropping.
      short_side: whether the short side of the image is resized to
        `min(image_size) / crop_fraction` independently of the shape of the crop. Only
        set for crops that are not square; for square crops it makes no difference.
      exif: whether files are rotated by their EXIF orientation tags; None if unknown:
        then evaluations do not rotate them, and `upright` does.
      crop_down: whether half a pixel of the margin above or beside the crop is rounded
        down as in transformers and big_vision, instead of to even as in torchvision.
      cut: rows at the bottom and columns on the right that fill no patch.
      fill: colour of the border, from 0 to 255 per channel; () without a border.
      pixels, bands: keys `data.pixels` and `data.bands` for reading files.
      max_tokens: maximum number of patches of an image that keeps its aspect ratio;
        then `image_size` is that of the position embeddings. 0 for images of
        `image_size`.
      patch: side of patches in pixels, see `surgery.resize_patches`; 0 for the
        network's.
      max_megapixels: size of the largest image to read, see `data.max_megapixels`.
      patch_resize: method that resizes the patch embedding to `patch`, one of
        `flexivit.METHODS`; "" for the network's `patch_resize`.
      transform: line of transforms that prepares images instead of the fields above, if
        these cannot express it, such as "resize_small(256) | pad(320)"; else "". With a
        line, the fields describe the preparation for formats that cannot store a line.
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
    transform: str = ""

    @classmethod
    def of_data(cls, data: Mapping[str, object]) -> "Preprocess":
        """Returns the preprocessing of a run's evaluations.

        A user's module is not imported before an image is prepared.

        Args:
          data: `config.data` as plain values, possibly stored by an earlier version.
        """
        image_size, line = tuple(data["image_size"]), data["eval_transform"]
        how = cls(
            image_size,
            tuple(per_channel(data["mean"], data["channels"])),
            tuple(per_channel(data["std"], data["channels"])),
            interpolation=parse.filter_of(line, image_size) or cls.interpolation,
            squash=True,
            exif=data.get("exif", False),
            pixels=data.get("pixels", cls.pixels),
            bands=tuple(data.get("bands", ())),
        )
        if not line.strip():  # The images already have this size.
            return how
        of_line = _fields_of(line, image_size) or {"transform": line}
        return dataclasses.replace(how, **of_line)

    def replace(self, **given) -> "Preprocess":
        """Returns the preprocessing with other values of some fields.

        `transform` is dropped in favour of the fields if they resize images in another
        way than before, or if `transform` makes images of another size than
        `image_size`.
        """
        new = dataclasses.replace(self, **given)
        resizing = (*_RESIZING, "patch") if self.max_tokens else _RESIZING
        same = all(getattr(self, name) == getattr(new, name) for name in resizing)
        known = new.transform and not parse.names_custom(new.transform)
        if known and "image_size" in given:  # A user's line may make any size.
            made = parse.size_after(new.transforms, None)
            same = same and made in (None, tuple(new.image_size))
        return new if same else new.without_transform()

    def without_transform(self) -> "Preprocess":
        """Returns the preprocessing that the other fields describe."""
        return dataclasses.replace(self, transform="")

    def upright(self) -> "Preprocess":
        """Returns a preprocessing that rotates files by EXIF, unless `exif` is False."""
        return dataclasses.replace(self, exif=self.exif is not False)

    def whole(self, size: tuple[int, int]) -> "Preprocess":
        """Returns a preprocessing that resizes the whole image to a height and width."""
        kept = {name: getattr(self, name) for name in _OF_PIXELS}
        return Preprocess(size, squash=True, **kept)

    def of_image(self, size: tuple[int, int]) -> "Preprocess":
        """Returns the preprocessing for an image of a given size.

        Args:
          size: height and width of the image, in pixels.

        Returns:
          With `max_tokens`, a resize to the grid of patches into which `prepare` cuts
          the image; otherwise the preprocessing itself.
        """
        if not self.max_tokens:
            return self
        grid = fitting_grid(*size, self.max_tokens)
        return self.whole(tuple(count * self.patch for count in grid))

    def form(self, channels: int) -> PixelFormat:
        """Returns the bands and depth to read from files, for a number of channels."""
        return PixelFormat(channels, self.pixels, self.bands, self.max_megapixels)

    def data_keys(self) -> dict[str, object]:
        """Returns the keys of `config.data` that read and normalise images this way."""
        return {
            "mean": tuple(self.mean),
            "std": tuple(self.std),
            "pixels": self.pixels,
            "bands": self.bands,
        }

    @property
    def crop_sides(self) -> tuple[int, int]:
        """Height and width of the crop in pixels, including `cut`."""
        return tuple(map(operator.add, self.image_size, self.cut))

    @property
    def resize_sides(self) -> tuple[int, int]:
        """Minimum height and width after resizing, before cropping, in pixels."""
        sides = self.crop_sides
        if self.short_side:
            sides = (min(sides),) * 2
        # Floored as in timm, except that 224 / (224 / 232) is 232 despite its last bit.
        return tuple(
            math.floor(side / self.crop_fraction * (1 + 1e-12)) for side in sides
        )

    @property
    def line(self) -> str:
        """The `data.eval_transform` that prepares images of `image_size` in this way."""
        if self.transform:
            return self.transform
        how = f"interpolation={self.interpolation!r}"
        if self.max_tokens:
            return f"naflex({self.max_tokens}, patch={self.patch}, {how})"
        sides, resize = self.resize_sides, "resize" if self.squash else "resize_small"
        if self.squash and not self.fill and sides == self.image_size:
            return f"resize({how})"
        crop, rules = "central_crop", ["down=True"] if self.crop_down else []
        if self.fill:
            resize = "resize_long"
            rules.append(f"fill={tuple(self.fill)}")
        if any(self.cut):
            rules.append(f"cut={tuple(self.cut)}")
        if self.fill or any(self.cut) or self.short_side:
            crop = "crop_or_pad"
        size = sides[0] if sides[0] == sides[1] else sides
        crop += f"({', '.join(rules)})" if rules else ""
        return f"{resize}({size}, {how}) | {crop}"

    @functools.cached_property
    def transforms(self) -> tuple[HostTransform, ...]:
        """Host transforms that prepare an image, as evaluations run them."""
        return parse.parse_eval(self.line, self.image_size)

    def keeps(self, size: tuple[int, int]) -> bool:
        """Returns whether images of a height and width are not changed."""
        if self.transform or self.max_tokens or size != self.image_size:
            return False
        return self.resized_size(size) == size

    def resized_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns the height and width after resizing and before cropping.

        Args:
          size: height and width of the image, in pixels.
        """
        return self.transforms[0].target(size)

    def crop_box(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """Returns the box of an image that `prepare` crops.

        Args:
          size: height and width of the image, in pixels.

        Returns:
          Top, left, bottom and right, as fractions of the height and width. Rounding
          may place them up to a pixel outside the image, and a border further. With a
          `transform` the box is unknown, and the whole image is returned.
        """
        crop = self.transforms[-1]
        if self.transform or not isinstance(crop, CentralCrop):
            return 0.0, 0.0, 1.0, 1.0
        (height, width), (rows, columns) = self.resized_size(size), self.image_size
        top, left = crop.corner((height, width))
        return (
            top / height,
            left / width,
            (top + rows) / height,
            (left + columns) / width,
        )

    def read(
        self, data: bytes | Num[np.ndarray, "..."], channels: int = 3, name: str = ""
    ) -> Num[np.ndarray, "H W c"]:
        """Decodes one image, without resizing it.

        EXIF orientation tags are ignored unless `exif`, as in
        `PIL.Image.open(...).convert("RGB")`, the usual input of timm and Hugging Face.

        Args:
          data: content of an image file, or an array, see `bands.read`.
          channels: number of channels of the model.
          name: name of the image for warnings, see `warn_of_dark`.

        Raises:
          DamagedImage: the data are not a readable image.
        """
        form = self.form(channels)
        warn_of_dark(data, form, name)
        return read(data, form, exif=bool(self.exif))

    def prepare(
        self, image: Num[np.ndarray, "H W C"]
    ) -> Num[np.ndarray, "h w C"] | PatchSequence:
        """Resizes and crops one image; normalisation happens on the device.

        Returns:
          Pixels of `image_size`; with `max_tokens`, "image" and "grids" of `NaFlex`.

        Raises:
          DamagedImage: the image is too thin to resize or too small to crop.
        """
        rng = np.random.default_rng(0)  # No transform of evaluations draws from it.
        try:
            for transform in self.transforms:
                image = transform(image, rng)
        except TooSmall as error:
            raise DamagedImage(str(error)) from error
        if not self.max_tokens and np.shape(image)[:2] != tuple(self.image_size):
            raise DamagedImage(
                f"has the shape {np.shape(image)} after transform={self.transform!r}, not "
                f"image_size={self.image_size}"
            )
        return image

    def check(self, channels: int) -> None:
        """Raises UserError unless the fields are valid for images of `channels`."""
        size = math.prod(self.image_size)
        given = f"image_size={self.image_size}"
        if self.max_tokens:
            size = self.max_tokens * self.patch**2
            given = f"max_tokens={self.max_tokens} of {self.patch} pixels per side"
        if size > MAX_PIXELS:
            raise UserError(
                f"{given}: more than {MAX_PIXELS:,} pixels; choose a smaller one"
            )
        if self.interpolation not in INTERPOLATIONS:
            raise UserError(
                f"interpolation={self.interpolation!r} is not one of "
                f"{', '.join(INTERPOLATIONS)}: set --interpolation"
            )
        if not 0 < self.crop_fraction <= 1:
            raise UserError(
                f"crop_pct={self.crop_fraction} is not a fraction above 0 and up to 1: "
                "set --crop_pct"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                takes = f"{channels} channels: set --{name} to 1 or {channels} numbers"
                if channels == 1:
                    takes = f"1 channel: set --{name} to 1 number"
                raise UserError(
                    f"{name}={','.join(map(str, values))} has {len(values)} numbers, but "
                    f"the model takes {takes}"
                )
            if not all(math.isfinite(value) for value in values):
                raise UserError(f"{name}={values} is not finite: set --{name}")
        if len(self.fill) not in (0, 1, channels):
            raise UserError(
                f"fill={self.fill}: the model takes {channels} channels; give 1 or "
                f"{channels} numbers"
            )
        if min(self.std) <= 0:
            raise UserError(f"std={self.std} is not above 0: set --std")

    def describe(self) -> str:
        """Returns a description in one line."""
        height, width = self.image_size
        crop = f"crop {self.crop_fraction:g}"
        if self.short_side:
            crop = f"short side {self.resize_sides[0]}, centre crop"
        if self.squash:
            crop = "whole image" + (f", {crop}" if self.crop_fraction < 1 else "")
        if any(self.cut):
            crop += ", cut at the end"
        if self.fill:
            crop = f"whole image, {crop}, border {','.join(map(str, self.fill))}"
        mean, std = self._statistics(",")
        size = f"{height}x{width}"
        if self.max_tokens:
            size, crop = f"up to {self.max_tokens} patches", "aspect ratio kept"
        how = self.transform or f"{self.interpolation}, {crop}"
        return f"{size}, {how}, mean {mean}, std {std}"

    def explain(self) -> str:
        """Returns a description in sentences, for the page of a model."""
        target, resized = (
            f"{height}x{width}"
            for height, width in (self.image_size, self.resize_sides)
        )
        how = f"The whole image is resized to {resized}"
        if self.fill:
            how = f"The image is resized until it just fits in {resized}, with a border"
        elif not self.squash:
            how = f"The image is resized until it just covers {resized}"
        if target != resized or not self.squash:
            how += f", and the central {target} are cropped"
        how += f" ({self.interpolation})"
        if self.transform:
            how = f"The image becomes {target} by `{self.transform}`"
        mean, std = self._statistics(", ")
        return f"{how}. Mean {mean}; standard deviation {std}."

    def _statistics(self, comma: str) -> tuple[str, str]:
        return tuple(
            comma.join(f"{value:g}" for value in values)
            for values in (self.mean, self.std)
        )


# Fields that a caller may set.
FIELDS = {field.name for field in dataclasses.fields(Preprocess)} - {"transform"}


def _fields_of(line: str, image_size: tuple[int, int]) -> dict[str, object]:
    """Returns the fields of `Preprocess` that express an eval line.

    With `max_tokens` they may include `transform`. The result is empty if no fields
    express the line.
    """
    if parse.names_custom(line):
        last = line.rpartition("|")[2]
        of_last = {} if parse.names_custom(last) else _fields_of(last, image_size)
        return {**of_last, "transform": line} if "max_tokens" in of_last else {}
    *before, last = parse.parse_eval(line, image_size)
    if isinstance(last, NaFlex):
        ((most, patch),) = last.choices
        naflex = {"squash": False, "max_tokens": most, "patch": patch}
        return naflex | ({"transform": line} if before else {})
    if isinstance(last, Resize) and not before:
        before, last = [last], CentralCrop(last.size)
    match before, last:
        case [Resize() | ResizeSmall() as resize], CentralCrop(down=down):
            fill, cut = getattr(last, "fill", ()), getattr(last, "cut", (0, 0))
        case _:
            return {}
    squash = isinstance(resize, Resize)
    sides = tuple(map(operator.add, image_size, cut))
    short = not squash and isinstance(resize.size, int) and sides[0] != sides[1]
    values = {
        "squash": squash,
        "crop_fraction": (min(sides) if short else sides[0]) / pair(resize.size)[0],
        "short_side": short and not fill,
        "crop_down": down,
        "cut": tuple(cut),
        "fill": tuple(fill),
    }
    how = Preprocess(image_size, **values)
    exact = (
        pair(last.size) == image_size
        and 0 < how.crop_fraction <= 1
        and how.resize_sides == pair(resize.size)
        and bool(fill) == isinstance(resize, ResizeLong)
    )
    return values if exact else {}


def checked_fields(given: Mapping[str, object]) -> dict[str, object]:
    """Returns the values that a caller may set, checked and converted to their types.

    Raises:
      UserError: a value has another type than its field, or is out of its bounds.
    """
    usual, taken = Preprocess((1, 1)), {}
    for name in FIELDS & given.keys():
        about = _BOUNDS.get(name, _FREE)
        default = about.like or getattr(usual, name)
        taken[name] = arguments.take(name, about, given[name], default)
    return taken


def warn_of_dark(data: bytes | np.ndarray, form: PixelFormat, name: str) -> None:
    """Warns once about an image that is almost black to a network of 8 bits.

    Args:
      data: content of a file, or an array.
      form: bands and depth that the network reads.
      name: name of the image.
    """
    if is_cut(data, form) and (text := doubt(data)):
        warn(
            f"{name or 'an image'} {text}; others may be too: scale their values to fill "
            "the range",
            about="dark images",
        )


def per_channel(values: Sequence, channels: int) -> list:
    """Returns one value per channel, repeating a single value."""
    return list(values) * (channels if len(values) == 1 else 1)
