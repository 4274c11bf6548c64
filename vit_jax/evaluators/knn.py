"""Weighted k-nearest neighbours on frozen features, as in DINO.

Letters: N training examples, M test examples, D features, R rows of features, K
classes, k neighbours.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Integer

from vit_jax.config.fields import key
from vit_jax.evaluators.protocol import FeaturesConfig, Scored, mean

_BLOCK = 2**24  # Similarities per block; 4 bytes each, and 8 for their order.

Labels = Integer[np.ndarray, " M"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeighboursConfig(FeaturesConfig):
    """k-NN accuracy of features: votes of the nearest neighbours."""

    kind: str = key("knn", "Kind of evaluation.")
    k: int = key(20, "Number of nearest neighbours that vote.", at_least=1, below=2**32)
    temperature: float = key(
        0.07,
        "Temperature of the votes: a neighbour's vote is exp(cosine / temperature).",
        above=0,
    )

    def score_features(self, train, test, split, stop):
        arrays = train.features, train.labels, test.features, split.num_classes
        keys = {"k": self.k, "temperature": self.temperature}
        predicted = predict(*arrays, **keys, stop=stop)
        if predicted is None:
            return None
        return Scored({"top1": mean(predicted == test.labels)})

    def summarize(self, metrics):
        return metrics["top1"]


def predict(
    train: Float[np.ndarray, "N D"],
    labels: Integer[np.ndarray, " N"],
    test: Float[np.ndarray, "M D"],
    num_classes: int,
    *,
    k: int = 20,
    temperature: float = 0.07,
    stop: Callable[[], bool] = lambda: False,
) -> Labels | None:
    """Classifies by a weighted vote of the nearest neighbours.

    Each of the `k` training examples with the largest cosine similarity s votes for its
    class with weight exp(s / temperature).

    Memory besides the features: a normalised copy of the training features, and the
    larger of 200 MB and 12 bytes times N.

    Args:
      train: features of the training examples.
      labels: classes of the training examples.
      test: features to classify.
      num_classes: number of classes.
      k: number of neighbours; all examples if there are fewer.
      temperature: scale of the similarities; low values favour the nearest ones.
      stop: function that is called before every block of test examples; returning True
        stops.

    Returns:
      Class of each test example, the lowest class in case of a tie; None if stopped.

    Source: arXiv:2104.14294, appendix F.1, after arXiv:1805.01978, section 3.4.
    """
    index = Index(train)
    predicted = np.empty(len(test), np.int32)
    rows = max(1, _BLOCK // max(len(train), num_classes))
    for start in range(0, len(test), rows):
        if stop():
            return None
        nearest, cosines = index.search(test[start : start + rows], k)
        shares = votes(cosines, labels[nearest], num_classes, temperature)
        predicted[start : start + rows] = shares.argmax(1)
    return predicted


class Index:
    """Features among which the nearest ones to others are searched.

    Args:
      features: features; a normalised copy is kept.
    """

    def __init__(self, features: Float[np.ndarray, "N D"]):
        self._known = _normalised(features)

    def search(
        self, features: Float[np.ndarray, "M D"], k: int
    ) -> tuple[Integer[np.ndarray, "M k"], Float[np.ndarray, "M k"]]:
        """Returns the nearest known features by cosine similarity.

        Args:
          features: features to compare with.
          k: number of nearest ones; all if there are fewer.

        Returns:
          Their numbers, nearest first, and their cosine similarities, in float64.
        """
        k = min(k, len(self._known))
        similar = _normalised(features) @ self._known.T
        nearest = np.argpartition(similar, -k, axis=1)[:, -k:]
        cosines = np.take_along_axis(similar, nearest, 1).astype(np.float64)
        order = np.lexsort((nearest, -cosines), axis=1)
        return (
            np.take_along_axis(nearest, order, 1),
            np.take_along_axis(cosines, order, 1),
        )


def votes(
    cosines: Float[np.ndarray, "M k"],
    labels: Integer[np.ndarray, "M k"],
    num_classes: int,
    temperature: float = 0.07,
) -> Float[np.ndarray, "M K"]:
    """Returns the share of each class in the votes of neighbours, see `predict`.

    Args:
      cosines: similarities of the neighbours.
      labels: classes of the neighbours.
      num_classes: number of classes.
      temperature: scale of the similarities.
    """
    shares = np.zeros((len(cosines), num_classes))
    # Subtracting the maximum avoids overflow and does not change the shares.
    weights = np.exp((cosines - cosines.max(1, keepdims=True)) / temperature)
    np.add.at(shares, (np.arange(len(cosines))[:, None], labels), weights)
    return shares / weights.sum(1, keepdims=True)


def _normalised(features: Float[np.ndarray, "R D"]) -> Float[np.ndarray, "R D"]:
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.maximum(lengths, np.finfo(np.float32).tiny)
