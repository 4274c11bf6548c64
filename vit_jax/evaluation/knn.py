"""Weighted k-nearest neighbours on frozen features, as DINO does it."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Integer

_BLOCK = 2**24  # Similarities at once; 4 bytes each, and 8 for their order.

Labels = Integer[np.ndarray, " M"]


def predict(
    train: Float[np.ndarray, "N D"],
    labels: Integer[np.ndarray, " N"],
    test: Float[np.ndarray, "M D"],
    classes: int,
    *,
    k: int = 20,
    temperature: float = 0.07,
    stop: Callable[[], bool] = lambda: False,
) -> Labels | None:
    """Classifies by a vote of the nearest neighbours.

    Each of the `k` training examples of the largest cosine similarity s votes for its
    class with the weight exp(s / temperature).

    Memory besides the features: a normalised copy of those to train on, and 200 MB, or
    12 bytes times N where that is more.

    Args:
      train: features that vote.
      labels: their classes.
      test: features to classify.
      classes: number of classes.
      k: neighbours; all examples where there are fewer.
      temperature: the lower, the more the nearest count.
      stop: asked before every block of test examples; True abandons.

    Returns:
      Class of each test example, of equal votes the lowest number; or None when it was
      abandoned.

    Source: arXiv:2104.14294, appendix F.1, after arXiv:1805.01978, section 3.4.
    """
    k = min(k, len(train))
    known = _normalised(train)
    found = np.empty(len(test), np.int32)
    rows = max(1, _BLOCK // max(len(train), classes))
    for start in range(0, len(test), rows):
        if stop():
            return None
        similar = _normalised(test[start : start + rows]) @ known.T
        nearest = np.argpartition(similar, -k, axis=1)[:, -k:]
        closeness = np.take_along_axis(similar, nearest, 1).astype(np.float64)
        votes = np.zeros((len(similar), classes))
        # Less the largest, which changes no winner, so that nothing overflows.
        weights = np.exp((closeness - closeness.max(1, keepdims=True)) / temperature)
        np.add.at(votes, (np.arange(len(similar))[:, None], labels[nearest]), weights)
        found[start : start + rows] = votes.argmax(1)
    return found


def _normalised(features: Float[np.ndarray, "R D"]) -> Float[np.ndarray, "R D"]:
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.maximum(lengths, np.finfo(np.float32).tiny)
