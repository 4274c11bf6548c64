"""Results of `python -m vit_jax.evaluate`: a table, JSON and confusion matrices.

Letters: K classes.
"""

import csv
import io
import json
import os

import numpy as np
from etils import epath
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFont

from vit_jax.command_line.files import replace_image, replace_text, writing_out
from vit_jax.command_line.printing import printable
from vit_jax.evaluators import fonts
from vit_jax.evaluators.metric_names import fewer_images, is_beside, text
from vit_jax.evaluators.protocol import Confusion

FILE = "evaluate.json"
# Sizes in the picture of a confusion matrix, in pixels.
_SIDE = 900  # Approximate width of the matrix.
_CELLS = (1, 44)  # Smallest and largest width of a cell.
_NAMED = 13  # Smallest width of a cell to write the names of classes.
_COUNTED = 26  # Smallest width of a cell to write counts.
_MARGIN, _BAR, _FONT_SIZE = 12, 120, 12
_PAPER, _INK, _GRID = (255, 255, 255), (20, 20, 20), (210, 210, 210)
_DARK = np.array((8, 48, 107))  # Colour of a cell with all examples of its true class.
_GOOD = (66, 146, 198)
_MAX_LETTERS = 24  # Longest name that is written in full.


def prepare(folder: str | os.PathLike) -> None:
    """Creates the folder and writes to it, to fail before any evaluation runs."""
    trial = epath.Path(folder) / f".{FILE}.new"
    with writing_out(folder):
        trial.parent.mkdir(parents=True, exist_ok=True)
        trial.write_text("")
        trial.unlink()


def write(
    folder: str | os.PathLike, report: dict, tables: dict[str, Confusion]
) -> list[str]:
    """Writes evaluate.json, and each confusion matrix as a picture and a CSV table.

    Returns:
      The names of the files.

    Raises:
      UserError: the folder cannot be written.
    """
    folder, written = epath.Path(folder), []
    with writing_out(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            picture, numbers = f"{name}_confusion.png", f"{name}_confusion.csv"
            replace_image(folder / picture, draw_confusion(table), "PNG")
            replace_text(folder / numbers, confusion_to_csv(table))
            written += [picture, numbers]
        replace_text(folder / FILE, json.dumps(report, indent=2) + "\n")
    return [FILE, *written]


def table(results: dict, tables: dict[str, Confusion]) -> str:
    """Returns evaluations as a table for a terminal, one metric per line.

    `results` has metrics by evaluation and set of parameters. For evaluations with a
    confusion matrix in `tables`, the least accurate classes are listed.
    """
    lines = []
    for name, kinds in results.items():
        for metrics in kinds.values():
            for metric, value in metrics.items():
                if is_beside(metric):
                    continue
                line = f"{name:<16} {metric:<16} {text(metric, value):>12}"
                lines.append(line + fewer_images(metric, metrics))
        if name in tables:
            lines += [f"{name:<16} {line}" for line in _worst(tables[name])]
    return "\n".join(lines)


def _worst(table: Confusion, most: int = 3) -> list[str]:
    accuracies = table.accuracies
    known = np.flatnonzero(~np.isnan(accuracies))
    order = known[np.argsort(accuracies[known], kind="stable")][:most].tolist()
    return [
        f"least accurate   {accuracies[i]:>12.2%} {printable(table.name(i))}"
        for i in order
    ]


def confusion_to_csv(confusion: Confusion) -> str:
    """Returns the confusion matrix as CSV, with one row per true class.

    Its columns: class, examples, accuracy (empty without examples), and the number of
    examples predicted as each class.
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


def draw_confusion(confusion: Confusion) -> Image.Image:
    """Draws the matrix, and beside it the accuracy of each class as a bar.

    The darker a cell, the larger its fraction of the true class. Names and counts are
    written if they fit.
    """
    counts = confusion.counts
    K = len(counts)
    cell = int(np.clip(_SIDE // K, *_CELLS))
    font = ImageFont.load_default(_FONT_SIZE)
    names = []
    if cell >= _NAMED:
        names = [fonts.choose(_cut(confusion.name(i)), _FONT_SIZE) for i in range(K)]
    width = max((round(style.getlength(name)) for name, style in names), default=40) + 8
    left, top, side = _MARGIN + width, 2 * _MARGIN + _FONT_SIZE + width, cell * K
    title = f"true class (rows) by predicted class: {counts.sum():,} "
    title += f"{confusion.counted}, {counts.trace() / max(counts.sum(), 1):.2%} right"
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


def _colours(parts: Float[np.ndarray, "K K"]) -> UInt8[np.ndarray, "K K 3"]:
    # The square root makes rare confusions visible.
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
    # The end distinguishes "terrier 7" and "terrier 8".
    half = (_MAX_LETTERS - 3) // 2
    return name if len(name) <= _MAX_LETTERS else f"{name[:half]}...{name[-half:]}"
