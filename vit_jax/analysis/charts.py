"""Charts, matrices and sheets of tiles, drawn by matplotlib, as SVG, PNG and CSV."""

import contextlib
import csv
import dataclasses
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vit_jax.data import display
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
WIDTH = 5.2  # Width of a chart, in inches.

_LEGEND_LETTER = 0.08  # Width of a letter in the legend, in inches.
_TICK_LETTERS = 60  # Number of letters beyond which tick labels are slanted.
_LONGEST = 56  # Maximum number of characters in a legend entry.
# Most classes of a confusion matrix with names, and with counts in the cells.
_NAMED_CLASSES, _COUNTED_CLASSES = 100, 20
_LONGEST_CLASS = 22  # Maximum number of characters in the name of a class.

PAPER, INK, GRID = "#ffffff", "#1b1b1b", "#d0d0d0"

DPI = 200  # Resolution of PNG files.
_HEIGHT = 3.3  # Height of a chart without the legend, in inches.
_LEGEND_LINE = 0.21  # Height of a legend entry, in inches.
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
# Colours of `to_dark_svg` on dark screens.
_DARK = {PAPER: "#14171a", INK: "#e9e7e2", GRID: "#41464c"}
_COLORMAP = "cividis"  # Uniform for colour-blind readers and in grey print.
_RING_COLOUR = "#ff3b30"
_MIN_IMAGE_WIDTH = 2.4  # Inches.
_MAX_IMAGE_PIXELS = 1600  # Maximum size of the longer side.
_HEATMAP_SIZE = 4.6  # Inches on the longer side, unless there are too many cells.
_MIN_CELL = 2 / DPI  # Inches.
_MARGIN, _CAPTION, _TITLE, _ROW_LABEL, _GAP = 0.12, 0.22, 0.24, 0.62, 0.06  # Inches.
_TITLE_LETTER = 0.085  # Approximate width of a letter in titles, in inches.


@dataclasses.dataclass(frozen=True)
class Series:
    """A series of points of a chart.

    Attributes:
      label: legend entry.
      x, y: coordinates.
      colour: index into COLOURS.
      marker: index into MARKERS.
      line: whether a line joins the points.
      hollow: whether markers are outlines, which stand for published numbers.
      marked: whether there are markers.
      dashes: index into DASHES.
      spread: length of the error bar of each y to either side, None where unknown;
        empty if all are unknown.
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
      title: text above the chart.
      x_label, y_label: axis labels, with units.
      series: lines or groups of points.
      log_x, log_y: whether an axis is logarithmic.
      ticks: x ticks; chosen automatically if empty.
      tick_labels: texts of the ticks; their numbers if empty.
      spread_label: column title of the spreads in the CSV file.
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
      title: text above the picture.
      classes: names in the order of rows (true) and columns (predicted).
      counts: examples per true class (row) and predicted class (column).
      note: text below the picture.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    counts: tuple[tuple[Number, ...], ...]
    note: str = ""


@contextlib.contextmanager
def _new_figure(width: float, height: float, layout: str = "none") -> Iterator:
    """Yields an empty figure of a size in inches, and computes its layout at the end.

    Raises:
      UserError: matplotlib is missing.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "figures are drawn by matplotlib, which is not installed: "
            "pip install -e '.[plots]' in the clone, or matplotlib itself"
        ) from error
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout=layout, dpi=DPI)
        yield figure
        if layout != "none":  # All file formats get the same layout.
            figure.draw_without_rendering()
            figure.set_layout_engine("none")


def draw(picture: Chart | Matrix) -> "Figure":
    """Draws a chart or a confusion matrix.

    Raises:
      UserError: matplotlib is missing.
    """
    with _new_figure(*_figure_size(picture), layout="constrained") as figure:
        if isinstance(picture, Matrix):
            _draw_matrix(figure, picture)
        else:
            _draw_chart(figure, picture)
    return figure


