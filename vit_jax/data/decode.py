"""Encoded images to uint8 pixels: by OpenCV where it is the faster, else by Pillow.

Orientation tags of cameras are ignored, as in the published recipes.
"""

import io
import zlib

import cv2
import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

# The loader has threads of its own; OpenCV's would fight over the same cores.
cv2.setNumThreads(0)

MAX_PIXELS = 100_000_000


class DamagedImage(ValueError):
    """The bytes are no readable image; says why."""


def decode(
    data: bytes | UInt8[np.ndarray, "H W C"], channels: int = 3
) -> UInt8[np.ndarray, "H W D"]:
    """Decodes an image.

    Args:
      data: content of an image file, of a format found from the content; an array
        has its channels adapted.
      channels: 3 for RGB, 1 for grey.

    Returns:
      Pixels. Transparency is laid over white, 16-bit values keep their high byte, and
      of an animation the first frame counts.

    Raises:
      DamagedImage: empty, truncated, damaged, unknown format or over 100 megapixels.
    """
    if isinstance(data, np.ndarray):
        return _adapt_channels(data, channels)
    if not data:
        raise DamagedImage("is empty (0 bytes)")
    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > MAX_PIXELS:
            raise DamagedImage(f"has {image.width}x{image.height} pixels, too many")
        if image.format == "PNG":
            _check_png(data)
        if _is_plain(image, data):
            pixels = _decode_plain(data, channels)
            if pixels is not None:
                return pixels
        return _to_pixels(image, channels)
    except DamagedImage:
        raise
    except Image.DecompressionBombError as error:
        raise DamagedImage(f"has too many pixels ({error})") from error
    except UnidentifiedImageError as error:  # Its text has an address in memory.
        raise DamagedImage("cannot be decoded (of no known format)") from error
    except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error, ...
        raise DamagedImage(f"cannot be decoded ({error})") from error


def _check_png(data: bytes) -> None:
    """Raises DamagedImage unless every critical chunk is whole.

    OpenCV and Pillow both may fill up an image whose pixels end in the middle.
    """
    start, kind = 8, b""
    while kind != b"IEND":
        length = int.from_bytes(data[start : start + 4], "big")
        kind, end = data[start + 4 : start + 8], start + 8 + length
        checksum = zlib.crc32(data[start + 4 : end]).to_bytes(4, "big")
        critical = kind[:1].isupper()  # PNG specification, 5.4.
        if not kind or (critical and data[end : end + 4] != checksum):
            raise DamagedImage(f"cannot be decoded (its PNG chunk {kind!r} is damaged)")
        start = end + 4


def _is_plain(image: Image.Image, data: bytes) -> bool:
    """Returns whether OpenCV may have it: whole, 8 bits, grey or RGB, opaque."""
    if image.mode not in ("L", "RGB") or "transparency" in image.info:
        return False
    if image.format == "PNG":
        return data[24] == 8  # Bits a channel (PNG specification, 11.2.1).
    # Without the end marker some versions of OpenCV fill up with grey and say nothing.
    # It is sought after the last scan begins: an embedded thumbnail has one too.
    end = data.find(b"\xff\xd9", data.rfind(b"\xff\xda"))
    return image.format == "JPEG" and end >= 0


def _decode_plain(data: bytes, channels: int) -> np.ndarray | None:
    colour = cv2.IMREAD_COLOR_RGB if channels == 3 else cv2.IMREAD_GRAYSCALE
    flags = colour | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        return None
    return pixels[..., None] if pixels is not None and channels == 1 else pixels


def _to_pixels(image: Image.Image, channels: int) -> np.ndarray:
    image.load()
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(grey.clip(0, 255).astype(np.uint8))
    elif "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    # Through RGB, because Pillow has no way from some modes (CMYK) to grey.
    image = image if image.mode == "L" else image.convert("RGB")
    pixels = np.array(image.convert("RGB" if channels == 3 else "L"))
    return pixels[..., None] if channels == 1 else pixels


def _adapt_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    if pixels.shape[-1] == channels:
        return pixels
    if channels == 3 and pixels.shape[-1] == 1:
        return np.repeat(pixels, 3, axis=-1)
    raise DamagedImage(f"has {pixels.shape[-1]} channels, not {channels}")
