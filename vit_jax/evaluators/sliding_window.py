"""Predicts the class of every pixel of images of any size from windows.

The windows have the network's input size. As in mmsegmentation's `slide_inference`, an
image is resized, windows overlap, their logits are averaged, and the average is resized
to the image. An image that is smaller than a window is padded with the mean colour,
where mmsegmentation gives the network the smaller image (docs/decisions.md). Letters: H
by W pixels of an image, h by w of a window, y by x cells of a grid, C channels, L
classes, B windows.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
from jaxtyping import Float, Int16, Num

from vit_jax.data.transforms.host import covering_size, resize_all, resize_fast
from vit_jax.data.transforms.scale_crop import padded

RESIZES = ("cover", "none", "whole")

Logits = Float[np.ndarray, "B y x L"]
LabelMap = Int16[np.ndarray, "H W"]
T = TypeVar("T")

_MOST_BYTES = 1 << 28  # Logits that are resized to an image's original size at a time.


@dataclasses.dataclass(frozen=True)
class Sliding:
    """How an image is divided into windows.

    Attributes:
      window: height and width of a window.
      resize: "cover" resizes an image, with its aspect ratio kept, until it just covers
        a window; "none" keeps its size, padded if it is smaller than a window; "whole"
        resizes all of it to one window.
      overlap: smallest fraction of a window's side that the next window overlaps.
      interpolation: filter of the resize, one of `host.INTERPOLATIONS`.
      mean: colour of the padding, one value or one per channel, as a fraction of white.
    """

    window: tuple[int, int]
    resize: str = "cover"
    overlap: float = 1 / 3
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.0,)

    def label_maps(
        self,
        images: Iterable[tuple[T, Num[np.ndarray, "H W C"] | None]],
        logits_of: Callable[[Num[np.ndarray, "B h w C"]], Logits],
        batch_size: int,
    ) -> Iterator[tuple[T, LabelMap | None]]:
        """Yields the class of each pixel of each image, in order, at the images' sizes.

        Args:
          images: pairs of any object, which is returned beside the classes, and an
            image, or None, which gives None. They are read ahead by about a batch of
            windows.
          logits_of: function of windows that returns their logits; it is called with
            `batch_size` windows, and at the end with the rest.
          batch_size: number of windows per batch.
        """
        waiting, cut = collections.deque(), []

        def classify():
            results = logits_of(np.stack([window for *_, window in cut]))
            for (canvas, corner, _), logits in zip(cut, results, strict=True):
                canvas.add(corner, logits)
            cut.clear()

        def done():
            while waiting and (waiting[0][1] is None or not waiting[0][1].missing):
                beside, canvas = waiting.popleft()
                yield beside, None if canvas is None else canvas.label_map()

        for beside, image in images:
            canvas = None if image is None else _Canvas(image.shape[:2], self)
            waiting.append((beside, canvas))
            for corner, window in self._windows(image, canvas) if canvas else ():
                cut.append((canvas, corner, window))
                if len(cut) == batch_size:
                    classify()
            yield from done()
        if cut:
            classify()
        yield from done()

    def _windows(self, image, canvas):
        """Yields the corners and windows of an image."""
        image, (rows, columns) = self._fit(image, canvas.size), self.window
        for top, left in list(canvas.missing):
            yield (top, left), image[top : top + rows, left : left + columns]

    def fitted(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns the height and width that an image is resized to."""
        if self.resize == "whole":
            return self.window
        if self.resize == "none":
            return size
        return covering_size(size, self.window, self.interpolation)

    def _fit(self, image, least):
        """Returns an image resized and, if it is smaller than a window, padded."""
        size = self.fitted(image.shape[:2])
        if image.shape[:2] != size:
            image = resize_all(image, size, self.interpolation)
        return padded(image, least, [255 * level for level in self.mean])


class _Canvas:
    """Sums the logits of the windows of one image.

    Attributes:
      size: height and width of the resized image, at least those of a window.
      missing: top and left of the windows that have not been added yet.
    """

    def __init__(self, size: tuple[int, int], how: Sliding):
        self._original, self._how = size, how
        self._fitted = how.fitted(size)
        self.size = tuple(map(max, self._fitted, how.window))
        starts = [
            _starts(length, window, how.overlap)
            for length, window in zip(self.size, how.window, strict=True)
        ]
        self.missing = list(itertools.product(*starts))
        self._counts = [
            _coverage(length, window, first)
            for length, window, first in zip(self.size, how.window, starts, strict=True)
        ]
        self._sum = None

    def add(self, corner: tuple[int, int], logits: Float[np.ndarray, "y x L"]) -> None:
        """Adds the logits of the window at a corner."""
        self.missing.remove(corner)
        if self._how.window == self.size:
            self._sum = logits
            return
        if self._sum is None:
            self._sum = np.zeros((*self.size, logits.shape[-1]), np.float32)
        (top, left), (rows, columns) = corner, self._how.window
        part = self._sum[top : top + rows, left : left + columns]
        part += interpolate(logits, self._how.window)

    def label_map(self) -> LabelMap:
        """Returns the class of each pixel of the image at its original size."""
        logits, window = self._sum, self._how.window
        if window != self.size:
            down, across = self._counts
            logits /= (down[:, None] * across)[..., None]
        if self._fitted != self.size:  # The padding has no classes.
            logits = interpolate(logits, self.size)
            logits = logits[: self._fitted[0], : self._fitted[1]]
        return largest(logits, self._original)


def _starts(length: int, window: int, overlap: float) -> list[int]:
    """Returns the first pixels of the fewest windows that overlap enough.

    The last window ends with the image, and may overlap more, as in mmsegmentation.
    """
    if length <= window:
        return [0]
    step = max(1, math.floor(window * (1 - overlap)))
    count = 1 + math.ceil((length - window) / step)
    return [min(i * step, length - window) for i in range(count)]


def _coverage(length: int, window: int, starts: list[int]) -> Float[np.ndarray, " n"]:
    """Returns the number of windows that contain each pixel of one axis."""
    counts = np.zeros(length, np.float32)
    for start in starts:
        counts[start : start + window] += 1
    return counts


def interpolate(
    maps: Float[np.ndarray, "y x L"], size: tuple[int, int]
) -> Float[np.ndarray, "H W L"]:
    """Resizes maps in the same way as `segmenter.resize`."""
    if maps.shape[:2] == size:
        return maps
    return resize_fast(np.ascontiguousarray(maps), size, antialias=False)


def largest(logits: Float[np.ndarray, "y x L"], size: tuple[int, int]) -> LabelMap:
    """Returns the class with the largest resized logit, for some rows at a time."""
    step = max(1, _MOST_BYTES // (4 * size[0] * size[1]))
    classes, best = np.zeros(size, np.int16), np.full(size, -np.inf, np.float32)
    for first in range(0, logits.shape[-1], step):
        part = interpolate(logits[..., first : first + step], size)
        place = part.argmax(-1)
        value = np.take_along_axis(part, place[..., None], -1)[..., 0]
        better = value > best
        classes[better] = place[better] + first
        best[better] = value[better]
    return classes
