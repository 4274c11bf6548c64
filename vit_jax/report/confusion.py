"""A confusion matrix and the accuracy of each class, as a picture and as numbers."""

import csv
import io
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Integer, UInt8
from PIL import Image, ImageDraw, ImageFont

from vit_jax.report import lettering

_SIDE = 900  # Pixels of the matrix, about.
_CELLS = (1, 44)  # Pixels of a class, least and most.
_NAMED = 13  # Pixels of a class from which it is named ...
_COUNTED = 26  # ... and its counts are written.
_MARGIN, _BAR, _FONT_SIZE = 12, 120, 12
_PAPER, _INK, _GRID = (255, 255, 255), (20, 20, 20), (210, 210, 210)
_DARK = np.array((8, 48, 107))  # Of a class that is always predicted as one.
_GOOD = (66, 146, 198)
_LONGEST = 24  # Letters of a name.


class Confusion(NamedTuple):
    """How often which class was taken for which.

    Attributes:
      counts: examples of each true class (rows) by predicted class (columns).
      class_names: in label order; empty gives numbers.
    """

    counts: Integer[np.ndarray, "K K"]
    class_names: tuple[str, ...] = ()

    @property
    def accuracies(self) -> Float[np.ndarray, " K"]:
        """Returns the part of each class that is right; NaN where it has no example."""
        examples = self.counts.sum(1)
        with np.errstate(invalid="ignore"):
            return self.counts.diagonal() / np.where(examples, examples, np.nan)

    def name(self, number: int) -> str:
        """Returns the name of a class."""
        return self.class_names[number] if self.class_names else f"class {number}"


def draw(confusion: Confusion) -> Image.Image:
    """Draws the matrix, and beside it the accuracy of each class as a bar.

    A cell is the darker, the larger its part of the true class. Names and counts are
    written as far as there is room for them.
    """
    counts = confusion.counts
    K = len(counts)
    cell = int(np.clip(_SIDE // K, *_CELLS))
    font = ImageFont.load_default(_FONT_SIZE)
    names = []
    if cell >= _NAMED:
        names = [
            lettering.choose(_cut(confusion.name(i)), _FONT_SIZE) for i in range(K)
        ]
    width = max((round(own.getlength(name)) for name, own in names), default=40) + 8
    left, top, side = _MARGIN + width, 2 * _MARGIN + _FONT_SIZE + width, cell * K
    title = f"true class (rows) by predicted class: {counts.sum():,} images, "
    title += f"{counts.trace() / max(counts.sum(), 1):.2%} right"
    across = max(left + side + _BAR + 60, _MARGIN + round(font.getlength(title)))
    picture = Image.new("RGB", (across + _MARGIN, top + side + _MARGIN), _PAPER)
    parts = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    body = Image.fromarray(_colours(parts)).resize(
        (side, side), Image.Resampling.NEAREST
    )
    picture.paste(body, (left, top))
    pen = ImageDraw.Draw(picture)
    pen.rectangle((left - 1, top - 1, left + side, top + side), outline=_GRID)
    pen.text((_MARGIN, _MARGIN // 2), title, _INK, font)
    if names:
        _write_names(picture, names, (left, top), cell)
    else:
        _write_numbers(pen, K, (left, top), cell, font)
    if cell >= _COUNTED:
        _write_counts(pen, counts, parts, (left, top), cell)
    _draw_bars(pen, confusion.accuracies, (left + side + 8, top), cell, font)
    return picture


def to_csv(confusion: Confusion) -> str:
    """Returns all numbers as a table: a row for each true class.

    Its columns: class, examples, accuracy (empty without examples), and the examples
    that were taken for each class.
    """
    K = len(confusion.counts)
    names = [confusion.name(i) for i in range(K)]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["class", "examples", "accuracy", *names])
    for i, accuracy in enumerate(confusion.accuracies.tolist()):
        row = confusion.counts[i].tolist()
        shown = "" if np.isnan(accuracy) else f"{accuracy:.6f}"
        table.writerow([names[i], sum(row), shown, *row])
    return text.getvalue()


def _colours(parts: Float[np.ndarray, "K K"]) -> UInt8[np.ndarray, "K K 3"]:
    # The root shows rare confusions too.
    depth = np.sqrt(parts)[..., None]
    return (255 + depth * (_DARK - 255)).round().astype(np.uint8)


def _write_names(picture, names, corner, cell) -> None:
    left, top = corner
    pen, middle = ImageDraw.Draw(picture), cell / 2
    for i, (name, font) in enumerate(names):
        place = left - 6, top + i * cell + middle
        pen.text(place, name, _INK, font, anchor="rm")
        length = round(font.getlength(name)) + 2
        upright = Image.new("RGB", (length, _FONT_SIZE + 4), _PAPER)
        place = 0, (_FONT_SIZE + 4) / 2
        ImageDraw.Draw(upright).text(place, name, _INK, font, anchor="lm")
        upright = upright.rotate(90, expand=True)
        x = round(left + i * cell + middle - upright.width / 2)
        picture.paste(upright, (x, top - 6 - upright.height))


def _write_numbers(pen, classes, corner, cell, font) -> None:
    left, top = corner
    every = next(n for n in (10, 20, 50, 100, 200, 500) if n * cell >= 30)
    for i in range(0, classes, every):
        at = i * cell + cell / 2
        pen.text((left - 6, top + at), str(i), _INK, font, anchor="rm")
        pen.text((left + at, top - 6), str(i), _INK, font, anchor="ms")


def _write_counts(pen, counts, parts, corner, cell) -> None:
    left, top = corner
    font = ImageFont.load_default(_FONT_SIZE - 2)
    for i, j in zip(*np.nonzero(counts), strict=True):
        text = str(counts[i, j])
        if font.getlength(text) > cell - 2:
            continue
        place = left + j * cell + cell / 2, top + i * cell + cell / 2
        pen.text(place, text, _PAPER if parts[i, j] > 0.2 else _INK, font, anchor="mm")


def _draw_bars(pen, accuracies, corner, cell, font) -> None:
    left, top = corner
    side = len(accuracies) * cell
    for tenth in (0, 5, 10):
        x = left + _BAR * tenth / 10
        pen.line((x, top, x, top + side), _GRID)
        pen.text((x, top - 6), f"{tenth * 10}%", _INK, font, anchor="ms")
    for i, accuracy in enumerate(accuracies):
        if np.isnan(accuracy):
            continue
        y, gap = top + i * cell, 2 if cell >= _NAMED else 0
        end = left + _BAR * accuracy, y + max(cell - 1 - gap, 0)
        if end[0] >= left + 1:
            pen.rectangle((left, y + gap, *end), fill=_GOOD)
        if cell >= _NAMED:
            place = left + _BAR + 10, y + cell / 2
            pen.text(place, f"{accuracy:.1%}", _INK, font, anchor="lm")


def _cut(name: str) -> str:
    # The end tells "terrier 7" from "terrier 8".
    half = (_LONGEST - 3) // 2
    return name if len(name) <= _LONGEST else f"{name[:half]}...{name[-half:]}"
