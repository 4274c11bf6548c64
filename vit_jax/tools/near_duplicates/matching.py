"""Detects images of the same picture by thumbnails, hashes, search and alignment.

Resized, recompressed, mirrored, grey and slightly cropped copies match. Hashes select
candidate pairs; alignment decides. Letters: N images, S side of a thumbnail, W windows.
"""

import collections
import functools
import io
from typing import NamedTuple

import cv2
import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vit_jax.data import bands
from vit_jax.data.config import MAX_MEGAPIXELS
from vit_jax.errors import UserError

SIDE = 64  # Side of a thumbnail, in pixels.
# Images whose grey values have a smaller standard deviation have no content to compare;
# JPEG noise is smaller.
_FLAT = 2.0

Thumbnail = UInt8[np.ndarray, "S S"]

BITS = 128
_FREQUENCIES = 16  # Number per side; the lowest BITS of them are kept.
_PART = 0.92  # Side of a window, for crops of 10 % in area (0.95) and in sides (0.9).

# Top, bottom, left and right as fractions of the image.
Window = tuple[float, float, float, float]
WHOLE: Window = (0.0, 1.0, 0.0, 1.0)
_OFFSETS = (0.0, (1 - _PART) / 2, 1 - _PART)
WINDOWS: tuple[Window, ...] = (
    WHOLE,
    *((y, y + _PART, x, x + _PART) for y in _OFFSETS for x in _OFFSETS),
)

DISTANCE = 28  # Hamming distance of 128 bits; unrelated photographs are at about 64.
_PER_QUERY = 50  # Maximum number of candidates per query.

CORRELATION = 0.9  # Minimum correlation of near-duplicates.

_SIGMA = 4.0  # Sigma of the high-pass, in pixels of a thumbnail.
_BLUR = 5  # Pixels; sharpening and compression change only finer structure.
_STOP = (cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, 15, 1e-4)
# Maximum distance of an aligned corner from that of the window, in pixels.
_FURTHEST = 5.0
_CORNERS = np.array([[x, y, 1] for x in (0, SIDE) for y in (0, SIDE)]) - [0.5, 0.5, 0]


def make_thumbnail(
    data: bytes | UInt8[np.ndarray, "H W C"], max_megapixels: float = MAX_MEGAPIXELS
) -> Thumbnail:
    """Returns an image as SIDE x SIDE grey pixels, regardless of its aspect ratio.

    `data` is the content of an image file, or RGB pixels, with at most
    `max_megapixels`.

    Raises:
      DamagedImage: the image cannot be decoded.
    """
    grey = _decode_reduced(data, max_megapixels) if isinstance(data, bytes) else None
    if grey is None:
        pixels = np.ascontiguousarray(
            bands.picture(data, max_megapixels=max_megapixels)
        )
        grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    shrinks = min(grey.shape) >= SIDE
    how = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    if not shrinks and max(grey.shape) > SIDE:  # Avoids aliasing on the long side.
        height, width = (min(side, SIDE) for side in grey.shape)
        grey = cv2.resize(grey, (width, height), interpolation=cv2.INTER_AREA)
    return cv2.resize(grey, (SIDE, SIDE), interpolation=how)


def is_flat(thumbnail: Thumbnail) -> bool:
    """Returns whether all pixels are nearly equal, as in a blank page."""
    return float(thumbnail.std()) < _FLAT


def _decode_reduced(data: bytes, max_megapixels: float) -> np.ndarray | None:
    """Decodes the luma of a JPEG at a reduced size of at least SIDE, None otherwise."""
    try:
        image = Image.open(io.BytesIO(data))
        small = image.width * image.height <= max_megapixels * 1e6
        if image.format != "JPEG" or image.mode not in ("L", "RGB") or not small:
            return None
        image.draft("L", (SIDE, SIDE))
        return np.asarray(image.convert("L"))
    except (OSError, SyntaxError, ValueError):
        # `decode.decode` raises the error that names the reason.
        return None


