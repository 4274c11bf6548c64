"""Mistakes of a classifier: by class, confusions, single images, doubtful labels.

Letters: N images, K classes, D features.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer
from scipy import special

from vit_jax.evaluators.classification import BINS, calibration_error
from vit_jax.evaluators.multi_label import average_precision

NEIGHBOURS = 10
# A label is doubtful if at most the first fraction of its nearest neighbours has it,
# and at least the second fraction has another label in common.
_SAME, _OTHER = 0.1, 0.7


class ClassScores(NamedTuple):
    """Scores of one class.

    Attributes:
      name: name of the class.
      images: number of images of the class.
      recall: fraction of the class's images that are predicted as it; NaN without
        images.
      precision: fraction of the predictions of it that are right; NaN without
        predictions.
      f1: harmonic mean of recall and precision; 0 if one of them is 0 or NaN.
      average_precision: average precision over all thresholds; NaN without images.
    """

    name: str
    images: int
    recall: float
    precision: float
    f1: float
    average_precision: float


class Confusion(NamedTuple):
    """Images of one class that were predicted as another, most probable first."""

    true: int  # Index of the true class.
    predicted: int  # Index of the predicted class.
    images: list[int]


class Doubt(NamedTuple):
    """An image that resembles images of another class."""

    image: int
    same: float  # Fraction of its nearest neighbours with the same label.
    other: int  # The most frequent class of the neighbours.
    share: float  # Fraction of the neighbours with that class.


@dataclasses.dataclass(frozen=True)
class Answers:
    """Outputs of a network for images, and their labels.

    Attributes:
      logits: logits of the classes, (N, K).
      labels: 0 or 1 for each class, (N, K).
      class_names: class names in label order.
      one_each: whether an image has exactly one class.
    """

    logits: Float[np.ndarray, "N K"]
    labels: Integer[np.ndarray, "N K"]
    class_names: tuple[str, ...]
    one_each: bool

    @functools.cached_property
    def probabilities(self) -> Float[np.ndarray, "N K"]:
        """Probabilities of the classes: softmax of one class per image, else sigmoid."""
        logits = self.logits.astype(np.float64)
        return special.softmax(logits, 1) if self.one_each else special.expit(logits)

    @functools.cached_property
    def predicted(self) -> Bool[np.ndarray, "N K"]:
        """Mask of predicted classes: the most probable one, or all with at least 0.5."""
        if not self.one_each:
            return self.probabilities >= 0.5
        return np.eye(len(self.class_names), dtype=bool)[self.logits.argmax(1)]

    @functools.cached_property
    def losses(self) -> Float[np.ndarray, " N"]:
        """Cross-entropy of each image in nats, summed if it has several labels."""
        logits, labels = self.logits.astype(np.float64), self.labels > 0
        if self.one_each:
            return -special.log_softmax(logits, 1)[labels]
        return np.logaddexp(0, np.where(labels, -logits, logits)).sum(1)

    def by_class(self) -> list[ClassScores]:
        """Returns the scores of each class."""
        from sklearn import metrics

        precision, recall, f1, images = metrics.precision_recall_fscore_support(
            self.labels, self.predicted.astype(int), zero_division=np.nan
        )
        areas = [
            average_precision(p, label) if label.any() else np.nan
            for p, label in zip(self.probabilities.T, self.labels.T > 0, strict=True)
        ]
        columns = images.tolist(), recall, precision, np.nan_to_num(f1), areas
        return [*map(ClassScores, self.class_names, *columns)]

    def least_recalled(self, most: int) -> list[ClassScores]:
        """Returns the classes with the lowest recall, lowest first."""
        missed = [each for each in self.by_class() if each.recall < 1]
        return sorted(missed, key=lambda each: (each.recall, each.name))[:most]

    def mistakes(self) -> list[int]:
        """Returns the images with a wrong prediction, most confident first.

        The confidence is the probability of the prediction; with several labels, the
        largest error of a label's probability.
        """
        wrong = (self.predicted != (self.labels > 0)).any(1)
        sure = self.probabilities - (0 if self.one_each else self.labels)
        order = np.argsort(-np.abs(sure).max(1), kind="stable")
        return order[wrong[order]].tolist()

    def highest_losses(self, most: int) -> list[int]:
        """Returns the images with the highest losses, highest first."""
        return np.argsort(-self.losses, kind="stable")[:most].tolist()

    def right_answers(self) -> list[int]:
        """Returns the images with a right prediction, one of each class in turn."""
        right = np.flatnonzero((self.predicted == (self.labels > 0)).all(1))
        seen: dict[bytes, int] = {}
        turns = []
        for i in right:
            label = self.labels[i].tobytes()
            turns.append(seen.setdefault(label, 0))
            seen[label] += 1
        return right[np.argsort(turns, kind="stable")].tolist()

    def confusion(self) -> Integer[np.ndarray, "K K"] | None:
        """Returns the number of images by true (row) and predicted class, (K, K).

        None for several labels.
        """
        if not self.one_each:
            return None
        from sklearn import metrics

        classes = np.arange(len(self.class_names))
        true, predicted = self.labels.argmax(1), self.logits.argmax(1)
        return metrics.confusion_matrix(true, predicted, labels=classes)

    def confusions(self, most: int) -> list[Confusion]:
        """Returns the most confused pairs of classes; none for several labels."""
        if not self.one_each:
            return []
        true, predicted = self.labels.argmax(1), self.logits.argmax(1)
        pairs: dict[tuple[int, int], list[int]] = {}
        for i in self.mistakes():
            pairs.setdefault((int(true[i]), int(predicted[i])), []).append(i)
        ordered = sorted(pairs.items(), key=lambda pair: (-len(pair[1]), pair[0]))
        return [Confusion(*pair, images) for pair, images in ordered[:most]]

    def calibration(self) -> tuple[list[tuple[float, float, int]], float]:
        """Returns mean probability, accuracy and count per bin, and the error.

        The probability is that of the prediction, or of each label if an image may have
        several. The bins are the same as in `classification.calibration_error`.
        """
        probabilities, right = self.probabilities.ravel(), (self.labels > 0).ravel()
        if self.one_each:
            best = self.logits.argmax(1)
            probabilities = self.probabilities.max(1)
            right = self.labels[np.arange(len(best)), best] > 0
        bins = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], probabilities)
        rows = [
            (float(probabilities[at].mean()), float(right[at].mean()), int(at.sum()))
            for at in (bins == b for b in np.unique(bins))
        ]
        return rows, calibration_error(probabilities, right)


def doubtful_labels(
    features: Float[np.ndarray, "N D"],
    labels: Integer[np.ndarray, " N"],
    most: int,
) -> list[Doubt]:
    """Returns images that look mislabelled: their nearest neighbours have another label.

    The neighbours are the 10 other images with the highest cosine similarity.

    Args:
      features: features of the images before the classifier, (N, D).
      labels: class of each image, (N,).
      most: maximum number of images to return, most doubtful first.
    """
    from sklearn.neighbors import NearestNeighbors

    count = min(NEIGHBOURS, len(labels) - 1)
    if count < 1:
        return []
    search = NearestNeighbors(n_neighbors=count, metric="cosine").fit(features)
    nearest, doubts = search.kneighbors(return_distance=False), []
    for i, others in enumerate(labels[nearest]):
        counts = np.bincount(others)
        other, same = int(counts.argmax()), float((others == labels[i]).mean())
        share = float(counts[other] / count)
        if same <= _SAME and share >= _OTHER:
            doubts.append(Doubt(i, same, other, share))
    doubts.sort(key=lambda doubt: (-doubt.share, doubt.same, doubt.image))
    return doubts[:most]
