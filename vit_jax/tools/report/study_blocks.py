"""Blocks of a study: its points beside the paper's, charts, rankings and fitted laws.

What is drawn the study's config states (tools/sweeps/study_config.py):

figures   {"x": ..., "y": score, "lines": (columns), "colours": column, "log_x": bool,
          "log_y": bool}.
          x is an axis, a label, "exaflops" or "images_seen"; or "step", and then y is an
          evaluation of the first stage within the runs, as "val/top1". Each combination
          of the columns `lines` is a line.
laws      {"x": column, "y": score, "lines": (columns)}: y = a + b x^-c through the points
          of each line.
"""

import itertools
import math
import numbers
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.analysis.charts import COLOURS, Chart, Number, Series
from vit_jax.config import fields
from vit_jax.evaluators.protocol import is_fraction
from vit_jax.tools.report.blocks import (
    NONE,
    OURS,
    PLAIN,
    Block,
    Table,
    Text,
    number,
    percent,
    stem,
    with_spread,
)
from vit_jax.tools.report.results import Run
from vit_jax.training.actions import lower_is_better

_AXES = {"exaflops": "exaFLOPs of pretraining", "images_seen": "images seen"}
_LEAST = 4  # Points of a law, which has three parameters.
_INTERVAL = "half of the 95 % interval"
Row = Mapping[str, object]  # A point of study.json.


def study_blocks(run: Run) -> tuple[Block, ...]:
    """Returns the table of a study, its ranking beside the paper's, charts and laws."""
    points, config = run.study["points"], run.study["config"]
    if not points:
        return (Text(f"{run.name} has no point yet."),)
    found: list[Block] = [_table(run.name, points, config)]
    every = math.prod(map(len, config["axes"].values()))
    if len(points) < every:
        found.append(Text(f"{len(points)} of the {every} points are there."))
    if lines := _diverged(points):
        found.append(Text(f"Diverged, and in no mean: {'; '.join(lines)}."))
    if text := _ranking(points, config):
        found.append(Text(text))
    for figure in config["figures"]:
        if figure["x"] == "step":
            chart = _curves(run, figure)
        else:
            chart = _chart(run.name, points, config, figure)
            if text := _leaders(points, config, figure):
                found.append(Text(text))
        if chart.series:
            found.append(chart)
    found += [_law(points, config, law) for law in config["laws"]]
    return tuple(found)


def column(row: Row, name: str) -> object:
    """Returns an axis, a label or an amount of compute of a point, None if absent."""
    for part in (row["axes"], row["labels"], row):
        if name in part:
            return part[name]
    return None


def _scaled(config: Row, name: str) -> float:
    """Returns what a score is multiplied by: fractions are shown in percent."""
    return 100.0 if is_fraction(_metric(config["scores"][name])) else 1.0


def _metric(path: str) -> str:
    return path.rpartition("/")[2]


def _unit(path: str) -> str:
    return " in %" if is_fraction(_metric(path)) else ""


def _score(row: Row, config: Row, name: str) -> tuple[Number, Number | None] | None:
    """Returns mean and half the interval of a score as they are shown, or None."""
    found, scale = row.get("scores", {}).get(name), _scaled(config, name)
    if found is None:
        return None
    half = found["half_interval"]
    return scale * found["mean"], None if half is None else scale * half