def draw_tiles(
    tiles: Sequence[np.ndarray | None],
    columns: int,
    *,
    title: str,
    captions: Sequence[str] = (),
    row_labels: Sequence[str] = (),
    tile_width: float = 1.0,
    rings: Mapping[int, tuple[Number, Number]] | None = None,
) -> "Figure":
    """Draws tiles in rows.

    Args:
      tiles: maps (height, width), each coloured from its minimum to its maximum, or RGB
        or grey images; all of one aspect ratio. None leaves a gap, but not as the first
        tile.
      columns: tiles per row.
      title: text above the rows.
      captions: texts above the tiles.
      row_labels: texts left of the rows.
      tile_width: width of a tile in inches.
      rings: positions to circle by index of the tile: x and y from its top left, as
        fractions of its size.
    """
    height, width = tiles[0].shape[:2]
    tile_height, num_rows = tile_width * height / width, -(-len(tiles) // columns)
    captions = [*captions, *[""] * (len(tiles) - len(captions))]
    starts = range(0, len(tiles), columns)
    heights = [_CAPTION * any(captions[i : i + columns]) + tile_height for i in starts]
    left = _MARGIN + (_ROW_LABEL if row_labels else 0)
    W = max(
        left + columns * (tile_width + _GAP) + _MARGIN,
        2 * _MARGIN + _TITLE_LETTER * len(title),
    )
    H = 2 * _MARGIN + _TITLE + sum(heights) + num_rows * _GAP
    bottoms = H - _MARGIN - _TITLE - np.cumsum(heights) - _GAP * np.arange(num_rows)
    with _new_figure(W, H) as figure:
        figure.text(_MARGIN / W, 1 - _MARGIN / H, title, va="top", fontsize=11)
        for i, tile in enumerate(tiles):
            if tile is None:
                continue
            row, column = divmod(i, columns)
            x = left + column * (tile_width + _GAP)
            box = x / W, bottoms[row] / H, tile_width / W, tile_height / H
            axes = figure.add_axes(box)
            image = _reduce(tile, tile_width)
            axes.imshow(image, cmap=_COLORMAP, interpolation="nearest")
            axes.set_axis_off()
            if captions[i]:
                axes.set_title(captions[i], fontsize=8, pad=3)
            if rings and i in rings:
                _draw_ring(axes, *rings[i])
        for label, bottom in zip(row_labels, bottoms, strict=False):
            x, y = (left - _GAP) / W, (bottom + tile_height / 2) / H
            figure.text(x, y, label, ha="right", va="center", size=8)
    return figure


def native_tile_width(image: np.ndarray) -> float:
    """Returns the tile width at which an image keeps its pixels, in inches.

    Images with more than 1,600 pixels on the longer side are reduced to that size;
    small ones are enlarged.

    Args:
      image: pixels, (height, width, channels).
    """
    height, width = image.shape[:2]
    scale = min(1, _MAX_IMAGE_PIXELS / max(height, width))
    # A narrow image at the minimum width would be taller than the limit.
    minimum = min(_MIN_IMAGE_WIDTH, _MAX_IMAGE_PIXELS / DPI * width / height)
    return max(minimum, scale * width / DPI)


def draw_heatmap(
    values: np.ndarray,
    *,
    title: str,
    x_label: str,
    y_label: str,
    colorbar_label: str,
    limits: tuple[Number, Number],
    ticks: Sequence[tuple[Sequence[Number], Sequence[str]]],
    origin: str = "lower",
) -> "Figure":
    """Draws a matrix as a heat map with a colour bar.

    Args:
      values: matrix (rows, columns); NaN is left blank.
      title, x_label, y_label, colorbar_label: labels of the picture.
      limits: values at the two ends of the colour map.
      ticks: positions and labels of the x axis, then of the y axis.
      origin: "lower" or "upper", where the first row is drawn.
    """
    rows, columns = values.shape
    longest = max(rows, columns)
    width, height = (
        max(_HEATMAP_SIZE, _MIN_CELL * longest) * count / longest
        for count in (columns, rows)
    )
    # Space for the colour bar and the labels; the title is centred to the left of them.
    size = (
        max(1.1 * max(2.6, width), _TITLE_LETTER * len(title)) + 1.3,
        max(2.0, height) + 1.0,
    )
    with _new_figure(*size, layout="compressed") as figure:
        axes = figure.add_subplot()
        image = axes.imshow(
            values,
            cmap=_COLORMAP,
            vmin=limits[0],
            vmax=limits[1],
            interpolation="nearest",
            origin=origin,
        )
        # The fraction refers to the width but also limits the height, so that narrow
        # figures need a larger one.
        fraction = 0.05 * max(1, rows / columns)
        bar = figure.colorbar(image, ax=axes, shrink=0.85, fraction=fraction)
        bar.set_label(colorbar_label)
        bar.outline.set_visible(False)
        axes.spines[:].set_visible(False)
        axes.set_xticks(*ticks[0])
        axes.set_yticks(*ticks[1])
        axes.set_title(title)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
    return figure


def to_svg(figure: "Figure", letters: str = "path") -> str:
    """Returns a figure as SVG, without dates, so that equal figures are equal.

    Letters are drawn as "path", or, with "none", as text in a font of the reader, which
    may have letters that matplotlib's font lacks.
    """
    how = {"svg.fonttype": letters}
    metadata = {"Date": None, "Creator": None}
    return _save(figure, "svg", how, metadata=metadata).decode()


def to_dark_svg(figure: "Figure") -> str:
    """Returns a figure as SVG that is dark on dark screens and white in print.

    The elements keep their light colours, for programs that ignore style sheets.
    """
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    )
    rules = f"@media screen and (prefers-color-scheme:dark){{{rules}}}"
    return to_svg(figure).replace("</style>", f"{rules}</style>", 1)


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
      text: output of `to_svg`.
      name: prefix of the ids, which keeps those of several pictures apart.

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


