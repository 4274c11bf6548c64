"""Transforms of one image, run by the loader before images are batched.

Images are uint8, uint16 or float32, see bands.py. Arrays of int16 are masks (masks.py),
whose class numbers are not mixed: the nearest pixel is used instead. Letters: H and W
height and width before, h and w height and width after, C channels.
"""

import dataclasses
import math
from collections.abc import Sequence

import cv2
import numpy as np
from jaxtyping import Float32, Int16, Num
from PIL import Image

from vit_jax.config.fields import key
from vit_jax.data import decode
from vit_jax.data.config import MAX_MEGAPIXELS, MAX_PIXELS
from vit_jax.data.transforms.base import (
    Given,
    HostTransform,
    Size,
    TooSmall,
    check_part,
    pair,
    to_size,
)

Before = Num[np.ndarray, "H W C"]
After = Num[np.ndarray, "h w C"]
Box = tuple[float | int, float | int, float | int, float | int]

# When it shrinks an image, Pillow antialiases with all of these filters except nearest.
PILLOW = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}
# Filters of `tf.image.resize`, as in Google's code: "area", and "bilinear" with
# antialias=False. `covering_size` rounds for them as that code does.
TENSORFLOW = {"area": cv2.INTER_AREA, "bilinear_plain": cv2.INTER_LINEAR}
INTERPOLATIONS = (*PILLOW, *TENSORFLOW)

_TRIES = 100  # Largest number of parts that `InceptionCrop` draws.
_MOST_BANDS = 64  # Bands resized at once; OpenCV 5 allows 128.
_MOST_BANDS_OF_AREA = 4  # Bands resized at once with cv2.INTER_AREA.
_FAST_UP_TO = 3  # If an image shrinks by more, three taps antialias too little.


@dataclasses.dataclass(frozen=True)
class RandomResizedCrop(HostTransform):
    """Crops a random part of random shape and resizes it, as torchvision does.

    The area and the logarithm of the aspect ratio are drawn uniformly. If no part fits
    in ten tries, the largest central part with an allowed ratio is used.

    Args:
      size: height and width of the result in pixels, or one number for both.
      area: smallest and largest fraction of the image's area.
      ratio: smallest and largest width of the part divided by its height.
      interpolation: "fast" for `resize_fast`; "bilinear" or "bicubic" for Pillow's
        antialiased filters. SimMIM was trained with "bilinear", MAE and DINO with
        "bicubic".
    """

    moves_pixels = True
    output_size = to_size

    size: Given = None
    area: Given = (0.05, 1.0)
    ratio: Given = (3 / 4, 4 / 3)
    antialias: Given = key(True, "Antialias when the part shrinks.")
    rough: Given = key(
        False,
        "Repeat the subsampled chroma of JPEG files instead of interpolating it, which "
        "is faster; needs the extra `fast`.",
    )
    interpolation: Given = key(
        "fast", "Filter of the resize.", choices=("fast", "bilinear", "bicubic")
    )

    def __post_init__(self):
        super().__post_init__()
        check_part(self.area, self.ratio)
        if not self.antialias and self.interpolation != "fast":
            raise ValueError("antialias=False needs interpolation='fast'")
        if self.rough:
            try:
                decode.import_simplejpeg()
            except ImportError as error:
                raise ValueError(f"rough=True {error}") from error

    def __call__(self, image: Before, rng: np.random.Generator) -> After:
        return self.cut(image, self.box(*image.shape[:2], rng))

    def from_file(
        self,
        data: bytes,
        channels: int,
        rng: np.random.Generator,
        max_megapixels: float = MAX_MEGAPIXELS,
    ) -> After:
        """Crops and resizes an image file, and decodes only the rows of the part.

        The part is the one that `__call__` would draw from `rng`. The pixels are equal,
        to the bit, to those from the decoded image, unless `rough` is set. If the part
        of a JPEG has at least twice the result's size, the image is shrunk while it is
        decoded, which is faster and closer to the exact filter.

        Raises:
          DamagedImage: the file cannot be decoded.
        """
        (crop,) = crops_of_file([self], data, channels, rng, max_megapixels)
        return crop

    def cut(
        self, image: Before, box: tuple[int, int, int, int], shrink: int = 1
    ) -> After:
        """Cuts a part out and resizes it.

        Args:
          image: image, possibly decoded at a smaller size.
          box: top, left, height and width of the part in pixels of the full-size image.
          shrink: size of the full-size image divided by the size of `image`.
        """
        fast = self.interpolation == "fast"
        how = "bilinear" if fast else self.interpolation
        if shrink > 1:
            box = tuple(x / shrink for x in box)
            return resize_box(image, box, pair(self.size), how)
        top, left, height, width = box
        part = image[top : top + height, left : left + width]
        if not fast:  # Pixels outside of the part are not used, as in torchvision.
            whole = (0, 0, height, width)
            return resize_box(part, whole, pair(self.size), how)
        return resize_fast(part, pair(self.size), self.antialias)

    def box(
        self, height: int, width: int, rng: np.random.Generator
    ) -> tuple[int, int, int, int]:
        """Draws a part: top, left, height and width, in pixels."""
        for _ in range(10):
            h, w = self._sides(height, width, rng)
            if 0 < w <= width and 0 < h <= height:
                return below(height - h + 1, rng), below(width - w + 1, rng), h, w
        # For an extreme image, the largest central part with an allowed ratio.
        w = max(1, min(width, round(height * self.ratio[1])))
        h = max(1, min(height, round(width / self.ratio[0])))
        return (height - h) // 2, (width - w) // 2, h, w

    def _sides(
        self, height: int, width: int, rng: np.random.Generator
    ) -> tuple[int, int]:
        """Draws the height and width of a part, which may not fit."""
        low, high = map(math.log, self.ratio)
        span = self.area[1] - self.area[0]
        area = height * width * (self.area[0] + rng.random() * span)
        ratio = math.exp(low + rng.random() * (high - low))
        return round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))


