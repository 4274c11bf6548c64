"""Decodes images to uint8 pixels: with OpenCV where it is faster, else with Pillow.

Orientation tags of cameras are ignored by default, as in the published recipes. JPEG
headers are read in microseconds, so that a crop decodes only the rows that it needs;
names and layout of the JPEG markers are those of ITU-T T.81, annex B.
"""

import functools
import io
import math
import struct
import threading
import zlib
from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from vit_jax.data.config import MAX_MEGAPIXELS

# OpenCV's threads would compete with the loader's for the same cores.
cv2.setNumThreads(0)
# Damaged files are reported by this package, with their names.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
# Pillow's error about its limit names no file or key; that of `check_size` does.
Image.MAX_IMAGE_PIXELS = None

# Functions that turn an image upright, by the value of its orientation tag.
_ORIENTATION = 0x0112
_TURNS = {
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: np.rot90(x),
}
_TAGS_WITHIN = 2**17  # Bytes; the tags of a JPEG are in its first 64 KiB.
_TAG_MARKS, _TIFF = (b"Exif", b"eXIf", b"EXIF"), (b"II", b"MM")
# First bytes of a TIFF file; the last two of these are BigTIFF.
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# First bytes of a file of np.save, and of np.savez.
OF_ARRAYS = NPY, NPZ = b"\x93NUMPY", b"PK\x03\x04"
# Samples per pixel by the tag 262 (TIFF 6.0, section 8); the tag 338 describes others.
_TIFF_COLOURS = {2: 3, 5: 4, 6: 3, 8: 3}
# Brands of HEIF files, as from Apple's cameras.
_HEIF = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")

_START, _END = b"\xff\xd8", b"\xff\xd9"
_SCAN, _RESTARTS, _APP2 = 0xDA, 0xDD, 0xE2
_FRAMES = (0xC0, 0xC1, 0xC2)  # Baseline, extended and progressive, with Huffman codes.
_PROGRESSIVE = 0xC2
_FRAME = struct.Struct(">HBHHB")  # Length, bits, height, width, number of colours.
# Lossless, hierarchical and arithmetic coding; the numbers between mark other things.
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}

# Divisors of height and width in the inverse transform. The flags below are combined
# with those for grey or colour.
JPEG_SHRINKS = (8, 4, 2)
_REDUCED = {
    1: 0,
    2: cv2.IMREAD_REDUCED_GRAYSCALE_2,
    4: cv2.IMREAD_REDUCED_GRAYSCALE_4,
    8: cv2.IMREAD_REDUCED_GRAYSCALE_8,
}

# Memory for results, one array per thread. An image in fresh memory costs a page fault
# every 4 KiB, a fifth of its decoding.
_LARGEST_SCRATCH = 2**23  # Bytes; larger images are rare, and their memory would stay.
_local = threading.local()


class DamagedImage(ValueError):
    """Raised for bytes that are not a readable image; the message has the reason."""


class JpegHeader(NamedTuple):
    """Size and layout of an ordinary JPEG file, read before it is decoded.

    Attributes:
      height_at: offset of the height in the file, two bytes.
      strip: height in pixels of a row of blocks; a row is decoded as a whole.
      end: offset of the marker at the end of the image.
      one_scan: whether one scan from top to bottom contains all colours.
    """

    height: int
    width: int
    height_at: int
    strip: int
    end: int
    one_scan: bool


def check_size(size: tuple[int, int], max_megapixels: float = MAX_MEGAPIXELS) -> None:
    """Refuses an image that is too large to decode.

    Args:
      size: height and width in pixels.
      max_megapixels: largest size, see `data.max_megapixels`.

    Raises:
      DamagedImage: the image is too large; the message names the limit.
    """
    height, width = size
    if height * width > max_megapixels * 1e6:
        least = math.ceil(height * width / 1e6)
        raise DamagedImage(
            f"has {width}x{height} pixels, and the limit is "
            f"max_megapixels={max_megapixels:g} (data.max_megapixels in a config): set "
            f"it to {least}, or resize the image"
        )


def reads(data: bytes | np.ndarray) -> bool:
    """Returns whether `decode` reads the data: all image files, and arrays of uint8."""
    if isinstance(data, np.ndarray):
        return data.dtype == np.uint8
    return not data.startswith(OF_ARRAYS)


