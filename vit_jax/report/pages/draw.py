"""Charts as SVG, PNG and CSV, by matplotlib."""

import csv
import io
import re
from typing import TYPE_CHECKING

import numpy as np

from vit_jax.errors import UserError
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
PAPER, INK, GRID = "#ffffff", "#1b1b1b", "#d0d0d0"

_WIDTH, _HEIGHT = 5.2, 3.3  # Inches, without the legend.
_LEGEND_LINE, _LEGEND_LETTER = 0.21, 0.08  # Inches, of a line and of a letter.
_LONGEST = 56  # Letters of a legend's entry.
_NAMED_CLASSES, _COUNTED_CLASSES = 40, 15  # Up to how many there is room for text.
_STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.hashsalt": "vit_jax",  # The same picture has the same text.
    "path.simplify": False,
}


def figure(picture: Chart | Matrix) -> "Figure":
    """Draws a picture.

    Raises:
      UserError: matplotlib is missing.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "plots are drawn by matplotlib, which is not installed: "
            "pip install 'vit_jax[plots]', or matplotlib itself"
        ) from error
    with mpl.rc_context(_STYLE):
        drawn = Figure(figsize=_size(picture), layout="constrained")
        axes = drawn.add_subplot()
        if isinstance(picture, Matrix):
            _draw_matrix(drawn, axes, picture)
        else:
            _draw_chart(drawn, axes, picture)
        drawn.draw_without_rendering()
        drawn.set_layout_engine("none")  # It is laid out, for all forms alike.
        return drawn


def svg(drawn: "Figure") -> str:
    """Returns a figure as SVG, without what changes from day to day."""
    return _saved(drawn, "svg", metadata={"Date": None, "Creator": None}).decode()


def png(drawn: "Figure") -> bytes:
    """Returns a figure as PNG, fine enough for print."""
    return _saved(drawn, "png", dpi=200)


def table(picture: Chart | Matrix) -> str:
    """Returns what a picture shows as CSV: all points, or all counts."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    if isinstance(picture, Matrix):
        writer.writerow(["true class", *picture.classes])
        writer.writerows(
            [name, *row]
            for name, row in zip(picture.classes, picture.counts, strict=True)
        )
        return stream.getvalue()
    spread = any(series.spread for series in picture.series)
    head = ["series", picture.x_label, picture.y_label]
    writer.writerow(head + ["standard deviation"] * spread)
    for series in picture.series:
        deviations = series.spread or [""] * len(series.x)
        for x, y, deviation in zip(series.x, series.y, deviations, strict=True):
            writer.writerow([series.label, x, y] + [deviation] * spread)
    return stream.getvalue()


def inline(text: str, name: str) -> str:
    """Turns SVG into a part of a page.

    Args:
      text: from `svg`.
      name: of the picture; makes ids differ from those of other pictures.

    Returns:
      The element, whose colours are the page's variables --paper, --ink, --grid and
      --c0 to --c7.
    """
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = text.replace("xlink:href", "href").replace(
        ' xmlns:xlink="http://www.w3.org/1999/xlink"', ""
    )
    names = {PAPER: "paper", INK: "ink", GRID: "grid"}
    names |= {colour: f"c{i}" for i, colour in enumerate(COLOURS)}
    for colour, variable in names.items():
        text = text.replace(colour, f"var(--{variable})")
    # As wide as there is room for, in its own proportions.
    return re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)


def _saved(drawn: "Figure", form: str, **options) -> bytes:
    import matplotlib as mpl

    stream = io.BytesIO()
    with mpl.rc_context(_STYLE):
        drawn.savefig(stream, format=form, **options)
    return stream.getvalue()


def _size(picture: Chart | Matrix) -> tuple[float, float]:
    if isinstance(picture, Matrix):
        side = min(9.0, max(4.0, 0.32 * len(picture.classes) + 2.0))
        return side + 0.6, side
    rows = -(-len(picture.series) // _columns(picture))
    return _WIDTH, _HEIGHT + _LEGEND_LINE * rows


def _columns(chart: Chart) -> int:
    """Returns how many columns of a legend there is room for."""
    longest = max((len(_short(series.label)) for series in chart.series), default=1)
    return max(1, min(4, int(_WIDTH / (_LEGEND_LETTER * (longest + 7)))))


def _draw_chart(drawn, axes, chart: Chart) -> None:
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
            ncols=_columns(chart),
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
    if series.spread:
        axes.errorbar(
            series.x,
            series.y,
            yerr=series.spread,
            fmt="none",
            ecolor=colour,
            elinewidth=1,
            capsize=2.5,
        )


def _draw_matrix(drawn, axes, matrix: Matrix) -> None:
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
