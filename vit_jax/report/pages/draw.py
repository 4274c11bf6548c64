"""Charts as SVG, PNG and CSV, by matplotlib."""

import csv
import io
import re
from typing import TYPE_CHECKING

from vit_jax.errors import UserError
from vit_jax.report.pages import axes
from vit_jax.report.pages.blocks import Chart, Matrix, Series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
            "pip install -e '.[plots]' in the clone, or matplotlib itself"
        ) from error
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=_size(picture), layout="constrained")
        if isinstance(picture, Matrix):
            axes.matrix(drawn, picture)
        else:
            axes.chart(drawn, picture)
        drawn.draw_without_rendering()
        drawn.set_layout_engine("none")  # It is laid out, for all forms alike.
        return drawn


def svg(drawn: "Figure") -> str:
    """Returns a figure as SVG, without what changes from day to day."""
    return _saved(drawn, "svg", metadata={"Date": None, "Creator": None}).decode()


def png(drawn: "Figure") -> bytes:
    """Returns a figure as PNG, fine enough for print."""
    return _saved(drawn, "png", dpi=DPI)


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
    spread = any(map(_has_spread, picture.series))
    head = ["series", picture.x_label, picture.y_label]
    writer.writerow(head + ["standard deviation"] * spread)
    for series in picture.series:
        deviations = series.spread or [None] * len(series.x)
        for x, y, deviation in zip(series.x, series.y, deviations, strict=True):
            writer.writerow([series.label, x, y] + [deviation] * spread)
    return stream.getvalue()


def _has_spread(series: Series) -> bool:
    return any(deviation is not None for deviation in series.spread)


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
    names |= {colour: f"c{i}" for i, colour in enumerate(axes.COLOURS)}
    for colour, variable in names.items():
        text = text.replace(colour, f"var(--{variable})")
    # As wide as there is room for, in its own proportions.
    return re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)


def _saved(drawn: "Figure", form: str, **options) -> bytes:
    import matplotlib as mpl

    stream = io.BytesIO()
    with mpl.rc_context(STYLE):
        drawn.savefig(stream, format=form, **options)
    return stream.getvalue()


def _size(picture: Chart | Matrix) -> tuple[float, float]:
    if isinstance(picture, Matrix):
        side = min(9.0, max(4.0, 0.32 * len(picture.classes) + 2.0))
        return side + 0.6, side
    rows = -(-len(picture.series) // axes.columns(picture))
    return axes.WIDTH, _HEIGHT + _LEGEND_LINE * rows
