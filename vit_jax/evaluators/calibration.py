"""Fits the decisions of a classifier on held-out images: calibration.

These are a temperature, thresholds for several labels, and conformal prediction sets;
`vit_jax/weights/calibration.py` stores and applies them. Letters: N images, K classes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Integer, Shaped
from scipy import optimize, special

from vit_jax.data import groups
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.base import Source
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.evaluators import checkpoint, forward_passes, multi_label
from vit_jax.evaluators.forward_passes import Wanted
from vit_jax.evaluators.splits import VALIDATIONS, EvalSplits, ModelClassesConfig
from vit_jax.evaluators.suite import PARAMS_NAME, full_batch
from vit_jax.weights import surgery
from vit_jax.weights.calibration import Calibration, checksum
from vit_jax.weights.pretrained import Pretrained

BINS, _LEAST_IN_BIN = 15, 10
FOLDS = 5  # Parts of the cross-fitting without a test split.
COVERAGES = (0.8, 0.9, 0.95)
# Classes with fewer images share a threshold, since the best one would be chance.
LEAST_POSITIVE = 5
_MOST_SCORES = 10_000  # A random part of more images is stored.
_HALF = 0.5


class Outputs(NamedTuple):
    """Logits of held-out images, and 0 or 1 for each of their classes.

    `groups` has the group of each image, see data/groups.py; None if they are unknown.
    """

    logits: Float[np.ndarray, "N K"]
    labels: Integer[np.ndarray, "N K"]
    groups: Shaped[np.ndarray, " N"] | None = None

    @classmethod
    def of(cls, seen: forward_passes.Outputs, source: Source, title: str) -> "Outputs":
        """Returns the logits and labels of a pass over a source.

        Raises:
          UserError: logits are not finite; the message has the split's `title`.
        """
        if not np.isfinite(seen.logits).all():
            raise UserError(
                f"the outputs for {title} are not finite: the checkpoint is damaged, or "
                "diverged in training"
            )
        labels, known = seen.labels, source.record_groups
        if labels.ndim == 1:
            labels = np.eye(seen.logits.shape[1], dtype=np.int32)[labels]
        if known is not None:
            known = np.array(known)[seen.records]
        return cls(seen.logits, labels, known)

    def take(self, images: np.ndarray) -> "Outputs":
        """Returns the outputs of some images, without their groups."""
        return Outputs(self.logits[images], self.labels[images])


@dataclasses.dataclass(frozen=True)
class What:
    """What to fit.

    Attributes:
      sigmoid: whether probabilities are sigmoids of the logits.
      several: whether an image may have several labels, so that thresholds are fitted.
      scale: whether to fit the temperature and the sets; if not, only thresholds.
    """

    sigmoid: bool
    several: bool
    scale: bool = True


def equal_mass_error(
    probabilities: Float[np.ndarray, " N"], right: Bool[np.ndarray, " N"]
) -> float:
    """Returns the expected calibration error with bins of equal numbers of images.

    The predictions are sorted by probability and cut into 15 bins of equal size, fewer
    if a bin would have under 10. The error is the mean over all predictions of the
    difference between accuracy and mean probability in the bin (arXiv:1904.01685).
    """
    order = np.argsort(probabilities, kind="stable")
    count = min(BINS, max(1, len(order) // _LEAST_IN_BIN))
    bins = np.array_split(order, count)
    gaps = [abs((right[at] - probabilities[at]).sum(dtype=np.float64)) for at in bins]
    return float(sum(gaps) / len(order))


def fit_scale(outputs: Outputs, *, sigmoid: bool) -> tuple[float, float]:
    """Returns temperature and bias with the least cross-entropy.

    All classes share both; the bias is 0 with a softmax (arXiv:1706.04599). With a
    sigmoid this is Platt scaling. As with Platt's targets, one image with the classes'
    mean frequencies is added, so that logits without any mistake stay finite.
    """
    logits, labels = outputs.logits.astype(np.float64), outputs.labels > 0
    weight = 1 / (len(logits) + 1)
    targets = (1 - weight) * labels + weight * labels.mean(0)

    def softmax_loss(log_scale):
        scaled = logits * np.exp(log_scale)
        return -(targets * special.log_softmax(scaled, 1)).sum(1).mean()

    if not sigmoid:
        found = optimize.minimize_scalar(
            softmax_loss, bounds=(-5, 5), method="bounded", options={"xatol": 1e-6}
        )
        return float(np.exp(-found.x)), 0.0

    def sigmoid_loss(x):
        scale, bias = np.exp(x[0]), x[1]
        scaled = logits * scale + bias
        loss = (np.logaddexp(0, scaled) - targets * scaled).sum(1).mean()
        error = special.expit(scaled) - targets
        slopes = [(error * logits).sum(1).mean() * scale, error.sum(1).mean()]
        return loss, np.array(slopes)

    found = optimize.minimize(
        sigmoid_loss,
        np.zeros(2),
        jac=True,
        method="L-BFGS-B",
        bounds=((-5, 5), (-20, 20)),
    )
    return float(np.exp(-found.x[0])), float(found.x[1])


def best_thresholds(
    probabilities: Float[np.ndarray, "N K"], labels: Integer[np.ndarray, "N K"]
) -> tuple[float, ...]:
    """Returns the threshold of each class with the highest F1 score.

    A threshold lies in the middle between two probabilities. Classes of fewer than 5
    images get the threshold with the highest micro F1 score of all classes.
    """
    shared = _best_threshold(probabilities.ravel(), labels.ravel() > 0)
    return tuple(
        _best_threshold(p, label > 0) if label.sum() >= LEAST_POSITIVE else shared
        for p, label in zip(probabilities.T, labels.T, strict=True)
    )


def _best_threshold(
    probabilities: Float[np.ndarray, " N"], positive: Bool[np.ndarray, " N"]
) -> float:
    """Returns the threshold with the highest F1; of equal ones the nearest to 0.5."""
    if not positive.any():
        return _HALF
    order = np.argsort(-probabilities, kind="stable")
    sure, right = probabilities[order], np.cumsum(positive[order])
    ends = np.flatnonzero(np.append(np.diff(sure) != 0, True))
    f1 = 2 * right[ends] / (ends + 1 + right[-1])
    below = np.append(sure, 0.0)[ends + 1]
    middle = (sure[ends] + below) / 2
    best = np.flatnonzero(f1 == f1.max())
    return float(middle[best[np.abs(middle[best] - _HALF).argmin()]])


def conformal_scores(
    probabilities: Float[np.ndarray, "N K"], labels: Integer[np.ndarray, "N K"]
) -> Float[np.ndarray, " M"]:
    """Returns 1 minus the smallest probability of an image's classes, sorted.

    This is the score of least ambiguous sets (arXiv:2107.07511, section 1). Images
    without a label have no score. It is rounded up to 6 digits, which only makes sets
    larger.
    """
    labelled = (labels > 0).any(1)
    least = np.where(labels > 0, probabilities, 1.0).min(1)[labelled]
    return np.sort(np.ceil((1 - least) * 1e6) / 1e6)


def fit(outputs: Outputs, what: What) -> Calibration:
    """Returns the decisions for the logits and labels of held-out images."""
    found = Calibration(sigmoid=what.sigmoid)
    if what.scale:
        temperature, bias = fit_scale(outputs, sigmoid=what.sigmoid)
        found = dataclasses.replace(found, temperature=temperature, bias=bias)
    probabilities = found.probabilities(outputs.logits)
    if what.several:
        thresholds = best_thresholds(probabilities, outputs.labels)
        found = dataclasses.replace(found, thresholds=thresholds)
    if what.scale:
        scores = conformal_scores(probabilities, outputs.labels)
        if len(scores) > _MOST_SCORES:
            rng = np.random.default_rng(0)
            scores = np.sort(rng.choice(scores, _MOST_SCORES, replace=False))
        found = dataclasses.replace(found, scores=tuple(scores.tolist()))
    return found


class _Decided(NamedTuple):
    """Decisions on images: probabilities, predictions, and sets by coverage, (N, K)."""

    probabilities: np.ndarray
    predicted: np.ndarray
    sets: dict[float, np.ndarray]


def prediction_sets(
    probabilities: Float[np.ndarray, "N K"], smallest: float
) -> Bool[np.ndarray, "N K"]:
    """Returns the classes of each image's set, which has at least its best class."""
    best = np.eye(probabilities.shape[1], dtype=bool)[probabilities.argmax(1)]
    return best | (probabilities >= smallest)