def hash_windows(
    thumbnails: UInt8[np.ndarray, "N S S"], windows: tuple[Window, ...]
) -> UInt8[np.ndarray, "N W 16"]:
    """Computes perceptual hashes, of BITS bits, of windows of images.

    Hashes are the signs of the lowest cosine frequencies. Resizing, recompression and
    conversion to grey hardly change them.

    Source: "pHash" (C. Zauner, Implementation and Benchmarking of Perceptual Image Hash
    Functions, 2010), but with windows, with the 128 frequencies that are closest to
    zero, and with their signs instead of a comparison with their median.
    """
    pixels = thumbnails.astype(np.float32)
    hashes = np.empty((len(pixels), len(windows), BITS // 8), np.uint8)
    for number, (top, bottom, left, right) in enumerate(windows):
        down, across = _cosines(top, bottom), _cosines(left, right)
        waves = np.matmul(np.matmul(down, pixels), across.T)
        by_image = waves.reshape(len(pixels), waves.shape[1] * waves.shape[2])
        hashes[:, number] = np.packbits(by_image[:, _lowest()] > 0, axis=1)
    return hashes


@functools.cache
def _cosines(start: float, stop: float) -> np.ndarray:
    """Returns cosine waves (frequency, pixel) over a part of an axis, 0 outside.

    Pixels on an edge of the part are weighted by their fraction inside.
    """
    edges = np.arange(SIDE + 1) / SIDE
    first, last = (np.clip(e, start, stop) for e in (edges[:-1], edges[1:]))
    middle = ((first + last) / 2 - start) / (stop - start)
    waves = np.cos(np.pi * np.arange(_FREQUENCIES)[:, None] * middle[None])
    return (waves * (last - first)).astype(np.float32)


@functools.cache
def _lowest() -> np.ndarray:
    """Returns the indices of the kept frequencies, without the always positive mean."""
    rows, columns = np.mgrid[:_FREQUENCIES, :_FREQUENCIES]
    return np.argsort((rows**2 + columns**2).ravel(), kind="stable")[1 : BITS + 1]


class Candidate(NamedTuple):
    """A pair of images with similar hashes."""

    query: int  # Index of the query.
    indexed: int  # Number of the indexed image.
    distance: int  # Hamming distance of the hashes.
    flipped: bool  # Whether the indexed image was mirrored.
    window: Window  # Part of the larger image that matches all of the smaller one.
    query_is_larger: bool


class Index:
    """Exact search in the hashes of a set of images; 35 MB per 100,000 images.

    Raises:
      UserError: faiss is not installed.
    """

    def __init__(self):
        try:
            import faiss
        except ImportError as error:
            raise UserError(
                "de-duplication needs faiss: pip install -e '.[dedup]' in the clone"
            ) from error
        # Entries are ordered by image, then flip, then window.
        self._parts = faiss.IndexBinaryFlat(BITS)
        self._wholes = faiss.IndexBinaryFlat(BITS)
        self._numbers = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, thumbnails: UInt8[np.ndarray, "N S S"], numbers: np.ndarray) -> None:
        """Adds images with the numbers, (N,) int64, that `candidates` returns."""
        both = np.stack([thumbnails, thumbnails[:, :, ::-1]], axis=1)
        hashes = hash_windows(both.reshape(-1, *both.shape[2:]), WINDOWS)
        self._parts.add(np.ascontiguousarray(hashes.reshape(-1, hashes.shape[-1])))
        self._wholes.add(np.ascontiguousarray(hashes[:, 0]))
        self._numbers = np.concatenate([self._numbers, numbers])

    def candidates(self, thumbnails: UInt8[np.ndarray, "N S S"]) -> list[Candidate]:
        """Returns candidate pairs of query images, nearest first for each query."""
        if not len(thumbnails) or not len(self):
            return []
        hashes = hash_windows(thumbnails, WINDOWS)
        windows = len(WINDOWS)
        best: dict[tuple[int, int], Candidate] = {}

        def add(query, row, distance, flipped, window, query_is_larger):
            pair = query, int(self._numbers[row])
            if pair not in best or distance < best[pair].distance:
                how = bool(flipped), WINDOWS[window], query_is_larger
                best[pair] = Candidate(*pair, int(distance), *how)

        # Either the query is a crop of the indexed image, or all of it ...
        for query, entry, distance in _within(self._parts, hashes[:, 0]):
            image, window = divmod(entry, windows)
            add(query, image // 2, distance, image % 2, window, False)
        # ... or the indexed image is a crop of the query.
        crops = hashes[:, 1:].reshape(-1, hashes.shape[-1])
        for crop, entry, distance in _within(self._wholes, crops):
            query, window = divmod(crop, windows - 1)
            add(query, entry // 2, distance, entry % 2, window + 1, True)
        return _nearest(best.values())


def _within(index, queries: np.ndarray):
    """Yields (query, entry, distance) for all distances up to DISTANCE."""
    # The bound of faiss is exclusive.
    ends, distances, entries = index.range_search(
        np.ascontiguousarray(queries), DISTANCE + 1
    )
    rows = np.repeat(np.arange(len(queries)), np.diff(ends.astype(np.int64)))
    yield from zip(rows.tolist(), entries.tolist(), distances.tolist(), strict=True)


def _nearest(candidates) -> list[Candidate]:
    """Sorts by query and distance; keeps the nearest candidates of each query."""
    kept, counts = [], collections.Counter()
    for each in sorted(candidates, key=lambda c: (c.query, c.distance, c.indexed)):
        counts[each.query] += 1
        if counts[each.query] <= _PER_QUERY:
            kept.append(each)
    return kept


def correlation(part: Thumbnail, whole: Thumbnail, window: Window) -> float:
    """Returns the correlation of two images after affine alignment, from -1 to 1.

    Hashes of different photographs can be close by chance. Their fine structure is not
    correlated, so only this part (a high-pass) is compared.

    Args:
      part: the image that may be a crop.
      whole: the other image.
      window: approximate position of the crop in `whole`; the result is 0 if `part`
        fits only elsewhere, or nowhere.

    Source: Evangelidis and Psarakis, Parametric Image Alignment Using Enhanced
    Correlation Coefficient Maximization, PAMI 2008 (OpenCV's `findTransformECC`).
    """
    top, bottom, left, right = window
    wide, high = right - left, bottom - top
    # Maps pixel centres of `part` to those of `whole`.
    start = np.array(
        [
            [wide, 0, left * SIDE + wide / 2 - 0.5],
            [0, high, top * SIDE + high / 2 - 0.5],
        ],
        np.float32,
    )
    images = _fine(part), _fine(whole)
    how = cv2.MOTION_AFFINE, _STOP, None, _BLUR
    try:
        value, fitted = cv2.findTransformECC(*images, start.copy(), *how)
    except cv2.error:  # The alignment did not converge.
        return 0.0
    moved = np.abs(_CORNERS @ (fitted - start).T).max()
    return float(value) if moved <= _FURTHEST else 0.0


def _fine(thumbnail: Thumbnail) -> np.ndarray:
    pixels = thumbnail.astype(np.float32)
    return pixels - cv2.GaussianBlur(pixels, (0, 0), _SIGMA)
