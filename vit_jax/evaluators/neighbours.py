"""Classifies images by the votes of the nearest labelled images.

Letters: N labelled images, B images to classify, D features.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from vit_jax.evaluators import knn
from vit_jax.evaluators.image_features import ImageFeatures
from vit_jax.evaluators.prediction import Prediction

K = 20  # Number of neighbours by default, as in DINO.


@dataclasses.dataclass(frozen=True)
class Vote(Prediction):
    """A class with its share of the votes, as `probability`.

    Attributes:
      images: names of the neighbours of this class, nearest first.
    """

    images: tuple[str, ...] = ()


class NeighbourClassifier:
    """Labelled images whose nearest ones vote for the class of other images.

    Votes are weighted by similarity, see `knn.predict`.

    Args:
      labelled: features of the labelled images, with labels.
      class_names: class names in label order; if empty, classes have numbers.
      k: number of neighbours; all images if there are fewer.
    """

    def __init__(
        self, labelled: ImageFeatures, class_names: Sequence[str] = (), k: int = K
    ):
        self._index, self._k = knn.Index(labelled.features), k
        self._labels, self._names = labelled.labels, labelled.names
        count = int(self._labels.max()) + 1
        self.class_names = tuple(class_names) or tuple(
            f"class {i}" for i in range(count)
        )

    def rank(
        self,
        features: Float[np.ndarray, "B D"],
        topk: int,
        threshold: float | None = None,
    ) -> list[tuple[Vote, ...]]:
        """Returns the classes that the neighbours of each image vote for, best first.

        Args:
          features: features of the images.
          topk: largest number of classes per image.
          threshold: smallest share of the votes; replaces `topk`.
        """
        nearest, cosines = self._index.search(features, self._k)
        labels = self._labels[nearest]
        shares = knn.votes(cosines, labels, len(self.class_names))
        return [
            self._votes(*one, topk, threshold)
            for one in zip(shares, labels, nearest, strict=True)
        ]

    def _votes(self, shares, labels, nearest, topk, threshold) -> tuple[Vote, ...]:
        best = np.argsort(-shares, kind="stable")
        best = best[np.isin(best, labels)]
        best = best[:topk] if threshold is None else best[shares[best] >= threshold]
        return tuple(
            Vote(
                int(label),
                self.class_names[label],
                float(shares[label]),
                tuple(self._names[i] for i in nearest[labels == label]),
            )
            for label in best
        )