def _decide(found: Calibration, logits: np.ndarray) -> _Decided:
    probabilities = found.probabilities(logits)
    predicted = probabilities >= (
        np.array(found.thresholds) if found.thresholds else _HALF
    )
    sets = {}
    for coverage in COVERAGES if found.scores else ():
        try:
            smallest = found.smallest_probability(coverage)
        except UserError:  # Too few images.
            continue
        sets[coverage] = prediction_sets(probabilities, smallest)
    return _Decided(probabilities, predicted, sets)


def measure(fitted_on: Outputs, test: Outputs | None, what: What) -> dict[str, object]:
    """Returns scores before and after the calibration, of images it was not fitted on.

    Without test images, the images are cut into 5 parts, which keep groups together, and
    each part is scored with the decisions that were fitted on the others (cross-fitting).

    Returns:
      "ece" and "loss" (nats), pairs of before and after, with `what.scale`; "micro_f1"
      and "macro_f1", pairs of the threshold 0.5 and the fitted ones, with
      `what.several`; "coverage" and "set_size" (mean number of classes) by coverage;
      "images".
    """
    if test is None:
        parts = _parts(fitted_on)
        pairs = [
            (fitted_on.take(parts != p), fitted_on.take(parts == p))
            for p in np.unique(parts)
        ]
    else:
        pairs = [(fitted_on, test)]
    decided = [_decide(fit(one, what), other.logits) for one, other in pairs]
    logits, labels = (np.concatenate([each[i] for _, each in pairs]) for i in range(2))
    common = set.intersection(*({*each.sets} for each in decided))
    after = _Decided(
        np.concatenate([each.probabilities for each in decided]),
        np.concatenate([each.predicted for each in decided]),
        {c: np.concatenate([each.sets[c] for each in decided]) for c in common},
    )
    before = _decide(Calibration(sigmoid=what.sigmoid), logits)
    return _scores(before, after, labels, what)


