"""Images of any number of bands and any depth: TIFF, NumPy files, and arrays.

What `decode` does for photographs, this does for the rest: 13 bands of a satellite, 16 bits
of a microscope, the floats of a scanner. Values keep their depth on the way to the device
(`data.pixels`): "uint8"; "uint16", of which 65,535 is white as 255 is of 8 bits; "float32",
of which 255 stands for 1.0 of the file, so that transforms and `data.mean` mean the same for
all. Letters: H and W height and width, C bands of the file, c bands that are read.
"""

import contextlib
import dataclasses
import io
from collections.abc import Sequence

import cv2
import numpy as np
from jaxtyping import Num, UInt8
from PIL import Image

from vit_jax.data import decode, display
from vit_jax.data.config import (
    DEPTHS,
    MAX_MEGAPIXELS,
    DataConfig,
    are_photographs,
)
from vit_jax.data.decode import DamagedImage
from vit_jax.errors import UserError

_PNG = b"\x89PNG"
_PNG_DEPTH = 24  # Where a PNG file has its bits per sample.
# White by the type of whole numbers; of floats that `read` returns it is 255.
WHITE = {"uint8": 255, "uint16": 65_535}
_NOT_FINITE = "has NaN or infinite pixels"
# Parts of the range that images usually exceed: 14 bits in 16 do not, and reflectances in
# ten thousandths do not.
_DARK = {"uint8": 1 / 16, "uint16": 1 / 4}


@dataclasses.dataclass(frozen=True)
class PixelFormat:
    """What is read of an image file.

    Attributes:
      channels: number of bands in the result.
      depth: one of config.DEPTHS.
      bands: numbers of the file's bands, from 0 on, in their order; () for all.
      max_megapixels: size of the largest image, see `data.max_megapixels`.
    """

    channels: int = 3
    depth: str = DEPTHS[0]
    bands: tuple[int, ...] = ()
    max_megapixels: float = MAX_MEGAPIXELS

    @classmethod
    def of(cls, data: DataConfig) -> "PixelFormat":
        """Returns the format that `config.data` asks for."""
        return cls(data.channels, data.pixels, data.bands, data.max_megapixels)

    @property
    def is_photograph(self) -> bool:
        """Whether it is RGB or grey of 8 bits, as `decode.decode` returns."""
        return are_photographs(self.channels, self.depth, self.bands)

    def is_decoded(self, data: bytes | np.ndarray) -> bool:
        """Whether `decode.decode` reads the data, and not this module."""
        return self.is_photograph and decode.reads(data)


def check_config(data: DataConfig) -> None:
    """Raises UserError unless `data.bands` are as many as `data.channels`."""
    if len(data.bands) != data.channels:
        raise UserError(
            f"data.bands={data.bands} chooses {len(data.bands)} bands, but "
            f"data.channels={data.channels}: make them equal"
        )


def read(
    data: bytes | np.ndarray, form: PixelFormat, *, exif: bool = False
) -> Num[np.ndarray, "H W c"]:
    """Reads an image of any kind.

    A photograph is converted to RGB or grey, see `decode.decode`. Of other images the bands
    must be as many as asked for, or chosen; a single one is repeated for RGB. More depth
    than the file has is added, less is refused. 8 and 16 bits without sign become floats
    from 0 to 1; other numbers are taken as they are.

    Args:
      data: content of a file, or an array (H, W), (H, W, C) or (C, H, W), which are told
        apart by the number of bands that is asked for.
      form: what is wanted.
      exif: whether a photograph is turned by its orientation tag.

    Raises:
      DamagedImage: it cannot be read, or has other bands or more depth.
    """
    if form.is_decoded(data):
        limit = form.max_megapixels
        return decode.decode(data, form.channels, exif=exif, max_megapixels=limit)
    image = _with_bands(data, exif, form.max_megapixels)
    return _to_depth(_choose(image, form), form.depth)


def _with_bands(
    data: bytes | np.ndarray, exif: bool, max_megapixels: float
) -> np.ndarray:
    """Returns what is stored as (H, W, C) or (C, H, W), in the byte order of this machine."""
    image = stored(data, exif, max_megapixels)
    if image.dtype.kind not in "buif":
        raise DamagedImage(f"is an array of {image.dtype}, not of real numbers")
    image = image.astype(image.dtype.newbyteorder("="), copy=False)
    if image.ndim not in (2, 3) or 0 in image.shape:
        raise DamagedImage(f"has the shape {image.shape}, not (height, width, bands)")
    image = image[..., None] if image.ndim == 2 else image
    decode.check_size(image.shape[:2], max_megapixels)
    return image