def decode(
    data: bytes | np.ndarray,
    channels: int = 3,
    *,
    exif: bool = False,
    max_megapixels: float = MAX_MEGAPIXELS,
) -> UInt8[np.ndarray, "H W D"]:
    """Decodes an image of any format.

    Args:
      data: content of an image file, or a uint8 array, whose channels are adapted.
      channels: 3 for RGB, 1 for grey.
      exif: whether a file is rotated by its orientation tag.
      max_megapixels: largest size, see `data.max_megapixels`.

    Returns:
      Pixels. Transparent images are laid over white; values of 16 bits are reduced to
      their high byte, and values of 32 bits too if one of them is above 255; floats
      from 0 to 1 are scaled to 255; an animation is its first frame.

    Raises:
      DamagedImage: the data are empty, truncated, damaged, of an unknown format, too
        large, or floats outside of 0 to 1; or an array is not uint8 (H, W, C).
    """
    if isinstance(data, np.ndarray):
        return _adapt_channels(data, channels)
    if not data:
        raise DamagedImage("is empty (0 bytes)")
    if exif and (tag := orientation(data)) != 1:
        upright = decode(data, channels, max_megapixels=max_megapixels)
        return np.ascontiguousarray(_TURNS[tag](upright))
    if header := read_jpeg_header(data):
        check_size((header.height, header.width), max_megapixels)
        pixels = decode_jpeg(data, header, channels, header.height)
        if pixels is not None:
            return pixels
    if data[4:8] == b"ftyp" and data[8:12] in _HEIF:
        _register_heif()
    try:
        image = Image.open(io.BytesIO(data))
        check_size((image.height, image.width), max_megapixels)
        if image.format == "TIFF":
            _check_bands(image)
        if image.format == "PNG":
            critical = critical_chunks(data)
            opaque = image.mode in ("L", "RGB") and "transparency" not in image.info
            # Bits per channel: PNG specification, 11.2.1.
            if opaque and data[24] == 8:
                pixels = _by_opencv(critical, channels)
                if pixels is not None:
                    return pixels
        return to_pixels(image, channels)
    except DamagedImage:
        raise
    except UnidentifiedImageError as error:  # Its text has an address in memory.
        kind = "of no known format"
        if data.startswith(TIFF):
            kind = "TIFF of other bands or depth; see data.channels and data.pixels"
        raise DamagedImage(f"cannot be decoded ({kind})") from error
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, ...
        raise DamagedImage(f"cannot be decoded ({error})") from error


def _check_bands(image: Image.Image) -> None:
    """Refuses a TIFF file with bands that Pillow would drop or read as opacity."""
    count, photometric, more = (image.tag_v2.get(tag) for tag in (277, 262, 338))
    of_colours = _TIFF_COLOURS.get(photometric, 1)
    if (count or 1) > of_colours and not {1, 2} & set(more or ()):
        raise DamagedImage(
            f"has {count} bands, and none is marked as opacity: set "
            f"--config.data.channels={count}, or choose with --config.data.bands"
        )


def orientation(data: bytes) -> int:
    """Returns the orientation tag of a file, 1 to 8; 1, upright, if it has none.

    TIFF and HEIC count as upright too, because their decoders always rotate them.
    """
    first = data[:_TAGS_WITHIN]
    if not any(mark in first for mark in _TAG_MARKS) or data.startswith(_TIFF):
        return 1
    try:
        tag = Image.open(io.BytesIO(data)).getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 (decoding reports the damage)
        return 1
    return tag if tag in _TURNS else 1


@functools.cache
def _register_heif() -> None:
    try:
        import pi_heif
    except ImportError as error:
        raise DamagedImage(
            "is HEIC, which needs the extra `heic`: pip install -e '.[heic]' in the clone"
        ) from error
    pi_heif.register_heif_opener()


