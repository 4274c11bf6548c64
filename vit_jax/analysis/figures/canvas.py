"""Figures in the style of our reports, on files in three forms."""

import dataclasses
import io
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from etils import epath

from vit_jax.analysis import charts
from vit_jax.errors import UserError
from vit_jax.report.writer import replace_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours of a dark screen in place of paper's.
_DARK = {charts.PAPER: "#14171a", charts.INK: "#e9e7e2", charts.GRID: "#41464c"}


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure and what it shows.

    Attributes:
      stem: of its files; a folder may come before it.
      figure: as drawn.
      data: arrays.
    """

    stem: str
    figure: "Figure"
    data: Mapping[str, np.ndarray]


def save(picture: Picture, out: pathlib.Path) -> list[str]:
    """Writes a picture as PNG, SVG and npz below a folder, each whole or not at all.

    Returns:
      Their names.

    Raises:
      UserError: they cannot be written.
    """
    drawn, arrays = picture.figure, io.BytesIO()
    np.savez_compressed(arrays, **picture.data)
    contents = {
        f"{picture.stem}.png": charts.to_png(drawn),
        f"{picture.stem}.svg": for_dark(charts.to_svg(drawn)).encode(),
        f"{picture.stem}.npz": arrays.getvalue(),
    }
    for name, content in contents.items():
        path = epath.Path(out / name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_bytes(path, content)
        except OSError as error:
            raise UserError(
                f"--out={out}: {path} cannot be written ({error.strerror or error}): "
                "choose another folder"
            ) from error
    return list(contents)


def for_dark(svg: str) -> str:
    """Lets an SVG turn its paper dark on dark screens; in print it stays white.

    Colours stay as they are in the elements, for programs that know no style sheets.
    """
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    )
    rules = f"@media screen and (prefers-color-scheme:dark){{{rules}}}"
    return svg.replace("</style>", f"{rules}</style>", 1)


def figure(width: float, height: float, layout: str = "none") -> "Figure":
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
    with style():
        return Figure(figsize=(width, height), layout=layout, dpi=charts.DPI)


def style():
    """Applies our style within a `with` block."""
    import matplotlib as mpl

    return mpl.rc_context(charts.STYLE)
