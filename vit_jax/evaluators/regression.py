"""Regression of a split: errors of predicted numbers, with bootstrap intervals.

Letters: N examples, T targets, K levels, R resamples.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float

from vit_jax.config.fields import key
from vit_jax.data.fields.target import NAME
from vit_jax.errors import UserError
from vit_jax.evaluators.forward_passes import Wanted
from vit_jax.evaluators.protocol import Confusion, Evaluator, Pass, Scored
from vit_jax.evaluators.splits import EvalConfig, EvalSplits
from vit_jax.models.targets import Decoded, Targets

SEED = 0
_DRAWS = (
    20_000_000  # Most random numbers of a bootstrap: of many images fewer resamples.
)
_FEWEST, _BLOCK = 200, 4_000_000
_INTERVAL = (2.5, 97.5)  # Percentiles.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegressionConfig(EvalConfig):
    """Errors and correlations of predicted numbers, in the units of the targets."""

    fractions: ClassVar = ("coverage", "coverage/*")

    kind: str = key("regression", "Kind of evaluation.")
    split: str = key("", 'Split to evaluate; "" is the test split of the data set.')
    resamples: int = key(
        1_000,
        "Number of bootstrap resamples of the images for 95 % intervals; 0 computes no "
        "intervals. Of more than 20,000 images there are fewer.",
        reason="shorter evaluations while a run trains",
        at_most=1_000_000,
    )

    def open(self, name, splits):
        targets = targets_of(name, splits)
        split = splits.open(
            name,
            named(self, splits),
            self.split,
            model_classes=False,
            labelled=False,
        )
        check_count(name, split.data.targets, targets)

        def score_outputs(outputs, stop):
            (result,) = outputs
            if np.isnan(result.fields[NAME]).all():
                raise UserError(
                    f"evals.{name}: no image of {split.title} has a number in "
                    f"{', '.join(split.data.targets)}: choose a split that has"
                )
            decoded = targets.decode(result.logits.astype(np.float64))
            return score(decoded, result.fields[NAME], targets, self.resamples)

        return Evaluator((Pass(split, Wanted(logits=True)),), score_outputs)


def targets_of(name: str, splits: EvalSplits) -> Targets:
    """Returns the targets of the weights; UserError if they predict no numbers."""
    if splits.targets is None:
        raise UserError(
            f"evals.{name} scores numbers, which these weights do not predict: evaluate a "
            "run with task.name='regression', or its features by kind='ridge'"
        )
    return splits.targets


def named(config: EvalConfig, splits: EvalSplits) -> EvalConfig:
    """Returns a config with names of targets: those of the weights by default."""
    given = config.target_key or (splits.target_key if not config.name else "")
    if given or splits.targets is None:
        return config
    return dataclasses.replace(config, target_key=",".join(splits.targets.names))


def check_count(name: str, given: tuple[str, ...], targets: Targets) -> None:
    """Raises UserError unless there are as many targets as the weights predict."""
    if len(given) != len(targets.names):
        raise UserError(
            f"evals.{name}.target_key={','.join(given)!r} has {len(given)} names, but the "
            f"weights predict {len(targets.names)}: {', '.join(targets.names)}"
        )


def score(
    decoded: Decoded,
    truth: Float[np.ndarray, "N T"],
    targets: Targets,
    resamples: int = 1_000,
) -> Scored:
    """Scores predictions against the targets that are present.

    Args:
      decoded: predictions in units.
      truth: true values, NaN where one is missing.
      targets: meaning of the predictions.
      resamples: number of bootstrap resamples; 0 for no intervals.

    Returns:
      For each target mae and rmse, in its unit; r2, 1 minus the squared errors divided
      by those of the mean; spearman, the rank correlation; for ordinal targets qwk,
      Cohen's kappa with quadratic weights; and coverage, the fraction of values within
      their 95 % intervals, if there are intervals. Each has an interval, from mae_low
      to mae_high. With several targets the names are mae/NAME, and mae is the mean over
      the targets, of mae and rmse in standard deviations of the training images. A
      target without values is left out of both, unless no target has any. A value that
      is undefined, as the correlation of equal predictions, is 0. Ordinal
      targets also have a confusion matrix if there is one.
    """
    truth = truth.astype(np.float64)
    present = ~np.isnan(truth)
    known = np.flatnonzero(present.any(0)).tolist() or range(len(targets.names))
    scores = {
        t: _score_one(decoded, truth[:, t], present[:, t], targets, t, resamples)
        for t in known
    }
    metrics = _named_metrics(scores, targets)
    if len(targets.names) > 1:
        metrics |= {
            f"values/{name}": int(present[:, t].sum())
            for t, name in enumerate(targets.names)
        }
    metrics["examples"] = int(present.any(1).sum())
    if not targets.levels or len(targets.names) > 1:
        return Scored(metrics)
    (rows,) = np.nonzero(present[:, 0])
    pairs = truth[rows, 0], decoded.values[rows, 0]
    true, predicted = (np.searchsorted(targets.levels, x) for x in pairs)
    K = len(targets.levels)
    true = true.clip(0, K - 1)
    counts = np.bincount(true * K + predicted, minlength=K * K).reshape(K, K)
    return Scored(metrics, Confusion(counts, tuple(f"{x:g}" for x in targets.levels)))


def _score_one(
    decoded: Decoded, truth, present, targets: Targets, t: int, resamples: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the metrics of a target, and their values on resamples, (R,)."""
    true, predicted = truth[present], decoded.values[present, t].astype(np.float64)
    if not len(true):
        true = predicted = np.zeros(1)
    # Standardised, because the variance of large or tiny numbers would lose digits.
    scale = true.std() if np.ptp(true) else math.inf
    terms = {
        "error": np.abs(predicted - true),
        "square": np.square(predicted - true),
        "relative": np.square((predicted - true) / scale),
        **_products(t=(true - true.mean()) / scale),
    }
    if targets.levels:
        places = [np.searchsorted(targets.levels, x) for x in (true, predicted)]
        terms |= _products(a=places[0], b=places[1])
    if decoded.low is not None and present.any():
        low, high = (x[present, t] for x in (decoded.low, decoded.high))
        terms["inside"] = (low <= true) & (true <= high)
    table = np.stack([np.asarray(x, np.float64) for x in terms.values()], 1)
    pair = _Ties.of(true), _Ties.of(predicted)

    def metrics(counts):
        means = counts @ table / len(table)
        of_means = _metrics(dict(zip(terms, np.moveaxis(means, -1, 0), strict=True)))
        return of_means | {"spearman": _rank_correlation(counts, *pair)}

    values = {k: v[0] for k, v in metrics(np.ones((1, len(table)))).items()}
    blocks = [metrics(counts) for counts in resampled_counts(len(table), resamples)]
    return values, {
        name: np.concatenate([each[name] for each in blocks])
        for name in values
        if blocks
    }


