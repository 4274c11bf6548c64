"""Linear probe: multinomial logistic regression on frozen features, full data.

The strength of the L2 regularisation is chosen on a part of the training examples that
is held out, or by cross-validation where that part would be small; then all of them are
used. Test examples are only scored. Letters: N examples, D features, K classes, B blocks
of R examples.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

from vit_jax.evaluation import fewshot

_BLOCK = 2**24  # Logits at once on the device; 4 bytes each.
# Held-out examples below which strengths are compared by cross-validation. Of 500 an
# accuracy of 90 % is known to 1.3 points, about what neighbouring strengths differ by.
_SMALL = 500
_FOLDS = 5

Features = Float[np.ndarray, "N D"]
Labels = Integer[np.ndarray, " N"]


class Probe(NamedTuple):
    """A linear classifier of features as they are.

    Attributes:
      slopes: (D, K).
      offsets: (K,).
    """

    slopes: np.ndarray
    offsets: np.ndarray

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Returns the class of each example."""
        return (features @ self.slopes + self.offsets).argmax(1).astype(np.int32)


class Choice(NamedTuple):
    """What the held-out examples chose.

    Attributes:
      l2: the strength.
      top1: accuracy on the held-out examples with it; nan if none were needed.
      probe: fitted to all training examples.
    """

    l2: float
    top1: float
    probe: Probe


class _Stopped(Exception):
    """It was abandoned."""


class _Asking:
    """Asks a question a fixed number of times in all.

    How often L-BFGS computes the loss may hang on the last bits of it, and so differ
    between processes, which must ask equally often (see `guards.Preemption`).
    """

    def __init__(self, stop: Callable[[], bool], times: int):
        self._stop, self._left = stop, times

    def once(self) -> None:
        if self._left:
            self._left -= 1
            if self._stop():
                raise _Stopped

    def rest(self) -> None:
        while self._left:
            self.once()


def choose(
    features: Features,
    labels: Labels,
    classes: int,
    *,
    l2: Sequence[float],
    held_out: float,
    seed: int = 0,
    iterations: int = 1_000,
    stop: Callable[[], bool] = lambda: False,
) -> Choice | None:
    """Chooses the strength on held-out examples, and fits all of them with it.

    The held-out part is one draw of every class. Where that is fewer than _SMALL examples,
    every example is held out once, in _FOLDS stratified folds, and the accuracy is that
    over all of them. Of several best strengths the middle one in order of size is taken;
    of two middle ones the stronger.

    Args:
      features: to train on.
      labels: their classes.
      classes: number of classes.
      l2: strengths to try.
      held_out: part of every class that is held out, at least one example where there
        are two or more.
      seed: of the draw of that part.
      iterations: of L-BFGS, at most, for each strength.
      stop: asked whenever the loss is computed, and equally often for each fit, as
        processes that agree on the answer must; True abandons.

    Returns:
      The choice, or None when it was abandoned.
    """
    with contextlib.suppress(_Stopped):
        strengths = sorted(set(l2), reverse=True)
        best, top1 = strengths[0], float("nan")
        parts = _held_out_parts(labels, classes, held_out, seed)
        if len(strengths) > 1 and parts:
            right = np.zeros(len(strengths), int)
            for held in parts:
                known = features[~held], labels[~held]
                fits = path(*known, classes, strengths, iterations, stop)
                tried, true = features[held], labels[held]
                right += [(fitted.predict(tried) == true).sum() for fitted in fits]
            tied = np.flatnonzero(right == right.max())
            best = strengths[tied[(len(tied) - 1) // 2]]
            top1 = float(right.max() / np.sum(parts))
        (probe,) = path(features, labels, classes, [best], iterations, stop)
        return Choice(best, top1, probe)
    return None


def path(
    features: Features,
    labels: Labels,
    classes: int,
    l2: Sequence[float],
    iterations: int = 1_000,
    stop: Callable[[], bool] = lambda: False,
):
    """Fits one probe after the other, each from where the last one ended.

    The loss is the mean softmax cross-entropy plus l2 / 2 times the square of the
    slopes of standardised features; offsets are free. It is computed in float32 on this
    process's first device, which holds the features; L-BFGS keeps its own in float64 on
    the host, 20 times (D + 1) K.

    Args:
      features, labels, classes, iterations: as of `choose`.
      l2: strengths, the largest first.
      stop: as of `choose`; raises _Stopped.

    Yields:
      A probe for each strength.
    """
    from scipy import optimize

    mean, scale = features.mean(0), features.std(0) + fewshot.EPSILON
    blocks = _place((features - mean) / scale, labels, classes)
    size = features.shape[1] + 1, classes
    weights = np.zeros(size[0] * size[1])
    most = 2 * iterations  # Evaluations of the loss, about.
    for strength in l2:
        asking = _Asking(stop, most)

        def objective(flat, strength=strength, asking=asking):
            asking.once()
            given = jax.device_put(flat.reshape(size).astype(np.float32))
            value, slope = jax.device_get(_loss(given, blocks))
            body = flat.reshape(size)[:-1]
            slope = slope.astype(np.float64)
            slope[:-1] += strength * body
            return value + strength / 2 * (body**2).sum(), slope.ravel()

        options = {"maxiter": iterations, "maxfun": most, "gtol": 1e-6}
        weights = optimize.minimize(
            objective, weights, jac=True, method="L-BFGS-B", options=options
        ).x
        asking.rest()
        found = weights.reshape(size)
        slopes = found[:-1] / scale[:, None]
        offsets = found[-1] - mean @ slopes
        yield Probe(slopes.astype(np.float32), offsets.astype(np.float32))


def _held_out_parts(
    labels: np.ndarray, classes: int, part: float, seed: int
) -> list[Bool[np.ndarray, " N"]]:
    """Returns masks of what is held out in turn: one large part, or disjoint folds."""
    held = _held_out(labels, classes, part, seed)
    if not held.any():
        return []
    if held.sum() >= _SMALL:
        return [held]
    # Class by class, so that the folds have the same number of each to within one.
    order = fewshot.draw(labels, len(labels), seed, classes)
    # The only example of a class is needed to learn that class.
    order = order[np.bincount(labels, minlength=classes)[labels[order]] > 1]
    folds = np.full(len(labels), -1)
    folds[order] = np.arange(len(order)) % _FOLDS
    return [folds == fold for fold in range(min(_FOLDS, len(order)))]


def _held_out(
    labels: np.ndarray, classes: int, part: float, seed: int
) -> Bool[np.ndarray, " N"]:
    """Marks a part of every class, drawn as the support of few-shot evaluation is."""
    held = np.zeros(len(labels), bool)
    counts = np.bincount(labels, minlength=classes)
    order = fewshot.draw(labels, len(labels), seed, classes)
    wanted = np.where(counts > 1, np.clip(np.round(counts * part), 1, counts - 1), 0)
    for start, count in zip(np.cumsum(counts) - counts, wanted.astype(int)):
        held[order[start : start + count]] = True
    return held


def _place(features: np.ndarray, labels: np.ndarray, classes: int) -> tuple:
    """Puts examples on the device in blocks, the last filled up with weights of 0."""
    rows = min(len(labels), max(1, _BLOCK // classes))
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
    """Returns the mean cross-entropy and its gradient, block by block."""

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
