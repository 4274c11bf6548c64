"""Decodes images to uint8 pixels: with OpenCV where it is faster, else with Pillow.

Orientation tags of cameras are ignored, as in the published recipes, unless they are
asked for. JPEG headers are read in microseconds, so that a crop decodes only the rows
that it needs; names and layout of the JPEG markers are those of ITU-T T.81, annex B.
"""

import functools
import io
import math
import struct
import threading
import warnings
import zlib
from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from vit_jax.data.config import MAX_PIXELS

# The loader has threads of its own; OpenCV's would fight over the same cores.
cv2.setNumThreads(0)
# It names no file: up to MAX_PIXELS images are read, and larger ones are named.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

# By the value of the tag: what makes the image upright.
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
# Brands of files that a camera of Apple's writes, and their like.
_HEIF = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")

_START, _END = b"\xff\xd8", b"\xff\xd9"
_SCAN, _RESTARTS, _APP2 = 0xDA, 0xDD, 0xE2
_FRAMES = (0xC0, 0xC1, 0xC2)  # Baseline, extended and progressive, with Huffman codes.
_PROGRESSIVE = 0xC2
_FRAME = struct.Struct(">HBHHB")  # Length, bits, height, width, number of colours.
# Lossless, hierarchical and arithmetic coding; the gaps are markers of other things.
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}

JPEG_SHRINKS = (8, 4, 2)  # What the inverse transform can divide height and width by.
_OPENCV_FLAGS = {
    (1, 1): cv2.IMREAD_GRAYSCALE,
    (1, 2): cv2.IMREAD_REDUCED_GRAYSCALE_2,
    (1, 4): cv2.IMREAD_REDUCED_GRAYSCALE_4,
    (1, 8): cv2.IMREAD_REDUCED_GRAYSCALE_8,
    (3, 1): cv2.IMREAD_COLOR_RGB,
    # OpenCV has no names for these, but its bits combine.
    (3, 2): cv2.IMREAD_REDUCED_GRAYSCALE_2 | cv2.IMREAD_COLOR_RGB,
    (3, 4): cv2.IMREAD_REDUCED_GRAYSCALE_4 | cv2.IMREAD_COLOR_RGB,
    (3, 8): cv2.IMREAD_REDUCED_GRAYSCALE_8 | cv2.IMREAD_COLOR_RGB,
}

# Memory for passing results, one array per thread and use. An image in fresh memory
# costs a page fault every 4 KiB, a fifth of its decoding.
_LARGEST_SCRATCH = 2**23  # Bytes; what is larger is rare, and would stay for good.
_local = threading.local()


class DamagedImage(ValueError):
    """The bytes are no readable image; the message says why."""


class JpegHeader(NamedTuple):
    """Size and layout of an ordinary JPEG file, read before it is decoded.

    Attributes:
      height: in pixels.
      width: in pixels.
      height_at: where in the file the height stands, in two bytes.
      strip: height in pixels of a row of blocks, which are decoded together.
      end: where the marker at the end of the image stands.
      one_scan: whether all colours come at once, from top to bottom, in one go.
    """

    height: int
    width: int
    height_at: int
    strip: int
    end: int
    one_scan: bool


