"""Classification of a split: accuracy, loss, calibration and confusion matrix.

Classes of the data and of the model are matched by their names. Letters: N examples.
"""

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import Outputs, Wanted
from vit_jax.evaluators.protocol import Confusion, Evaluator, Pass, Scored, mean
from vit_jax.evaluators.splits import EvalSplit, ModelClassesConfig

BINS = 15
_MAX_CLASSES = 2_000  # A confusion matrix with more would be gigabytes, and unreadable.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassificationConfig(ModelClassesConfig):
    """Accuracy, loss and calibration of a classifier."""

    fractions: ClassVar = (
        *("top1", "top5", "ece", "balanced_accuracy", "macro_f1"),
        *("worst_class_recall", "majority_baseline"),
    )

    kind: str = key("classification", "Kind of evaluation.")
    split: str = key("", 'Split to evaluate; "" is the test split of the data set.')
    only_present_classes: bool | None = key(
        None,
        "Whether predictions are restricted to classes of the data. None: yes, if the "
        "data names fewer classes than the model has. True, for data that names all "
        "classes: they are restricted to the labels that occur.",
        reason="ImageNet-A (arXiv:1907.07174) and ImageNet-R (arXiv:2006.16241)",
    )

    def open(self, name, splits):
        if splits.multi_label:
            raise UserError(
                f"evals.{name}: data.multi_label=True has several labels per image: "
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
    """Returns the classes that may be predicted, () for all, and a line to print."""
    present, option = sorted(split.classes), config.only_present_classes
    if option and len(present) == num_classes:
        present = np.unique(split.labels).tolist()
    if len(present) == num_classes:
        return (), ""
    restricted = option is None or option
    answers = f"these {len(present):,} only" if restricted else f"all {num_classes:,}"
    note = f"possible answers: {answers} (only_present_classes={restricted})"
    return tuple(present) if restricted else (), note


def score(
    outputs: Outputs,
    num_classes: int,
    allowed: tuple[int, ...] = (),
    class_names: tuple[str, ...] = (),
) -> Scored:
    """Scores predictions against one label each.

    The metrics are top1, top5 (with more than five classes), loss (nats), ece,
    balanced_accuracy (mean accuracy of the classes that occur), worst_class_recall (the
    lowest of these accuracies), macro_f1 (mean of their F1 scores), majority_baseline
    (the accuracy of always predicting the most frequent class) and examples. If `allowed` is not (), only these classes are predicted,
    and their number is a metric too. There is a confusion matrix for up to 2,000
    classes.
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
    recalls = hits / np.maximum(counts, 1)
    metrics |= {
        "loss": mean(answers.losses),
        "ece": calibration_error(answers.confidence, right[:, 0]),
        "balanced_accuracy": mean(recalls, occurs),
        "worst_class_recall": float(recalls[occurs].min()),
        "macro_f1": mean(2 * hits / np.maximum(counts + predicted, 1), occurs),
        "majority_baseline": float(counts.max() / len(labels)),
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
    """Returns the expected calibration error (arXiv:1706.04599, equation 3).

    Confidence is the softmax probability of the predicted class. It is divided into 15
    equally wide bins, (0, 1/15] to (14/15, 1]. The error is the mean over the examples
    of the difference between accuracy and mean confidence in the example's bin.
    """
    edges = np.linspace(0, 1, BINS + 1)[1:-1]
    bins = np.searchsorted(edges, confidence.astype(np.float64))
    difference = np.bincount(
        bins, right.astype(np.float64) - confidence, minlength=BINS
    )
    return float(np.abs(difference).sum() / len(right))
