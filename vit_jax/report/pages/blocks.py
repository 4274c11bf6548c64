"""What a report is made of, before it is HTML or Markdown."""

import dataclasses
import re

NONE = "-"  # There is no such number; nothing is ever made up for it.
# Whose a number is: the paper's, ours, or how far ours is from the paper's.
PLAIN, OURS, DIFFERENCE = "", "ours", "difference"

Number = float | int


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of words and numbers.

    Attributes:
      title: above it.
      head: names of the columns; the first `labels` of them name rows.
      rows: one string a column; NONE where there is nothing.
      kinds: of the columns, PLAIN, OURS or DIFFERENCE; all PLAIN if empty.
      row_kinds: of the rows, in the same way.
      labels: columns that name a row.
      note: below it.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...] = ()
    row_kinds: tuple[str, ...] = ()
    labels: int = 1
    note: str = ""

    def kind(self, row: int, column: int) -> str:
        """Returns whose number stands in a cell."""
        of_row = self.row_kinds[row] if self.row_kinds else PLAIN
        return of_row or (self.kinds[column] if self.kinds else PLAIN)


@dataclasses.dataclass(frozen=True)
class Series:
    """Points that belong together.

    Attributes:
      label: in the legend.
      x, y: of the points.
      colour: number in the palette.
      marker: number in the list of markers.
      line: whether the points are joined.
      hollow: whether the markers are outlines, as those of the paper's numbers are.
      marked: whether there are markers at all.
      dashes: number in the list of line styles.
      spread: standard deviation of each y, None where it is unknown; or nothing.
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
    """Points over two axes.

    Attributes:
      name: stem of its files.
      title: above it.
      x_label, y_label: of the axes, with units.
      series: what is drawn.
      log_x: whether the x axis is logarithmic.
      ticks: places of the marks on the x axis; as it fits if empty.
      note: below it.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    ticks: tuple[Number, ...] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A picture of a confusion matrix.

    Attributes:
      name: stem of its files.
      title: above it.
      classes: names, in the order of rows (true) and columns (predicted).
      counts: examples, a row a true class.
      note: below it.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    counts: tuple[tuple[Number, ...], ...]
    note: str = ""


Block = Text | Table | Chart | Matrix


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a report under a heading."""

    title: str
    blocks: tuple[Block, ...]


def percent(value: Number | None, decimals: int = 2) -> str:
    """Writes a percentage without its sign."""
    return NONE if value is None else f"{value:.{decimals}f}"


def signed(value: Number | None, decimals: int = 2) -> str:
    """Writes a difference in percentage points, with + or a minus sign."""
    if value is None:
        return NONE
    text = f"{value:+.{decimals}f}"
    return text.replace("-", "\N{MINUS SIGN}")


def with_spread(value: Number | None, spread: Number | None, decimals: int = 2) -> str:
    """Writes a mean, and its standard deviation if there is one."""
    text = percent(value, decimals)
    if value is None or spread is None:
        return text
    return f"{text} ± {spread:.{decimals}f}"


def number(value: Number | None) -> str:
    """Writes any number with three digits that count, large ones in full."""
    if value is None:
        return NONE
    if value == 0 or 1e-4 <= abs(value) < 1e3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.2e}"


def stem(*words: str) -> str:
    """Returns the name of a picture; `make.sections` keeps equal ones apart."""
    return re.sub(r"\W", "_", "_".join(words))