def decode(
    data: bytes | np.ndarray, channels: int = 3, *, exif: bool = False
) -> UInt8[np.ndarray, "H W D"]:
    """Decodes an image.

    Args:
      data: content of an image file, of a format found from the content; a uint8
        array has its channels adapted.
      channels: 3 for RGB, 1 for grey.
      exif: whether a file is turned as the orientation tag of its camera says.

    Returns:
      Pixels. Transparency is laid over white, 16-bit values keep their high byte,
      floats from 0 to 1 are scaled to 255, and of an animation the first frame counts.

    Raises:
      DamagedImage: empty, truncated, damaged, unknown format, over 100 megapixels, or
        with floats outside of 0 to 1; or an array that is not uint8 (H, W, C).
    """
    if isinstance(data, np.ndarray):
        return _adapt_channels(data, channels)
    if not data:
        raise DamagedImage("is empty (0 bytes)")
    if exif and (tag := orientation(data)) != 1:
        return np.ascontiguousarray(_TURNS[tag](decode(data, channels)))
    header = plain_header(data)
    if header is not None:
        pixels = decode_jpeg(data, header, channels, header.height)
        if pixels is not None:
            return pixels
    if data[4:8] == b"ftyp" and data[8:12] in _HEIF:
        _register_heif()
    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > MAX_PIXELS:
            raise DamagedImage(f"has {image.width}x{image.height} pixels, too many")
        if image.format == "PNG":
            critical = _critical_chunks(data)
            if _is_plain_png(image, data):
                pixels = _by_opencv(critical, _OPENCV_FLAGS[channels, 1])
                if pixels is not None:
                    return pixels
        return to_pixels(image, channels)
    except DamagedImage:
        raise
    except Image.DecompressionBombError as error:
        raise DamagedImage(f"has too many pixels ({error})") from error
    except UnidentifiedImageError as error:  # Its text has an address in memory.
        raise DamagedImage("cannot be decoded (of no known format)") from error
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, ...
        raise DamagedImage(f"cannot be decoded ({error})") from error


def orientation(data: bytes) -> int:
    """Returns the orientation tag of a file, 1 to 8; 1, upright, if it has none.

    It is 1 of TIFF and HEIC as well, which their decoders turn in any case.
    """
    first = data[:_TAGS_WITHIN]
    if not any(mark in first for mark in _TAG_MARKS) or data.startswith(_TIFF):
        return 1
    try:
        tag = Image.open(io.BytesIO(data)).getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 (decoding says what is damaged)
        return 1
    return tag if tag in _TURNS else 1


@functools.cache
def _register_heif() -> None:
    try:
        import pi_heif
    except ImportError as error:
        raise DamagedImage(
            "is HEIC, which takes the extra `heic`: pip install -e '.[heic]' in the clone"
        ) from error
    pi_heif.register_heif_opener()


def plain_header(data: bytes) -> JpegHeader | None:
    """Returns the header of a JPEG file that needs no Pillow and is not too large."""
    header = read_jpeg_header(data)
    small = header is not None and header.height * header.width <= MAX_PIXELS
    return header if small else None


def read_jpeg_header(data: bytes) -> JpegHeader | None:
    """Reads the header of a JPEG file, if it is one that OpenCV may decode.

    Args:
      data: content of a file.

    Returns:
      None for all but whole files of 8 bits in one or three colours: other formats,
      CMYK, arithmetic coding, several pictures, no end marker.
    """
    if not data.startswith(_START):
        return None
    frame, restarts, at = None, False, 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # Any number of them may fill up before a marker.
            at += 1
            continue
        after = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in _FRAMES:
            frame = at
        elif marker == _SCAN:
            header = _jpeg_header(data, frame, at, after) if frame else None
            # A decoder that stops early would complain of the restart that follows.
            return header._replace(one_scan=False) if header and restarts else header
        several = marker == _APP2 and data[at + 4 : at + 8] == b"MPF\0"
        if several or marker in _OTHER_FRAMES:
            return None
        restarts |= marker == _RESTARTS
        at = after
    return None