def read_jpeg_header(data: bytes) -> JpegHeader | None:
    """Reads the header of a JPEG file, if OpenCV may decode it.

    The result is None unless the file is complete, with 8 bits and one or three
    colours: thus for other formats, CMYK, arithmetic coding, several pictures, or no
    end marker.
    """
    if not data.startswith(_START):
        return None
    frame, restarts, at = None, False, 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # Any number of these bytes may precede a marker.
            at += 1
            continue
        after = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in _FRAMES:
            frame = at
        elif marker == _SCAN:
            header = _jpeg_header(data, frame, at, after) if frame else None
            # A decoder that stops early would report the next restart marker as damage.
            return header._replace(one_scan=False) if header and restarts else header
        several = marker == _APP2 and data[at + 4 : at + 8] == b"MPF\0"
        if several or marker in _OTHER_FRAMES:
            return None
        restarts |= marker == _RESTARTS
        at = after
    return None


def _jpeg_header(data: bytes, frame: int, scan: int, after: int) -> JpegHeader | None:
    """Parses the header at the markers of the frame and the first scan."""
    # Without the end marker OpenCV may fill missing rows with grey and report nothing.
    # The search starts at the pixels, because a thumbnail in the header has an end
    # marker too.
    end = len(data) - 2 if data.endswith(_END) else data.find(_END, after)
    if end < after or after < frame + 2 + _FRAME.size:
        return None
    length, bits, height, width, colours = _FRAME.unpack_from(data, frame + 2)
    if length != 8 + 3 * colours or bits != 8 or colours not in (1, 3):
        return None
    if not height * width:
        return None
    # The second of the three bytes of each colour has its sampling: across, down.
    down = max(data[frame + 11 + 3 * i] & 15 for i in range(colours))
    return JpegHeader(
        height=height,
        width=width,
        height_at=frame + 5,
        # Subsampling does not affect the blocks of a single colour.
        strip=8 * (down if colours > 1 else 1),
        end=end,
        one_scan=data[frame + 1] != _PROGRESSIVE and data[scan + 4] == colours,
    )