@dataclasses.dataclass(frozen=True)
class ClippedCrop(RandomResizedCrop):
    """Crops a random part of random shape and resizes it, as BYOL and MAE's linear probe do.

    Area and shape are drawn only once, while `RandomResizedCrop` draws again if the
    part does not fit: a side that is longer than the image's is clipped. The arguments
    are those of `RandomResizedCrop`.
    """

    def box(
        self, height: int, width: int, rng: np.random.Generator
    ) -> tuple[int, int, int, int]:
        h, w = self._sides(height, width, rng)
        h, w = max(1, min(h, height)), max(1, min(w, width))
        return below(height - h + 1, rng), below(width - w + 1, rng), h, w


@dataclasses.dataclass(frozen=True)
class InceptionCrop(RandomResizedCrop):
    """Crops a random part of random shape and resizes it (Szegedy et al., 2015), as Google does.

    Part and filter are those of `tf.image.sample_distorted_bounding_box` and
    `tf.image.resize`
    (tensorflow/core/kernels/image/sample_distorted_bounding_box_op.cc), with which the
    paper's authors trained. The height and the aspect ratio of a part are drawn
    uniformly, so small parts are more frequent than in `RandomResizedCrop`. If no part
    fits in 100 tries, the whole image is used. The arguments are those of
    `RandomResizedCrop`.
    """

    ratio: Given = (0.75, 1.33)
    antialias: Given = key(False, "Antialias when the part shrinks.")

    def box(
        self, height: int, width: int, rng: np.random.Generator
    ) -> tuple[int, int, int, int]:
        low, high = self.ratio
        for _ in range(_TRIES):
            part = self._part(height, width, low + rng.random() * (high - low), rng)
            if part:
                h, w = part
                # The last position is never drawn, as in TensorFlow.
                return below(height - h, rng), below(width - w, rng), h, w
        return 0, 0, height, width

    def _part(
        self, height: int, width: int, ratio: float, rng: np.random.Generator
    ) -> tuple[int, int] | None:
        """Draws the height and width of a part with a ratio; None if no part fits."""
        least, most = (part * height * width for part in self.area)
        first, last = (round(math.sqrt(area / ratio)) for area in (least, most))
        if round(last * ratio) > width:
            last = int((width + 0.5 - 1e-7) / ratio)
            last -= round(last * ratio) > width
        last = min(last, height)
        first = min(first, last)
        h = first + below(last - first + 1, rng) if first < last else first
        # Rounding may move the area out of its range.
        h += round(h * ratio) * h < least
        h -= round(h * ratio) * h > most
        w = round(h * ratio)
        if not (least <= w * h <= most and 0 < w <= width and 0 < h <= height):
            return None
        return h, w