def _table(name: str, points: Sequence[Row], config: Row) -> Table:
    scores, published = config["scores"], config["published"]
    tuned = [(s, k) for s, keys in config["tune"].items() for k in keys]
    tuned = [(s, k) for s, k in tuned if any(_chosen(p, s, k) for p in points)]
    units = {score: _unit(path) for score, path in scores.items()}
    decimals = {score: _decimals(points, config, score) for score in scores}
    head = [*config["axes"], "exaFLOPs", *(k.rpartition(".")[2] for _, k in tuned)]
    head += [f"{score}{units[score]}" for score in scores]
    kinds = [PLAIN] * (len(head) - len(scores)) + [OURS] * len(scores)
    if published:
        head, kinds = (
            [*head, "rank", "paper", "rank there"],
            [*kinds, OURS, PLAIN, PLAIN],
        )
    first = next(iter(scores))
    ranks = _ranks(
        {p["name"]: v[0] for p in points if (v := _score(p, config, first))},
        lower=lower_is_better(_metric(scores[first])),
    )
    theirs = _ranks({p["name"]: published.get(p["name"]) for p in points}, lower=False)
    rows = []
    for point in points:
        cells = [str(value) for value in point["axes"].values()]
        cells.append(number(point.get("exaflops")))
        cells += [_chosen(point, stage, key) or NONE for stage, key in tuned]
        for score in scores:
            value = _score(point, config, score)
            cells.append(with_spread(*value, decimals[score]) if value else NONE)
        if published:
            paper = published.get(point["name"])
            paper = None if paper is None else _scaled(config, first) * paper
            label = point["name"]
            cells += [ranks.get(label, NONE), percent(paper), theirs.get(label, NONE)]
        rows.append(tuple(cells))
    seeds = {len(s["values"]) for p in points for s in p.get("scores", {}).values()}
    note = f"Scores are means over {_range(seeds)} seeds ± {_INTERVAL} of the mean (Student's t)."
    if seeds == {1}:
        note = "Scores are of one seed."
    if published:
        note += f" Paper: {config['source']}."
    title = f"Points of {name}"
    return Table(
        title,
        tuple(head),
        tuple(rows),
        tuple(kinds),
        labels=len(config["axes"]),
        note=note,
    )


def _decimals(points: Sequence[Row], config: Row, name: str) -> int:
    """Returns the decimals of a score: 2 of percent, fewer the larger it gets."""
    if _unit(config["scores"][name]):
        return 2
    values = [found[0] for p in points if (found := _score(p, config, name))]
    if all(float(value).is_integer() for value in values):
        return 0
    largest = max(map(abs, values))
    return 4 if largest < 10 else 2 if largest < 100 else 1