def decode_jpeg(
    data: bytes,
    header: JpegHeader,
    channels: int,
    stop: int,
    shrink: int = 1,
    rough: bool = False,
) -> UInt8[np.ndarray, "H W C"] | None:
    """Decodes the rows from the top to `stop`, and possibly some more.

    If one scan contains the pixels, the decoder gets a copy of the file with a smaller
    height in its header, and skips the other rows. The decoded rows are equal, to the
    bit, to those of the whole image.

    Args:
      data: content of the file.
      header: header of the file.
      channels: 3 for RGB, 1 for grey.
      stop: row after the last one, in pixels of the file.
      shrink: 1, or one of `JPEG_SHRINKS`: pixel i approximates the mean of `shrink`
        pixels from `shrink` * i on, computed in the cosine transform.
      rough: with `shrink` 1, whether to repeat subsampled chroma instead of
        interpolating it, which is a tenth faster. The next call in this thread may
        overwrite the pixels.

    Returns:
      Pixels, (H, W, C) uint8; None if they cannot be decoded.
    """
    # Chroma of half the height is interpolated with the row below.
    rows = stop + 2 * shrink
    # The last strip is not cut: only the end marker shows that it is complete.
    if header.one_scan and -(-rows // header.strip) < -(-header.height // header.strip):
        # Without the end marker the decoder does not report the rows that it skips.
        data = bytearray(memoryview(data)[: header.end])
        data[header.height_at : header.height_at + 2] = rows.to_bytes(2, "big")
    else:
        rows = header.height
    if rough and shrink == 1:
        return _decode_rough(data, (rows, header.width), channels)
    return _by_opencv(data, channels, shrink)


def _by_opencv(
    data: bytes | bytearray, channels: int, shrink: int = 1
) -> np.ndarray | None:
    """Decodes a file with OpenCV; returns None if that fails."""
    colour = cv2.IMREAD_COLOR_RGB if channels == 3 else cv2.IMREAD_GRAYSCALE
    flags = colour | _REDUCED[shrink] | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        return None
    return pixels[..., None] if pixels is not None and pixels.ndim == 2 else pixels


def _decode_rough(
    data: bytes | bytearray, size: tuple[int, int], channels: int
) -> np.ndarray | None:
    simplejpeg = import_simplejpeg()
    try:
        return simplejpeg.decode_jpeg(
            data,
            "RGB" if channels == 3 else "GRAY",
            fastupsample=True,
            strict=False,  # The rows below are missing.
            buffer=_scratch((*size, channels)),
        )
    except ValueError:
        return None


def import_simplejpeg():
    """Imports the decoder of the extra `fast`; ImportError says how to install it."""
    try:
        import simplejpeg
    except ImportError as error:
        raise ImportError("needs: pip install -e '.[fast]' in the clone") from error
    return simplejpeg


def _scratch(shape: tuple[int, ...]) -> UInt8[np.ndarray, "..."]:
    """Returns an uninitialised array, which the next call may overwrite."""
    size = math.prod(shape)
    if size > _LARGEST_SCRATCH:
        return np.empty(shape, np.uint8)
    if getattr(_local, "scratch", np.empty(0)).size < size:
        _local.scratch = np.empty(size, np.uint8)
    return _local.scratch[:size].reshape(shape)


def critical_chunks(data: bytes) -> bytes:
    """Returns a PNG file without ancillary chunks; libpng prints warnings about those.

    Damaged critical chunks raise DamagedImage, since OpenCV and Pillow may complete an
    image whose pixels end in the middle without an error.
    """
    start, kind, kept = 8, b"", [data[:8]]
    while kind != b"IEND":
        length = int.from_bytes(data[start : start + 4], "big")
        kind, end = data[start + 4 : start + 8], start + 8 + length
        checksum = zlib.crc32(data[start + 4 : end]).to_bytes(4, "big")
        critical = kind[:1].isupper()  # PNG specification, 5.4.
        if not kind or (critical and data[end : end + 4] != checksum):
            raise DamagedImage(f"cannot be decoded (its PNG chunk {kind!r} is damaged)")
        if critical:
            kept.append(data[start : end + 4])
        start = end + 4
    return b"".join(kept)


def to_pixels(image: Image.Image, channels: int) -> np.ndarray:
    """Returns the pixels of a PIL image of any mode, converted as by `decode`."""
    image.load()
    if image.mode.startswith("I"):
        # The value of white is unknown for integers of 32 bits, except for PGM files,
        # whose 16 bits Pillow stores as 32.
        known = image.mode != "I" or image.format == "PPM"
        image = Image.fromarray(_from_integers(np.asarray(image), known))
    elif image.mode == "F":
        image = Image.fromarray(_from_floats(np.asarray(image)))
    elif "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    # Through RGB, because Pillow cannot convert some modes (CMYK) to grey.
    image = image if image.mode == "L" else image.convert("RGB")
    pixels = np.array(image.convert("RGB" if channels == 3 else "L"))
    return pixels[..., None] if channels == 1 else pixels


def _from_integers(grey: np.ndarray, are_16_bits: bool) -> np.ndarray:
    """Scales grey values to bytes; values up to 255 only if `are_16_bits`."""
    low, high = int(grey.min()), int(grey.max())
    if low < 0 or high > 65_535:
        raise DamagedImage(
            f"has grey values from {low} to {high}: scale them to 0..255 or 0..65535"
        )
    shift = 8 if are_16_bits or high > 255 else 0
    return (grey.astype(np.int64) >> shift).astype(np.uint8)


def _from_floats(grey: np.ndarray) -> np.ndarray:
    """Scales grey values from 0..1 to bytes; white is unknown in other ranges."""
    low, high = float(grey.min()), float(grey.max())
    if not (low >= 0 and high <= 1):  # Also for NaN.
        raise DamagedImage(
            f"has float pixels from {low:g} to {high:g}: scale them to 0..1, or save "
            "the image with 8 or 16 bits"
        )
    return (grey * 255).round().astype(np.uint8)


def _adapt_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    if pixels.dtype != np.uint8 or pixels.ndim != 3:
        raise DamagedImage(
            f"is an array of {pixels.dtype} {pixels.shape}, not uint8 (H, W, C)"
        )
    if pixels.shape[-1] == channels:
        return pixels
    if channels == 3 and pixels.shape[-1] == 1:
        return np.repeat(pixels, 3, axis=-1)
    raise DamagedImage(f"has {pixels.shape[-1]} channels, not {channels}")
