"""Ridge regression: numbers from frozen features, for any weights.

The strength of the regularisation is chosen by the leave-one-out error of the training
examples, which has a closed form (Golub, Heath and Wahba, Technometrics 21, 1979). Test
examples are only scored. Letters: N examples, M test examples, D features, T targets.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float

from vit_jax.config.fields import key
from vit_jax.data.fields.target import NAME
from vit_jax.errors import UserError
from vit_jax.evaluators import fewshot
from vit_jax.evaluators.forward_passes import Outputs, Wanted
from vit_jax.evaluators.protocol import Evaluator, FeaturesConfig, Pass, Scored
from vit_jax.evaluators.regression import named, score
from vit_jax.models.targets import Decoded, Targets


@dataclasses.dataclass(frozen=True, kw_only=True)
class RidgeConfig(FeaturesConfig):
    """Ridge regression from features to numbers."""

    fractions: ClassVar = ()

    kind: str = key("ridge", "Kind of evaluation.")
    l2: tuple[float, ...] = key(
        (10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 1e-2, 3e-3, 1e-3, 1e-4),
        "Strengths of the L2 regularisation, relative to the number of training images; "
        "the one with the smallest leave-one-out error is used for each target.",
        above=0,
        distinct=True,
    )
    resamples: int = key(
        1_000,
        "Number of bootstrap resamples for 95 % intervals, as in kind='regression'.",
        reason="shorter evaluations while a run trains",
        at_most=1_000_000,
    )

    def open(self, name, splits):
        config = named(self, splits)
        if not (config.target_key or splits.target_key):
            raise UserError(
                f"evals.{name}.target_key='': name the numbers to predict, such as age"
            )
        train, test = (
            splits.open(name, config, split, model_classes=False, labelled=False)
            for split in (self.train or splits.train_split(self), self.test)
        )

        def score_outputs(outputs, stop):
            if self.layers:
                outputs = map(self._join, outputs)
            return self._score(*outputs, test.data.targets)

        wanted = Wanted(features=not self.layers, layers=self.layers)
        return Evaluator((Pass(train, wanted), Pass(test, wanted)), score_outputs)

    def _score(self, train: Outputs, test: Outputs, names: tuple[str, ...]) -> Scored:
        columns, chosen, std = [], [], []
        for name, known in zip(names, train.fields[NAME].T, strict=True):
            present = ~np.isnan(known)
            if len(np.unique(known[present])) < 2:
                raise UserError(
                    f"{name!r} has fewer than two different numbers in the training split: "
                    "choose another target_key"
                )
            fitted = fit(train.features[present], known[present], self.l2)
            columns.append(fitted.predict(test.features))
            chosen.append(fitted.l2)
            std.append(float(known[present].std(dtype=np.float64)))
        targets = Targets(
            names, ("",) * len(names), "mse", (0.0,) * len(names), tuple(std)
        )
        decoded = Decoded(np.stack(columns, 1))
        scored = score(decoded, test.fields[NAME], targets, self.resamples)
        several = len(names) > 1
        return Scored(
            scored.metrics
            | {
                f"l2/{name}" if several else "l2": l2
                for name, l2 in zip(names, chosen, strict=True)
            }
        )


class Ridge(NamedTuple):
    """A linear function of raw features: slopes (D,) and an offset."""

    slopes: np.ndarray
    offset: float
    l2: float

    def predict(self, features: Float[np.ndarray, "M D"]) -> Float[np.ndarray, " M"]:
        """Returns the number of each example."""
        return features.astype(np.float64) @ self.slopes + self.offset


def fit(
    features: Float[np.ndarray, "N D"],
    values: Float[np.ndarray, " N"],
    l2: Sequence[float],
) -> Ridge:
    """Fits ridge regression with the strength of the smallest leave-one-out error.

    The loss is the mean squared error plus l2 times the squared slopes of standardised
    features; the offset is not regularised.

    Args:
      features: features of the training examples.
      values: number of each example.
      l2: strengths to try.
    """
    mean, scale = features.mean(0, np.float64), features.std(0) + fewshot.EPSILON
    x, y = (features - mean) / scale, values.astype(np.float64) - values.mean()
    u, s, v = np.linalg.svd(x, full_matrices=False)
    along = u.T @ y
    best = None
    for strength in l2:
        shrunk = s**2 / (s**2 + strength * len(y))
        residual = y - u @ (shrunk * along)
        leverage = np.square(u) @ shrunk + 1 / len(y)
        error = np.square(residual / np.maximum(1 - leverage, 1e-9)).mean()
        if best is None or error < best[0]:
            best = error, strength
    _, strength = best
    slopes = v.T @ (s / (s**2 + strength * len(y)) * along) / scale
    return Ridge(slopes, float(values.mean(dtype=np.float64) - mean @ slopes), strength)
