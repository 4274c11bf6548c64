"""The HTML page of a network that predicts numbers, and the intervals of its predictions.

page.py has the parts that it shares with the pages of other annotations. Letters: N
images, T targets, P parts of the range of a target.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from vit_jax.analysis.charts import Chart, Series
from vit_jax.data.fields.target import NAME, read_targets
from vit_jax.data.sources.open import open_source
from vit_jax.evaluators import numbers, regression
from vit_jax.models.targets import PREDICTS_SPREAD, Decoded, Targets
from vit_jax.tools.finetuning import page
from vit_jax.tools.finetuning.evaluated import SplitOutputs, TrainedNetwork
from vit_jax.tools.finetuning.kind import Result
from vit_jax.tools.report.blocks import Table
from vit_jax.training.config import TrainConfig, complete
from vit_jax.weights import checkpoint_folders, workdir

_TEMPLATE = "finetuning/number_page.html"
_SHOWN, _WORST = 12, 3  # Images on the page, and in the lines of the terminal.
_MOST_POINTS = 2_000  # Of a figure.
_PARTS = 5


def write(
    config: TrainConfig, result: Result, score: str, network: TrainedNetwork
) -> tuple[str, list[str]]:
    """Writes the page of a run, and the widths of intervals beside its checkpoints.

    Args:
      config: config of the run.
      result: result of the run, whose best checkpoint is evaluated again.
      score: score as a sentence.
      network: network of the run.

    Returns:
      The path of the page, and lines about the worst images.
    """
    targets, data = network.pretrained.targets, config.data
    seen, source, _ = network.of_evaluation(result.split)
    if targets.loss not in PREDICTS_SPREAD:
        apart = network.of_evaluation("val").outputs
        values = targets.decode(apart.logits.astype(np.float64))
        margins = numbers.margins(values, apart.fields[NAME])
        workdir.write_margins(result.workdir, margins)
        targets = dataclasses.replace(targets, margins=margins or ())
    decoded, truth = targets.decode(seen.logits.astype(np.float64)), seen.fields[NAME]
    trained = read_targets(open_source(data, data.split), targets.names)
    errors = np.abs(decoded.values - truth)
    # In standard deviations, so that targets of different units are compared.
    relative = np.nan_to_num(errors / np.nanstd(trained, 0), nan=-1)
    worst = np.argsort(-relative.max(1), kind="stable")[:_SHOWN]
    best = np.argsort(np.where(relative < 0, np.inf, relative).max(1), kind="stable")

    def caption(i: int) -> str:
        return describe(decoded.values[i], truth[i], targets)

    def pictures(images) -> list[dict[str, str]]:
        return [page.picture(source, seen.records[i], caption(i)) for i in images]

    what = ", ".join(targets.names)
    curves = {"r2": "R2"} | (
        {"mae": "mean absolute error"} if len(targets.names) == 1 else {}
    )
    common = page.common(config, result, score, what, curves)
    values = {
        "scores": scores_table(result, targets, trained),
        "scatters": [
            page.draw(scatter(decoded.values[:, t], truth[:, t], targets, t))
            for t in range(len(targets.names))
        ],
        "parts": [
            parts_table(decoded.values[:, t], truth[:, t], name)
            for t, name in enumerate(targets.names)
        ],
        "worst": pictures(worst),
        "best": pictures([i for i in best[:_SHOWN] if i not in worst]),
        "has_intervals": decoded.low is not None,
        "learnt": targets.loss in PREDICTS_SPREAD,
    }
    path = page.write(_TEMPLATE, common, result.workdir, **values)
    lines = [
        f"{source.describe(int(seen.records[i]))}: {caption(i)}" for i in worst[:_WORST]
    ]
    return path, [f"worst:     {line}" for line in lines]


def score_all(runs: Sequence[SplitOutputs]) -> dict[str, float]:
    """Returns the scores of all images that several networks predicted."""
    each = [targets.decode(seen.logits.astype(np.float64)) for seen, _, targets in runs]
    joined = {
        name: np.concatenate([getattr(one, name) for one in each])
        for name in ("values", "low", "high")
        if getattr(each[0], name) is not None
    }
    truth = np.concatenate([one.outputs.fields[NAME] for one in runs])
    levels = sorted({level for one in runs for level in one.targets.levels})
    targets = dataclasses.replace(runs[0].targets, levels=tuple(levels))
    return regression.score(Decoded(**joined), truth, targets).metrics


def units_of(result: Result) -> tuple[str, ...]:
    """Returns the unit of each target of a run."""
    metadata = checkpoint_folders.read_metadata(result.workdir)
    config = complete(metadata["config"])
    return config.task.targets(config.data).units


def error_of(result: Result, suffix: str, unit: str) -> str:
    """Returns the mean absolute error of a target with its interval.

    Args:
      result: result of a run.
      suffix: what follows the names of metrics: "" or "/NAME".
      unit: unit of the target.
    """
    scores = result.scores
    text = f"{scores[f'mae{suffix}']:.4g} {unit}".strip()
    low, high = (scores.get(f"mae_{end}{suffix}") for end in ("low", "high"))
    if low is None:
        return text
    return f"{text} (95 % interval {low:.4g} to {high:.4g})"


def describe(
    predicted: Float[np.ndarray, " T"], truth: Float[np.ndarray, " T"], targets: Targets
) -> str:
    """Returns the true and the predicted numbers of an image in words."""
    parts = []
    for t, (name, unit) in enumerate(zip(targets.names, targets.units, strict=True)):
        named = f"{name} " * (len(targets.names) > 1)
        true = "unknown" if np.isnan(truth[t]) else f"{truth[t]:.4g} {unit}".strip()
        parts.append(f"{named}{true}, predicted {predicted[t]:.4g}")
    return "; ".join(parts)


def scores_table(
    result: Result, targets: Targets, trained: Float[np.ndarray, "N T"]
) -> Table:
    """Returns the scores of each target with their intervals.

    `trained` are the values of the training images, for the error of their mean.
    """
    metrics = [m for m in ("mae", "rmse", "r2", "spearman", "qwk", "coverage")]
    metrics = [m for m in metrics if any(k.split("/")[0] == m for k in result.scores)]
    labels = {"r2": "R2", "qwk": "quadratic kappa", "spearman": "Spearman"}
    labels |= {"mae": "mean absolute error", "rmse": "root mean squared error"}
    labels["coverage"] = "values within their interval"
    several, rows = len(targets.names) > 1, []
    for t, (name, unit) in enumerate(zip(targets.names, targets.units, strict=True)):
        suffix = f"/{name}" * several
        for metric in metrics:
            value, low, high = (
                result.scores.get(f"{metric}{end}{suffix}")
                for end in ("", "_low", "_high")
            )
            shown = f"{value:.4g}"
            if metric in ("mae", "rmse"):
                shown = f"{shown} {unit}".strip()
            interval = "-" if low is None else f"{low:.4g} to {high:.4g}"
            rows.append((name, labels[metric], shown, interval))
        column = trained[:, t]
        spread = np.nanmean(np.abs(column - np.nanmedian(column)))
        text = f"{spread:.4g} {unit}".strip()
        rows.append((name, "mean absolute error of always the median", text, "-"))
    head = ("target", "score", "value", "95 % interval")
    return Table("Scores", head, tuple(rows), labels=2)


def scatter(
    predicted: Float[np.ndarray, " N"],
    truth: Float[np.ndarray, " N"],
    targets: Targets,
    t: int,
) -> Chart:
    """Returns the figure of predicted by true values of target `t`."""
    (rows,) = np.nonzero(~np.isnan(truth))
    note = "On the line, both are equal."
    if len(rows) > _MOST_POINTS:
        note += f" {_MOST_POINTS:,} of {len(rows):,} images."
        rows = rows[np.linspace(0, len(rows) - 1, _MOST_POINTS).astype(int)]
    name, unit = targets.names[t], targets.units[t]
    labelled = f"{name} in {unit}" if unit else name
    ends = float(np.min(truth[rows])), float(np.max(truth[rows]))
    points = [tuple(x[rows].tolist()) for x in (truth, predicted)]
    return Chart(
        f"predicted_{t}",
        "",
        f"true {labelled}",
        f"predicted {labelled}",
        (
            Series("images", *points, line=False, hollow=True),
            Series("equal", ends, ends, colour=6, marked=False, dashes=1),
        ),
        note=note,
    )


def parts_table(
    predicted: Float[np.ndarray, " N"], truth: Float[np.ndarray, " N"], name: str
) -> Table:
    """Returns the errors in parts of the range of a target with equally many images."""
    known = ~np.isnan(truth)
    true, errors = truth[known], (predicted - truth)[known]
    ends = np.unique(np.quantile(true, np.linspace(0, 1, _PARTS + 1)))
    part = np.searchsorted(ends[1:-1], true, side="right")
    rows = []
    for p in range(max(len(ends) - 1, 1)):
        inside = part == p
        if not inside.any():
            continue
        low, high = true[inside].min(), true[inside].max()
        error = errors[inside]
        rows.append(
            (
                f"{low:.4g} to {high:.4g}",
                f"{inside.sum():,}",
                f"{np.abs(error).mean():.4g}",
                f"{error.mean():+.4g}",
            )
        )
    head = (f"true {name}", "images", "mean absolute error", "mean error")
    return Table(f"Errors by {name}", head, tuple(rows))
