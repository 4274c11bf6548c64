"""Tile sheets and heat maps by matplotlib, and the files that they are saved to."""

import dataclasses
import functools
import io
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from etils import epath
from jaxtyping import Float
from PIL import Image

from vit_jax.analysis import charts
from vit_jax.analysis.charts import Number
from vit_jax.errors import UserError
from vit_jax.files import replace_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours of the SVG in dark mode.
_DARK = {charts.PAPER: "#14171a", charts.INK: "#e9e7e2", charts.GRID: "#41464c"}
_COLORMAP = "cividis"  # Uniform to colour-blind readers and in grey print.
_RING_COLOUR = "#ff3b30"
_MIN_IMAGE_WIDTH = 2.4  # Inches.
_MAX_IMAGE_PIXELS = 1600  # Longer side.
_HEATMAP_SIZE = 4.6  # Inches of the longer side, unless there are too many cells.
_MIN_CELL = 2 / charts.DPI  # Inches.
_MARGIN, _CAPTION, _TITLE, _ROW_LABEL, _GAP = 0.12, 0.22, 0.24, 0.62, 0.06  # Inches.


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure and the arrays that it shows.

    Attributes:
      stem: file name without suffix; may begin with a folder.
      figure: the drawing.
      data: arrays by name.
    """

    stem: str
    figure: "Figure"
    data: Mapping[str, np.ndarray]


class UniqueStems:
    """File stems for images, distinct even if two images share a name."""

    def __init__(self) -> None:
        self._stems: dict[str, str] = {}

    def stem(self, image: str) -> str:
        """Returns the stem of an image; the same one on every call."""
        if image not in self._stems:
            plain = re.sub(r"[^\w.-]+", "_", pathlib.Path(image).stem).strip("._-")
            stem, number = plain or "image", 1
            # Some file systems ignore case.
            while stem.lower() in {known.lower() for known in self._stems.values()}:
                number += 1
                stem = f"{plain or 'image'}_{number}"
            self._stems[image] = stem
        return self._stems[image]


def save(picture: Picture, out: pathlib.Path) -> list[str]:
    """Writes a picture as PNG, SVG and npz; replaces each file atomically.

    Returns:
      The names of the files, relative to `out`.

    Raises:
      UserError: a file cannot be written.
    """
    arrays = io.BytesIO()
    np.savez_compressed(arrays, **picture.data)
    contents = {
        f"{picture.stem}.png": charts.to_png(picture.figure),
        f"{picture.stem}.svg": add_dark_mode(charts.to_svg(picture.figure)).encode(),
        f"{picture.stem}.npz": arrays.getvalue(),
    }
    for name, content in contents.items():
        path = epath.Path(out / name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_bytes(path, content)
        except OSError as error:
            raise UserError(
                f"--out={out}: {path} cannot be written ({error.strerror or error}); "
                "choose another folder"
            ) from error
    return list(contents)


def add_dark_mode(svg: str) -> str:
    """Returns an SVG that is dark on dark screens and white in print.

    The elements keep their light colours, for programs that ignore style sheets.
    """
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    )
    rules = f"@media screen and (prefers-color-scheme:dark){{{rules}}}"
    return svg.replace("</style>", f"{rules}</style>", 1)


def draw_tiles(
    tiles: Sequence[np.ndarray | None],
    columns: int,
    *,
    title: str = "",
    captions: Sequence[str] = (),
    row_labels: Sequence[str] = (),
    tile_width: float = 1.0,
    rings: Mapping[int, tuple[Number, Number]] | None = None,
) -> "Figure":
    """Draws tiles in rows.

    Args:
      tiles: maps (height, width), each coloured from its minimum to its maximum, or RGB
        images; all of one aspect ratio. None leaves a gap, but not as the first tile.
      columns: tiles per row.
      title: above the rows.
      captions: above each tile.
      row_labels: left of each row.
      tile_width: in inches.
      rings: positions to circle by index of the tile: x and y from its top left, as
        fractions of its size.
    """
    height, width = tiles[0].shape[:2]
    tile_height, num_rows = tile_width * height / width, -(-len(tiles) // columns)
    captions = list(captions) + [""] * (len(tiles) - len(captions))
    caption_heights = [
        _CAPTION * any(captions[row * columns : (row + 1) * columns])
        for row in range(num_rows)
    ]
    left = _MARGIN + (_ROW_LABEL if row_labels else 0)
    size = (
        left + columns * (tile_width + _GAP) + _MARGIN,
        2 * _MARGIN
        + _TITLE * bool(title)
        + sum(caption_heights)
        + num_rows * (tile_height + _GAP),
    )
    figure = _new_figure(max(size[0], _title_width(title)), size[1])
    W, H = figure.get_size_inches()
    text = functools.partial(figure.text, color=charts.INK)
    top = H - _MARGIN
    if title:
        text(_MARGIN / W, top / H, title, va="top", fontsize=11)
        top -= _TITLE
    for row in range(num_rows):
        top -= caption_heights[row] + tile_height
        for i in range(row * columns, min((row + 1) * columns, len(tiles))):
            if tiles[i] is None:
                continue
            x = left + (i - row * columns) * (tile_width + _GAP)
            axes = figure.add_axes((x / W, top / H, tile_width / W, tile_height / H))
            _draw_tile(axes, tiles[i], tile_width)
            if captions[i]:
                axes.set_title(captions[i], fontsize=8, pad=3, color=charts.INK)
            if rings and i in rings:
                _draw_ring(axes, *rings[i])
        if row < len(row_labels):
            x, y = (left - _GAP) / W, (top + tile_height / 2) / H
            text(x, y, row_labels[row], ha="right", va="center", size=8)
        top -= _GAP
    return figure


def native_tile_width(image: np.ndarray) -> float:
    """Returns the tile width at which an image keeps its own pixels, in inches.

    Images of more than 1,600 pixels on the longer side are reduced to that; small ones
    are enlarged.

    Args:
      image: (height, width, channels).
    """
    height, width = image.shape[:2]
    scale = min(1, _MAX_IMAGE_PIXELS / max(height, width))
    # A narrow image at the minimum width would be taller than the limit.
    minimum = min(_MIN_IMAGE_WIDTH, _MAX_IMAGE_PIXELS / charts.DPI * width / height)
    return max(minimum, scale * width / charts.DPI)


def draw_heatmap(
    values: np.ndarray,
    *,
    title: str,
    x_label: str,
    y_label: str,
    colorbar_label: str,
    limits: tuple[Number, Number],
    ticks: tuple[tuple[Sequence[Number], Sequence[str]], ...] = (),
    origin: str = "lower",
) -> "Figure":
    """Draws a matrix as a heat map with a colour bar.

    Args:
      values: (rows, columns); NaN is left blank.
      title, x_label, y_label, colorbar_label: texts.
      limits: values at the two ends of the colour map.
      ticks: positions and labels of the x axis, then of the y axis; automatic if empty.
      origin: "lower" or "upper", where the first row is drawn.
    """
    rows, columns = values.shape
    longest = max(rows, columns)
    width, height = (
        max(_HEATMAP_SIZE, _MIN_CELL * longest) * count / longest
        for count in (columns, rows)
    )
    # The colour bar and the labels need the rest.
    size = 1.1 * max(2.6, width) + 1.3, max(2.0, height) + 1.0
    figure = _new_figure(*size, layout="compressed")
    with _style():
        axes = figure.add_subplot()
        image = axes.imshow(
            values,
            cmap=_colormap(),
            vmin=limits[0],
            vmax=limits[1],
            interpolation="nearest",
            origin=origin,
        )
        # The fraction is of the width and limits the height too: raise it where the
        # width is small.
        fraction = 0.05 * max(1, rows / columns)
        bar = figure.colorbar(image, ax=axes, shrink=0.85, fraction=fraction)
        bar.set_label(colorbar_label)
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
        figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def mosaic(grids: Float[np.ndarray, "y x Y X"]) -> Float[np.ndarray, "h w"]:
    """Returns grids (third and fourth axis) laid out in rows, separated by NaN."""
    y, x, Y, X = grids.shape
    padded = np.full((y, Y + 1, x, X + 1), np.nan, np.float32)
    padded[:, :Y, :, :X] = grids.transpose(0, 2, 1, 3)
    return padded.reshape(y * (Y + 1), x * (X + 1))[:-1, :-1]


def _new_figure(width: float, height: float, layout: str = "none") -> "Figure":
    """Returns an empty figure of a size in inches.

    Raises:
      UserError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            "figures are drawn by matplotlib, which is not installed: "
            "pip install -e '.[plots]' in the clone, or matplotlib itself"
        ) from error
    with _style():
        return Figure(figsize=(width, height), layout=layout, dpi=charts.DPI)


def _style():
    import matplotlib as mpl

    return mpl.rc_context(charts.STYLE)


def _draw_tile(axes, tile, width: float) -> None:
    if tile.ndim == 3:
        tile = _reduce_to_width(tile, round(width * charts.DPI))
    axes.imshow(tile, cmap=_colormap(), interpolation="nearest")
    axes.set_axis_off()


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


def _reduce_to_width(image, max_width: int) -> np.ndarray:
    """Returns an image with at most `max_width` columns of pixels."""
    height, width = image.shape[:2]
    if width <= max_width or image.dtype != np.uint8:
        return image
    size = max_width, max(1, round(height * max_width / width))
    return np.array(Image.fromarray(image).resize(size, Image.Resampling.LANCZOS))


def _colormap():
    """Returns the colour map, transparent for NaN."""
    import matplotlib as mpl

    return mpl.colormaps[_COLORMAP].with_extremes(bad=(0, 0, 0, 0))


def _title_width(title: str) -> float:
    """Returns the approximate width of a title in inches."""
    return 2 * _MARGIN + 0.085 * len(title)
