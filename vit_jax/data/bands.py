"""Reads images of any number of bands and any depth: TIFF, NumPy files, and arrays.

`decode` reads photographs; this module reads all other images, such as 13 bands of a
satellite, 16 bits of a microscope or floats of a scanner. Values keep their depth on
the way to the device (`data.pixels`). White is 255 as "uint8" and 65,535 as "uint16".
Images of "float32" are multiplied by 255, so that 1.0 in the file becomes 255, and
transforms and `data.mean` have the same meaning for all depths. Letters: H and W height
and width, C bands of the file, c bands that are read.
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
_PNG_DEPTH = 24  # Offset of the bits per sample in a PNG file.
# White by integer type; in floats that `read` returns, white is 255.
WHITE = {"uint8": 255, "uint16": 65_535}
_NOT_FINITE = "has NaN or infinite pixels"
# Images are dark if no value exceeds this fraction of the range, as with 14 bits stored
# in 16, and with reflectances in ten thousandths.
_DARK = {"uint8": 1 / 16, "uint16": 1 / 4}


@dataclasses.dataclass(frozen=True)
class PixelFormat:
    """The bands and the depth to read from an image file.

    Attributes:
      channels: number of bands in the result.
      depth: dtype of the result, one of config.DEPTHS.
      bands: indices of the file's bands, counted from 0, in order; () for all.
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
        """Whether images are RGB or grey of 8 bits, as `decode.decode` returns."""
        return are_photographs(self.channels, self.depth, self.bands)

    def is_decoded(self, data: bytes | np.ndarray) -> bool:
        """Whether `decode.decode` reads the data instead of this module."""
        return self.is_photograph and decode.reads(data)


def check_config(data: DataConfig) -> None:
    """Raises UserError unless the number of `data.bands` is `data.channels`."""
    if len(data.bands) != data.channels:
        raise UserError(
            f"data.bands={data.bands} chooses {len(data.bands)} bands, but "
            f"data.channels={data.channels}: make them equal"
        )


def read(
    data: bytes | np.ndarray, form: PixelFormat, *, exif: bool = False
) -> Num[np.ndarray, "H W c"]:
    """Reads an image of any kind.

    A photograph is converted to RGB or grey, see `decode.decode`. Any other image must
    have `form.channels` bands, unless `form.bands` chooses some; a single band is
    repeated for RGB. Images are converted to a greater depth, but never to a smaller
    one. In floats, 8 and 16 bits without sign are divided by their white; other numbers
    are not. Then all are multiplied by 255.

    Args:
      data: content of a file, or an array (H, W), (H, W, C) or (C, H, W); the number of
        bands in `form` decides which axis has the bands.
      form: bands and depth of the result.
      exif: whether a photograph is rotated by its orientation tag.

    Raises:
      DamagedImage: it cannot be read, has other bands, or is deeper than `form.depth`.
    """
    if form.is_decoded(data):
        limit = form.max_megapixels
        return decode.decode(data, form.channels, exif=exif, max_megapixels=limit)
    image = _with_bands(data, exif, form.max_megapixels)
    return _to_depth(_choose(image, form), form.depth)


def _with_bands(
    data: bytes | np.ndarray, exif: bool, max_megapixels: float
) -> np.ndarray:
    """Returns the stored image, (H, W, C) or (C, H, W), in this machine's byte order."""
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
    """Returns an array itself, or the array that a file stores."""
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
    except Exception as error:  # tifffile and NumPy raise many types.
        raise DamagedImage(f"cannot be decoded ({error})") from error
    # Pillow would cut colours of 16 bits to 8.
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
            f"holds {len(file.files)} arrays ({', '.join(file.files)}): save only one"
        )
    return file[file.files[0]]


def _read_tiff(data: bytes) -> np.ndarray:
    """Returns the first image of a TIFF file, bands last."""
    try:
        import tifffile
    except ImportError as error:
        raise DamagedImage(
            "is a TIFF file of bands, which needs the extra `tiff`: pip install -e "
            "'.[tiff]' in the clone"
        ) from error
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        series = file.series[0]
        image, axes = series.asarray(), series.axes
    # Bands may be the first axis, or each on a page.
    return np.moveaxis(image, 0, -1) if axes[1:] == "YX" else image


def _choose(image: np.ndarray, form: PixelFormat) -> np.ndarray:
    """Returns the bands that `form` asks for."""
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
    """Converts pixels to a depth; refuses a smaller depth than they have."""
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
    """Returns whether reading may drop bits of a file, by its first bytes."""
    if form.depth != DEPTHS[0] or isinstance(data, np.ndarray):
        return False
    with contextlib.suppress(Exception):  # Reading the file reports the damage.
        if data.startswith(decode.TIFF):
            return Image.open(io.BytesIO(data)).mode.startswith("I")
    return _is_deep_png(data)


def _is_deep_png(data: bytes) -> bool:
    return data.startswith(_PNG) and data[_PNG_DEPTH : _PNG_DEPTH + 1] == b"\x10"


def doubt(data: bytes | np.ndarray, mean: Sequence[float] = (1.0,)) -> str:
    """Returns why the values of an image are suspicious; "" if they are not.

    Pixels of 12 bits are often stored in 16 bits, where they look almost black.

    Args:
      data: content of a file, or an array.
      mean: `data.mean`, as fractions of white, one or one per band; an image with
        values above it is not dark.
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
    """Returns an image of any kind as RGB, scaled by `display.to_display`.

    Raises:
      DamagedImage: it cannot be read.
    """
    return display.to_rgb(_of_any_bands(data, exif, max_megapixels))


def check(data: bytes, max_megapixels: float = MAX_MEGAPIXELS) -> None:
    """Raises DamagedImage unless a file is an image, of any bands and depth."""
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
