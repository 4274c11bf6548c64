"""Training curves: loss and accuracy by step and by images seen."""

import math
from collections.abc import Sequence

from vit_jax.report.pages.axes import COLOURS
from vit_jax.report.pages.blocks import Chart, Number, Series, stem
from vit_jax.report.pages.runs import Run

_MOST = 500  # Points a curve; of more, evenly spaced ones are drawn.
_FEW = 25  # Points up to which each has a marker.

Points = list[tuple[int, Number]]  # Step and value.


def charts(runs: Sequence[Run]) -> tuple[Chart, ...]:
    """Returns what was logged in training, as far as anything was.

    Args:
      runs: those without metrics are passed over.
    """
    trained = [run for run in runs if run.metrics]
    losses = [(run.name, i, 0, run, _loss(run)) for i, run in enumerate(trained)]
    tops = [
        (f"{run.name}: {label}", i, order, run, points)
        for i, run in enumerate(trained)
        for order, (label, points) in enumerate(_tops(run).items())
    ]
    found = []
    for name, title, y_label, curves in (
        ("loss", "Training loss", "loss", losses),
        ("top1", "Accuracy in training", "top-1 in %", tops),
    ):
        curves = [curve for curve in curves if curve[-1]]
        by_step = tuple(_series(*curve[:3], curve[-1], 1) for curve in curves)
        by_images = tuple(
            _series(*curve[:3], curve[-1], size)
            for curve in curves
            if (size := images_a_step(curve[3]))
        )
        found.append(
            Chart(f"{name}_by_step", f"{title} by step", "step", y_label, by_step)
        )
        found.append(
            Chart(
                f"{name}_by_images",
                f"{title} by images seen",
                "images seen",
                y_label,
                by_images,
                note="Without runs that have not recorded their compute yet."
                if len(by_images) < len(by_step)
                else "",
            )
        )
    return tuple(chart for chart in found if chart.series)


def inner_charts(runs: Sequence[Run]) -> tuple[Chart, ...]:
    """Returns the losses of the runs inside transfers and studies, by step.

    Such runs are alike in length and batch, and most are scored at their end alone.
    """
    found = []
    for run in runs:
        for title, inside in run.inner.items():
            losses = [(one.name, i, _loss(one)) for i, one in enumerate(inside)]
            series = tuple(
                _series(name, i, i // len(COLOURS), points, 1)
                for name, i, points in losses
                if points
            )
            if series:
                about = f"{run.name}, {title}: training loss", "step", "loss"
                found.append(Chart(stem(run.name, title, "loss"), *about, series))
    return tuple(found)


def images_a_step(run: Run) -> Number | None:
    """Returns the batch size of a run that is finished, or None."""
    told = run.training or {}
    seen = told.get("compute", {}).get("images_seen")
    return seen / told["steps"] if seen and told["steps"] else None


def _loss(run: Run) -> Points:
    return _points(run, "train/loss")


def _tops(run: Run) -> dict[str, Points]:
    """Returns the top-1 of every evaluation and set of parameters, in percent."""
    names = dict.fromkeys(
        name
        for line in run.metrics
        for name in line
        if name.endswith("/top1") and not name.startswith("train/")
    )
    return {
        name.removesuffix("/top1").replace("/", " "): [
            (step, 100 * value) for step, value in _points(run, name)
        ]
        for name in names
    }


def _points(run: Run, name: str) -> Points:
    return [
        (line["step"], line[name])
        for line in run.metrics
        if name in line and math.isfinite(line[name])
    ]


def _series(
    label: str, colour: int, order: int, points: Points, size: Number
) -> Series:
    stride = -(-len(points) // _MOST)
    kept = points[::stride]
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return Series(
        label,
        tuple(step * size for step, _ in kept),
        tuple(value for _, value in kept),
        colour=colour,
        marker=colour,
        dashes=order,
        marked=len(kept) <= _FEW,
    )
