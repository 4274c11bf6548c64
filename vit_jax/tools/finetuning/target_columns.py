"""Finds the columns of a table with the numbers to predict."""

import contextlib
import math
from collections.abc import Sequence

from vit_jax.data.fields.target import number
from vit_jax.data.sources.table import Table
from vit_jax.errors import UserError


def detect(of: Table, labels: str, others: Sequence[str]) -> str:
    """Returns the column whose numbers are to be predicted; "" for a table of classes.

    It is the column of labels if its numbers are mostly different. Without a column of
    labels it is the only other column, if its numbers are mostly different or not whole.

    Args:
      of: table of the training images.
      labels: column with a usual name of labels; "" without such a column.
      others: columns that are neither paths nor splits, groups or masks.

    Raises:
      UserError: the only column has whole numbers that recur, which may be classes; or
        several columns have numbers, and none has labels; or cells among numbers are
        none.
    """
    if labels:
        return labels if are_different(numbers_of(of, labels)) else ""
    for name in others:
        _check_cells(of, name)
    known = {name: numbers for name in others if (numbers := numbers_of(of, name))}
    if len(others) > 1 and known:
        raise UserError(
            f"{of.path} has the columns {', '.join(others)}: give the numbers to predict "
            f"with --target, such as --target={next(iter(known))}, or the classes with "
            "--config.data.label_key"
        )
    if not known:
        return ""
    ((name, numbers),) = known.items()
    if are_different(numbers) or not all(one.is_integer() for one in numbers):
        return name
    raise UserError(
        f"column {name!r} of {of.path} has {len({*numbers}):,} different whole numbers in "
        f"{len(numbers):,} rows: give --target={name} to predict numbers, or "
        f"--config.data.label_key={name} if they are classes"
    )


def _check_cells(of: Table, column: str) -> None:
    """Raises UserError for a cell that is not a number, if most cells are numbers."""
    bad, count = "", 0
    for row, cells in enumerate(of.rows, 1):
        cell = cells.get(column)
        try:
            number(cell, column)
        except UserError as error:
            bad = bad or f"{of.path} row {row} {error}"
            cell = cell.replace(",", ".") if isinstance(cell, str) else ""
        with contextlib.suppress(TypeError, ValueError):
            count += bool(float(cell) < math.inf)
    if bad and 2 * count > len(of.rows):
        raise UserError(f"{bad}; or give --config.data.label_key for classes")


def numbers_of(of: Table, column: str) -> list[float]:
    """Returns the numbers of a column without missing ones; [] if it has other cells."""
    try:
        values = [number(row.get(column), column) for row in of.rows]
    except UserError:
        return []
    return [value for value in values if not math.isnan(value)]


def are_different(numbers: Sequence[float]) -> bool:
    """Returns whether numbers are mostly different, and so measurements, not classes.

    Class numbers may all be different in a small table: 0, 1, 2, ... or 1, 2, 3, ...
    """
    different = sorted({*numbers})
    count = len(different)
    in_order = different in ([*range(count)], [*range(1, count + 1)])
    return 2 * count > len(numbers) and not in_order
