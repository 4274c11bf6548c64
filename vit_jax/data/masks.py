"""Masks for semantic segmentation: images whose pixels are class numbers.

A mask is decoded to a label map: the class of each pixel of its image, or IGNORED for
pixels without a class. Letters: H and W height and width.
"""

import contextlib
import dataclasses
import functools
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Int16, Integer, Num, UInt8
from PIL import Image

from vit_jax.data import bands, decode
from vit_jax.data.config import IGNORED, MAX_MEGAPIXELS, DataConfig, ReaderConfig
from vit_jax.data.decode import DamagedImage
from vit_jax.data.sources.base import (
    Beside,
    Source,
    name_of,
    read_file,
    read_record,
    warn,
)
from vit_jax.errors import UserError

_MAX_CLASSES = 2**15  # Masks are read as int16.
_OUT_OF_RANGE = -2

LabelMap = Int16[np.ndarray, "H W 1"]

_PNG = b"\x89PNG"
_GREY = 0  # Colour type of a PNG file (PNG specification, 11.2.1).
_AS_NUMBERS = "save each mask as a grey PNG whose pixels are class numbers from 0 on"


def read(
    mask: bytes | np.ndarray, data: DataConfig, size: tuple[int, int] | None
) -> LabelMap:
    """Reads a mask.

    Args:
      mask: content of an image file or of a file of np.save, see `decode_mask`; or an
        integer array (H, W) or (H, W, 1).
      data: `config.data`.
      size: height and width of its image; None checks no size.

    Returns:
      Classes from 0 on, or IGNORED.

    Raises:
      DamagedImage: the mask cannot be read, or has another size than its image.
      UserError: its values are not class numbers, or a class is out of range.
    """
    values = decode_mask(mask, data.max_megapixels)
    if size and values.shape != size:
        raise DamagedImage(_other_size(values.shape, size, data))
    first = int(data.reduce_zero_label)
    numbers = data.mask_values or tuple(range(first, first + data.num_classes))
    keys = numbers, data.ignore_label, data.reduce_zero_label
    if values.dtype.name in ("uint8", "uint16"):
        classes = _table(np.iinfo(values.dtype).max + 1, *keys)[values]
    else:
        classes = _to_classes(values.astype(np.int64), *keys)
    if classes.min() == _OUT_OF_RANGE:
        row, column = np.argwhere(classes == _OUT_OF_RANGE)[0].tolist()
        raise UserError(_out_of_range(int(values[row, column]), row, column, data))
    return classes[..., None]


@functools.lru_cache(maxsize=2)
def _table(count: int, *keys: tuple[int, ...] | int | bool) -> Int16[np.ndarray, " V"]:
    """Returns the class of each value below `count`, for fast look-up."""
    return _to_classes(np.arange(count), *keys)


def _to_classes(
    values: Integer[np.ndarray, "..."],
    of_classes: tuple[int, ...],
    ignore_label: int,
    reduce: bool,
) -> Int16[np.ndarray, "..."]:
    """Returns classes, IGNORED or _OUT_OF_RANGE for the values of masks."""
    known, order = np.unique(np.array(of_classes), return_index=True)
    place = np.searchsorted(known, values).clip(0, len(known) - 1)
    ignored = (values == ignore_label) | (values == 0 if reduce else False)
    others = np.where(ignored, IGNORED, _OUT_OF_RANGE)
    return np.where(known[place] == values, order[place], others).astype(np.int16)


