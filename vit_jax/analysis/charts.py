"""Charts and confusion matrices, drawn by matplotlib, as SVG, PNG and CSV."""

import csv
import dataclasses
import io
import re
from typing import TYPE_CHECKING

import numpy as np

from vit_jax.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Number = float | int

# The colour-blind safe palette of Okabe and Ito, without its yellow, which is too light
# on paper. Markers and dashes differ as well.
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
_TICK_LETTERS = 60  # Of all tick labels together, beyond which they are slanted.
_LONGEST = 56  # Characters of a legend entry.
# Most classes of a confusion matrix with names, and with counts in the cells.
_NAMED_CLASSES, _COUNTED_CLASSES = 40, 15

PAPER, INK, GRID = "#ffffff", "#1b1b1b", "#d0d0d0"

DPI = 200  # Of PNG files.
_HEIGHT = 3.3  # Inches, without the legend.
_LEGEND_LINE = 0.21  # Inches.
STYLE = {
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
    "svg.hashsalt": "vit_jax",  # Equal pictures give equal files.
    "path.simplify": False,
}


@dataclasses.dataclass(frozen=True)
class Series:
    """A series of points of a chart.

    Attributes:
      label: for the legend.
      x, y: coordinates.
      colour: index into COLOURS.
      marker: index into MARKERS.
      line: whether a line joins the points.
      hollow: whether markers are outlines; published numbers are.
      marked: whether there are markers.
      dashes: index into DASHES.
      spread: length of the error bar of each y to either side, None where unknown;
        empty if all are.
    """

    label: str
    x: tuple[Number, ...]
    y: tuple[Number, ...]
    colour: int = 0
    marker: int = 0
    line: bool = True
    hollow: bool = False
    marked: bool = True
    dashes: int = 0
    spread: tuple[Number | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class Chart:
    """A line or scatter chart.

    Attributes:
      name: file name without suffix.
      title: above the chart.
      x_label, y_label: axis labels, with units.
      series: points.
      log_x, log_y: whether an axis is logarithmic.
      ticks: x ticks; chosen automatically if empty.
      tick_labels: texts of the ticks; their numbers if empty.
      spread_label: what the series' spreads are, for the CSV file.
      note: text below the chart.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    ticks: tuple[Number, ...] = ()
    note: str = ""
    tick_labels: tuple[str, ...] = ()
    spread_label: str = "standard deviation"


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A confusion matrix.

    Attributes:
      name: file name without suffix.
      title: above the picture.
      classes: names, in the order of rows (true) and columns (predicted).
      counts: examples per true class (row) and predicted class (column).
      note: text below the picture.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    counts: tuple[tuple[Number, ...], ...]
    note: str = ""


def draw(picture: Chart | Matrix) -> "Figure":
    """Draws a chart or a confusion matrix.

    Raises:
      UserError: matplotlib is missing.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "plots are drawn by matplotlib, which is not installed: "
            "pip install -e '.[plots]' in the clone, or matplotlib itself"
        ) from error
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=_figure_size(picture), layout="constrained")
        if isinstance(picture, Matrix):
            _draw_matrix(figure, picture)
        else:
            _draw_chart(figure, picture)
        figure.draw_without_rendering()
        # The layout is done; keep it for all file formats.
        figure.set_layout_engine("none")
        return figure


def to_svg(figure: "Figure") -> str:
    """Returns a figure as SVG, without dates, so that equal figures are equal."""
    return _save(figure, "svg", metadata={"Date": None, "Creator": None}).decode()


def to_png(figure: "Figure") -> bytes:
    """Returns a figure as PNG at 200 dots per inch."""
    return _save(figure, "png", dpi=DPI)