@dataclasses.dataclass(frozen=True)
class Resize(HostTransform):
    """Resizes to exactly `size` pixels."""

    in_eval = True
    moves_pixels = True
    output_size = to_size

    size: Given = None
    interpolation: Given = key(
        "bilinear", "Filter of the resize.", choices=INTERPOLATIONS
    )

    def target(self, size: Size) -> Size:
        """Returns the height and width that an image of a size is resized to."""
        return pair(self.size)

    def __call__(self, image: Before, rng: np.random.Generator) -> After:
        return _resize_to(image, self.target(image.shape[:2]), self.interpolation)


@dataclasses.dataclass(frozen=True)
class ResizeSmall(HostTransform):
    """Resizes with fixed aspect ratio until the image just covers `size`.

    If `size` is one number, the short side gets this number of pixels; otherwise it is
    (height, width).
    """

    in_eval = True
    moves_pixels = True

    size: Given
    interpolation: Given = key(
        "bilinear", "Filter of the resize.", choices=INTERPOLATIONS
    )

    def target(self, size: Size) -> Size:
        """Returns the height and width that an image of a size is resized to."""
        return covering_size(size, pair(self.size), self.interpolation)

    def __call__(self, image: Before, rng: np.random.Generator) -> After:
        return _resize_to(image, self.target(image.shape[:2]), self.interpolation)

    def output_size(self, before: Size | None) -> None:
        return None  # The long side differs from image to image.


@dataclasses.dataclass(frozen=True)
class CentralCrop(HostTransform):
    """Cuts `size` pixels out of the middle."""

    in_eval = True
    moves_pixels = True
    output_size = to_size

    size: Given = None
    down: Given = key(
        False,
        "Round half a pixel of the margin down, as big_vision and Hugging Face do, "
        "instead of to even.",
    )

    @property
    def sides(self) -> Size:
        """Height and width of the central part."""
        return pair(self.size)

    def corner(self, size: Size) -> Size:
        """Returns the top and left of the crop in an image of a height and width."""
        return tuple(
            centre_crop_start(side, crop, self.down)
            for side, crop in zip(size, self.sides, strict=True)
        )

    def __call__(self, image: Before, rng: np.random.Generator) -> After:
        _room(image, self.size)
        (top, left), (height, width) = self.corner(image.shape[:2]), pair(self.size)
        return image[top : top + height, left : left + width]


@dataclasses.dataclass(frozen=True)
class RandomCrop(HostTransform):
    """Cuts `size` pixels out at a random position."""

    moves_pixels = True
    output_size = to_size

    size: Given = None

    def __call__(self, image: Before, rng: np.random.Generator) -> After:
        (top, left), (height, width) = _room(image, self.size), pair(self.size)
        top, left = below(top + 1, rng), below(left + 1, rng)
        return image[top : top + height, left : left + width]