def _products(**columns: np.ndarray) -> dict[str, np.ndarray]:
    """Returns columns and their products, whose means give variances and covariances."""
    pairs = itertools.combinations_with_replacement(columns.items(), 2)
    return columns | {x + y: a * b for (x, a), (y, b) in pairs}


def _metrics(means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns metrics of the means of the terms of `_score_one`, each (R,)."""
    variance = means["tt"] - np.square(means["t"])
    metrics = {
        "mae": means["error"],
        "rmse": np.sqrt(means["square"]),
        "r2": _ratio(variance - means["relative"], variance),
    }
    if "ab" in means:
        observed = means["aa"] + means["bb"] - 2 * means["ab"]
        expected = means["aa"] + means["bb"] - 2 * means["a"] * means["b"]
        metrics["qwk"] = _ratio(expected - observed, expected)
    if "inside" in means:
        metrics["coverage"] = means["inside"]
    return metrics


def _ratio(total: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Returns total / whole, 0 where `whole` is the rounded variance of equal numbers."""
    undefined = whole < 1e-12
    return np.where(undefined, 0, total / np.where(undefined, 1, whole))


class _Ties(NamedTuple):
    """Examples by increasing value: their order, and where each value begins.

    `value` is the number of each example's value among the different values, (N,).
    """

    order: np.ndarray
    starts: np.ndarray
    value: np.ndarray

    @classmethod
    def of(cls, values: Float[np.ndarray, " N"]) -> "_Ties":
        _, value, sizes = np.unique(values, return_inverse=True, return_counts=True)
        return cls(np.argsort(value, kind="stable"), sizes.cumsum() - sizes, value)

    def ranks(self, counts: Float[np.ndarray, "R N"]) -> Float[np.ndarray, "R N"]:
        """Returns the ranks of the examples in resamples, from 0 to 1.

        Equal values have the mean of their ranks.
        """
        of_values = np.add.reduceat(counts[:, self.order], self.starts, axis=1)
        ranks = of_values.cumsum(1) - of_values / 2
        return ranks[:, self.value] / counts.shape[1]


def _rank_correlation(
    counts: Float[np.ndarray, "R N"], true: _Ties, predicted: _Ties
) -> Float[np.ndarray, " R"]:
    """Returns Spearman's correlation of resamples; 0 if all values are equal."""
    # The mean of all ranks, which are divided by N, is 1 / 2.
    r, s = (each.ranks(counts) - 0.5 for each in (true, predicted))
    covariance, *variances = (
        (counts * a * b).mean(1) for a, b in ((r, s), (r, r), (s, s))
    )
    return _ratio(covariance, np.sqrt(np.prod(variances, axis=0)))


def resampled_counts(N: int, resamples: int) -> Iterator[Float[np.ndarray, "R N"]]:
    """Yields how often bootstrap resamples of N examples have each example, in blocks.

    The resamples depend only on their number and on N; of many examples there are
    fewer.
    """
    count = min(resamples, max(_FEWEST, _DRAWS // N))
    draw, rows = np.random.default_rng(SEED), max(1, _BLOCK // N)
    for start in range(0, count, rows):
        part = min(rows, count - start)
        drawn = draw.integers(0, N, (part, N)) + N * np.arange(part)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=part * N)
        yield counts.reshape(part, N).astype(np.float64)


def _named_metrics(scores: Mapping[int, tuple[dict, dict]], targets: Targets) -> dict:
    """Returns metrics with intervals by name, see `score`.

    `scores` has the metrics of each target, by its number, and their values on
    resamples.
    """
    metrics, several = {}, len(targets.names) > 1
    if several:
        for name in next(iter(scores.values()))[0]:
            units = (
                targets.std if name in ("mae", "rmse") else np.ones(len(targets.std))
            )
            known = [
                (values[name] / units[t], drawn[name] / units[t] if drawn else math.nan)
                for t, (values, drawn) in scores.items()
            ]
            value, drawn = (sum(part) / len(known) for part in zip(*known, strict=True))
            metrics |= _with_interval(name, value, drawn)
    for t, (values, drawn) in scores.items():
        for name, value in values.items():
            at = f"{name}/{targets.names[t]}" if several else name
            metrics |= _with_interval(at, value, drawn.get(name))
    return metrics


def _with_interval(name: str, value, drawn) -> dict[str, float]:
    """Returns a metric, and its interval if `drawn` has values on resamples."""
    metric, _, target = name.partition("/")
    result = {name: float(value)}
    if np.ndim(drawn):
        for end, limit in zip(("low", "high"), np.percentile(drawn, _INTERVAL)):
            result[f"{metric}_{end}" + f"/{target}" * bool(target)] = float(limit)
    return result
