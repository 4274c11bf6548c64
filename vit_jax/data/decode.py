"""Encoded images to uint8 pixels: by OpenCV where it is the faster, else by Pillow.

Orientation tags of cameras are ignored, as in the published recipes.
"""

import io
import zlib

import cv2
import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

from vit_jax.config.fields import MAX_PIXELS
from vit_jax.data import jpeg


class DamagedImage(ValueError):
    """The bytes are no readable image; says why."""


def decode(data: bytes | np.ndarray, channels: int = 3) -> UInt8[np.ndarray, "H W D"]:
    """Decodes an image.

    Args:
      data: content of an image file, of a format found from the content; a uint8
        array has its channels adapted.
      channels: 3 for RGB, 1 for grey.

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
    header = plain_header(data)
    if header is not None:
        pixels = jpeg.decode(data, header, channels, header.height)
        if pixels is not None:
            return pixels
    try:
        image = Image.open(io.BytesIO(data))
        if image.width * image.height > MAX_PIXELS:
            raise DamagedImage(f"has {image.width}x{image.height} pixels, too many")
        if image.format == "PNG":
            critical = _critical_chunks(data)
            if _is_plain_png(image, data):
                pixels = _decode_png(critical, channels)
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


def plain_header(data: bytes) -> jpeg.Header | None:
    """Returns the header of a JPEG file that needs no Pillow and is not too large."""
    header = jpeg.read_header(data)
    small = header is not None and header.height * header.width <= MAX_PIXELS
    return header if small else None


def _critical_chunks(data: bytes) -> bytes:
    """Returns a PNG file without its ancillary chunks, such as a colour profile.

    The decoder of OpenCV, libpng, would print its warnings about them to standard error.

    Raises:
      DamagedImage: a critical chunk is damaged: OpenCV and Pillow both may fill up an
        image whose pixels end in the middle.
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


def _decode_png(data: bytes, channels: int) -> np.ndarray | None:
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