def check_config(data: DataConfig) -> None:
    """Raises UserError if keys for masks contradict each other or `data.num_classes`."""
    where = f"data.mask_key={data.mask_key!r}"
    for name in ("class_balance", "multi_label"):
        if value := getattr(data, name):
            raise UserError(
                f"{where} with data.{name}={value!r}: images with masks have no other "
                "labels; set only one of the two"
            )
    if not data.num_classes:
        raise UserError(
            f"{where} with data.num_classes=0: set --config.data.num_classes to the "
            "number of classes of the pixels, or data.mask_key='' to read no masks"
        )
    if data.num_classes > _MAX_CLASSES:
        raise UserError(
            f"{where} with data.num_classes={data.num_classes}: masks have at most "
            f"{_MAX_CLASSES:,} classes; merge some"
        )
    values, ignored = data.mask_values, data.ignore_label
    if values and (len(values) != data.num_classes or data.reduce_zero_label):
        raise UserError(
            f"data.mask_values={values}: give one value for each of "
            f"data.num_classes={data.num_classes}, without data.reduce_zero_label"
        )
    if len({*values}) < len(values):
        raise UserError(
            f"data.mask_values={values}: each value stands for one class; remove "
            "values that occur twice"
        )
    # With 0 and 255 as values, 255 is a class, unless `ignore_label` was set
    # explicitly.
    if ignored in values and ignored != ReaderConfig.ignore_label:
        raise UserError(
            f"data.ignore_label={ignored} is also a class of data.mask_values={values}: "
            "remove it from one of the two"
        )
    first = int(data.reduce_zero_label)
    numbers = range(first, first + data.num_classes)
    # One class is a placeholder if the number of classes is not known yet.
    if not values and data.num_classes > 1 and ignored in numbers:
        raise UserError(
            f"data.ignore_label={ignored} is also a class of data.num_classes="
            f"{data.num_classes}, which are {numbers[0]} to {numbers[-1]} in a mask: "
            "set --config.data.ignore_label to another value, or to -1 for none, or "
            "--config.data.mask_values to the values of the classes"
        )


@dataclasses.dataclass(frozen=True)
class MaskFiles(Beside):
    """The masks of image files.

    Attributes:
      files: path of an image -> path and bytes of its mask, both relative to the root.
    """

    name = "mask"
    part = "masks"

    files: Mapping[str, tuple[str, int]]

    def read(self, root, path):
        return read_file(os.path.join(root, self.files[path][0]))

    def entries(self, root, paths):
        return [self.files[path] for path in paths]


def read_pair(
    source: Source, data: DataConfig, i: int
) -> tuple[Num[np.ndarray, "H W C"], Int16[np.ndarray, "H W"]]:
    """Returns the image and the label map of record i, without transforms.

    Raises:
      DamagedImage: the image or the mask cannot be read; `loader.Loader.refuse` adds
        the record's name, and skips it if `data.on_error` allows that.
      UserError: the mask contradicts the config, see `read`.
    """
    record = read_record(source, i)
    form = bands.PixelFormat.of(data)
    image = bands.read(record["image"], form, exif=data.exif)
    with _named(source, i):
        return image, read(record["mask"], data, image.shape[:2])[..., 0]


@contextlib.contextmanager
def _named(source: Source, i: int) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{name_of(source, i)}: {error}") from error


def warn_of_one_class(source: Source, data: DataConfig, records: Iterable[int]) -> None:
    """Warns if some masks have only one class, beside pixels without a class.

    This happens with masks of 0 and 255 if 255 was meant as a class.
    """
    seen = set()
    for i in records:
        # Damaged records are left to `data.on_error`.
        with contextlib.suppress(DamagedImage), _named(source, i):
            mask = read_record(source, i)["mask"]
            seen |= set(np.unique(read(mask, data, None)).tolist())
    if IGNORED in seen and len(seen) == 2 and data.num_classes > 1:
        warn(
            f"the masks of {data.name!r}, such as {name_of(source, 0)}, have only "
            f"class {max(seen)} beside data.ignore_label={data.ignore_label}, which "
            "means no class: if it should be one, set --config.data.mask_values to the "
            f"values of all classes, such as ({max(seen)},{data.ignore_label})"
        )


def palette(
    count: int, known: Sequence[Sequence[int]] = ()
) -> UInt8[np.ndarray, "L 3"]:
    """Returns the colours of classes in pictures of masks.

    Args:
      count: number of classes.
      known: `class_colors` of a data set; if empty, the colours are those of PASCAL VOC
        (VOClabelcolormap of its devkit), beginning with black.
    """
    if known:
        return np.array(known, np.uint8)
    bits = np.arange(count)[:, None, None] >> (np.arange(24).reshape(8, 3)) & 1
    return (bits << np.arange(7, -1, -1)[:, None]).sum(1).astype(np.uint8)