def _save(figure: "Figure", form: str, style: Mapping = {}, **options) -> bytes:
    import matplotlib as mpl

    stream = io.BytesIO()
    with mpl.rc_context(STYLE | style):
        figure.savefig(stream, format=form, **options)
    return stream.getvalue()


def _figure_size(picture: Chart | Matrix) -> tuple[float, float]:
    if isinstance(picture, Matrix):
        cell, letter = _matrix_sizes(picture)
        longest = max(len(_short(name, _LONGEST_CLASS)) for name in picture.classes)
        named = len(picture.classes) <= _NAMED_CLASSES
        labels = longest * named * letter / 72 * 0.62
        side = len(picture.classes) * cell
        height = labels + side + (1.1 if picture.title else 0.8)
        return labels + max(side, 2.8) + 0.5, height
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


def _matrix_sizes(matrix: Matrix) -> tuple[Number, Number]:
    """Returns the side of a cell in inches, and the size of letters in points."""
    count = len(matrix.classes)
    if count > _NAMED_CLASSES:
        return 9 / count, 9
    if count > 40:
        return 0.14, 8.5
    return (0.23, 9) if count > _COUNTED_CLASSES else (0.42, 10)


def _draw_matrix(figure: "Figure", matrix: Matrix) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgb

    axes = figure.add_subplot()
    counts = np.array(matrix.counts, float)
    # Rows of classes without examples stay blank.
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    rows, columns = np.nonzero(counts)
    # Transparent, for light and dark pages; rare mistakes must be visible too.
    opacity = 0.15 + 0.85 * shares[rows, columns]
    square = np.array([(0, 0), (1, 0), (1, 1), (0, 1)]) - 0.5
    cells = np.stack([columns, rows], 1)[:, None] + square
    colours = [(*to_rgb(COLOURS[0]), alpha) for alpha in opacity]
    axes.add_collection(PolyCollection(cells, facecolors=colours, linewidths=0))
    count, letter = len(matrix.classes), _matrix_sizes(matrix)[1]
    last = count - 0.5
    axes.set(xlim=(-0.5, last), ylim=(last, -0.5), aspect="equal")
    axes.tick_params(length=0)
    if count <= _NAMED_CLASSES:
        names = [_short(name, _LONGEST_CLASS) for name in matrix.classes]
        how = {"fontsize": letter, "parse_math": False}  # "$" is a letter of a name.
        axes.set_xticks(range(count), names, rotation=90, **how)
        axes.set_yticks(range(count), names, **how)
        for lines in (axes.hlines, axes.vlines):
            lines(np.arange(count + 1) - 0.5, -0.5, last, colors=GRID, linewidths=0.4)
    if count <= _COUNTED_CLASSES:
        as_counts = counts.max(initial=0) < 10_000  # They fit into the cells.
        for i, j, alpha in zip(rows, columns, opacity, strict=True):
            text = f"{counts[i, j]:.0f}" if as_counts else f"{100 * shares[i, j]:.0f}%"
            ink = PAPER if alpha > 0.55 else INK
            axes.text(j, i, text, ha="center", va="center", color=ink, fontsize=8)
    axes.spines[:].set_visible(False)
    axes.set_title(matrix.title)
    axes.set_xlabel("predicted class\n(colour: fraction of the true class)")
    axes.set_ylabel("true class")


def _short(text: str, longest: int = _LONGEST) -> str:
    """Shortens a text in the middle; matplotlib hides legend entries that start with _."""
    text = (text.lstrip("_") or text).encode("utf-8", "replace").decode()
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


def _draw_ring(axes, x: float, y: float) -> None:
    axes.autoscale(False)  # A ring at the edge must not enlarge the tile.
    axes.plot(
        x,
        1 - y,
        "o",
        transform=axes.transAxes,
        clip_on=False,
        mfc="none",
        mec=_RING_COLOUR,
        mew=1.2,
        ms=6,
    )


def _reduce(tile: np.ndarray, width: float) -> np.ndarray:
    """Returns an image with at most as many columns of pixels as fit into `width` inches."""
    columns = round(width * DPI)
    if tile.ndim == 3:
        is_picture = tile.shape[-1] in (1, 3) and tile.dtype != np.uint16
        tile = tile if is_picture else display.to_display(tile)  # A model's input.
        tile = tile.repeat(3 // tile.shape[-1], axis=-1)
    if tile.ndim == 2 or tile.shape[1] <= columns or tile.dtype != np.uint8:
        return tile
    size = columns, max(1, round(tile.shape[0] * columns / tile.shape[1]))
    return np.array(Image.fromarray(tile).resize(size, Image.Resampling.LANCZOS))