def _parts(outputs: Outputs) -> Integer[np.ndarray, " N"]:
    """Returns the part of each image for cross-fitting: random, or of whole groups."""
    count = len(outputs.logits)
    different = 0 if outputs.groups is None else len(np.unique(outputs.groups))
    if different > 1:
        names = outputs.groups.tolist()
        return groups.folds(names, None, min(FOLDS, different), "data.group_key")
    return np.random.default_rng(0).permutation(count) % min(FOLDS, count)


def _scores(
    before: _Decided, after: _Decided, labels: np.ndarray, what: What
) -> dict[str, object]:
    """Returns the scores of `measure`."""
    result: dict[str, object] = {"images": len(labels)}
    both = before, after
    if what.scale:
        result["ece"] = [_error(each.probabilities, labels, what) for each in both]
        result["loss"] = [_loss(each.probabilities, labels, what) for each in both]
    if what.several:
        pairs = [multi_label.f1_scores(each.predicted, labels > 0) for each in both]
        result["macro_f1"], result["micro_f1"] = map(list, zip(*pairs, strict=True))
    labelled = (labels > 0).any(1)
    if labelled.any() and after.sets:
        sets = {c: after.sets[c][labelled] for c in sorted(after.sets)}
        missed = {c: (labels[labelled] > 0) & ~each for c, each in sets.items()}
        result["coverage"] = {
            f"{c:g}": 1 - float(m.any(1).mean()) for c, m in missed.items()
        }
        result["set_size"] = {f"{c:g}": float(s.sum(1).mean()) for c, s in sets.items()}
    return result


def _error(probabilities: np.ndarray, labels: np.ndarray, what: What) -> float:
    """Returns the calibration error of the best class, or of every label."""
    if what.several:
        return equal_mass_error(probabilities.ravel(), labels.ravel() > 0)
    best = probabilities.argmax(1)
    right = labels[np.arange(len(best)), best] > 0
    return equal_mass_error(probabilities.max(1), right)


def _loss(probabilities: np.ndarray, labels: np.ndarray, what: What) -> float:
    """Returns the mean cross-entropy in nats, summed over the classes with a sigmoid."""
    tiny = np.finfo(np.float64).tiny
    terms = np.where(labels > 0, np.log(probabilities.clip(tiny)), 0.0)
    if what.sigmoid:
        terms += np.where(labels > 0, 0.0, np.log1p(-probabilities.clip(0, 1 - 1e-16)))
    return float(-terms.sum(1).mean())


