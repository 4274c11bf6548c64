"""JPEG files: a header read in microseconds, and a decoder of only what is needed.

Names and layout of the markers are those of ITU-T T.81, annex B.
"""

import struct
from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import UInt8

from vit_jax.data import scratch

# The loader has threads of its own; OpenCV's would fight over the same cores.
cv2.setNumThreads(0)

_START, _END = b"\xff\xd8", b"\xff\xd9"
_SCAN, _RESTARTS, _APP2 = 0xDA, 0xDD, 0xE2
_FRAMES = (0xC0, 0xC1, 0xC2)  # Baseline, extended and progressive, with Huffman codes.
_PROGRESSIVE = 0xC2
_FRAME = struct.Struct(">HBHHB")  # Length, bits, height, width, number of colours.
# Lossless, hierarchical and arithmetic coding; the gaps are markers of other things.
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}

SHRINKS = (8, 4, 2)  # What the inverse transform can divide height and width by.
_FLAGS = {
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


class Header(NamedTuple):
    """What an ordinary JPEG file says before it is decoded.

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


def read_header(data: bytes) -> Header | None:
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
            header = _header(data, frame, at, after) if frame else None
            # A decoder that stops early would complain of the restart that follows.
            return header._replace(one_scan=False) if header and restarts else header
        several = marker == _APP2 and data[at + 4 : at + 8] == b"MPF\0"
        if several or marker in _OTHER_FRAMES:
            return None
        restarts |= marker == _RESTARTS
        at = after
    return None


def _header(data: bytes, frame: int, scan: int, after: int) -> Header | None:
    """Puts together what stands at the frame's and the first scan's markers."""
    # Without the end marker OpenCV may fill up with grey and say nothing. It is sought
    # from the pixels on, because a thumbnail in the header has one too.
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
    return Header(
        height=height,
        width=width,
        height_at=frame + 5,
        # Of a single colour the blocks stand alone, whatever its sampling.
        strip=8 * (down if colours > 1 else 1),
        end=end,
        one_scan=data[frame + 1] != _PROGRESSIVE and data[scan + 4] == colours,
    )


def decode(
    data: bytes,
    header: Header,
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
      shrink: 1, or one of `SHRINKS`: pixel i then is the mean, as far as the cosine
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
    flags = _FLAGS[channels, shrink] | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        return None
    return pixels[..., None] if pixels is not None and channels == 1 else pixels


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
            buffer=scratch.borrow("decoded", (*size, channels)),
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
