"""What a classifier gets wrong: classes, confusions, single images, doubtful labels.

Letters: N images, K classes, D features.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer

from vit_jax.evaluators.classification import BINS, calibration_error
from vit_jax.evaluators.multi_label import average_precision

NEIGHBOURS = 10
# A label is doubtful if so few of the neighbours have it, and so many another one.
_OWN, _OTHER = 0.1, 0.7
_BLOCK = 1_024  # Images compared at a time.


class ClassScores(NamedTuple):
    """Scores of one class.

    Attributes:
      name: of the class.
      images: that have it.
      recall: part of them that is found; nan without any.
      precision: part of what is found that has it; nan where nothing is.
      f1: harmonic mean of the two; 0 where one is 0 or nan.
      average_precision: over all thresholds; nan without images.
    """

    name: str
    images: int
    recall: float
    precision: float
    f1: float
    average_precision: float


class Confusion(NamedTuple):
    """Images of one class that were taken for another.

    Attributes:
      true, found: numbers of the classes.
      images: their numbers, the surest first.
    """

    true: int
    found: int
    images: list[int]


class Doubt(NamedTuple):
    """An image that looks like those of another class.

    Attributes:
      image: its number.
      own: part of its nearest neighbours with its label.
      other: class of most of them.
      share: part of the neighbours with that class.
    """

    image: int
    own: float
    other: int
    share: float


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a network said about images.

    Attributes:
      logits: of the classes.
      labels: 0 or 1 for each class.
      class_names: in label order.
      one_each: whether an image has exactly one class.
    """

    logits: Float[np.ndarray, "N K"]
    labels: Integer[np.ndarray, "N K"]
    class_names: tuple[str, ...]
    one_each: bool

    @property
    def probabilities(self) -> Float[np.ndarray, "N K"]:
        """Of the classes: together 1 if an image has one, else each by itself."""
        logits = self.logits.astype(np.float64)
        if not self.one_each:
            return np.exp(-np.logaddexp(0, -logits))
        powers = np.exp(logits - logits.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)

    @property
    def found(self) -> Bool[np.ndarray, "N K"]:
        """The classes that are answered: the best one, or all from one half on."""
        if not self.one_each:
            return self.probabilities >= 0.5
        return np.eye(len(self.class_names), dtype=bool)[self.logits.argmax(1)]

    @property
    def losses(self) -> Float[np.ndarray, " N"]:
        """Cross-entropy of each image in nats, of several labels summed."""
        probabilities = self.probabilities
        right = np.where(self.labels > 0, probabilities, 1 - probabilities)
        if self.one_each:
            right = probabilities[self.labels > 0][:, None]
        return -np.log(np.maximum(right, 1e-30)).sum(1)

    def by_class(self) -> list[ClassScores]:
        """Returns the scores of each class."""
        there, found = self.labels > 0, self.found
        scores = []
        for k, name in enumerate(self.class_names):
            right = float((there[:, k] & found[:, k]).sum())
            images, answers = int(there[:, k].sum()), int(found[:, k].sum())
            scores.append(
                ClassScores(
                    name,
                    images,
                    right / images if images else np.nan,
                    right / answers if answers else np.nan,
                    2 * right / max(images + answers, 1),
                    average_precision(self.probabilities[:, k], there[:, k])
                    if images
                    else np.nan,
                )
            )
        return scores

    def mistakes(self) -> list[int]:
        """Returns the images whose answer is wrong, the surest first.

        How sure an answer is, is its probability; of several labels that of the label
        that is furthest from the truth.
        """
        wrong = (self.found != (self.labels > 0)).any(1)
        sure = np.abs(self.probabilities - self.labels).max(1)
        if self.one_each:
            sure = self.probabilities.max(1)
        order = np.argsort(-sure, kind="stable")
        return order[wrong[order]].tolist()

    def highest_losses(self, most: int) -> list[int]:
        """Returns the images of the highest losses, the highest first."""
        return np.argsort(-self.losses, kind="stable")[:most].tolist()

    def confusions(self, most: int) -> list[Confusion]:
        """Returns the pairs of classes that are confused most; none of several labels."""
        if not self.one_each:
            return []
        true, found = self.labels.argmax(1), self.logits.argmax(1)
        pairs: dict[tuple[int, int], list[int]] = {}
        for i in self.mistakes():
            pairs.setdefault((int(true[i]), int(found[i])), []).append(i)
        ordered = sorted(pairs.items(), key=lambda pair: (-len(pair[1]), pair[0]))
        return [Confusion(*pair, images) for pair, images in ordered[:most]]

    def calibration(self) -> tuple[list[tuple[float, float, int]], float]:
        """Returns mean probability, accuracy and number of each bin, and the error.

        Of images with one class the probability is that of the answer, else that of
        each label. The bins are those of `classification.calibration_error`.
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
            here = bins == b
            if here.any():
                mean = float(probabilities[here].mean())
                rows.append((mean, float(right[here].mean()), int(here.sum())))
        return rows, calibration_error(probabilities, right)


def doubtful_labels(
    features: Float[np.ndarray, "N D"],
    labels: Integer[np.ndarray, " N"],
    most: int,
) -> list[Doubt]:
    """Returns images that look mislabelled: their nearest neighbours have another label.

    An image does not count among its own neighbours, which are the 10 of the highest
    cosine similarity.

    Args:
      features: of images, before the classifier.
      labels: class of each.
      most: number of images to return, the most doubtful first.
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
            other, own = int(counts.argmax()), float((others == labels[i]).mean())
            share = float(counts[other] / count)
            if own <= _OWN and share >= _OTHER:
                doubts.append(Doubt(i, own, other, share))
    doubts.sort(key=lambda doubt: (-doubt.share, doubt.own, doubt.image))
    return doubts[:most]
