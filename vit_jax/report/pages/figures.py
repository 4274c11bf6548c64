"""The paper's figures 3 and 5 with our points: accuracy, pretraining size and compute.

Figures 3 and 5 follow from its tables 5 and 6. Of figure 4 (few-shot accuracy on subsets
of JFT-300M) no numbers are published: the chart of a scaling study stands for it.
"""

from collections.abc import Sequence

from vit_jax.report import published
from vit_jax.report.pages import pretrained, results
from vit_jax.report.pages.blocks import Chart, Number, Series
from vit_jax.report.pages.results import Result

# Family to its number in the palette and in the markers, the same in all charts.
FAMILIES = {"vit": 0, "hybrid": 2, "resnet": 1}
NAMES = {"vit": "ViT", "hybrid": "hybrid", "resnet": "ResNet (BiT)"}
# The paper's "Average-5" is over its transfer sets; table 6 has ReaL besides.
_FIVE = ("ImageNet", "CIFAR-10", "CIFAR-100", "Pets", "Flowers")
_COLUMNS = {"CIFAR-10": "C10", "CIFAR-100": "C100"}


def family(name: str) -> str:
    """Returns the family of a variant, ours ("R50+B/16") or table 6's."""
    if "/" not in name:
        return "resnet"
    return "hybrid" if "+" in name else "vit"


def charts(found: Sequence[Result]) -> tuple[Chart, ...]:
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
    told = published.tables()["table6"]
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
        _points(f"{NAMES[kind]}, published", sorted(points), number, hollow=True)
        for (kind, points), number in zip(paper.items(), FAMILIES.values(), strict=True)
    ]
    ours = {kind: [] for kind in FAMILIES}
    for model in results.models(found):
        picked = [results.best(found, model, data) for data in datasets]
        if all(picked) and "exaflops" in model.compute and model.variant:
            value = sum(result.value for result in picked) / len(picked)
            # Of a mean over data sets no run tells the deviation.
            spread = picked[0].spread if len(picked) == 1 else None
            point = model.compute["exaflops"], value, spread
            ours[family(model.variant)].append(point)
    series += [
        _points(f"{NAMES[kind]}, ours", _in_order(points), FAMILIES[kind])
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
    told = published.tables()["table5"]
    sizes = pretrained.IMAGES
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
    # Variants that the paper lacks come after its own, each with a colour.
    numbers = list(dict.fromkeys([*told["cols"], *ours]))
    for variant, points in ours.items():
        number = numbers.index(variant)
        series.append(_points(f"{variant}, ours", _in_order(points), number))
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


def _points(label, points, number: int, *, hollow: bool = False) -> Series:
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
