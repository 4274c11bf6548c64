"""Classification of a split: accuracy, loss, calibration and confusion matrix.

Each example counts exactly once. Classes of the data and of the model are matched by
their names. Letters: N examples, K classes, T the best classes of an example.
"""

import csv
import dataclasses
import io
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image, ImageDraw, ImageFont

from vit_jax import fonts
from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import Outputs, Wanted
from vit_jax.evaluators.protocol import (
    Confusion,
    Evaluator,
    Pass,
    Scored,
    mean,
)
from vit_jax.evaluators.splits import EvalSplit, ModelClassesConfig

BINS = 15
_MAX_CLASSES = 2_000  # A confusion matrix of more has gigabytes, and is unreadable.
# The drawing of a confusion matrix, in pixels.
_SIDE = 900  # Width of the matrix, about.
_CELLS = (1, 44)  # Smallest and largest width of a class.
_NAMED = 13  # Smallest width of a class with a name.
_COUNTED = 26  # Smallest width of a class with counts.
_MARGIN, _BAR, _FONT_SIZE = 12, 120, 12
_PAPER, _INK, _GRID = (255, 255, 255), (20, 20, 20), (210, 210, 210)
_DARK = np.array((8, 48, 107))  # A class that is always predicted as one other.
_GOOD = (66, 146, 198)
_MAX_LETTERS = 24  # Of a name.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationConfig(ModelClassesConfig):
    """Classification of a split."""

    fractions: ClassVar = ("top1", "top5", "ece", "balanced_accuracy", "macro_f1")

    kind: str = key("classification", "What is evaluated.")
    split: str = key("", 'To classify; "" is the split that the data set is tested on.')
    only_present_classes: bool | None = key(
        None,
        "Whether the answer is one of the classes that the data has, and not any of the "
        "model's. None: yes if the data names fewer classes than the model has, as for "
        "ImageNet-A and -R. True for data that names them all: of the labels that occur.",
    )

    def open(self, name, splits):
        if splits.multi_label:
            raise UserError(
                f"evals.{name}: data.multi_label=True has no one class to classify as: "
                f"set evals.{name}.kind=multi_label"
            )
        split = splits.open(name, self, self.split, model_classes=True)
        allowed, note = _allowed(self, split, splits.num_classes)
        if note:
            splits.notes.append(f"evals.{name}: {note}")
        names = split.source.class_names
        wanted = Wanted(predictions=True, losses=True, restricted=allowed)
        return Evaluator(
            (Pass(split, wanted),),
            lambda outputs, stop: score(*outputs, splits.num_classes, allowed, names),
        )


def _allowed(
    config: ClassificationConfig, split: EvalSplit, num_classes: int
) -> tuple[tuple[int, ...], str]:
    """Returns the classes that may be answered, () for all, and a line for the user."""
    present, option = sorted(split.classes), config.only_present_classes
    if option and len(present) == num_classes:
        present = np.unique(split.labels).tolist()
    if len(present) == num_classes:
        return (), ""
    restricted = option is None or option
    answers = f"these {len(present):,} alone" if restricted else f"all {num_classes:,}"
    note = f"answers are of {answers} (only_present_classes={restricted})"
    return tuple(present) if restricted else (), note


def score(
    outputs: Outputs,
    num_classes: int,
    allowed: tuple[int, ...] = (),
    class_names: tuple[str, ...] = (),
) -> Scored:
    """Scores predictions against one label each.

    Args:
      outputs: with predictions, or restricted ones, and their losses.
      num_classes: number of classes.
      allowed: the classes that restricted predictions choose among; () is all.
      class_names: of all classes; may be empty.

    Returns:
      top1, top5 (with more than five classes), loss (nats), ece, balanced_accuracy (mean
      of the accuracies of the classes that occur), macro_f1 (mean of their F1 scores),
      examples, and the number of allowed classes if those are not all; and the confusion
      matrix, of up to 2,000 classes.
    """
    answers = outputs.restricted if allowed else outputs.predictions
    classes = allowed or range(num_classes)
    place = np.full(num_classes, -1)
    place[list(classes)] = np.arange(len(classes))
    labels, tops = place[outputs.labels], place[answers.tops]
    num_classes = len(classes)
    right = tops == labels[:, None]
    counts = np.bincount(labels, minlength=num_classes)
    hits = np.bincount(labels[right[:, 0]], minlength=num_classes)
    predicted = np.bincount(tops[:, 0], minlength=num_classes)
    occurs = counts > 0
    metrics = {"top1": mean(right[:, 0])}
    if num_classes > tops.shape[1]:
        metrics["top5"] = mean(right.any(1))
    metrics |= {
        "loss": mean(answers.losses),
        "ece": calibration_error(answers.confidence, right[:, 0]),
        "balanced_accuracy": mean(hits / np.maximum(counts, 1), occurs),
        "macro_f1": mean(2 * hits / np.maximum(counts + predicted, 1), occurs),
        "examples": len(labels),
    }
    if allowed:
        metrics["classes"] = num_classes
    if num_classes > _MAX_CLASSES:
        return Scored(metrics)
    cells = labels.astype(np.int64) * num_classes + tops[:, 0]
    cells = np.bincount(cells, minlength=num_classes**2)
    names = tuple(class_names[k] for k in classes) if class_names else ()
    return Scored(metrics, Confusion(cells.reshape(num_classes, num_classes), names))


def calibration_error(
    confidence: Float[np.ndarray, " N"], right: Bool[np.ndarray, " N"]
) -> float:
    """Returns the expected calibration error.

    Args:
      confidence: softmax probability of the predicted class.
      right: whether the prediction is right.

    Returns:
      Mean over the examples of the difference between accuracy and mean confidence in
      their bin, out of 15 equally wide bins of confidence, (0, 1/15] to (14/15, 1].

    Source: arXiv:1706.04599, equation 3.
    """
    edges = np.linspace(0, 1, BINS + 1)[1:-1]
    bins = np.searchsorted(edges, confidence.astype(np.float64))
    difference = np.bincount(
        bins, right.astype(np.float64) - confidence, minlength=BINS
    )
    return float(np.abs(difference).sum() / len(right))


def draw_confusion(confusion: Confusion) -> Image.Image:
    """Draws the matrix, and beside it the accuracy of each class as a bar.

    The darker a cell, the larger its fraction of the true class. Names and counts are
    written if there is room for them.
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


def confusion_to_csv(confusion: Confusion) -> str:
    """Returns all numbers as a CSV table with a row per true class.

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
    half = (_MAX_LETTERS - 3) // 2
    return name if len(name) <= _MAX_LETTERS else f"{name[:half]}...{name[-half:]}"