def decode_mask(
    mask: bytes | np.ndarray, max_megapixels: float = MAX_MEGAPIXELS
) -> Integer[np.ndarray, "H W"]:
    """Returns the numbers in a mask as they are stored.

    Images with a palette give the indices, not the colours; black and white of one bit
    are 0 and 1.

    Raises:
      DamagedImage: the file cannot be read.
      UserError: it holds colours or floats, or is a JPEG file, which changes numbers.
    """
    if isinstance(mask, bytes):
        arrays = mask.startswith(decode.OF_ARRAYS)
        try:
            mask = bands.stored(mask) if arrays else _read_file(mask, max_megapixels)
        except DamagedImage as error:
            raise DamagedImage(f"has a mask that {error}") from error
    if mask.dtype.kind not in "bui":
        raise UserError(
            f"its mask is an array of {mask.dtype}, not of class numbers: save it as "
            "integers"
        )
    if mask.ndim == 3:
        mask = _only_band(mask)
    if mask.ndim != 2 or not mask.size:
        raise DamagedImage(f"has a mask of the shape {mask.shape}, not (height, width)")
    return mask.astype(np.uint8) if mask.dtype == bool else mask


def _read_file(data: bytes, max_megapixels: float) -> np.ndarray:
    if not data:
        raise DamagedImage("is empty (0 bytes)")
    if data.startswith(b"\xff\xd8\xff"):
        raise UserError(
            f"its mask is a JPEG file, whose compression changes class numbers: "
            f"{_AS_NUMBERS}"
        )
    try:
        grey = data.startswith(_PNG) and data[25] == _GREY
        if data.startswith(_PNG):
            data = decode.critical_chunks(data)
        image = Image.open(io.BytesIO(data))
        decode.check_size((image.height, image.width), max_megapixels)
        values = np.asarray(image)
    except DamagedImage:
        raise
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, ...
        raise DamagedImage(f"cannot be decoded ({error})") from error
    bits = data[24] if grey else 8
    # Pillow stretches grey of 2 and 4 bits to 0..255.
    return values // (255 // (2**bits - 1)) if bits in (2, 4) else values


def _only_band(mask: Integer[np.ndarray, "H W C"]) -> Integer[np.ndarray, "H W"]:
    """Returns the numbers of a mask of several equal bands, without opacity."""
    opaque = (
        mask.shape[-1] not in (2, 4) or (mask[..., -1] == mask[..., -1].max()).all()
    )
    colours = mask[..., :-1] if mask.shape[-1] in (2, 4) else mask
    unequal = (colours != colours[..., :1]).any(-1)
    if opaque and not unequal.any():
        return colours[..., 0]
    example = mask[unequal][0] if unequal.any() else mask[0, 0]
    raise UserError(
        f"its mask has colours, such as {tuple(example.tolist())}, whose classes are "
        f"not known: {_AS_NUMBERS}"
    )


def _other_size(
    size: tuple[int, ...], of_image: tuple[int, int], data: DataConfig
) -> str:
    text = "has a mask of {}x{} pixels, but an image of {}x{} (height, width)"
    text = text.format(*size, *of_image)
    if size == of_image[::-1]:
        text += (
            f": --config.data.exif=True rotates images, but not masks, by orientation "
            f"tags; it is {data.exif}"
        )
    return text


def _out_of_range(value: int, row: int, column: int, data: DataConfig) -> str:
    first, where = int(data.reduce_zero_label), f"its mask has {value} in row {row}, "
    where += f"column {column}, but "
    ignore = f"--config.data.ignore_label={value} if it means no class"
    if data.mask_values:
        return f"{where}data.mask_values={data.mask_values}: add it, or set {ignore}"
    remedies = ["set --config.data.num_classes to the number of classes", ignore]
    if value == data.num_classes and not data.reduce_zero_label:
        remedies.append("--config.data.reduce_zero_label=True if classes begin with 1")
    return (
        f"{where}data.num_classes={data.num_classes} allows {first} to "
        f"{data.num_classes - 1 + first}: {', or '.join(remedies)}"
    )