def _range(numbers: set[int]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return str(low) if low == high else f"{low} to {high}"


def _chosen(point: Row, stage: str, key: str) -> str:
    """Returns the chosen value of a tuned key, "" if the stage is not done."""
    chosen = point["stages"].get(stage, {}).get("chosen") or {}
    value = chosen.get(key, "")
    return f"{value:g}" if fields.is_number(value, numbers.Real) else str(value)


def _ranks(values: Mapping[str, Number | None], *, lower: bool) -> dict[str, str]:
    there = {name: value for name, value in values.items() if value is not None}
    order = sorted(there.values(), reverse=not lower)
    return {name: str(order.index(value) + 1) for name, value in there.items()}


def _diverged(points: Sequence[Row]) -> list[str]:
    """Returns the stages of which all diverged, and single seeds that did."""
    found = []
    for point in points:
        for stage, outcome in point["stages"].items():
            if not outcome["runs"]:
                found.append(f"{point['name']}, {stage}")
            else:
                found += [
                    f"{point['name']}, {stage}, seed {run['seed']}"
                    for run in outcome.get("diverged", [])
                ]
    return found


def _ranking(points: Sequence[Row], config: Row) -> str:
    """Compares the order of our points with the paper's, pair by pair."""
    first = next(iter(config["scores"]))
    both = [
        (
            point["name"],
            _score(point, config, first),
            config["published"][point["name"]],
        )
        for point in points
        if point["name"] in config["published"] and _score(point, config, first)
    ]
    both = [one for one in both if one[2] is not None]
    if len(both) < 2:
        return ""
    pairs, same, clear, wrong = 0, 0, 0, []
    for (a, (ours_a, half_a), paper_a), (
        b,
        (ours_b, half_b),
        paper_b,
    ) in itertools.combinations(both, 2):
        if paper_a == paper_b:
            continue
        pairs += 1
        agrees = (ours_a > ours_b) == (paper_a > paper_b)
        same += agrees
        if abs(ours_a - ours_b) > np.hypot(half_a or 0.0, half_b or 0.0):
            clear += 1
            if not agrees:
                better, worse = (a, b) if ours_a > ours_b else (b, a)
                wrong.append(f"{better} over {worse}")
    return (
        f"Pairs of points that the paper orders: {pairs}; in the same order here: {same}. "
        "Pairs that differ here by more than the root of the sum of their squared "
        f"intervals: {clear}; of these against the paper: {', '.join(wrong) or 'none'}."
    )


def _lines(points: Sequence[Row], names: Sequence[str]) -> dict[str, list[Row]]:
    """Returns label of a line -> its points."""
    found: dict[str, list[Row]] = {}
    for point in points:
        label = ", ".join(_short(name, column(point, name)) for name in names)
        found.setdefault(label, []).append(point)
    return found


def _short(name: str, value: object) -> str:
    """Returns the value of a column for a legend; a number with the column's name."""
    if isinstance(value, int | float):
        text = f"{value:,}" if isinstance(value, int) else f"{value:g}"
        return f"{name} {text}"
    return str(value)


def _chart(name: str, points: Sequence[Row], config: Row, figure: Row) -> Chart:
    x, y = figure["x"], figure["y"]
    there = [p for p in points if _score(p, config, y) and column(p, x) is not None]
    texts = [str(column(p, x)) for p in there if isinstance(column(p, x), str)]
    places = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    log_x = figure.get("log_x", x in _AXES)
    lines, series = _lines(there, figure.get("lines", ())), []
    looks = _looks(lines, figure.get("colours"))
    for (label, own), look in zip(lines.items(), looks, strict=True):
        own = sorted(own, key=lambda p: places.get(column(p, x), column(p, x)))
        values = [_score(point, config, y) for point in own]
        series.append(
            Series(
                label or y,
                tuple(places.get(column(p, x), column(p, x)) for p in own),
                tuple(mean for mean, _ in values),
                line=not places or bool(figure.get("lines")),
                spread=tuple(half for _, half in values),
                **look,
            )
        )
    spread = any(half is not None for one in series for half in one.spread)
    ticks = tuple(places.values()) or tuple(sorted({column(p, x) for p in there}))
    return Chart(
        stem(name, y, "by", x),
        f"{y} by {_AXES.get(x, x.replace('_', ' '))}",
        _AXES.get(x, x.replace("_", " ")),
        f"{y}{_unit(config['scores'][y])}",
        tuple(series),
        log_x=log_x and not places,
        log_y=figure.get("log_y", False),
        ticks=() if x in _AXES else ticks,
        tick_labels=tuple(places),
        spread_label=_INTERVAL,
        note=f"Error bars: {_INTERVAL} of the mean." if spread else "",
    )


def _looks(lines: Mapping[str, list[Row]], colours: str | None) -> list[dict[str, int]]:
    """Returns colour, marker and dashes of each line.

    Args:
      lines: label -> points.
      colours: column whose values have a colour each; a colour for each line if None.
    """
    firsts = [own[0] for own in lines.values()]
    if colours is None:
        numbers = range(len(firsts))
        return [
            {"colour": i, "marker": i, "dashes": i // len(COLOURS)} for i in numbers
        ]
    groups, looks = [column(point, colours) for point in firsts], []
    order = list(dict.fromkeys(groups))
    for i, group in enumerate(groups):
        nth = groups[:i].count(group)
        looks.append({"colour": order.index(group), "marker": nth, "dashes": nth})
    return looks


def _curves(run: Run, figure: Row) -> Chart:
    """Returns the course of an evaluation in the runs of the first stage."""
    stage = run.study["config"]["stages"][0]
    evaluation, _, metric = figure["y"].rpartition("/")
    wanted = [f"{evaluation}/{kind}/{metric}" for kind in ("ema", "params")]
    scale, series = 100.0 if is_fraction(metric) else 1.0, []
    logged = {one.name: one for one in run.inner.get(stage, ())}
    lines = _lines(run.study["points"], figure.get("lines", ("name",)))
    looks = _looks(lines, figure.get("colours"))
    for (label, own), look in zip(lines.items(), looks, strict=True):
        if (inside := logged.get(own[0]["name"])) is None:
            continue
        name = next((n for n in wanted for line in inside.metrics if n in line), "")
        course = [(m["step"], scale * m[name]) for m in inside.metrics if name in m]
        if course:
            x, y = zip(*course, strict=True)
            series.append(Series(label, x, y, **look))
    title = f"{figure['y']} in training"
    name = stem(run.name, figure["y"], "by", "step")
    note = "The first seed of each point."
    y_label = f"{figure['y']}{_unit(figure['y'])}"
    return Chart(name, title, "step", y_label, tuple(series), note=note)


def _leaders(points: Sequence[Row], config: Row, figure: Row) -> str:
    """Names the leading line at each value of an axis, and whether the lead changes."""
    x, y, lines = figure["x"], figure["y"], figure.get("lines", ())
    if x not in config["axes"] or not lines:
        return ""
    decimals = _decimals(points, config, y)
    there = [p for p in points if _score(p, config, y)]
    values = list(dict.fromkeys(column(p, x) for p in there))
    sign = -1 if (lower := lower_is_better(_metric(config["scores"][y]))) else 1
    parts, first = [], []
    for value in values:
        own = [p for p in there if column(p, x) == value]
        best = max(own, key=lambda p: sign * _score(p, config, y)[0])
        (label,) = _lines([best], lines)
        first.append(label)
        parts.append(
            f"{label} at {_short(x, value)} ({_score(best, config, y)[0]:.{decimals}f})"
        )
    text = f"{y}: the {'lowest' if lower else 'highest'} is {', '.join(parts)}."
    if len(values) < 2:
        return text
    if len(set(first)) == 1:
        return f"{text} The lead never changes."
    return f"{text} The lead changes."


def fit_law(x: Sequence[float], y: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Fits y = a + b (x / min x)^-c with a, b and c not negative, by least squares.

    Args:
      x: positive, (N,).
      y: (N,).

    Returns:
      (a, b, c), and the residuals y - fit, (N,).
    """
    from scipy import optimize

    x, y = np.asarray(x, float) / min(x), np.asarray(y, float)

    def residuals(p):
        return p[0] + p[1] * x ** -p[2] - y

    low = max(0.0, min(y))
    # The valley between a and c is flat: the best of several beginnings.
    fits = [
        optimize.least_squares(
            residuals, (share * low, max(y) - share * low, c), bounds=(0, np.inf)
        )
        for share in (0.0, 0.5, 0.95)
        for c in (0.1, 0.5, 2.0)
    ]
    best = min(fits, key=lambda fit: fit.cost)
    return best.x, -best.fun


def _law(points: Sequence[Row], config: Row, law: Row) -> Text:
    x, y = law["x"], law["y"]
    there = [p for p in points if _score(p, config, y) and column(p, x)]
    parts = []
    for label, own in _lines(there, law["lines"]).items():
        xs = [float(column(point, x)) for point in own]
        if len(set(xs)) < _LEAST:
            continue
        (a, b, c), rest = fit_law(xs, [_score(p, config, y)[0] for p in own])
        worst = own[int(np.argmax(np.abs(rest)))]["name"]
        parts.append(
            f"{label}: {a:.3g} + {b:.3g} ({x} / {min(xs):.3g})^-{c:.3g}, residuals of "
            f"{np.sqrt(np.mean(rest**2)):.2g} (root mean square; the largest, "
            f"{np.abs(rest).max():.2g}, at {worst})"
        )
    if not parts:
        return Text(
            f"{y} by {x}: fewer than {_LEAST} points a line, so no law is fitted."
        )
    return Text(f"{y} = a + b {x}^-c, fitted by least squares. {'; '.join(parts)}.")
