"""Several labels per image: average precision of each class, their mean, and F1.

Letters: N examples, K classes.
"""

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import Wanted
from vit_jax.evaluators.protocol import Evaluator, Pass, Scored, mean
from vit_jax.evaluators.splits import ModelClassesConfig

_MAX_CLASSES = 100  # Precisions by class are metrics only up to this number.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiLabelConfig(ModelClassesConfig):
    """Mean average precision and F1 of images with several labels."""

    fractions: ClassVar = ("map", "macro_f1@*", "micro_f1@*", "ap/*")

    kind: str = key("multi_label", "Kind of evaluation.")
    split: str = key("", 'Split to evaluate; "" is the test split of the data set.')
    thresholds: tuple[float, ...] = key(
        (0.5,),
        "Probabilities above which a class counts as predicted; F1 is computed at each "
        "of them.",
        reason="choosing a threshold for images with several labels",
        below=1,
    )

    def open(self, name, splits):
        if not splits.multi_label:
            raise UserError(
                f"evals.{name}.kind=multi_label needs data.multi_label=True: several "
                "labels per image"
            )
        split = splits.open(name, self, self.split, model_classes=True)
        # Labels of classes that the data set lacks are unknown.
        classes, names = sorted(split.classes), split.source.class_names
        names = tuple(names[k] for k in classes) if names else ()

        def score_outputs(outputs, stop):
            (result,) = outputs
            logits, labels = result.logits[:, classes], result.labels[:, classes]
            return Scored(score(logits, labels, self.thresholds, names))

        return Evaluator((Pass(split, Wanted(logits=True)),), score_outputs)


def score(
    logits: Float[np.ndarray, "N K"],
    labels: np.ndarray,
    thresholds: tuple[float, ...] = (0.5,),
    names: tuple[str, ...] = (),
) -> dict[str, float]:
    """Scores logits against any number of labels per image.

    Args:
      logits: logits of the classes.
      labels: 0 or 1 for each class, (N, K).
      thresholds: probabilities above which a class counts as predicted.
      names: names of the classes; numbers if empty.

    Returns:
      map, the mean average precision of the classes that occur; loss, the binary
      cross-entropies in nats, summed over the classes and averaged over the images; for
      each threshold T macro_f1@T, the mean F1 score of the classes that occur, and
      micro_f1@T, the F1 score of all labels together; ap/CLASS for up to 100 classes;
      examples.
    """
    true = labels > 0
    logits = logits.astype(np.float64)
    occurs = np.flatnonzero(true.any(0))
    precisions = {k: average_precision(logits[:, k], true[:, k]) for k in occurs}
    losses = np.logaddexp(0, np.where(true, -logits, logits)).sum(1)
    metrics = {
        "map": mean(np.array([*precisions.values()])) if len(occurs) else 0.0,
        "loss": mean(losses),
    }
    probabilities = np.exp(-np.logaddexp(0, -logits))
    for threshold in thresholds:
        macro, micro = f1_scores(probabilities >= threshold, true)
        metrics[f"macro_f1@{threshold:g}"] = macro
        metrics[f"micro_f1@{threshold:g}"] = micro
    if labels.shape[1] <= _MAX_CLASSES:
        metrics |= {
            f"ap/{names[k] if names else k}": value for k, value in precisions.items()
        }
    return metrics | {"examples": len(labels)}


def f1_scores(
    predicted: Bool[np.ndarray, "N K"], true: Bool[np.ndarray, "N K"]
) -> tuple[float, float]:
    """Returns the mean F1 score of the classes that occur, and that of all labels."""
    occurs = np.flatnonzero(true.any(0))
    right, both = (predicted & true).sum(0), predicted.sum(0) + true.sum(0)
    f1 = 2 * right / np.maximum(both, 1)
    macro = mean(f1, occurs) if len(occurs) else 0.0
    return macro, float(2 * right.sum() / max(both.sum(), 1))


def average_precision(
    scores: Float[np.ndarray, " N"], relevant: Bool[np.ndarray, " N"]
) -> float:
    """Returns the mean of the precisions at the ranks of the relevant examples.

    Examples are sorted by their scores, highest first; examples with equal scores share
    a rank. Precision is not interpolated. At least one example must be relevant.
    """
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(relevant[order])
    # The last position of each score.
    ends = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))
    gained = np.diff(hits[ends], prepend=0)
    return float((gained * hits[ends] / (ends + 1)).sum() / hits[-1])
