"""Linear probe: multinomial logistic regression on frozen features, full data.

The strength of the L2 regularisation is chosen on held-out training examples, or by
cross-validation if there are few of them; then the probe is fitted to all training
examples. Test examples are only scored. Letters: N examples, D features, K classes.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

from vit_jax.config.fields import key
from vit_jax.evaluators import fewshot
from vit_jax.evaluators.protocol import FeaturesConfig, Scored, mean

_BLOCK = 2**24  # Logits per block on the device; 4 bytes each.
# With fewer held-out examples, cross-validation is used: with 500, an accuracy of 90 %
# has an error of 1.3 points, about the difference between neighbouring strengths.
_SMALL = 500
_FOLDS = 5

Features = Float[np.ndarray, "N D"]
Labels = Integer[np.ndarray, " N"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig(FeaturesConfig):
    """Linear probe of features: logistic regression."""

    fractions: ClassVar = ("top1", "held_out_top1")

    kind: str = key("probe", "Kind of evaluation.")
    l2: tuple[float, ...] = key(
        (10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5),
        "Strengths of the L2 regularisation; the best one on a held-out part of "
        "`train` is used.",
        above=0,
        distinct=True,
    )
    held_out: float = key(
        0.1,
        "Size of the held-out part, as a fraction of `train`; if it has fewer than 500 "
        "images, 5-fold cross-validation is used.",
        above=0,
        below=1,
    )
    seed: int = key(0, "Seed for drawing the held-out part.", below=2**32)
    iterations: int = key(
        1_000, "Maximum number of iterations of L-BFGS.", at_least=1, below=2**32
    )

    def score_features(self, train, test, split, stop):
        keys = {"l2": self.l2, "held_out": self.held_out, "seed": self.seed}
        keys |= {"iterations": self.iterations, "stop": stop}
        choice = choose(train.features, train.labels, split.num_classes, **keys)
        if choice is None:
            return None
        predicted = choice.probe.predict(test.features)
        metrics = {"top1": mean(predicted == test.labels), "l2": choice.l2}
        if not np.isnan(choice.top1):
            metrics["held_out_top1"] = choice.top1
        return Scored(metrics)


class Probe(NamedTuple):
    """A linear classifier of raw features: slopes (D, K) and offsets (K,)."""

    slopes: np.ndarray
    offsets: np.ndarray

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Returns the class of each example."""
        return (features @ self.slopes + self.offsets).argmax(1).astype(np.int32)


class Choice(NamedTuple):
    """The strength that is best on held-out examples, and its probe for all examples.

    `top1` is the accuracy on the held-out examples; NaN if there is only one strength.
    """

    l2: float
    top1: float
    probe: Probe


class _Stopped(Exception):
    """Raised when `stop` returns True."""