def crops_of_file(
    crops: Sequence[RandomResizedCrop],
    data: bytes,
    channels: int,
    rng: np.random.Generator,
    max_megapixels: float,
) -> list[np.ndarray]:
    """Decodes the rows of an image file that its crops need, once, and cuts the crops.

    If all parts have at least twice the size of their results, and are antialiased, a
    JPEG is shrunk while it is decoded.
    """
    header, pixels, shrink = decode.read_jpeg_header(data), None, 1
    if header is None:
        pixels = decode.decode(data, channels, max_megapixels=max_megapixels)
        boxes = [crop.box(*pixels.shape[:2], rng) for crop in crops]
    else:
        decode.check_size((header.height, header.width), max_megapixels)
        boxes = [crop.box(header.height, header.width, rng) for crop in crops]
        times = min(
            min(height / pair(crop.size)[0], width / pair(crop.size)[1])
            for crop, (_, _, height, width) in zip(crops, boxes, strict=True)
        )
        if all(crop.antialias for crop in crops):
            shrink = next((n for n in decode.JPEG_SHRINKS if n <= times), 1)
        stop = max(top + height for top, _, height, _ in boxes)
        rough = crops[0].rough
        pixels = decode.decode_jpeg(data, header, channels, stop, shrink, rough)
    if pixels is None:  # Damaged, or only Pillow can decode it.
        pixels = decode.decode(data, channels, max_megapixels=max_megapixels)
        shrink = 1
    return [
        crop.cut(pixels, box, shrink) for crop, box in zip(crops, boxes, strict=True)
    ]


def _room(image: np.ndarray, size: Given) -> tuple[int, int]:
    """Returns the rows and columns of an image minus those of the crop."""
    height, width = pair(size)
    room = image.shape[0] - height, image.shape[1] - width
    if min(room) < 0:
        raise TooSmall(
            f"crop of {height}x{width} from an image of "
            f"{image.shape[0]}x{image.shape[1]}: put resize_small(({height}, {width})) "
            "before it"
        )
    return room


def below(stop: int, rng: np.random.Generator) -> int:
    """Draws a whole number from 0 to `stop` - 1."""
    # NumPy may change the stream of `integers`, but not that of `random`.
    return int(rng.random() * stop)


def covering_size(
    size: tuple[int, int], least: tuple[int, int], interpolation: str = "bilinear"
) -> tuple[int, int]:
    """Returns the height and width of an image that is resized until it covers `least`.

    If `least` is square, the long side is rounded down, as in torchvision's Resize;
    otherwise both sides are rounded. timm does the same. With filters of `TENSORFLOW`
    both sides are always rounded, as in big_vision's `resize_small`.
    """
    height, width = size
    rows, columns = least
    if rows == columns and interpolation in TENSORFLOW:
        ratio = np.float32(rows) / np.float32(min(size))  # As in TensorFlow.
        return round(height * ratio), round(width * ratio)
    if rows == columns:
        short = min(size)
        return int(rows * height / short), int(rows * width / short)
    ratio = min(height / rows, width / columns)
    return round(height / ratio), round(width / ratio)


def centre_crop_start(length: int, crop: int, down: bool = False) -> int:
    """Returns the first row (or column) of the central `crop` of `length` pixels.

    Half a pixel is rounded to even, as in torchvision's CenterCrop, or down if `down`.
    The result is negative if the crop is larger.
    """
    return (length - crop) // 2 if down else round((length - crop) / 2)


def _resize_to(image: Before, size: Size, interpolation: str) -> After:
    """Resizes as `resize_all`; refuses results that may not fit the memory."""
    if math.prod(size) > MAX_PIXELS:
        raise decode.DamagedImage(
            f"has {image.shape[1]}x{image.shape[0]} pixels, which become "
            f"{size[1]}x{size[0]} when they are resized, too many"
        )
    return resize_all(image, size, interpolation)


def resize_all(
    image: Before, size: tuple[int, int], interpolation: str = "bilinear"
) -> After:
    """Resizes to (height, width) with a filter of `INTERPOLATIONS`."""
    if image.shape[:2] == size:
        return image
    whole = (0, 0, *image.shape[:2])
    return resize_box(image, whole, size, interpolation)


