"""Rank and spread of features, which need no labels: they show whether features collapse.

Letters: N images, D features, R rows of features, K = min(N, D) singular values.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import Wanted
from vit_jax.evaluators.protocol import Evaluator, Pass, Scored
from vit_jax.evaluators.splits import EvalConfig

_EPSILON = 1e-7  # As in RankMe, for features of float32.
_BLOCK = 2**22  # Features per block in float64; 8 bytes each.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankConfig(EvalConfig):
    """Rank and spread of features, without labels: RankMe (arXiv:2210.02885)."""

    fractions: ClassVar = ("first_component",)

    kind: str = key("rank", "Kind of evaluation.")
    split: str = key("", 'Split to evaluate; "" is the test split of the data set.')

    def open(self, name, splits):
        split = splits.open(name, self, self.split, model_classes=False, labelled=False)

        def check(count):
            if count < 2:
                raise UserError(
                    f"evals.{name}: {split.title} has {count} image, but features are "
                    "compared: use a split of two images or more"
                )

        check(len(split.source))

        def score(outputs, stop):
            (features,) = (each.features for each in outputs)
            check(len(features))
            metrics = measure(features, stop)
            return None if metrics is None else Scored(metrics)

        return Evaluator((Pass(split, Wanted(features=True)),), score)


def measure(
    features: Float[np.ndarray, "N D"], stop: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """Returns how many directions features use, and how similar they are.

    - "rankme": exp(-sum_k p_k log p_k) with p_k = s_k / (s_1 + ... + s_K) + 1e-7, where
      s_k are the singular values of the features, which are not centred. It lies
      between 1 (all features are multiples of one vector) and about K.
    - "mean_cosine": mean cosine similarity of two different images; 1 if all features
      have one direction. A feature that is 0 has the cosine 0 with all others.
    - "first_component": fraction of the variance along the first principal component; 1
      if all features are equal.

    They are computed in float64, in blocks of rows that depend only on N and D.

    Args:
      features: one row per image, at least two rows.
      stop: function that is called before every block; returning True stops.

    Returns:
      The three metrics; None if stopped.

    Source: RankMe, arXiv:2210.02885, equations 1 and 2.
    """
    N = len(features)
    mean = features.mean(0, dtype=np.float64)
    moments = []
    for center in np.zeros_like(mean), mean:
        values = _squared_singular_values(features, center, stop)
        if values is None:
            return None
        moments.append(values)
    squares, variances = moments
    singular = np.sqrt(squares)
    parts = singular / max(singular.sum(), np.finfo(np.float64).tiny) + _EPSILON
    total, squared_lengths = _sum_of_directions(features)
    return {
        "rankme": float(np.exp(-(parts * np.log(parts)).sum())),
        "mean_cosine": float((total @ total - squared_lengths) / (N * (N - 1))),
        "first_component": (
            float(variances.max() / variances.sum()) if variances.any() else 1.0
        ),
    }


def _squared_singular_values(
    features: Float[np.ndarray, "N D"],
    center: Float[np.ndarray, " D"],
    stop: Callable[[], bool],
) -> Float[np.ndarray, " K"] | None:
    """Returns the squared singular values of features minus a centre, unordered."""
    N, D = features.shape
    products = np.zeros((min(N, D), min(N, D)))
    # Of the two matrices of products with these eigenvalues, the smaller one.
    across, length = (features.T, N) if N < D else (features, D)
    rows = max(1, _BLOCK // length)
    for start in range(0, len(across), rows):
        if stop():
            return None
        block = across[start : start + rows].astype(np.float64)
        block -= center[start : start + rows, None] if N < D else center
        products += block.T @ block
    return np.linalg.eigvalsh(products).clip(0)


def _sum_of_directions(
    features: Float[np.ndarray, "N D"],
) -> tuple[Float[np.ndarray, " D"], float]:
    """Returns the sum of the features divided by their norms, and of squared norms."""
    total, squares = np.zeros(features.shape[1]), 0.0
    rows = max(1, _BLOCK // features.shape[1])
    for start in range(0, len(features), rows):
        block = features[start : start + rows].astype(np.float64)
        lengths = np.linalg.norm(block, axis=1, keepdims=True)
        block /= np.maximum(lengths, np.finfo(np.float64).tiny)
        total += block.sum(0)
        squares += float(np.square(block).sum())
    return total, squares
