"""Charts of runs: figures 3 and 5 of the paper with measured points, training curves.

Figures 3 and 5 are drawn from tables 5 and 6. The numbers of figure 4 (few-shot accuracy
on subsets of JFT-300M) are not published. Charts of studies are in study_blocks.py.
"""

import math
from collections.abc import Mapping, Sequence

from vit_jax.analysis.charts import COLOURS, Chart, Number, Series
from vit_jax.config.fields import is_custom
from vit_jax.evaluators import metric_names
from vit_jax.tools.report import results
from vit_jax.tools.report.blocks import stem
from vit_jax.tools.report.results import Result, Run
from vit_jax.training import run_report

# Indices of colour and marker, by family.
FAMILIES = {"vit": 0, "hybrid": 2, "resnet": 1}
NAMES = {"vit": "ViT", "hybrid": "hybrid", "resnet": "ResNet (BiT)"}
# Data sets of the paper's "Average-5"; table 6 also has ReaL.
_FIVE = ("ImageNet", "CIFAR-10", "CIFAR-100", "Pets", "Flowers")
_COLUMNS = {"CIFAR-10": "C10", "CIFAR-100": "C100"}
_MOST = 500  # Maximum number of points per curve; longer curves are thinned evenly.
_FEW = 25  # Curves with up to this number of points have markers.

Points = list[tuple[int, Number]]  # Step and value.


def family(name: str) -> str:
    """Returns the family of a variant, which is named "R50+B/16" or as in table 6."""
    if "/" not in name:
        return "resnet"
    return "hybrid" if "+" in name else "vit"


def paper_figures(measured: Sequence[Result]) -> tuple[Chart, ...]:
    """Returns figure 5 (average and ImageNet) and figure 3."""
    return (
        _figure_5(measured, _FIVE, "figure5_average", "mean of 5 data sets"),
        _figure_5(measured, ("ImageNet",), "figure5_imagenet", "ImageNet"),
        _figure_3(measured),
    )


def _figure_5(measured, datasets: Sequence[str], name: str, what: str) -> Chart:
    table = run_report.published_tables()["table6"]
    columns = [table["cols"].index(_COLUMNS.get(data, data)) for data in datasets]
    series = []
    for kind, number in FAMILIES.items():
        points = [
            (row[-1], sum(row[i] for i in columns) / len(columns))
            for row in table["rows"]
            if family(row[0]) == kind
        ]
        label = f"{NAMES[kind]}, published"
        series.append(_scatter(label, points, number, hollow=True))
    by_family = {kind: [] for kind in FAMILIES}
    for model in results.models(measured):
        scores = [results.best(measured, model, data) for data in datasets]
        has_family = model.variant and not is_custom(model.variant)
        if all(scores) and "exaflops" in model.compute and has_family:
            value = sum(result.value for result in scores) / len(scores)
            # The deviation of a mean over data sets is unknown.
            spread = scores[0].spread if len(scores) == 1 else None
            point = model.compute["exaflops"], value, spread
            by_family[family(model.variant)].append(point)
    series += [
        _scatter(f"{NAMES[kind]}, measured", points, FAMILIES[kind])
        for kind, points in by_family.items()
        if points
    ]
    note = "Published: table 6, pretraining on JFT-300M."
    if len(datasets) > 1:
        note += f" Mean over {', '.join(datasets)}."
    return Chart(
        name,
        f"Figure 5: {what}",
        "exaFLOPs of pretraining",
        "top-1 after fine-tuning in %",
        tuple(series),
        log_x=True,
        note=note,
    )


def _figure_3(measured) -> Chart:
    table = run_report.published_tables()["table5"]
    sizes = results.IMAGES
    series = []
    for i, column in enumerate(table["cols"]):
        points = [
            (size, table[data]["ImageNet"][i])
            for data, size in sizes.items()
            if table[data]["ImageNet"][i] is not None
        ]
        look = {"line": True, "dashes": 1, "hollow": True}
        series.append(_scatter(f"{column}, published", points, i, **look))
    variants: dict[str, list] = {}
    for model in results.models(measured):
        result = results.best(measured, model, "ImageNet")
        if result and model.images and model.variant:
            point = model.images, result.value, result.spread
            variants.setdefault(model.variant, []).append(point)
    # Variants that are not in the paper use the remaining colours.
    numbers = list(dict.fromkeys([*table["cols"], *variants]))
    for variant, points in variants.items():
        number = numbers.index(variant)
        series.append(_scatter(f"{variant}, measured", points, number))
    return Chart(
        "figure3",
        "Figure 3: ImageNet by size of the pretraining set",
        "images in the pretraining set",
        "ImageNet top-1 after fine-tuning in %",
        tuple(series),
        log_x=True,
        ticks=tuple(map(float, sizes.values())),
        note="Published: table 5, pretraining on ImageNet, ImageNet-21k and JFT-300M, "
        "with the sizes of section 4.1.",
    )