def stored(
    data: bytes | np.ndarray,
    exif: bool = False,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> np.ndarray:
    """Returns an array, or that of a file as it is stored."""
    if isinstance(data, np.ndarray):
        return data
    try:
        if data.startswith(decode.NPY):
            return np.load(io.BytesIO(data), allow_pickle=False)
        if data.startswith(decode.NPZ):
            return _only_array(np.load(io.BytesIO(data), allow_pickle=False))
        if data.startswith(decode.TIFF):
            return _read_tiff(data)
    except DamagedImage:
        raise
    except Exception as error:  # tifffile and NumPy raise many.
        raise DamagedImage(f"cannot be decoded ({error})") from error
    # Pillow would cut 16 bits of colours to 8.
    if _is_deep_png(data):
        flags = cv2.IMREAD_UNCHANGED | cv2.IMREAD_IGNORE_ORIENTATION
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
        if pixels is not None and pixels.dtype == np.uint16:
            orders = {3: [2, 1, 0], 4: [2, 1, 0, 3]}  # OpenCV has blue first.
            return pixels if pixels.ndim == 2 else pixels[..., orders[pixels.shape[-1]]]
    return decode.decode(data, 3, exif=exif, max_megapixels=max_megapixels)


def _only_array(file) -> np.ndarray:
    if len(file.files) != 1:
        raise DamagedImage(
            f"holds {len(file.files)} arrays ({', '.join(file.files)}): save one a file"
        )
    return file[file.files[0]]


def _read_tiff(data: bytes) -> np.ndarray:
    """Returns the first image of a TIFF file, bands last."""
    try:
        import tifffile
    except ImportError as error:
        raise DamagedImage(
            "is TIFF of bands, which needs the extra `tiff`: pip install -e '.[tiff]' in "
            "the clone"
        ) from error
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        series = file.series[0]
        image, axes = series.asarray(), series.axes
    # Bands may stand one after the other, or on a page each.
    return np.moveaxis(image, 0, -1) if axes[1:] == "YX" else image


def _choose(image: np.ndarray, form: PixelFormat) -> np.ndarray:
    """Returns the bands that are asked for."""
    wanted = len(form.bands) or form.channels
    enough = lambda count: count > max(form.bands) if form.bands else count == wanted
    if not enough(image.shape[-1]) and enough(image.shape[0]):
        image = np.moveaxis(image, 0, -1)
    count = image.shape[-1]
    if form.bands and enough(count):
        return image[..., form.bands]
    if not form.bands and count == form.channels:
        return image
    if not form.bands and (count, form.channels) == (1, 3):
        return np.repeat(image, 3, axis=-1)
    asked = (
        f"data.bands={form.bands}" if form.bands else f"data.channels={form.channels}"
    )
    raise DamagedImage(
        f"has {count} bands, but {asked}: set --config.data.channels={count}, or choose "
        "some with --config.data.bands, counted from 0"
    )


def _to_depth(image: np.ndarray, depth: str) -> np.ndarray:
    """Converts pixels to at least their own depth."""
    if image.dtype == depth and depth != "float32":
        return image
    white = WHITE.get(image.dtype.name)
    if depth == "float32":
        image = image.astype(np.float32) * np.float32(255 / (white or 1))
        if not np.isfinite(image).all():
            raise DamagedImage(_NOT_FINITE)
        return image
    if (image.dtype.name, depth) == ("uint8", "uint16"):
        return image.astype(np.uint16) * np.uint16(257)
    deeper = "uint16" if white else "float32"
    raise DamagedImage(
        f"has pixels of {image.dtype}, but data.pixels={depth!r}: set "
        f"--config.data.pixels={deeper}"
    )


def is_cut(data: bytes | np.ndarray, form: PixelFormat) -> bool:
    """Returns whether a file is read with fewer bits than it may have, by its first bytes."""
    if form.depth != DEPTHS[0] or isinstance(data, np.ndarray):
        return False
    with contextlib.suppress(Exception):  # Reading it says what is damaged.
        if data.startswith(decode.TIFF):
            return Image.open(io.BytesIO(data)).mode.startswith("I")
    return _is_deep_png(data)


def _is_deep_png(data: bytes) -> bool:
    return data.startswith(_PNG) and data[_PNG_DEPTH : _PNG_DEPTH + 1] == b"\x10"


def doubt(data: bytes | np.ndarray, mean: Sequence[float] = (1.0,)) -> str:
    """Returns what is odd about the values of an image; "" for nothing.

    Pixels of 12 bits are often stored in 16, where they look all but black.

    Args:
      data: content of a file, or an array.
      mean: as a fraction of white, one or one per band; an image with values above it
        is not dark.
    """
    with contextlib.suppress(DamagedImage):
        pixels = _with_bands(data, exif=False, max_megapixels=MAX_MEGAPIXELS)
        if not (full := WHITE.get(kind := pixels.dtype.name)):
            return ""
        if not (highest := int(pixels.max())):
            return "is black"
        if highest <= full * min(_DARK[kind], *mean):
            held = f", as {highest.bit_length()} bits in 16" if full > 255 else ""
            return f"has no value above {highest:,} of {full:,}{held}: all but black"
    return ""


def picture(
    data: bytes | np.ndarray,
    *,
    exif: bool = False,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> UInt8[np.ndarray, "H W 3"]:
    """Returns RGB of an image of any kind; of what is no photograph see
    `display.to_display`.

    Raises:
      DamagedImage: it cannot be read.
    """
    return display.to_rgb(_of_any_bands(data, exif, max_megapixels))


def check(data: bytes, max_megapixels: float = MAX_MEGAPIXELS) -> None:
    """Raises DamagedImage unless a file is an image of some number of bands and depth."""
    if not np.isfinite(_of_any_bands(data, False, max_megapixels)).all():
        raise DamagedImage(_NOT_FINITE)


def _of_any_bands(
    data: bytes | np.ndarray, exif: bool, max_megapixels: float
) -> np.ndarray:
    """Returns a photograph as RGB, another image as (H, W, C) or (C, H, W)."""
    try:
        return decode.decode(data, 3, exif=exif, max_megapixels=max_megapixels)
    except DamagedImage:
        of_bands = (*decode.OF_ARRAYS, *decode.TIFF)
        if isinstance(data, bytes) and not data.startswith(of_bands):
            raise
    return _with_bands(data, exif, max_megapixels)