def _jpeg_header(data: bytes, frame: int, scan: int, after: int) -> JpegHeader | None:
    """Returns the header from the frame's and the first scan's markers."""
    # Without the end marker OpenCV may fill up with grey and report nothing. The search
    # starts at the pixels, because a thumbnail in the header has an end marker too.
    end = len(data) - 2 if data.endswith(_END) else data.find(_END, after)
    if end < after or after < frame + 2 + _FRAME.size:
        return None
    length, bits, height, width, colours = _FRAME.unpack_from(data, frame + 2)
    if length != 8 + 3 * colours or bits != 8 or colours not in (1, 3):
        return None
    if not height or not width:
        return None
    # The second of the three bytes of each colour has its sampling: across, down.
    down = max(data[frame + 11 + 3 * i] & 15 for i in range(colours))
    return JpegHeader(
        height=height,
        width=width,
        height_at=frame + 5,
        # Of a single colour the blocks stand alone, whatever its sampling.
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
    """Decodes the rows from the top to `stop`, and perhaps some below.

    Where the pixels stand in one scan, everything below the rows that are needed is
    left alone: the decoder gets a copy of the file that says it were so high. Its rows
    are the same, to the bit, as those of the whole image.

    Args:
      data: content of the file.
      header: of it.
      channels: 3 for RGB, 1 for grey.
      stop: in pixels of the file.
      shrink: 1, or one of `JPEG_SHRINKS`: pixel i then is the mean, as far as the cosine
        transform knows, of `shrink` pixels from `shrink` * i on.
      rough: faster by a tenth, with chroma of less than full size repeated, not
        interpolated. Without effect where `shrink` is not 1.

    Returns:
      Pixels; None if they cannot be decoded. Rough ones may be overwritten by the next
      call in this thread.
    """
    # Chroma of half the height is interpolated: the row below has a part in it.
    rows = stop + 2 * shrink
    # Not into the last strip, which nothing but the end marker tells to be complete.
    if header.one_scan and -(-rows // header.strip) < -(-header.height // header.strip):
        # The end marker goes too, or the decoder would complain of what it skips.
        data = bytearray(memoryview(data)[: header.end])
        data[header.height_at : header.height_at + 2] = rows.to_bytes(2, "big")
    else:
        rows = header.height
    if rough and shrink == 1:
        return _decode_rough(data, (rows, header.width), channels)
    return _by_opencv(data, _OPENCV_FLAGS[channels, shrink])


def _by_opencv(data: bytes | bytearray, flags: int) -> np.ndarray | None:
    """Decodes a file; None if it is damaged or not for OpenCV."""
    try:
        pixels = cv2.imdecode(
            np.frombuffer(data, np.uint8), flags | cv2.IMREAD_IGNORE_ORIENTATION
        )
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
            strict=False,  # Or it would complain that the rows below are missing.
            buffer=_scratch("decoded", (*size, channels)),
        )
    except ValueError:
        return None


def import_simplejpeg():
    """Imports the decoder of the extra `fast`; ImportError says how to get it."""
    try:
        import simplejpeg
    except ImportError as error:
        raise ImportError("needs: pip install -e '.[fast]' in the clone") from error
    return simplejpeg


def _scratch(use: str, shape: tuple[int, ...]) -> UInt8[np.ndarray, "..."]:
    """Returns an array of any content, which the next call of this use may overwrite."""
    size = math.prod(shape)
    if size > _LARGEST_SCRATCH:
        return np.empty(shape, np.uint8)
    kept = getattr(_local, use, None)
    if kept is None or kept.size < size:
        kept = np.empty(size, np.uint8)
        setattr(_local, use, kept)
    return kept[:size].reshape(shape)


def _critical_chunks(data: bytes) -> bytes:
    """Returns a PNG file without its ancillary chunks, such as a colour profile.

    libpng would print its warnings about them. Damaged critical chunks raise DamagedImage:
    OpenCV and Pillow both may fill up an image whose pixels end in the middle.
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


def _is_plain_png(image: Image.Image, data: bytes) -> bool:
    """Returns whether OpenCV may have it: 8 bits, grey or RGB, opaque."""
    opaque = image.mode in ("L", "RGB") and "transparency" not in image.info
    # Bits a channel: PNG specification, 11.2.1.
    return image.format == "PNG" and opaque and data[24] == 8


def to_pixels(image: Image.Image, channels: int) -> np.ndarray:
    """Returns the pixels of a PIL image, of any mode, as `decode` does; may raise it too."""
    image.load()
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(grey.clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        image = Image.fromarray(_from_floats(np.asarray(image)))
    elif "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    # Through RGB, because Pillow has no way from some modes (CMYK) to grey.
    image = image if image.mode == "L" else image.convert("RGB")
    pixels = np.array(image.convert("RGB" if channels == 3 else "L"))
    return pixels[..., None] if channels == 1 else pixels


def _from_floats(grey: np.ndarray) -> np.ndarray:
    """Scales grey values from 0..1 to bytes; what white is of others cannot be told."""
    low, high = float(grey.min()), float(grey.max())
    if not (low >= 0 and high <= 1):  # Nor is NaN.
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
