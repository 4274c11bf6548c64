"""Classification of a split: accuracy, loss, calibration and confusion matrix.

Each example counts exactly once. Classes of the data and of the model are matched by
their names. Letters: N examples, K classes, T the best classes of an example.
"""

import csv
import dataclasses
import io
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer, UInt8
from PIL import Image, ImageDraw, ImageFont

from vit_jax import fonts
from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import LOSS, TOPS, Outputs
from vit_jax.evaluators.protocol import EVALUATORS, RequiredOutputs, Scored, Stop
from vit_jax.evaluators.splits import EvalConfig, EvalSplit, EvalSplits

BINS = 15
_MAX_CLASSES = 2_000  # A confusion matrix of more has gigabytes, and is unreadable.
_WORDNET = re.compile(r"n\d{8}")  # Names of ImageNet's classes.
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
class ClassificationConfig(EvalConfig):
    """Classification of a split."""

    kind: str = key("classification", "What is evaluated.")
    split: str = key("", 'To classify; "" is the split that the data set is tested on.')

    def open(self, name, splits, num_classes):
        if splits.multi_label:
            raise UserError(
                f"evals.{name}: data.multi_label=True has no one class to classify as: "
                f"set evals.{name}.kind=multi_label"
            )
        return Classification(name, self, splits, num_classes)


class Classification:
    """Top-1, top-5, loss, calibration and accuracy per class."""

    def __init__(
        self,
        name: str,
        config: ClassificationConfig,
        splits: EvalSplits,
        num_classes: int,
    ):
        split = splits.open(name, config, config.split, model_classes=True)
        self._split = with_model_order(name, split, splits)
        self.splits, self._classes = (self._split,), num_classes

    def required_outputs(self) -> dict[str, RequiredOutputs]:
        return {"test": RequiredOutputs(self._split, frozenset((TOPS, LOSS)))}

    def score(self, outputs: dict[str, Outputs], stop: Stop) -> Scored | None:
        return score(outputs["test"], self._classes)


EVALUATORS["classification"] = ClassificationConfig


def score(outputs: Outputs, num_classes: int) -> Scored:
    """Scores predictions against one label each.

    Args:
      outputs: with TOPS and LOSS.
      num_classes: number of classes.

    Returns:
      top1, top5 (with more than five classes), loss (nats), ece, balanced_accuracy (mean
      of the accuracies of the classes that occur), macro_f1 (mean of their F1 scores),
      examples; and the confusion matrix, of up to
      2,000 classes.
    """
    labels, tops = outputs.labels, outputs.values[TOPS]
    right = tops == labels[:, None]
    counts = np.bincount(labels, minlength=num_classes)
    hits = np.bincount(labels[right[:, 0]], minlength=num_classes)
    found = np.bincount(tops[:, 0], minlength=num_classes)
    occurs = counts > 0
    f1 = 2 * hits / np.maximum(counts + found, 1)
    metrics = {"top1": float(right[:, 0].mean())}
    if num_classes > tops.shape[1]:
        metrics["top5"] = float(right.any(1).mean())
    metrics |= {
        "loss": float(outputs.values[LOSS].mean(dtype=np.float64)),
        "ece": calibration_error(outputs.values["confidence"], right[:, 0]),
        "balanced_accuracy": float((hits[occurs] / counts[occurs]).mean()),
        "macro_f1": float(f1[occurs].mean()),
        "examples": len(labels),
    }
    confusion = None
    if num_classes <= _MAX_CLASSES:
        cells = labels.astype(np.int64) * num_classes + tops[:, 0]
        confusion = np.bincount(cells, minlength=num_classes**2).reshape(
            num_classes, num_classes
        )
    return Scored(metrics, confusion)


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


def with_model_order(name: str, split: EvalSplit, splits: EvalSplits) -> EvalSplit:
    """Returns the split with the model's indices of its classes."""
    names, model_names = split.source.class_names, splits.class_names
    if not model_names:
        return split
    indices = match_class_names(names, model_names)
    if indices is None:
        if note := describe_name_difference(names, model_names):
            splits.notes.append(f"evals.{name}: {split.title}: {note}")
        return split
    return splits.relabel(
        split,
        indices,
        f"evals.{name}: {split.title} numbers the model's classes in another order: "
        "they are matched by their names",
    )


def match_class_names(
    names: Sequence[str], model_names: Sequence[str]
) -> Integer[np.ndarray, " K"] | None:
    """Returns the model's index of each class, if the model has another order.

    Case, "_" and "-" do not count.

    Args:
      names: of the data, in the order of its labels.
      model_names: of the model, in the order of its outputs.

    Returns:
      None if the order is the same, or if the names do not decide it: there are none, or
      not the same ones on both sides, each once.
    """
    plain, known = list(map(_plain, names)), list(map(_plain, model_names))
    places = {name: place for place, name in enumerate(known)}
    same = plain == known or sorted(plain) != sorted(known)
    if same or len(places) < len(known):
        return None
    return np.array([places[name] for name in plain])


def describe_name_difference(names: Sequence[str], model_names: Sequence[str]) -> str:
    """Returns a note on names that differ; "" if they agree, or need not.

    They need not agree if one side has none, or has those of WordNet: ImageNet's classes
    are in the order of WordNet whatever their names are.

    Args:
      names, model_names: as in `match_class_names`, equally many.
    """
    if not names or not model_names or _wordnet(names) or _wordnet(model_names):
        return ""
    pairs = list(zip(map(_plain, names), map(_plain, model_names), strict=True))
    others = [i for i, (one, other) in enumerate(pairs) if one != other]
    if not others:
        return ""
    first = others[0]
    return (
        f"{len(others)} of {len(names)} classes are not called what the model calls "
        f"them (class {first} is {names[first]!r}, the model's {model_names[first]!r}): "
        "they are compared by their numbers"
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def _wordnet(names: Sequence[str]) -> bool:
    return list(names) == sorted(names) and all(map(_WORDNET.fullmatch, names))


class Confusion(NamedTuple):
    """A confusion matrix.

    Attributes:
      counts: examples of each true class (rows) by predicted class (columns).
      class_names: in label order; empty gives numbers.
    """

    counts: Integer[np.ndarray, "K K"]
    class_names: tuple[str, ...] = ()

    @property
    def accuracies(self) -> Float[np.ndarray, " K"]:
        """Returns the accuracy of each class; NaN without examples."""
        examples = self.counts.sum(1)
        with np.errstate(invalid="ignore"):
            return self.counts.diagonal() / np.where(examples, examples, np.nan)

    def name(self, number: int) -> str:
        """Returns the name of a class."""
        return self.class_names[number] if self.class_names else f"class {number}"


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