def choose(
    features: Features,
    labels: Labels,
    num_classes: int,
    *,
    l2: Sequence[float],
    held_out: float,
    seed: int = 0,
    iterations: int = 1_000,
    stop: Callable[[], bool] = lambda: False,
) -> Choice | None:
    """Chooses the strength on held-out examples, and fits all examples with it.

    The held-out examples are one draw from every class. If there are fewer than _SMALL,
    every example is held out once, in _FOLDS stratified folds, and the accuracy is that
    over all folds. If several strengths are equally good, the middle one in order of
    size is chosen, and of two middle ones the larger.

    Args:
      features: features of the training examples.
      labels: classes of the training examples.
      num_classes: number of classes.
      l2: strengths to try.
      held_out: fraction of every class that is held out, at least one example of each
        class with two or more.
      seed: seed of the draw.
      iterations: maximum number of iterations of L-BFGS for each strength.
      stop: function that is called the same number of times for each fit, because all
        processes must call it together; returning True stops.

    Returns:
      The choice; None if stopped.
    """
    with contextlib.suppress(_Stopped):
        strengths = sorted(set(l2), reverse=True)
        best, top1 = strengths[0], float("nan")
        parts = _held_out_parts(labels, num_classes, held_out, seed)
        if len(strengths) > 1 and parts:
            right = np.zeros(len(strengths), int)
            for held in parts:
                known = features[~held], labels[~held]
                fits = path(*known, num_classes, strengths, iterations, stop)
                tried, true = features[held], labels[held]
                right += [(fitted.predict(tried) == true).sum() for fitted in fits]
            tied = np.flatnonzero(right == right.max())
            best = strengths[tied[(len(tied) - 1) // 2]]
            top1 = float(right.max() / np.sum(parts))
        (probe,) = path(features, labels, num_classes, [best], iterations, stop)
        return Choice(best, top1, probe)
    return None


def path(
    features: Features,
    labels: Labels,
    num_classes: int,
    l2: Sequence[float],
    iterations: int = 1_000,
    stop: Callable[[], bool] = lambda: False,
):
    """Yields a probe for each strength, largest first, each starting from the previous.

    The loss is the mean softmax cross-entropy plus l2 / 2 times the squared slopes of
    standardised features; offsets are not regularised. It is computed in float32 on this
    process's first device, which holds the features; L-BFGS keeps 20 times (D + 1) K
    float64 numbers on the host. Raises _Stopped if `stop` returns True.
    """
    from scipy import optimize

    mean, scale = features.mean(0), features.std(0) + fewshot.EPSILON
    blocks = _place((features - mean) / scale, labels, num_classes)
    size = features.shape[1] + 1, num_classes
    weights = np.zeros(size[0] * size[1])
    most = 2 * iterations  # Approximate maximum number of evaluations of the loss.
    for strength in l2:
        # The number of evaluations may depend on the last bits of the loss, and
        # therefore differ between processes, which must call `stop` the same number of
        # times.
        calls = iter(range(most))

        def objective(flat, strength=strength, calls=calls):
            if next(calls, None) is not None and stop():
                raise _Stopped
            on_device = jax.device_put(flat.reshape(size).astype(np.float32))
            value, slope = jax.device_get(_loss(on_device, blocks))
            body = flat.reshape(size)[:-1]
            slope = slope.astype(np.float64)
            slope[:-1] += strength * body
            return value + strength / 2 * (body**2).sum(), slope.ravel()

        options = {"maxiter": iterations, "maxfun": most, "gtol": 1e-6}
        weights = optimize.minimize(
            objective, weights, jac=True, method="L-BFGS-B", options=options
        ).x
        if any(stop() for _ in calls):
            raise _Stopped
        solution = weights.reshape(size)
        slopes = solution[:-1] / scale[:, None]
        offsets = solution[-1] - mean @ slopes
        yield Probe(slopes.astype(np.float32), offsets.astype(np.float32))


def _held_out_parts(
    labels: np.ndarray, num_classes: int, part: float, seed: int
) -> list[Bool[np.ndarray, " N"]]:
    """Returns masks of held-out examples: one large draw, or disjoint folds."""
    held = _held_out(labels, num_classes, part, seed)
    if not held.any():
        return []
    if held.sum() >= _SMALL:
        return [held]
    # Class by class, so that the folds differ by at most one example of each class.
    order = fewshot.draw(labels, len(labels), seed, num_classes)
    # A class with a single example keeps it for training.
    order = order[np.bincount(labels, minlength=num_classes)[labels[order]] > 1]
    folds = np.full(len(labels), -1)
    folds[order] = np.arange(len(order)) % _FOLDS
    return [folds == fold for fold in range(min(_FOLDS, len(order)))]


def _held_out(
    labels: np.ndarray, num_classes: int, part: float, seed: int
) -> Bool[np.ndarray, " N"]:
    """Returns a mask of held-out examples, drawn like the support of few-shot."""
    held = np.zeros(len(labels), bool)
    counts = np.bincount(labels, minlength=num_classes)
    order = fewshot.draw(labels, len(labels), seed, num_classes)
    wanted = np.where(counts > 1, np.clip(np.round(counts * part), 1, counts - 1), 0)
    for start, count in zip(np.cumsum(counts) - counts, wanted.astype(int)):
        held[order[start : start + count]] = True
    return held


def _place(features: np.ndarray, labels: np.ndarray, num_classes: int) -> tuple:
    """Copies examples to the device in blocks; padding in the last one has weight 0."""
    rows = min(len(labels), max(1, _BLOCK // num_classes))
    blocks = -(-len(labels) // rows)

    def cut(x):
        filled = np.zeros((blocks * rows, *x.shape[1:]), x.dtype)
        filled[: len(x)] = x
        return filled.reshape(blocks, rows, *x.shape[1:])

    counted = np.full(len(labels), 1 / len(labels), np.float32)
    parts = (features.astype(np.float32), labels.astype(np.int32), counted)
    return jax.device_put(tuple(map(cut, parts)))


@jax.jit
def _loss(weights: jax.Array, blocks: tuple) -> tuple[jax.Array, jax.Array]:
    """Returns the mean cross-entropy and its gradient, computed block by block."""

    def of_block(weights, features, labels, counted):
        product = functools.partial(jnp.dot, precision=jax.lax.Precision.HIGHEST)
        logits = product(features, weights[:-1]) + weights[-1][None]
        chances = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(chances, labels[:, None], 1)[:, 0]
        return -(counted * chosen).sum()

    def add(total, block):
        part = jax.value_and_grad(of_block)(weights, *block)
        return jax.tree.map(jnp.add, total, part), None

    nothing = (jnp.zeros([]), jnp.zeros_like(weights))
    return jax.lax.scan(add, nothing, blocks)[0]