def resize_box(
    image: Before,
    box: Box,
    size: tuple[int, int],
    interpolation: str = "bilinear",
) -> After:
    """Resizes a part of an image with a filter of `INTERPOLATIONS`.

    Args:
      image: image to resize.
      box: top, left, height and width of the part in pixels; with Pillow's filters also
        fractions.
      size: height and width of the result.
      interpolation: filter.
    """
    if image.dtype == np.int16:
        return nearest(image, box, size)
    top, left, height, width = box
    if interpolation in TENSORFLOW:
        part = image[top : top + height, left : left + width]
        return _by_opencv(part, size, TENSORFLOW[interpolation])
    resample = PILLOW[interpolation]
    # Rounding may place fractions slightly beyond the border.
    bottom, right = np.minimum((top + height, left + width), image.shape[:2]).tolist()
    box, rows_last = (left, top, right, bottom), size[::-1]
    if image.dtype == np.uint8 and image.shape[-1] == 3:
        picture = Image.fromarray(np.ascontiguousarray(image))
        return np.array(picture.resize(rows_last, resample, box=box))
    # Pillow supports three channels only with 8 bits, and one channel of 8 bits or
    # floats.
    exact = np.uint8 if image.dtype == np.uint8 else np.float32
    bands = [
        Image.fromarray(band.astype(exact)).resize(rows_last, resample, box=box)
        for band in np.moveaxis(image, -1, 0)
    ]
    out = np.stack([np.array(band) for band in bands], axis=-1)
    if image.dtype == np.uint16:
        out = out.round().clip(0, 65_535)
    return out.astype(image.dtype, copy=False)


def nearest(
    maps: Int16[np.ndarray, "H W C"], box: Box, size: tuple[int, int]
) -> Int16[np.ndarray, "h w C"]:
    """Resizes a part of label maps to the nearest pixels."""
    places = []
    for axis, length in enumerate(size):
        centres = box[axis] + (np.arange(length) + 0.5) * (box[2 + axis] / length)
        places.append(centres.astype(np.intp).clip(0, maps.shape[axis] - 1))
    return maps[np.ix_(*places)]


def resize_fast(image: Before, size: tuple[int, int], antialias: bool = True) -> After:
    """Resizes nearly as `resize_all` does, in a third of the time.

    Without `antialias`, fine detail becomes noise when an image shrinks.
    """
    if image.dtype == np.int16:
        return resize_all(image, size)
    if image.shape[-1] > _MOST_BANDS:
        parts = _of_few_bands(image, _MOST_BANDS)
        return np.concatenate([resize_fast(p, size, antialias) for p in parts], axis=-1)
    if antialias:
        times = image.shape[0] / size[0], image.shape[1] / size[1]
        if max(times) > _FAST_UP_TO:
            return resize_all(image, size)
        if max(times) > 1:
            down, across = map(_low_pass, times)
            border = cv2.BORDER_REPLICATE
            low = cv2.sepFilter2D(image, -1, across, down, borderType=border)
            image = low.reshape(image.shape)  # OpenCV drops an axis of one channel.
    return _by_opencv(image, size, cv2.INTER_LINEAR)


def _by_opencv(image: Before, size: tuple[int, int], how: int) -> After:
    """Resizes with a filter of `TENSORFLOW`; values differ by at most 1 from TensorFlow.

    With "area" they differ by at most 1.3 if one side grows and the other shrinks.
    """
    area = how == cv2.INTER_AREA
    most = _MOST_BANDS_OF_AREA if area else _MOST_BANDS
    if image.shape[-1] > most:
        parts = _of_few_bands(image, most)
        return np.concatenate([_by_opencv(p, size, how) for p in parts], axis=-1)
    smaller = tuple(map(min, size, image.shape[:2]))
    if area and smaller not in (size, image.shape[:2]):
        # OpenCV averages an area only if no side grows.
        image = _by_opencv(image, smaller, how)
    out = cv2.resize(image, size[::-1], interpolation=how)
    return out.reshape(*size, -1)  # OpenCV drops an axis of one channel.


def _of_few_bands(image: Before, most: int) -> list[Before]:
    return np.split(image, range(most, image.shape[-1], most), axis=-1)


def _low_pass(times: float) -> Float32[np.ndarray, " taps"]:
    """Returns a low-pass filter: interpolated after it, images are nearly antialiased.

    Together both approximate the tent filter, exactly if the image keeps its size or is
    halved: then four pixels have the weights 1, 3, 3, 1.
    """
    if times <= 1:
        return np.ones(1, np.float32)
    side = min((times - 1) / 4, 1 / 3)
    return np.array([side, 1 - 2 * side, side], np.float32)
