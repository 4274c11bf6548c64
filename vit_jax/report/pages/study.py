"""A scaling study: accuracy by size of the pretraining set and by compute."""

from collections.abc import Callable

from vit_jax.report.pages.blocks import (
    NONE,
    Block,
    Chart,
    Series,
    Table,
    Text,
    number,
    percent,
    stem,
)
from vit_jax.report.pages.figures import FAMILIES, NAMES


def blocks(name: str, study: dict) -> tuple[Block, ...]:
    """Returns what a study found: its points, the crossover plots, who leads where.

    Args:
      name: of the study.
      study: `study.json`.
    """
    points = study["points"]
    if not points:
        return (Text(f"{name} has no point yet."),)
    found: list[Block] = []
    for key, title, get in _measures(points):
        there = [point for point in points if get(point) is not None]
        if there:
            found += [
                Text(_leaders(title, there, get)),
                _by_images(stem(name, key, "by_images"), title, there, get),
                _by_compute(stem(name, key, "by_compute"), title, there, get),
            ]
    text = (
        "The paper's figure 4 draws few-shot accuracy on subsets of JFT-300M; its numbers "
        "are in no table, so that here are our points alone."
    )
    if lines := _diverged(points):
        found.insert(0, Text(f"Diverged, so that it has no score: {'; '.join(lines)}."))
    return (_table(name, points), Text(text), *found)


def _diverged(points) -> list[str]:
    return [
        f"{point['model']} on {point['images']:,} images, {part} ({reason})"
        for point in points
        for part, reason in point.get("diverged", {}).items()
    ]


def _measures(points) -> list[tuple[str, str, Callable]]:
    """Returns (key, title, how to get it from a point in percent) of all measures."""

    def at(*keys):
        def get(point):
            for key in keys:
                point = point.get(key) if point is not None else None
            return None if point is None else 100 * point

        return get

    shots = sorted({s for p in points for s in p.get("fewshot") or {}}, key=int)
    few = [(f"{s}shot", f"{s}-shot linear", at("fewshot", s)) for s in shots]
    return [
        *few,
        ("finetuned", "Fine-tuned", at("finetuned")),
        ("upstream", "Upstream", at("upstream")),
    ]


def _by_images(name, title, points, get) -> Chart:
    """Draws the crossover plot: a line for each model."""
    series, order = [], dict.fromkeys(FAMILIES, 0)
    for model in dict.fromkeys(point["model"] for point in points):
        own = [point for point in points if point["model"] == model]
        kind = own[0]["family"]
        series.append(
            _series(f"{model} ({_short(kind)})", own, "images", get, kind, order[kind])
        )
        order[kind] += 1
    return Chart(
        name,
        f"{title}, by pretraining size",
        "images in the pretraining set",
        "top-1 in %",
        tuple(series),
        log_x=True,
        ticks=tuple(sorted({float(point["images"]) for point in points})),
    )


def _by_compute(name, title, points, get) -> Chart:
    """Draws a line for each family and size of the pretraining set."""
    series = []
    for kind in FAMILIES:
        sizes = sorted({p["images"] for p in points if p["family"] == kind})
        for order, size in enumerate(sizes):
            own = [p for p in points if (p["family"], p["images"]) == (kind, size)]
            label = f"{_short(kind)}, {size:,} images"
            series.append(_series(label, own, "exaflops", get, kind, order))
    return Chart(
        name,
        f"{title}, by compute",
        "exaFLOPs of pretraining",
        "top-1 in %",
        tuple(series),
        log_x=True,
    )


def _series(label, points, axis: str, get, kind: str, order: int) -> Series:
    """Returns points of a family, which its colour and marker tell."""
    own = sorted(points, key=lambda point: point[axis])
    return Series(
        label,
        tuple(point[axis] for point in own),
        tuple(get(point) for point in own),
        colour=FAMILIES[kind],
        marker=FAMILIES[kind] + 3 * (order // 2),
        dashes=order,
        hollow=order % 2 == 1,
    )


def _short(kind: str) -> str:
    return NAMES[kind].split()[0]


def _leaders(title: str, points, get) -> str:
    """Says which model is first at each size, and whether the family changes."""
    parts, families = [], []
    for size in sorted({point["images"] for point in points}):
        first = max((p for p in points if p["images"] == size), key=get)
        families.append(first["family"])
        parts.append(f"{first['model']} at {size:,} images ({percent(get(first))} %)")
    said = f"{title}: the best is {', '.join(parts)}."
    if len(families) == 1:
        return said
    if len(set(families)) == 1:
        return f"{said} The same family leads at every size: no crossover."
    return f"{said} The family that leads changes with the size."


def _table(name: str, points) -> Table:
    measures = _measures(points)
    rows = [
        (
            point["model"],
            _short(point["family"]),
            f"{point['images']:,}",
            number(point["exaflops"]),
            *(percent(get(point)) for _, _, get in measures),
        )
        for point in sorted(points, key=lambda p: (p["images"], p["exaflops"] or 0))
    ]
    head = (
        "model",
        "family",
        "images",
        "exaFLOPs",
        *(title for _, title, _ in measures),
    )
    note = f"Top-1 in % on the test split; {NONE} is not measured."
    return Table(f"Points of {name}", head, tuple(rows), labels=2, note=note)
