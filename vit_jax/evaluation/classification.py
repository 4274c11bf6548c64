"""Scores of a classifier, each example counted exactly once.

Letters: N examples, K classes, T the best classes of an example.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer

from vit_jax.evaluation.passes import LOSS, TOPS, Outputs

BINS = 15


class Scored(NamedTuple):
    """What an evaluation gives for one set of parameters.

    Attributes:
      metrics: name to number.
      confusion: examples of each true class (rows) by predicted class, or None.
    """

    metrics: dict[str, float]
    confusion: Integer[np.ndarray, "K K"] | None = None


def score(outputs: Outputs, classes: int) -> Scored:
    """Scores predictions against one label each.

    Args:
      outputs: with TOPS and LOSS.
      classes: number of classes.

    Returns:
      top1, top5 (of more than five classes), loss (nats), ece, class_mean (the mean of
      the accuracies of the classes that occur), examples; and the confusion matrix, of
      up to `MOST_CLASSES`.
    """
    labels, tops = outputs.labels, outputs.values[TOPS]
    right = tops == labels[:, None]
    counts = np.bincount(labels, minlength=classes)
    hits = np.bincount(labels[right[:, 0]], minlength=classes)
    there = counts > 0
    metrics = {"top1": float(right[:, 0].mean())}
    if classes > tops.shape[1]:
        metrics["top5"] = float(right.any(1).mean())
    metrics |= {
        "loss": float(outputs.values[LOSS].mean(dtype=np.float64)),
        "ece": calibration_error(outputs.values["confidence"], right[:, 0]),
        "class_mean": float((hits[there] / counts[there]).mean()),
        "examples": len(labels),
    }
    confusion = None
    if classes <= MOST_CLASSES:
        cells = labels.astype(np.int64) * classes + tops[:, 0]
        confusion = np.bincount(cells, minlength=classes**2).reshape(classes, classes)
    return Scored(metrics, confusion)


MOST_CLASSES = 2_000  # More make a confusion matrix of gigabytes that none can read.


def calibration_error(
    confidence: Float[np.ndarray, " N"], right: Bool[np.ndarray, " N"]
) -> float:
    """Returns the expected calibration error.

    Args:
      confidence: probability that the network gives to its first class.
      right: whether that is the true one.

    Returns:
      Mean over the examples of the difference between accuracy and mean confidence in
      the example's one of 15 equally wide bins of confidence, (0, 1/15] to (14/15, 1].

    Source: arXiv:1706.04599, equation 3.
    """
    edges = np.linspace(0, 1, BINS + 1)[1:-1]
    bins = np.searchsorted(edges, confidence.astype(np.float64))
    difference = np.bincount(
        bins, right.astype(np.float64) - confidence, minlength=BINS
    )
    return float(np.abs(difference).sum() / len(right))
