"""Confusion matrices in which classes that are confused stand together."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from vit_jax.analysis.charts import Matrix

_MOST = 100  # Maximum number of classes in a matrix: more have no readable names.


def matrix(counts: Integer[np.ndarray, "K K"], names: Sequence[str]) -> Matrix:
    """Returns a confusion matrix for a page, in the order of `order`.

    With more than 100 classes, it has those with the most mistakes.

    Args:
      counts: examples of each true class (row) by predicted class (column), (K, K).
      names: class names, (K,).
    """
    wrong = _mistakes(counts)
    errors = wrong.sum(0) + wrong.sum(1)
    kept = np.sort(np.argsort(-errors, kind="stable")[:_MOST])
    kept = kept[order(counts[np.ix_(kept, kept)])]
    note = ""
    if len(kept) < len(names):
        note = f"The {len(kept)} of {len(names):,} classes with the most mistakes."
    return Matrix(
        "confusion",
        "",
        tuple(names[k] for k in kept),
        tuple(map(tuple, counts[np.ix_(kept, kept)].tolist())),
        note,
    )


def order(counts: Integer[np.ndarray, "K K"]) -> Integer[np.ndarray, " K"]:
    """Returns classes in an order in which neighbours are often confused.

    It is the order of the leaves of average linkage by the sum of the fractions of two
    classes that are predicted as each other, with similar leaves side by side
    (Bar-Joseph, Gifford and Jaakkola, Bioinformatics 17, 2001). Classes without mistakes
    come last, in their own order.
    """
    from scipy.cluster import hierarchy
    from scipy.spatial import distance

    wrong = _mistakes(counts)
    confused = np.flatnonzero((wrong.sum(0) + wrong.sum(1)) > 0)
    rest = np.setdiff1d(np.arange(len(counts)), confused)
    if len(confused) < 3:
        return np.concatenate([confused, rest])
    shares = wrong / np.maximum(counts.sum(1, keepdims=True), 1)
    similar = (shares + shares.T)[np.ix_(confused, confused)]
    distances = distance.squareform(2 - similar, checks=False)
    tree = hierarchy.linkage(distances, "average", optimal_ordering=True)
    return np.concatenate([confused[hierarchy.leaves_list(tree)], rest])


def _mistakes(counts: Integer[np.ndarray, "K K"]) -> Integer[np.ndarray, "K K"]:
    return counts - np.diag(counts.diagonal())
