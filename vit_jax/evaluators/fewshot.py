"""Few-shot linear evaluation: least squares on frozen features, in closed form.

The protocol of arXiv:2010.11929 (section 4.1): features are standardised with mean and
standard deviation (+1e-5) of the support, a constant feature is appended, targets are
+1 for the class and -1 for the others, and one eigendecomposition solves for every
strength of the L2 regularisation. Letters: N support examples, M test examples, S drawn
rows, D features, E eigenvalues, K classes, L strengths.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Integer

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.evaluators.protocol import FeaturesConfig, Scored, mean
from vit_jax.evaluators.splits import EvalSplit

EPSILON = 1e-5  # Added to the standard deviation.
BIAS = 100.0  # The constant feature: so large that it is hardly regularised.
_BLOCK = 2**22  # Elements per block of rows; 8 bytes each.

Features = Float[np.ndarray, "N D"]
Labels = Integer[np.ndarray, " N"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShotConfig(FeaturesConfig):
    """Few-shot accuracy of features: least squares on a few examples per class.

    Metrics for S shots: "Sshot" is the mean accuracy over the seeds with the first
    strength, "Sshot_std" its sample standard deviation. "Sshot_l2_X" and
    "Sshot_l2_X_std" are these for each further strength X. "Sshot_short" is the number
    of classes with fewer than S examples, if any.
    """

    fractions: ClassVar = ("[0-9]*shot*",)

    kind: str = key("fewshot", "Kind of evaluation.")
    shots: tuple[int, ...] = key(
        (1, 5, 10, 25),
        "Numbers of training examples per class.",
        at_least=1,
        below=2**32,
        distinct=True,
    )
    seeds: int = key(
        20,
        "Number of draws of the examples, for mean and standard deviation of the "
        "accuracy.",
        at_least=1,
        below=2**32,
    )
    l2: tuple[float, ...] = key(
        (1024.0,),
        "Strengths of the L2 regularisation to evaluate; the report has the first one.",
        above=0,
        distinct=True,
    )

    def summarize(self, metrics):
        summary = {}
        for name, value in metrics.items():
            match = re.fullmatch(r"(\d+)shot(?:_l2_(.+?))?(?:_(std|short))?", name)
            if not match:
                continue
            shots = summary.setdefault(match[1], {})
            if match[2]:
                shots = shots.setdefault("l2", {}).setdefault(match[2], {})
            shots[match[3] or "mean"] = value
        return summary

    def _supports(self, train: EvalSplit, shots: int) -> list[np.ndarray]:
        seeds, num_classes = range(self.seeds), train.num_classes
        return [draw(train.labels, shots, seed, num_classes) for seed in seeds]

    def train_rows(self, train):
        return np.unique(np.concatenate(self._supports(train, max(self.shots))))

    def score_features(self, train, test, split, stop):
        num_classes = split.num_classes
        counts = np.bincount(split.labels, minlength=num_classes)
        metrics = {}
        for shots in self.shots:
            tops = []
            for rows in self._supports(split, shots):
                if stop():
                    return None
                places = _positions(train.records, rows)
                support = train.features[places], train.labels[places]
                tests = test.features, test.labels
                tops.append(accuracies(support, tests, num_classes, self.l2))
            for l2, values in zip(self.l2, np.transpose(tops), strict=True):
                more = "" if l2 == self.l2[0] else f"_l2_{l2:g}"
                metrics[f"{shots}shot{more}"] = mean(values)
                deviation = values.std(ddof=1) if len(values) > 1 else 0.0
                metrics[f"{shots}shot{more}_std"] = float(deviation)
            if short := int((counts < shots).sum()):
                metrics[f"{shots}shot_short"] = short
        return Scored(metrics)


def _positions(records: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the positions of rows in the outputs, without damaged records."""
    places = np.searchsorted(records, rows)
    places = np.minimum(places, len(records) - 1)
    return places[records[places] == rows]


def draw(
    labels: Labels, shots: int, seed: int, num_classes: int
) -> Integer[np.ndarray, " S"]:
    """Draws the support: positions of `shots` examples of every class, class by class.

    The draw from a class is a pure function of the seed, the class and its number of
    examples; fewer shots draw a subset of what more shots draw. A class with fewer than
    `shots` examples contributes all of them.
    """
    order = np.argsort(labels, kind="stable")
    bounds = np.searchsorted(labels[order], np.arange(num_classes + 1))
    drawn = []
    for number in range(num_classes):
        members = order[bounds[number] : bounds[number + 1]]
        bits = np.random.Philox(key=np.array([seed, number], np.uint64))
        # NumPy keeps the stream of `random` between versions, unlike that of
        # `permutation`.
        ranks = np.random.Generator(bits).random(len(members))
        drawn.append(members[np.argsort(ranks, kind="stable")[:shots]])
    return np.concatenate(drawn)


