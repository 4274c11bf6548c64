"""The axes of a chart and of a confusion matrix, by matplotlib."""

from typing import TYPE_CHECKING

import numpy as np

from vit_jax.report.pages.blocks import Chart, Matrix, Number, Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind readers too, without its yellow,
# which is too light for paper. Markers and dashes differ as well.
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#e69f00",
    "#7f7f7f",
    "#8c564b",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", ":", "-.")
WIDTH = 5.2  # Inches.

_LEGEND_LETTER = 0.08  # Inches.
_LONGEST = 56  # Letters of a legend's entry.
_NAMED_CLASSES, _COUNTED_CLASSES = 40, 15  # Up to how many there is room for text.


def columns(chart: Chart) -> int:
    """Returns how many columns of a legend there is room for."""
    longest = max((len(_short(series.label)) for series in chart.series), default=1)
    return max(1, min(4, int(WIDTH / (_LEGEND_LETTER * (longest + 7)))))


def chart(drawn: "Figure", chart: Chart) -> None:
    """Draws points over two axes."""
    axes = drawn.add_subplot()
    for series in chart.series:
        _draw_series(axes, series)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.ticks:
        axes.set_xticks(chart.ticks, [_readable(tick) for tick in chart.ticks])
        axes.minorticks_off()
    elif chart.log_x:
        _mark_powers(axes)
    else:
        axes.xaxis.set_major_formatter(lambda value, _: _readable(value))
        axes.locator_params(axis="x", nbins=6)
    axes.margins(x=0.06, y=0.1)
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.series:
        drawn.legend(
            loc="outside lower center",
            ncols=columns(chart),
            frameon=False,
            fontsize=9,
            handlelength=2.6,
            borderpad=0.1,
            labelspacing=0.35,
            columnspacing=1.4,
        )


def _mark_powers(axes) -> None:
    """Marks the powers of ten, and 2 and 5 times them where there are few."""
    from matplotlib import ticker

    low, high = axes.get_xlim()
    few = high / low < 10**2.2
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if few else (1,)))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: _readable(value))


def _draw_series(axes, series: Series) -> None:
    colour = COLOURS[series.colour % len(COLOURS)]
    marked = series.marked or len(series.x) == 1
    look = {
        "color": colour,
        "linestyle": DASHES[series.dashes % len(DASHES)] if series.line else "none",
        "linewidth": 1.5,
        "marker": MARKERS[series.marker % len(MARKERS)] if marked else "none",
        "markersize": 5.5,
        "markerfacecolor": "none" if series.hollow else colour,
        "markeredgewidth": 1.2,
        "label": _short(series.label),
    }
    axes.plot(series.x, series.y, **look)
    points = zip(series.x, series.y, series.spread, strict=False)
    known = [point for point in points if point[2] is not None]
    if known:
        x, y, spread = zip(*known, strict=True)
        axes.errorbar(
            x,
            y,
            yerr=spread,
            fmt="none",
            ecolor=colour,
            elinewidth=1,
            capsize=2.5,
        )


def matrix(drawn: "Figure", matrix: Matrix) -> None:
    """Draws a confusion matrix."""
    axes = drawn.add_subplot()
    counts = np.array(matrix.counts, float)
    totals = counts.sum(1, keepdims=True)
    # A class without examples has no shares, and is left blank.
    empty = np.full_like(counts, np.nan)
    shares = np.divide(counts, totals, out=empty, where=totals > 0)
    shown = axes.imshow(100 * shares, cmap="cividis", vmin=0, vmax=100)
    drawn.colorbar(shown, ax=axes, label="% of the true class", shrink=0.8)
    places = range(len(matrix.classes))
    if len(matrix.classes) <= _NAMED_CLASSES:
        names = [_short(name, 18) for name in matrix.classes]
        axes.set_xticks(places, names, rotation=90, fontsize=8)
        axes.set_yticks(places, names, fontsize=8)
    if len(matrix.classes) <= _COUNTED_CLASSES:
        for i, row in enumerate(shares):
            for j, share in enumerate(row):
                text = "" if np.isnan(share) else f"{counts[i, j]:.0f}"
                ink = "#000000" if share > 0.55 else "#fefefe"
                axes.text(j, i, text, ha="center", va="center", color=ink, fontsize=7)
    axes.spines[:].set_visible(False)
    axes.set_title(matrix.title)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")


def _short(text: str, longest: int = _LONGEST) -> str:
    """Leaves the middle of a long text out; a leading _ would hide it in a legend."""
    text = text.lstrip("_") or text
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def _readable(value: Number) -> str:
    """Writes a mark of an axis: 3k, 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