def outputs_of(
    pretrained: Pretrained, preprocess: Preprocess, config, split: str
) -> tuple[Outputs, str]:
    """Computes the logits of a split, and reads its labels; returns its name too.

    Args:
      pretrained, preprocess: the model, as `checkpoint.evaluate` takes them.
      config: a `TrainConfig` or `EvaluationConfig`, whose data set is read.
      split: split expression; "" is the usual validation split.

    Raises:
      UserError: the split cannot be opened or does not have the model's classes.
    """
    mesh = meshes.create(config.mesh)
    model, params = surgery.fit_network(pretrained, preprocess)
    rules, size = config.sharding.rules, config.sharding.min_size
    axes = model.config.model_axes
    shardings = sharding.parameters(model.shapes, mesh, axes, rules, size)
    data = checkpoint.data_of(pretrained, preprocess, config.data, model)
    splits = EvalSplits(data, preprocess, pretrained.class_names, VALIDATIONS)
    opened = splits.open("calibration", ModelClassesConfig(), split, model_classes=True)
    step = forward_passes.make_eval_step(
        model, data, mesh, Wanted(logits=True), shardings
    )
    params = {PARAMS_NAME: jax.device_put(params, shardings)}
    batch_size = full_batch(config.batch_size, mesh)
    with opened.batches(None, batch_size, *meshes.data_shard(mesh)) as batches:
        found = forward_passes.collect_outputs(
            step, params, batches, mesh, title=opened.title
        )
    return Outputs.of(found[PARAMS_NAME], opened.source, opened.title), opened.split


def calibrate(
    pretrained: Pretrained,
    compute: Callable[[str], tuple[Outputs, str]],
    split: str,
    test: str = "",
    *,
    scale: bool = True,
    chose_checkpoint: bool = False,
) -> Calibration:
    """Fits the decisions of a model on a split, and measures them on another.

    Args:
      pretrained: the model.
      compute: function of a split that returns its outputs and name, see `outputs_of`.
      split: split to fit on.
      test: split to measure on; "" cross-fits `split`, see `measure`.
      scale: whether to fit temperature and sets; if not, only thresholds.
      chose_checkpoint: whether `split` chose the checkpoint, for the record.

    Raises:
      UserError: the model has no classifier, a split cannot be read, or it has fewer
        than two images.
    """
    if not pretrained.options["num_classes"]:
        raise UserError(
            f"{pretrained.source} has no classifier, so nothing can be calibrated: give "
            "a model of classes"
        )
    what = What(pretrained.loss == "sigmoid", pretrained.multi_label, scale)
    outputs, split = compute(split)
    if len(outputs.logits) < 2:
        raise UserError(f"split {split!r} has one image: calibrate on two or more")
    tested = None
    if test:
        tested, test = compute(test)
    if test == split:  # Both are the only split that exists.
        tested, test = None, ""
    measured = measure(outputs, tested, what)
    measured["split"] = test or f"{split}, in {FOLDS} parts"
    fitted = {
        "split": split,
        "images": len(outputs.logits),
        "chose_checkpoint": chose_checkpoint,
    }
    return dataclasses.replace(
        fit(outputs, what),
        fitted=fitted,
        measured=measured,
        head=checksum(pretrained.params),
    )


def lines(found: Calibration) -> list[str]:
    """Returns lines about decisions: what was fitted, and how well it does."""
    fitted, measured = found.fitted, found.measured
    also = ", which also chose the checkpoint" if fitted.get("chose_checkpoint") else ""
    where = f"{fitted['images']:,} images of {fitted['split']}{also}"
    on = f"on {measured['images']:,} images of {measured['split']}"
    result = []
    if "ece" in measured:
        shift = f", bias {found.bias:.3g}" if found.sigmoid else ""
        (before, after), (loss, lower) = measured["ece"], measured["loss"]
        result.append(
            f"calibration: temperature {found.temperature:.3g}{shift}, from {where}"
        )
        result.append(
            f"calibration: error {before:.2%} before, {after:.2%} after; loss "
            f"{loss:.4f} before, {lower:.4f} after, {on}"
        )
    if "micro_f1" in measured:
        f1 = [
            f"{name} {measured[f'{name}_f1'][0]:.2%} at 0.5, {measured[f'{name}_f1'][1]:.2%} "
            "after"
            for name in ("micro", "macro")
        ]
        result.append(f"thresholds:  one per class, from {where}")
        result.append(f"thresholds:  F1 {'; '.join(f1)}, {on}")
    result += _set_lines(measured, on)
    return result


def _set_lines(measured: Mapping, on: str) -> list[str]:
    """Returns a line about the coverage of the sets, if there are any."""
    parts = [
        f"{level} covers {covered:.2%} with {measured['set_size'][level]:.2f} classes"
        for level, covered in measured.get("coverage", {}).items()
    ]
    return [f"sets:        --coverage={'; '.join(parts)}, {on}"] * bool(parts)
