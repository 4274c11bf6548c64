"""Sheets of tiles and heat maps, drawn by matplotlib."""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vit_jax.analysis.charts import DPI, INK, Number
from vit_jax.analysis.figures.canvas import figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = "cividis"  # Even in grey print, and to colour-blind readers.
_RING = "#ff3b30"
_LEAST, _LONGEST = 2.4, 1600  # Inches across at least, pixels at most; of an image.
_HEAT = 4.6  # Inches of a heat map, unless it has more cells than that shows.
_CELL = 2 / DPI  # Inches at least.
_MARGIN, _CAPTION, _TITLE, _LEFT, _GAP = 0.12, 0.22, 0.24, 0.62, 0.06  # Inches.


def sheet(
    tiles: Sequence[np.ndarray | None],
    columns: int,
    *,
    title: str = "",
    captions: Sequence[str] = (),
    rows: Sequence[str] = (),
    side: float = 1.0,
    limits: tuple[Number, Number] | None = None,
    marked: Mapping[int, tuple[Number, Number]] | None = None,
) -> "Figure":
    """Draws tiles row by row.

    Args:
      tiles: of one aspect ratio: (height, width) of numbers, or RGB. The first is
        there; further ones may be None, whose places stay empty.
      columns: tiles of a row.
      title: above all.
      captions: above each tile.
      rows: names of the rows.
      side: width of a tile, in inches.
      limits: the numbers of the first and of the last colour; if None each tile's own
        least and largest.
      marked: number of a tile to a place that gets a ring: across and down, as
        fractions of the tile.
    """
    height, width = tiles[0].shape[:2]
    high, lines = side * height / width, -(-len(tiles) // columns)
    captions = list(captions) + [""] * (len(tiles) - len(captions))
    above = [
        _CAPTION * any(captions[i * columns : (i + 1) * columns]) for i in range(lines)
    ]
    left = _MARGIN + (_LEFT if rows else 0)
    whole = (
        left + columns * (side + _GAP) + _MARGIN,
        2 * _MARGIN + _TITLE * bool(title) + sum(above) + lines * (high + _GAP),
    )
    drawn = figure(max(whole[0], _width(title)), whole[1])
    W, H = drawn.get_size_inches()
    text = functools.partial(drawn.text, color=INK)
    top = H - _MARGIN
    if title:
        text(_MARGIN / W, top / H, title, va="top", fontsize=11)
        top -= _TITLE
    for line in range(lines):
        top -= above[line] + high
        for i in range(line * columns, min((line + 1) * columns, len(tiles))):
            if tiles[i] is None:
                continue
            x = left + (i - line * columns) * (side + _GAP)
            axes = drawn.add_axes((x / W, top / H, side / W, high / H))
            _show(axes, tiles[i], side, limits)
            if captions[i]:
                axes.set_title(captions[i], fontsize=8, pad=3, color=INK)
            if marked and i in marked:
                _mark(axes, *marked[i])
        if line < len(rows):
            y = (top + high / 2) / H
            text((left - _GAP) / W, y, rows[line], ha="right", va="center", size=8)
        top -= _GAP
    return drawn


def heat(
    values: np.ndarray,
    *,
    title: str,
    x_label: str,
    y_label: str,
    label: str,
    limits: tuple[Number, Number],
    ticks: tuple[tuple[Sequence[Number], Sequence[str]], ...] = (),
    downwards: bool = False,
) -> "Figure":
    """Draws a matrix in colours.

    Args:
      values: (rows, columns); NaN is left blank.
      title, x_label, y_label: texts.
      label: of the colours.
      limits: numbers of the first and of the last colour.
      ticks: places and texts, across and down; as it fits if empty.
      downwards: whether the first row is on top.
    """
    rows, columns = values.shape
    longest = max(rows, columns)
    width, height = (
        max(_HEAT, _CELL * longest) * count / longest for count in (columns, rows)
    )
    # With room for the colours, and for texts.
    drawn = figure(1.1 * max(2.6, width) + 1.3, max(2.0, height) + 1.0, "compressed")
    with style():
        axes = drawn.add_subplot()
        shown = axes.imshow(
            values,
            cmap=_blank_where_nan(),
            vmin=limits[0],
            vmax=limits[1],
            interpolation="nearest",
            origin="upper" if downwards else "lower",
        )
        # A fraction of the width, which may be small, makes the bar's height too.
        part = 0.05 * max(1, rows / columns)
        bar = drawn.colorbar(shown, ax=axes, shrink=0.85, fraction=part)
        bar.set_label(label)
        bar.outline.set_visible(False)
        axes.spines[:].set_visible(False)
        if ticks:
            axes.set_xticks(*ticks[0])
            axes.set_yticks(*ticks[1])
        else:
            axes.locator_params(integer=True, nbins=8)
        axes.set_title(title)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        drawn.draw_without_rendering()
    drawn.set_layout_engine("none")
    return drawn


def own_side(image: np.ndarray) -> float:
    """Returns how wide a tile has to be to show an image's own pixels, in inches.

    Of more than 1,600 on the longer side some are left out; few are drawn large.

    Args:
      image: (height, width, channels).
    """
    height, width = image.shape[:2]
    kept = min(1, _LONGEST / max(height, width))
    # Not so wide that a tall image becomes longer than others.
    least = min(_LEAST, _LONGEST / DPI * width / height)
    return max(least, kept * width / DPI)


def _mark(axes, across: float, down: float) -> None:
    axes.autoscale(False)  # A ring at the edge leaves the tile as it is.
    axes.plot(
        across,
        1 - down,
        "o",
        transform=axes.transAxes,
        clip_on=False,
        mfc="none",
        mec=_RING,
        mew=1.2,
        ms=6,
    )


def _show(axes, tile, side, limits) -> None:
    if tile.ndim == 3:
        tile = _reduced(tile, round(side * DPI))
    low, high = limits or (None, None)
    axes.imshow(
        tile, cmap=_blank_where_nan(), vmin=low, vmax=high, interpolation="nearest"
    )
    axes.set_axis_off()


def _reduced(image, pixels: int) -> np.ndarray:
    """Returns an image no wider than it is drawn."""
    height, width = image.shape[:2]
    if width <= pixels or image.dtype != np.uint8:
        return image
    size = pixels, max(1, round(height * pixels / width))
    return np.array(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))


def _blank_where_nan():
    import matplotlib as mpl

    return mpl.colormaps[COLOURS].with_extremes(bad=(0, 0, 0, 0))


def _width(title: str) -> float:
    """Returns how many inches a title takes, about."""
    return 2 * _MARGIN + 0.085 * len(title)
