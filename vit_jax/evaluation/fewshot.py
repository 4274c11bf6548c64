"""Few-shot linear evaluation: least squares on frozen features, in closed form.

The protocol of arXiv:2010.11929 (section 4.1) and its field: the support's features
are standardised with its own mean and deviation (+1e-5), a constant feature is
appended, targets are +1 for the class and -1 for the others, and one eigendecomposition
solves for every strength of the L2 regularisation. Letters: N examples of the support,
M of the test, D features, E eigenvalues, K classes, L strengths.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Integer

from vit_jax.errors import UserError

EPSILON = 1e-5  # Added to the deviation.
BIAS = 100.0  # The constant feature: so large that it is hardly regularised.
_BLOCK = 2**22  # Elements of what is worked on at once; 8 bytes each.

Features = Float[np.ndarray, "N D"]
Labels = Integer[np.ndarray, " N"]


def draw(
    labels: Labels, shots: int, seed: int, classes: int
) -> Integer[np.ndarray, " S"]:
    """Draws the support: `shots` examples of every class.

    What is drawn of a class is a pure function of the seed, the number of the class and
    how many examples it has; fewer shots draw a part of what more do. A class with
    fewer examples gives all it has.

    Args:
      labels: of all examples that may be drawn.
      shots: examples a class.
      seed: of the draw.
      classes: number of classes.

    Returns:
      Positions in `labels`, class by class.
    """
    order = np.argsort(labels, kind="stable")
    bounds = np.searchsorted(labels[order], np.arange(classes + 1))
    drawn = []
    for number in range(classes):
        members = order[bounds[number] : bounds[number + 1]]
        bits = np.random.Philox(key=np.array([seed, number], np.uint64))
        # Of `random`, whose stream numpy keeps, unlike that of `permutation`.
        ranks = np.random.Generator(bits).random(len(members))
        drawn.append(members[np.argsort(ranks, kind="stable")[:shots]])
    return np.concatenate(drawn)


@dataclasses.dataclass(frozen=True)
class Solution:
    """Least squares for one support, before the strength is chosen.

    Attributes:
      mean: of the support's features.
      scale: their deviation, and EPSILON.
      basis: from eigenvectors to standardised features and the constant.
      values: eigenvalues.
      right: targets in terms of the eigenvectors.
    """

    mean: Float[np.ndarray, " D"]
    scale: Float[np.ndarray, " D"]
    basis: Float[np.ndarray, "D1 E"]
    values: Float[np.ndarray, " E"]
    right: Float[np.ndarray, "E K"]

    def weights(self, l2: float) -> Float[np.ndarray, "D1 K"]:
        """Returns the solution on standardised features, the last row the constant's."""
        return (self.basis / (self.values + l2)) @ self.right

    def predict(self, features: Features, l2: float) -> Labels:
        """Returns the class of each example, in float64."""
        weights = self.weights(l2)
        # In terms of the features as they are, in place.
        slopes, last = weights[:-1], weights[-1]
        slopes /= self.scale[:, None]
        offsets = BIAS * last - self.mean @ slopes
        found = np.empty(len(features), np.int32)
        for rows in _blocks(len(features), slopes.shape[1]):
            scores = features[rows].astype(np.float64) @ slopes
            scores += offsets
            found[rows] = scores.argmax(1)
        return found


def solve(features: Features, labels: Labels, classes: int) -> Solution:
    """Solves least squares for all strengths at once, in float64.

    Primal (a matrix of D + 1 features) when N >= D, dual (of N examples) otherwise.
    Besides the features this takes, in numbers of 8 bytes, (D + 1) K for the right side
    and as many for the sums of the classes here or the weights in `predict`, four
    matrices of min(N, D + 1) squared, and a block of _BLOCK: 530 MB measured for 21,843
    classes and 1,280 features.

    Args:
      features: of the support.
      labels: of the support.
      classes: number of classes.

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
        right = _times_targets(vectors, labels, classes)
        return Solution(mean, scale, whole.T @ vectors, _positive(values), right)
    gram, sums = np.zeros((D + 1, D + 1)), np.zeros((classes, D + 1))
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
    classes: int,
    l2: Sequence[float],
) -> Float[np.ndarray, " L"]:
    """Returns the accuracy on the test examples for each strength.

    Args:
      train: features and labels of the support.
      test: features and labels to score.
      classes: number of classes.
      l2: strengths, above 0.
    """
    solution = solve(*train, classes)
    features, labels = test
    return np.array([(solution.predict(features, x) == labels).mean() for x in l2])


def _times_targets(
    rows: Float[np.ndarray, "N E"], labels: Labels, classes: int
) -> Float[np.ndarray, "E K"]:
    """Multiplies by targets of +1 and -1, which are not laid out."""
    sums = np.zeros((classes, rows.shape[1]))
    _add_class_sums(sums, rows, labels)
    sums *= 2
    sums -= rows.sum(0)
    return sums.T


def _add_class_sums(
    sums: Float[np.ndarray, "K E"], rows: Float[np.ndarray, "N E"], labels: Labels
) -> None:
    """Adds to each class its rows; of further memory it takes that of `rows`."""
    from scipy import sparse

    found, places = np.unique(labels, return_inverse=True)
    ones = np.ones(len(labels)), (places, np.arange(len(labels)))
    sums[found] += sparse.csr_array(ones, shape=(len(found), len(labels))) @ rows


def _positive(values: np.ndarray) -> np.ndarray:
    return np.maximum(values, 0.0)  # They are but for rounding.


def _blocks(count: int, width: int) -> list[slice]:
    """Cuts rows of a width into blocks of about _BLOCK elements."""
    rows = max(1, _BLOCK // width)
    return [slice(i, min(i + rows, count)) for i in range(0, count, rows)]
