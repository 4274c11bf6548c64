"""Blocks of a study: points compared with the paper's, charts, rankings, fitted laws.

Charts and laws are set in the study's config (tools/sweeps/study_config.py):

figures   {"x": ..., "y": score, "lines": (columns), "colours": column, "log_x": bool,
          "log_y": bool}.
          x is an axis, a label, "exaflops" or "images_seen"; or "step", with y an
          evaluation during the first stage, such as "val/top1". Each combination of the
          columns `lines` is a line.
laws      {"x": column, "y": score, "lines": (columns)}: y = a + b x^-c through the
          points of each line.
"""

import itertools
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vit_jax.analysis.charts import COLOURS, Chart, Number, Series
from vit_jax.config import fields
from vit_jax.evaluators.metric_names import is_fraction, lower_is_better
from vit_jax.tools.report.blocks import (
    MEASURED,
    NONE,
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

_AXES = {"exaflops": "exaFLOPs of pretraining", "images_seen": "images seen"}
_LEAST = 4  # Minimum number of points to fit a law, which has three parameters.
_INTERVAL = "half of the 95 % interval"
Row = Mapping[str, object]  # A point in study.json.


def study_blocks(run: Run) -> tuple[Block, ...]:
    """Returns a study's table, its ranking compared with the paper's, charts and laws."""
    points, config = run.study["points"], run.study["config"]
    if not points:
        return (Text(f"{run.name} has no finished point yet."),)
    blocks: list[Block] = [_table(run.name, points, config)]
    every = math.prod(map(len, config["axes"].values()))
    if len(points) < every:
        blocks.append(Text(f"{len(points)} of the {every} points are done."))
    if lines := _diverged(points):
        blocks.append(Text(f"Diverged, not part of any mean: {'; '.join(lines)}."))
    if text := _ranking(points, config):
        blocks.append(Text(text))
    for figure in config["figures"]:
        if figure["x"] == "step":
            chart = _curves(run, figure)
        else:
            chart = _chart(run.name, points, config, figure)
            if text := _leaders(points, config, figure):
                blocks.append(Text(text))
        if chart.series:
            blocks.append(chart)
    blocks += [_law(points, config, law) for law in config["laws"]]
    return tuple(blocks)


def column(row: Row, name: str) -> object:
    """Returns an axis, label or amount of compute of a point; None if it has none."""
    for part in (row["axes"], row["labels"], row):
        if name in part:
            return part[name]
    return None


class _Score:
    """A score of a study in its displayed form: fractions are in percent."""

    def __init__(self, config: Row, name: str):
        metric = config["scores"][name].rpartition("/")[2]
        self.name, self.lower = name, lower_is_better(metric)
        self.scale = 100.0 if is_fraction(metric) else 1.0
        self.title = f"{name}{_unit(metric)}"

    def of(self, point: Row) -> tuple[Number, Number | None] | None:
        """Returns the mean and half of its interval; None if the point has no score."""
        score = point.get("scores", {}).get(self.name)
        if score is None:
            return None
        half = score["half_interval"]
        return self.scale * score["mean"], None if half is None else self.scale * half

    def decimals(self, points: Sequence[Row]) -> int:
        """Returns the number of decimals: 2 for percent, else fewer for larger values."""
        values = [score[0] for point in points if (score := self.of(point))]
        if self.scale == 100:
            return 2
        if all(float(value).is_integer() for value in values):
            return 0
        largest = max(map(abs, values))
        return 4 if largest < 10 else 2 if largest < 100 else 1


def _unit(metric: str) -> str:
    return " in %" if is_fraction(metric) else ""


def _table(name: str, points: Sequence[Row], config: Row) -> Table:
    published, scores = config["published"], _scores(config)
    tuned = [(s, k) for s, keys in config["tune"].items() for k in keys]
    tuned = [(s, k) for s, k in tuned if any(_chosen(p, s, k) for p in points)]
    decimals = [score.decimals(points) for score in scores]
    head = [*config["axes"], "exaFLOPs", *(k.rpartition(".")[2] for _, k in tuned)]
    kinds = [PLAIN] * len(head) + [MEASURED] * len(scores)
    head += [score.title for score in scores]
    if published:
        head += ["rank", "paper", "rank in paper"]
        kinds += [MEASURED, PLAIN, PLAIN]
    first = scores[0]
    ranks = _ranks(
        {p["name"]: v[0] for p in points if (v := first.of(p))}, lower=first.lower
    )
    paper_ranks = _ranks(
        {p["name"]: published.get(p["name"]) for p in points}, lower=False
    )
    rows = []
    for point in points:
        cells = [str(value) for value in point["axes"].values()]
        cells.append(number(point.get("exaflops")))
        cells += [_chosen(point, stage, key) or NONE for stage, key in tuned]
        for score, places in zip(scores, decimals, strict=True):
            value = score.of(point)
            cells.append(with_spread(*value, places) if value else NONE)
        if published:
            label = point["name"]
            paper = published.get(label)
            paper = None if paper is None else first.scale * paper
            cells += [ranks.get(label, NONE), percent(paper)]
            cells.append(paper_ranks.get(label, NONE))
        rows.append(tuple(cells))
    seeds = {len(s["values"]) for p in points for s in p.get("scores", {}).values()}
    note = f"Scores are means over {_range(seeds)} seeds ± {_INTERVAL} of the mean (Student's t)."
    if seeds == {1}:
        note = "Scores are of one seed."
    if published:
        note += f" Paper: {config['source']}."
    about = f"Points of {name}", tuple(head), tuple(rows), tuple(kinds)
    return Table(*about, labels=len(config["axes"]), note=note)


def _scores(config: Row) -> list[_Score]:
    return [_Score(config, name) for name in config["scores"]]


def _range(numbers: set[int]) -> str:
    low, high = min(numbers, default=0), max(numbers, default=0)
    return str(low) if low == high else f"{low} to {high}"


def _chosen(point: Row, stage: str, key: str) -> str:
    """Returns the chosen value of a tuned key; "" if the stage has not run."""
    chosen = point["stages"].get(stage, {}).get("chosen") or {}
    value = chosen.get(key, "")
    return f"{value:g}" if fields.is_number(value, numbers.Real) else str(value)


def _ranks(values: Mapping[str, Number | None], *, lower: bool) -> dict[str, str]:
    known = {name: value for name, value in values.items() if value is not None}
    order = sorted(known.values(), reverse=not lower)
    return {name: str(order.index(value) + 1) for name, value in known.items()}


def _diverged(points: Sequence[Row]) -> list[str]:
    """Returns the stages in which all runs diverged, and single seeds that did."""
    lines = []
    for point in points:
        for stage, outcome in point["stages"].items():
            line = f"{point['name']}, {stage}"
            if not outcome["runs"]:
                lines.append(line)
            else:
                lost = outcome.get("diverged", [])
                lines += [f"{line}, seed {run['seed']}" for run in lost]
    return lines


def _ranking(points: Sequence[Row], config: Row) -> str:
    """Returns a text that compares the order of the points with the paper's, or ""."""
    first, published = _scores(config)[0], config["published"]
    both = [
        (point["name"], score, paper)
        for point in points
        if (score := first.of(point))
        and (paper := published.get(point["name"])) is not None
    ]
    if len(both) < 2:
        return ""
    pairs, same, clear, wrong = 0, 0, 0, []
    for one, other in itertools.combinations(both, 2):
        (a, (score_a, half_a), paper_a), (b, (score_b, half_b), paper_b) = one, other
        if paper_a == paper_b:
            continue
        pairs += 1
        agrees = (score_a > score_b) == (paper_a > paper_b)
        same += agrees
        if abs(score_a - score_b) > np.hypot(half_a or 0.0, half_b or 0.0):
            clear += 1
            if not agrees:
                better, worse = (a, b) if score_a > score_b else (b, a)
                wrong.append(f"{better} over {worse}")
    return (
        f"Pairs of points with an order in the paper: {pairs}; in the same order here: "
        f"{same}. Pairs that differ here by more than the root of the sum of their squared "
        f"intervals: {clear}; those contrary to the paper: {', '.join(wrong) or 'none'}."
    )


def _lines(points: Sequence[Row], names: Sequence[str]) -> dict[str, list[Row]]:
    """Returns the points of each line, by its label."""
    lines: dict[str, list[Row]] = {}
    for point in points:
        label = ", ".join(_short(name, column(point, name)) for name in names)
        lines.setdefault(label, []).append(point)
    return lines


def _short(name: str, value: object) -> str:
    """Returns the value of a column for a legend; a number with the column's name."""
    if isinstance(value, int | float):
        text = f"{value:,}" if isinstance(value, int) else f"{value:g}"
        return f"{name} {text}"
    return str(value)


def _chart(name: str, points: Sequence[Row], config: Row, figure: Row) -> Chart:
    x, score = figure["x"], _Score(config, figure["y"])
    drawn = [p for p in points if score.of(p) and column(p, x) is not None]
    texts = [str(column(p, x)) for p in drawn if isinstance(column(p, x), str)]
    positions = {text: i for i, text in enumerate(dict.fromkeys(texts))}

    def x_of(point: Row) -> Number:
        return positions.get(column(point, x), column(point, x))

    series = []
    for label, members, look in _lines_and_looks(drawn, figure, ()):
        members = sorted(members, key=x_of)
        means, halves = zip(*map(score.of, members), strict=True)
        about = label or score.name, tuple(map(x_of, members)), means
        line = not positions or bool(figure.get("lines"))
        series.append(Series(*about, line=line, spread=halves, **look))
    spread = any(half is not None for one in series for half in one.spread)
    ticks = tuple(positions.values()) or tuple(sorted({column(p, x) for p in drawn}))
    x_label = _AXES.get(x, x.replace("_", " "))
    return Chart(
        stem(name, score.name, "by", x),
        f"{score.name} by {x_label}",
        x_label,
        score.title,
        tuple(series),
        log_x=figure.get("log_x", x in _AXES) and not positions,
        log_y=figure.get("log_y", False),
        ticks=() if x in _AXES else ticks,
        tick_labels=tuple(positions),
        spread_label=_INTERVAL,
        note=f"Error bars: {_INTERVAL} of the mean." if spread else "",
    )


def _lines_and_looks(
    points: Sequence[Row], figure: Row, names: Sequence[str]
) -> Iterator[tuple[str, list[Row], dict[str, int]]]:
    """Yields label and points of each line, with colour, marker and dashes.

    Lines with an equal value in the column `colours` share a colour; without that
    column each line has another one. `names` are the columns of lines if the figure has
    none.
    """
    lines = _lines(points, figure.get("lines", names))
    seen: dict[object, int] = {}  # Number of lines so far, by group.
    for i, (label, members) in enumerate(lines.items()):
        look = {"colour": i, "marker": i, "dashes": i // len(COLOURS)}
        if colours := figure.get("colours"):
            group = column(members[0], colours)
            nth = seen[group] = seen.get(group, -1) + 1
            look = {"colour": [*seen].index(group), "marker": nth, "dashes": nth}
        yield label, members, look


def _curves(run: Run, figure: Row) -> Chart:
    """Returns the curve of an evaluation during the runs of the first stage."""
    stage = run.study["config"]["stages"][0]
    evaluation, _, metric = figure["y"].rpartition("/")
    wanted = [f"{evaluation}/{kind}/{metric}" for kind in ("ema", "params")]
    scale, series = 100.0 if is_fraction(metric) else 1.0, []
    logged = {one.name: one for one in run.inner.get(stage, ())}
    for label, members, look in _lines_and_looks(
        run.study["points"], figure, ("name",)
    ):
        if (inner := logged.get(members[0]["name"])) is None:
            continue
        name = next((n for n in wanted for line in inner.metrics if n in line), "")
        curve = [(m["step"], scale * m[name]) for m in inner.metrics if name in m]
        if curve:
            series.append(Series(label, *zip(*curve, strict=True), **look))
    title = f"{figure['y']} in training"
    name = stem(run.name, figure["y"], "by", "step")
    note = "Shows the first seed of each point."
    y_label = f"{figure['y']}{_unit(metric)}"
    return Chart(name, title, "step", y_label, tuple(series), note=note)


def _leaders(points: Sequence[Row], config: Row, figure: Row) -> str:
    """Returns a text about the leading line at each value of an axis, or ""."""
    x, lines, score = figure["x"], figure.get("lines", ()), _Score(config, figure["y"])
    if x not in config["axes"] or not lines:
        return ""
    decimals, leaders, parts = score.decimals(points), set(), []
    scored = [point for point in points if score.of(point)]
    for value in dict.fromkeys(column(point, x) for point in scored):
        at_value = [point for point in scored if column(point, x) == value]
        best = (min if score.lower else max)(at_value, key=lambda p: score.of(p)[0])
        (label,) = _lines([best], lines)
        leaders.add(label)
        top = f"{score.of(best)[0]:.{decimals}f}"
        parts.append(f"{label} at {_short(x, value)} ({top})")
    most = "lowest" if score.lower else "highest"
    text = f"{score.name}: the {most} is {', '.join(parts)}."
    if len(parts) < 2:
        return text
    changes = "changes" if len(leaders) > 1 else "never changes"
    return f"{text} The lead {changes}."


def fit_law(x: Sequence[float], y: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Fits y = a + b (x / min x)^-c with non-negative a, b and c, by least squares.

    Args:
      x: positive values, (N,).
      y: values, (N,).

    Returns:
      (a, b, c), and the residuals y - fit, (N,).
    """
    from scipy import optimize

    x, y = np.asarray(x, float) / min(x), np.asarray(y, float)

    def residuals(p):
        return p[0] + p[1] * x ** -p[2] - y

    low = max(0.0, min(y))
    # The valley between a and c is flat: use the best of several initial values.
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
    score = _Score(config, y)
    scored = [p for p in points if score.of(p) and column(p, x)]
    parts = []
    for label, members in _lines(scored, law["lines"]).items():
        xs = [float(column(point, x)) for point in members]
        if len(set(xs)) < _LEAST:
            continue
        (a, b, c), rest = fit_law(xs, [score.of(point)[0] for point in members])
        worst = members[int(np.argmax(np.abs(rest)))]["name"]
        parts.append(
            f"{label}: {a:.3g} + {b:.3g} ({x} / {min(xs):.3g})^-{c:.3g}, residuals of "
            f"{np.sqrt(np.mean(rest**2)):.2g} (root mean square; the largest, "
            f"{np.abs(rest).max():.2g}, at {worst})"
        )
    if not parts:
        return Text(
            f"{y} by {x}: fewer than {_LEAST} points per line, so no law is fitted."
        )
    return Text(f"{y} = a + b {x}^-c, fitted by least squares. {'; '.join(parts)}.")