def _scatter(label, points, number: int, *, line: bool = False, **look) -> Series:
    """Returns a series of (x, y), or of (x, y, deviation or None)."""
    points = sorted(points, key=lambda point: point[:2])
    x, y, *spread = zip(*points, strict=True)
    look |= {"colour": number, "marker": number, "line": line}
    return Series(label, x, y, spread=spread[0] if spread else (), **look)


def training_curves(runs: Sequence[Run]) -> tuple[Chart, ...]:
    """Returns charts of loss and top-1 during training, by step and by images seen."""
    trained = [run for run in runs if run.metrics]
    losses = [(run, run.name, i, 0, _loss(run)) for i, run in enumerate(trained)]
    tops = [
        (run, f"{run.name}: {label}", i, order, points)
        for i, run in enumerate(trained)
        for order, (label, points) in enumerate(_tops(run).items())
    ]
    charts = []
    for name, title, y_label, curves in (
        ("loss", "Training loss", "loss", losses),
        ("top1", "Accuracy during training", "top-1 in %", tops),
    ):
        drawn = [curve for curve in curves if curve[-1]]
        for x, x_label, unit in (
            ("step", "step", lambda run: 1),
            ("images", "images seen", _images_per_step),
        ):
            series = tuple(
                _curve(*curve, size) for run, *curve in drawn if (size := unit(run))
            )
            note = "Without runs that have not recorded their compute yet."
            note = note if len(series) < len(drawn) else ""
            about = f"{name}_by_{x}", f"{title} by {x_label}", x_label, y_label
            charts.append(Chart(*about, series, note=note))
    return tuple(chart for chart in charts if chart.series)


def learning_curve(
    run: Run, metric: str, title: str, names: Mapping[str, str]
) -> Chart | None:
    """Returns a chart of one metric of a run by step; None if it has no points.

    Fractions are drawn in percent.

    Args:
      run: a training run.
      metric: name of the metric, such as "top1".
      title: description of the metric.
      names: legend entries by name in metrics.jsonl, such as "val/params/top1".
    """
    percent = metric_names.is_fraction(metric)
    scale = 100 if percent else 1
    points = {label: _points(run, name) for name, label in names.items()}
    series = tuple(
        _curve(label, i, i, [(step, scale * value) for step, value in values], 1)
        for i, (label, values) in enumerate(points.items())
        if values
    )
    if not series:
        return None
    y_label = f"{title} in %" if percent else title
    return Chart(stem("curve", metric), title, "step", y_label, series)


def inner_training_curves(runs: Sequence[Run]) -> tuple[Chart, ...]:
    """Returns charts of the training losses inside transfers and studies, by step.

    These runs have the same lengths and batch sizes, and most are evaluated only at the
    end.
    """
    charts = []
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
                charts.append(Chart(stem(run.name, title, "loss"), *about, series))
    return tuple(charts)


def _images_per_step(run: Run) -> Number | None:
    """Returns the batch size of a finished run, or None."""
    report = run.training or {}
    seen = report.get("compute", {}).get("images_seen")
    return seen / report["steps"] if seen and report["steps"] else None


def _loss(run: Run) -> Points:
    return _points(run, "train/loss")


def _tops(run: Run) -> dict[str, Points]:
    """Returns points of top-1 in percent, by evaluation and set of parameters."""
    names = dict.fromkeys(name for line in run.metrics for name in line)
    return {
        name.removesuffix("/top1").replace("/", " "): [
            (step, 100 * value) for step, value in _points(run, name)
        ]
        for name in names
        if name.endswith("/top1") and not name.startswith("train/")
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