@dataclasses.dataclass(frozen=True)
class Solution:
    """Least squares for one support and any strength of the regularisation.

    Attributes:
      mean: mean of the support's features.
      scale: standard deviation of the support's features, plus EPSILON.
      basis: map from eigenvectors to standardised features and the constant.
      values: eigenvalues.
      right: targets in the basis of the eigenvectors.
    """

    mean: Float[np.ndarray, " D"]
    scale: Float[np.ndarray, " D"]
    basis: Float[np.ndarray, "D1 E"]
    values: Float[np.ndarray, " E"]
    right: Float[np.ndarray, "E K"]

    def weights(self, l2: float) -> Float[np.ndarray, "D1 K"]:
        """Returns weights of standardised features, and of the constant in the last row."""
        return (self.basis / (self.values + l2)) @ self.right

    def predict(self, features: Features, l2: float) -> Labels:
        """Returns the class of each example, in float64."""
        weights = self.weights(l2)
        # Weights of the features before standardisation, in place.
        slopes, last = weights[:-1], weights[-1]
        slopes /= self.scale[:, None]
        offsets = BIAS * last - self.mean @ slopes
        predicted = np.empty(len(features), np.int32)
        for rows in _blocks(len(features), slopes.shape[1]):
            scores = features[rows].astype(np.float64) @ slopes
            scores += offsets
            predicted[rows] = scores.argmax(1)
        return predicted


def solve(features: Features, labels: Labels, num_classes: int) -> Solution:
    """Solves least squares for all strengths at once, in float64.

    The system is primal (a matrix of D + 1 features) if N >= D, else dual (of N
    examples). Memory besides the features, in numbers of 8 bytes: (D + 1) K for the
    right side and the same again for the class sums here or the weights in `predict`,
    four square matrices of side min(N, D + 1), and a block of _BLOCK: 530 MB measured
    for 21,843 classes and 1,280 features.

    Raises:
      UserError: the features are not finite.

    Source: arXiv:2010.11929, section 4.1, "few-shot linear".
    """
    N, D = features.shape
    mean = features.mean(0, dtype=np.float64)
    square = sum(
        np.square(features[rows] - mean).sum(0) for rows in _blocks(len(features), D)
    )
    scale = np.sqrt(square / N) + EPSILON
    if not np.isfinite(scale).all():
        raise UserError(
            "the features are not finite: the checkpoint is damaged, or diverged in "
            "training"
        )

    def standardised(rows):
        part = np.empty((len(features[rows]), D + 1))
        body = part[:, :-1]
        body[:] = features[rows]
        body -= mean
        body /= scale
        part[:, -1] = BIAS
        return part

    if N < D:
        whole = standardised(slice(None))
        values, vectors = np.linalg.eigh(whole @ whole.T)
        right = _times_targets(vectors, labels, num_classes)
        return Solution(mean, scale, whole.T @ vectors, _positive(values), right)
    gram, sums = np.zeros((D + 1, D + 1)), np.zeros((num_classes, D + 1))
    for rows in _blocks(N, D + 1):
        part = standardised(rows)
        gram += part.T @ part
        _add_class_sums(sums, part, labels[rows])
    values, vectors = np.linalg.eigh(gram)
    total = sums.sum(0)
    sums *= 2
    sums -= total
    return Solution(mean, scale, vectors, _positive(values), vectors.T @ sums.T)


def accuracies(
    train: tuple[Features, Labels],
    test: tuple[Float[np.ndarray, "M D"], Integer[np.ndarray, " M"]],
    num_classes: int,
    l2: Sequence[float],
) -> Float[np.ndarray, " L"]:
    """Returns the accuracy on the test examples for each strength.

    `train` and `test` are pairs of features and labels; the strengths `l2` are above 0.
    """
    solution = solve(*train, num_classes)
    features, labels = test
    return np.array([(solution.predict(features, x) == labels).mean() for x in l2])


def _times_targets(
    rows: Float[np.ndarray, "N E"], labels: Labels, num_classes: int
) -> Float[np.ndarray, "E K"]:
    """Multiplies by the targets of +1 and -1 without storing them in an array."""
    sums = np.zeros((num_classes, rows.shape[1]))
    _add_class_sums(sums, rows, labels)
    sums *= 2
    sums -= rows.sum(0)
    return sums.T


def _add_class_sums(
    sums: Float[np.ndarray, "K E"], rows: Float[np.ndarray, "N E"], labels: Labels
) -> None:
    """Adds each row to the sum of its class; needs as much memory again as `rows`."""
    from scipy import sparse

    classes, places = np.unique(labels, return_inverse=True)
    ones = np.ones(len(labels)), (places, np.arange(len(labels)))
    sums[classes] += sparse.csr_array(ones, shape=(len(classes), len(labels))) @ rows


def _positive(values: np.ndarray) -> np.ndarray:
    return np.maximum(values, 0.0)  # Negative eigenvalues are rounding errors.


def _blocks(count: int, width: int) -> list[slice]:
    """Returns slices of rows with about _BLOCK elements each."""
    rows = max(1, _BLOCK // width)
    return [slice(i, min(i + rows, count)) for i in range(0, count, rows)]
