"""Charts of runs: figures 3 and 5 of the paper with our points, and training curves.

Figures 3 and 5 are drawn from tables 5 and 6. The numbers of figure 4 (few-shot accuracy
on subsets of JFT-300M) are not published; studies have charts of their own
(study_blocks.py).
"""

import math
from collections.abc import Sequence

from vit_jax.analysis.charts import COLOURS, Chart, Number, Series
from vit_jax.config.fields import is_custom
from vit_jax.tools.report import results
from vit_jax.tools.report.blocks import (
    stem,
)
from vit_jax.tools.report.results import Result, Run
from vit_jax.training import run_report

# Family -> index of its colour and marker in all charts.
FAMILIES = {"vit": 0, "hybrid": 2, "resnet": 1}
NAMES = {"vit": "ViT", "hybrid": "hybrid", "resnet": "ResNet (BiT)"}
# Data sets of the paper's "Average-5"; table 6 also has ReaL.
_FIVE = ("ImageNet", "CIFAR-10", "CIFAR-100", "Pets", "Flowers")
_COLUMNS = {"CIFAR-10": "C10", "CIFAR-100": "C100"}
_MOST = 500  # Points per curve; longer curves are thinned evenly.
_FEW = 25  # Curves with up to this many points have markers.

Points = list[tuple[int, Number]]  # Step and value.


def family(name: str) -> str:
    """Returns the family of a variant, by our name ("R50+B/16") or that of table 6."""
    if "/" not in name:
        return "resnet"
    return "hybrid" if "+" in name else "vit"


def paper_figures(found: Sequence[Result]) -> tuple[Chart, ...]:
    """Returns figure 5 (average and ImageNet) and figure 3.

    Args:
      found: our accuracies, from `results.collect`.
    """
    return (
        _figure_5(found, _FIVE, "figure5_average", "mean of 5 data sets"),
        _figure_5(found, ("ImageNet",), "figure5_imagenet", "ImageNet"),
        _figure_3(found),
    )


def _figure_5(found, datasets: Sequence[str], name: str, what: str) -> Chart:
    told = run_report.published_tables()["table6"]
    places = [told["cols"].index(_COLUMNS.get(data, data)) for data in datasets]
    paper = {
        kind: [
            (row[-1], sum(row[i] for i in places) / len(places))
            for row in told["rows"]
            if family(row[0]) == kind
        ]
        for kind in FAMILIES
    }
    series = [
        _scatter(f"{NAMES[kind]}, published", sorted(points), number, hollow=True)
        for (kind, points), number in zip(paper.items(), FAMILIES.values(), strict=True)
    ]
    ours = {kind: [] for kind in FAMILIES}
    for model in results.models(found):
        picked = [results.best(found, model, data) for data in datasets]
        known = model.variant and not is_custom(model.variant)  # One of the families.
        if all(picked) and "exaflops" in model.compute and known:
            value = sum(result.value for result in picked) / len(picked)
            # The deviation of a mean over data sets is unknown.
            spread = picked[0].spread if len(picked) == 1 else None
            point = model.compute["exaflops"], value, spread
            ours[family(model.variant)].append(point)
    series += [
        _scatter(f"{NAMES[kind]}, ours", _in_order(points), FAMILIES[kind])
        for kind, points in ours.items()
        if points
    ]
    listed = ", ".join(datasets)
    return Chart(
        name,
        f"Figure 5: {what}",
        "exaFLOPs of pretraining",
        "top-1 after fine-tuning in %",
        tuple(series),
        log_x=True,
        note=f"Published: table 6, pretraining on JFT-300M. Mean over {listed}."
        if len(datasets) > 1
        else "Published: table 6, pretraining on JFT-300M.",
    )


def _figure_3(found) -> Chart:
    told = run_report.published_tables()["table5"]
    sizes = results.IMAGES
    series = []
    for i, column in enumerate(told["cols"]):
        points = [
            (size, told[data]["ImageNet"][i])
            for data, size in sizes.items()
            if told[data]["ImageNet"][i] is not None
        ]
        series.append(
            Series(
                f"{column}, published",
                *_transposed(points),
                colour=i,
                marker=i,
                dashes=1,
                hollow=True,
            )
        )
    ours: dict[str, list] = {}
    for model in results.models(found):
        result = results.best(found, model, "ImageNet")
        if result and model.images and model.variant:
            point = model.images, result.value, result.spread
            ours.setdefault(model.variant, []).append(point)
    # Variants that are not in the paper get further colours.
    numbers = list(dict.fromkeys([*told["cols"], *ours]))
    for variant, points in ours.items():
        number = numbers.index(variant)
        series.append(_scatter(f"{variant}, ours", _in_order(points), number))
    ticks = tuple(float(size) for size in sizes.values())
    return Chart(
        "figure3",
        "Figure 3: ImageNet by size of the pretraining set",
        "images in the pretraining set",
        "ImageNet top-1 after fine-tuning in %",
        tuple(series),
        log_x=True,
        ticks=ticks,
        note="Published: table 5, pretraining on ImageNet, ImageNet-21k and JFT-300M, "
        "whose sizes are those of section 4.1.",
    )


def _scatter(label, points, number: int, *, hollow: bool = False) -> Series:
    """Returns a series of (x, y), or of (x, y, deviation or None)."""
    spread = tuple(deviation for _, _, *more in points for deviation in more)
    return Series(
        label,
        *_transposed(points),
        colour=number,
        marker=number,
        line=False,
        hollow=hollow,
        spread=spread,
    )


def _in_order(points: list) -> list:
    return sorted(points, key=lambda point: point[:2])


def _transposed(points) -> tuple[tuple[Number, ...], tuple[Number, ...]]:
    return tuple(x for x, *_ in points), tuple(y for _, y, *_ in points)


def training_curves(runs: Sequence[Run]) -> tuple[Chart, ...]:
    """Returns charts of the loss and top-1 logged in training, by step and images.

    Args:
      runs: those without metrics are skipped.
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
        by_step = tuple(_curve(*curve[:3], curve[-1], 1) for curve in curves)
        by_images = tuple(
            _curve(*curve[:3], curve[-1], size)
            for curve in curves
            if (size := images_per_step(curve[3]))
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


def inner_training_curves(runs: Sequence[Run]) -> tuple[Chart, ...]:
    """Returns charts of the training losses inside transfers and studies, by step.

    Those runs have equal lengths and batches, and most are evaluated only at the end.
    """
    found = []
    for run in runs:
        for title, inside in run.inner.items():
            losses = [(one.name, i, _loss(one)) for i, one in enumerate(inside)]
            series = tuple(
                _curve(name, i, i // len(COLOURS), points, 1)
                for name, i, points in losses
                if points
            )
            if series:
                about = f"{run.name}, {title}: training loss", "step", "loss"
                found.append(Chart(stem(run.name, title, "loss"), *about, series))
    return tuple(found)


def images_per_step(run: Run) -> Number | None:
    """Returns the batch size of a finished run, or None."""
    told = run.training or {}
    seen = told.get("compute", {}).get("images_seen")
    return seen / told["steps"] if seen and told["steps"] else None


def _loss(run: Run) -> Points:
    return _points(run, "train/loss")


def _tops(run: Run) -> dict[str, Points]:
    """Returns evaluation and parameters -> points of top-1 in percent."""
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


def _curve(label: str, colour: int, order: int, points: Points, size: Number) -> Series:
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