def to_csv(picture: Chart | Matrix) -> str:
    """Returns the points of a chart, or the counts of a matrix, as CSV."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    if isinstance(picture, Matrix):
        writer.writerow(["true class", *picture.classes])
        writer.writerows(
            [name, *row]
            for name, row in zip(picture.classes, picture.counts, strict=True)
        )
        return stream.getvalue()
    spread = any(map(_has_spread, picture.series))
    head = ["series", picture.x_label, picture.y_label]
    writer.writerow(head + [picture.spread_label] * spread)
    for series in picture.series:
        deviations = series.spread or [None] * len(series.x)
        for x, y, deviation in zip(series.x, series.y, deviations, strict=True):
            writer.writerow([series.label, x, y] + [deviation] * spread)
    return stream.getvalue()


def _has_spread(series: Series) -> bool:
    return any(deviation is not None for deviation in series.spread)


def to_inline_svg(text: str, name: str) -> str:
    """Converts SVG into an element of an HTML page.

    Args:
      text: from `to_svg`.
      name: of the picture; keeps ids of pictures on one page apart.

    Returns:
      The element. Its colours are the page's CSS variables --paper, --ink, --grid and
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
    # Fills the width of its container and keeps its aspect ratio.
    return re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)


def _save(figure: "Figure", form: str, **options) -> bytes:
    import matplotlib as mpl

    stream = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(stream, format=form, **options)
    return stream.getvalue()


def _figure_size(picture: Chart | Matrix) -> tuple[float, float]:
    if isinstance(picture, Matrix):
        side = min(9.0, max(4.0, 0.32 * len(picture.classes) + 2.0))
        return side + 0.6, side
    rows = -(-len(picture.series) // _legend_columns(picture))
    return WIDTH, _HEIGHT + _LEGEND_LINE * rows


def _legend_columns(chart: Chart) -> int:
    longest = max((len(_short(series.label)) for series in chart.series), default=1)
    return max(1, min(4, int(WIDTH / (_LEGEND_LETTER * (longest + 7)))))


def _draw_chart(figure: "Figure", chart: Chart) -> None:
    axes = figure.add_subplot()
    for series in chart.series:
        _draw_series(axes, series)
    if chart.log_x:
        axes.set_xscale("log")
    if chart.log_y:
        axes.set_yscale("log")
    if chart.ticks:
        labels = chart.tick_labels or [_tick(tick) for tick in chart.ticks]
        slant = 30 if max(map(len, labels)) * len(labels) > _TICK_LETTERS else 0
        axes.set_xticks(
            chart.ticks, labels, rotation=slant, ha="right" if slant else "center"
        )
        axes.minorticks_off()
    elif chart.log_x:
        _mark_powers(axes)
    else:
        axes.xaxis.set_major_formatter(lambda value, _: _tick(value))
        axes.locator_params(axis="x", nbins=6)
    axes.margins(x=0.06, y=0.1)
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.series:
        figure.legend(
            loc="outside lower center",
            ncols=_legend_columns(chart),
            frameon=False,
            fontsize=9,
            handlelength=2.6,
            borderpad=0.1,
            labelspacing=0.35,
            columnspacing=1.4,
        )


def _mark_powers(axes) -> None:
    """Sets ticks at powers of ten, and at 2 and 5 times them on short axes."""
    from matplotlib import ticker

    low, high = axes.get_xlim()
    few = high / low < 10**2.2
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if few else (1,)))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: _tick(value))


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


def _draw_matrix(figure: "Figure", matrix: Matrix) -> None:
    axes = figure.add_subplot()
    counts = np.array(matrix.counts, float)
    totals = counts.sum(1, keepdims=True)
    # Rows of classes without examples stay blank.
    empty = np.full_like(counts, np.nan)
    shares = np.divide(counts, totals, out=empty, where=totals > 0)
    shown = axes.imshow(100 * shares, cmap="cividis", vmin=0, vmax=100)
    figure.colorbar(shown, ax=axes, label="% of the true class", shrink=0.8)
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
    """Shortens a text in the middle; matplotlib hides legend entries that start with _."""
    text = text.lstrip("_") or text
    if len(text) <= longest:
        return text
    half = (longest - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def _tick(value: Number) -> str:
    """Formats a tick: 3k, 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
