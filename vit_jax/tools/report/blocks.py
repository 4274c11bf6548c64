"""Sections, tables and text of a report, independent of HTML and Markdown."""

import dataclasses
import functools
import re

from vit_jax.analysis.charts import Chart, Matrix, Number

NONE = "-"  # A missing number.
# Kinds of numbers: published, measured, and measured minus published.
PLAIN, MEASURED, DIFFERENCE = "", "measured", "difference"


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
      rows: rows with one string per column; NONE for a missing number.
      kinds: kinds of the columns, PLAIN, MEASURED or DIFFERENCE; all PLAIN if empty.
      row_kinds: kinds of the rows; all PLAIN if empty.
      labels: number of leading columns that identify a row.
      folded: whether a page shows only the title until the reader opens it.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...] = ()
    row_kinds: tuple[str, ...] = ()
    labels: int = 1
    note: str = ""
    folded: bool = False

    def kind(self, row: int, column: int) -> str:
        """Returns the kind of a cell."""
        kind = self.row_kinds[row] if self.row_kinds else PLAIN
        return kind or (self.kinds[column] if self.kinds else PLAIN)

    @functools.cached_property
    def _column_looks(self) -> list[str]:
        cells = zip(*self.rows, strict=True) if self.rows else [()] * len(self.head)
        words = (any(text[:1].isalpha() for text in column) for column in cells)
        looks = ["words" if word else "" for word in words]
        return ["label"] * self.labels + looks[self.labels :]

    def looks(self, row: int | None, column: int) -> str:
        """Returns the CSS classes of a cell, or of a column's heading if `row` is None."""
        if row is None:
            kind = self.kinds[column] if self.kinds else PLAIN
        else:
            kind = self.kind(row, column)
        return f"{self._column_looks[column]} {kind}".strip()


Block = Text | Table | Chart | Matrix


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a report with a heading."""

    title: str
    blocks: tuple[Block, ...]


def percent(value: Number | None, decimals: int = 2) -> str:
    """Formats a percentage, without the percent sign."""
    return NONE if value is None else f"{value:.{decimals}f}"


def signed(value: Number | None, decimals: int = 2) -> str:
    """Formats a difference in percentage points, with a plus or minus sign."""
    if value is None:
        return NONE
    return f"{value:+.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def with_spread(value: Number | None, spread: Number | None, decimals: int = 2) -> str:
    """Formats a mean, with its standard deviation if it is known."""
    text = percent(value, decimals)
    if value is None or spread is None:
        return text
    return f"{text} ± {spread:.{decimals}f}"


def number(value: Number | None) -> str:
    """Formats a number with three significant digits, large numbers in full."""
    if value is None:
        return NONE
    if value == 0 or 1e-4 <= abs(value) < 1e3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.2e}"


def stem(*words: str) -> str:
    """Returns the file name of a picture; `pages.sections` makes equal names distinct."""
    return re.sub(r"\W", "_", "_".join(words))
