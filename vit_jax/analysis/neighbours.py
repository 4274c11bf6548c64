"""A picture of nearest neighbours by two networks, such as before and after training.

Letters: N images, D features, E features of the other network, Q queries, H by W pixels
of an image, C channels.
"""

import os
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Num
from PIL import Image, ImageDraw

from vit_jax.command_line.files import replace_image
from vit_jax.data import display
from vit_jax.evaluators import fonts, knn

QUERIES, NEIGHBOURS = 8, 5
TITLES = ("photograph", "nearest before training", "nearest after training")

# Sizes in pixels.
_CELL, _GAP, _GROUP_GAP, _FONT_SIZE, _TITLE = 140, 6, 28, 16, 34
_LONGEST = 3  # Largest ratio of sides; longer images show their middle.
_PAPER, _INK = (255, 255, 255), (20, 20, 20)


def spread(count: int, queries: int = QUERIES) -> list[int]:
    """Returns the middle image of each of several equal parts of all images.

    Args:
      count: number of images.
      queries: number of parts; all images are returned if there are fewer.
    """
    queries = min(queries, count)
    return [(2 * i + 1) * count // (2 * queries) for i in range(queries)]


def nearest_others(
    features: Float[np.ndarray, "N D"], queries: Sequence[int], k: int = NEIGHBOURS
) -> list[list[int]]:
    """Returns the nearest other images of each query by cosine similarity.

    Args:
      features: features of all images.
      queries: numbers of the images to compare with all others.
      k: number of neighbours; all other images if there are fewer.
    """
    nearest, _ = knn.Index(features).search(features[list(queries)], k + 1)
    return [
        [other for other in row.tolist() if other != query][:k]
        for query, row in zip(queries, nearest, strict=True)
    ]


def neighbours_figure(
    read: Callable[[int], Num[np.ndarray, "H W C"]],
    before: Float[np.ndarray, "N D"],
    after: Float[np.ndarray, "N E"],
    *,
    queries: Sequence[int] = (),
    titles: Sequence[str] = TITLES,
) -> Image.Image:
    """Draws some images, each beside its nearest neighbours by two networks.

    A row has the query, its five neighbours by the first network, and its five by the
    second one. Images keep their aspect; of an image more than three times as long as
    wide, the middle is shown.

    Args:
      read: function from the number of an image to its pixels at any size, such as
        `lambda i: preprocess.read(source[i]["image"])`. Only images that are drawn are
        read.
      before, after: features of the same images by the two networks.
      queries: numbers of the images to draw a row for; eight that are evenly spaced
        (`spread`) if empty.
      titles: titles of the query and of both groups of neighbours.

    Raises:
      ValueError: there are fewer than two images, or the networks saw different ones.
    """
    N = len(before)
    if N < 2 or len(after) != N:
        raise ValueError(
            f"features of {N} and {len(after)} images: give two or more, the same twice"
        )
    queries = list(queries) or spread(N)
    groups = [nearest_others(features, queries) for features in (before, after)]
    sizes = [1, *(max(map(len, group)) for group in groups)]
    lefts = _lefts(sizes)
    width = lefts[-1] + sizes[-1] * (_CELL + _GAP) - _GAP + _GROUP_GAP
    step = _CELL + _GAP
    sheet = Image.new("RGB", (width, _TITLE + len(queries) * step + _GAP), _PAPER)
    pen, thumbnails = ImageDraw.Draw(sheet), {}
    for title, left, size in zip(titles, lefts, sizes, strict=True):
        _write(pen, title, left, size * step - _GAP)
    for row, query in enumerate(queries):
        shown = [query], *(group[row] for group in groups)
        for numbers, left in zip(shown, lefts, strict=True):
            for column, number in enumerate(numbers):
                if number not in thumbnails:
                    thumbnails[number] = _thumbnail(read(number))
                picture = thumbnails[number]
                x = left + column * step + (_CELL - picture.width) // 2
                y = _TITLE + row * step + (_CELL - picture.height) // 2
                sheet.paste(picture, (x, y))
    return sheet


def write(path: str | os.PathLike, picture: Image.Image) -> None:
    """Writes a picture as JPEG or PNG, by its suffix; replaces a file atomically."""
    path = pathlib.Path(path)
    if path.suffix.lower() in (".jpg", ".jpeg"):
        replace_image(path, picture, "JPEG", quality=90)
    else:
        replace_image(path, picture, "PNG")


def _lefts(sizes: Sequence[int]) -> list[int]:
    """Returns the left side, in pixels, of each group of images in a row."""
    lefts = [_GROUP_GAP]
    for size in sizes[:-1]:
        lefts.append(lefts[-1] + size * (_CELL + _GAP) - _GAP + _GROUP_GAP)
    return lefts


def _thumbnail(pixels: Num[np.ndarray, "H W C"]) -> Image.Image:
    picture = Image.fromarray(display.to_rgb(pixels))
    width, height = picture.size
    keep_width = min(width, _LONGEST * height)
    keep_height = min(height, _LONGEST * width)
    left, top = (width - keep_width) // 2, (height - keep_height) // 2
    picture = picture.crop((left, top, left + keep_width, top + keep_height))
    factor = _CELL / max(picture.size)
    size = tuple(max(1, round(side * factor)) for side in picture.size)
    # Pixels of tiny images stay sharp.
    tiny = factor >= 2
    how = Image.Resampling.NEAREST if tiny else Image.Resampling.LANCZOS
    return picture.resize(size, how)


def _write(pen: ImageDraw.ImageDraw, title: str, left: int, width: int) -> None:
    """Writes a title in the middle above a group, cut to its width."""
    text, font = fonts.choose(title, _FONT_SIZE)
    while text and font.getlength(text) > width + _GROUP_GAP:
        text = text[:-1]
    middle = left + (width - font.getlength(text)) / 2
    pen.text((middle, (_TITLE - _FONT_SIZE) // 2), text, _INK, font)
