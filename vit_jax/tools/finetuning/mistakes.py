"""Mistakes of a classifier: by class, confusions, single images, doubtful labels.

Letters: N images, K classes, D features.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer

from vit_jax.evaluators.classification import BINS, calibration_error
from vit_jax.evaluators.multi_label import average_precision

NEIGHBOURS = 10
# A label is doubtful if at most the first part of the neighbours has it, and at least the
# second part has one other label.
_SAME, _OTHER = 0.1, 0.7
_BLOCK = 1_024  # Images compared at a time.


class ClassScores(NamedTuple):
    """Scores of one class.

    Attributes:
      name: name of the class.
      images: number of images of the class.
      recall: fraction of its images that are predicted as it; nan without images.
      precision: fraction of its predictions that are right; nan without predictions.
      f1: harmonic mean of the two; 0 where one is 0 or nan.
      average_precision: average precision over all thresholds; nan without images.
    """

    name: str
    images: int
    recall: float
    precision: float
    f1: float
    average_precision: float


class Confusion(NamedTuple):
    """Images of one class that were predicted as another.

    Attributes:
      true, predicted: numbers of the classes.
      images: numbers of the images, those of the highest probability first.
    """

    true: int
    predicted: int
    images: list[int]


class Doubt(NamedTuple):
    """An image that looks like those of another class.

    Attributes:
      image: number of the image.
      same: fraction of its nearest neighbours with its label.
      other: class of most of the neighbours.
      share: fraction of the neighbours with that class.
    """

    image: int
    same: float
    other: int
    share: float


@dataclasses.dataclass(frozen=True)
class Answers:
    """Outputs of a network for images, and their labels.

    Attributes:
      logits: logits of the classes, (N, K).
      labels: 0 or 1 for each class, (N, K).
      class_names: names in label order.
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
        if not self.one_each:
            return np.exp(-np.logaddexp(0, -logits))
        powers = np.exp(logits - logits.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)

    @functools.cached_property
    def predicted(self) -> Bool[np.ndarray, "N K"]:
        """Mask of predicted classes: the most probable one, or all of at least 0.5."""
        if not self.one_each:
            return self.probabilities >= 0.5
        return np.eye(len(self.class_names), dtype=bool)[self.logits.argmax(1)]

    @functools.cached_property
    def losses(self) -> Float[np.ndarray, " N"]:
        """Cross-entropy of each image in nats, summed over several labels."""
        probabilities = self.probabilities
        right = np.where(self.labels > 0, probabilities, 1 - probabilities)
        if self.one_each:
            right = probabilities[self.labels > 0][:, None]
        return -np.log(np.maximum(right, 1e-30)).sum(1)

    def by_class(self) -> list[ClassScores]:
        """Returns the scores of each class."""
        labels, predicted = self.labels > 0, self.predicted
        scores = []
        for k, name in enumerate(self.class_names):
            right = float((labels[:, k] & predicted[:, k]).sum())
            images, answers = int(labels[:, k].sum()), int(predicted[:, k].sum())
            scores.append(
                ClassScores(
                    name,
                    images,
                    right / images if images else np.nan,
                    right / answers if answers else np.nan,
                    2 * right / max(images + answers, 1),
                    average_precision(self.probabilities[:, k], labels[:, k])
                    if images
                    else np.nan,
                )
            )
        return scores

    def mistakes(self) -> list[int]:
        """Returns the images with a wrong answer, most confident first.

        The confidence is the probability of the answer; with several labels, the largest
        error of a label's probability.
        """
        wrong = (self.predicted != (self.labels > 0)).any(1)
        sure = np.abs(self.probabilities - self.labels).max(1)
        if self.one_each:
            sure = self.probabilities.max(1)
        order = np.argsort(-sure, kind="stable")
        return order[wrong[order]].tolist()

    def highest_losses(self, most: int) -> list[int]:
        """Returns the images with the highest losses, highest first."""
        return np.argsort(-self.losses, kind="stable")[:most].tolist()

    def confusions(self, most: int) -> list[Confusion]:
        """Returns the most confused pairs of classes; none with several labels."""
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

        The probability is that of the answer, or of each label if an image may have
        several. The bins are those of `classification.calibration_error`.
        """
        probabilities, right = self.probabilities.ravel(), (self.labels > 0).ravel()
        if self.one_each:
            best = self.logits.argmax(1)
            probabilities = self.probabilities.max(1)
            right = self.labels[np.arange(len(best)), best] > 0
        edges = np.linspace(0, 1, BINS + 1)[1:-1]
        bins = np.searchsorted(edges, probabilities)
        rows = []
        for b in range(BINS):
            members = bins == b
            if members.any():
                mean = float(probabilities[members].mean())
                rows.append((mean, float(right[members].mean()), int(members.sum())))
        return rows, calibration_error(probabilities, right)


def doubtful_labels(
    features: Float[np.ndarray, "N D"],
    labels: Integer[np.ndarray, " N"],
    most: int,
) -> list[Doubt]:
    """Returns images that look mislabelled: their nearest neighbours have another label.

    The neighbours are the 10 other images of the highest cosine similarity.

    Args:
      features: features of the images before the classifier, (N, D).
      labels: class of each image, (N,).
      most: largest number of images to return, most doubtful first.
    """
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    unit = features / np.maximum(norms, 1e-12)
    count = min(NEIGHBOURS, len(labels) - 1)
    if count < 1:
        return []
    doubts = []
    for start in range(0, len(labels), _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, len(labels)))
        similar = unit[rows] @ unit.T
        similar[np.arange(len(rows)), rows] = -np.inf
        nearest = np.argpartition(-similar, count - 1, axis=1)[:, :count]
        for i, others in zip(rows.tolist(), labels[nearest], strict=True):
            counts = np.bincount(others)
            other, same = int(counts.argmax()), float((others == labels[i]).mean())
            share = float(counts[other] / count)
            if same <= _SAME and share >= _OTHER:
                doubts.append(Doubt(i, same, other, share))
    doubts.sort(key=lambda doubt: (-doubt.share, doubt.same, doubt.image))
    return doubts[:most]
