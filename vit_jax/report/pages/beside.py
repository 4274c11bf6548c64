"""Columns of ours beside the columns of a published table."""

from collections.abc import Callable, Mapping, Sequence

from vit_jax.report.pages.blocks import (
    DIFFERENCE,
    NONE,
    OURS,
    PLAIN,
    Number,
    Table,
    number,
    signed,
    with_spread,
)
from vit_jax.report.pages.pretrained import Model

Row = tuple[str, ...]  # The words that name it.
# Mean and standard deviation; the mean of a published number may be words.
Value = tuple[Number | str, Number | None]


def by_column(
    title: str,
    labels: tuple[str, ...],
    rows: Sequence[Row],
    papers: Mapping[str, Mapping[Row, Value | None]],
    ours: Mapping[Model, Mapping[Row, Value]],
    match: Callable[[str, Model], bool],
    *,
    decimals: int = 2,
    amounts: Sequence[Row] = (),
    note: str = "",
) -> Table:
    """Lays a table out: each published column, and behind it ours and the difference.

    Args:
      title: of the table.
      labels: heads of the columns that name the rows.
      rows: what is scored.
      papers: published columns.
      ours: our columns. One that matches no published column comes last, without a
        difference; if there is none, a column of ours is there and empty.
      match: whether a published column is of the same model and pretraining.
      decimals: of percentages.
      amounts: rows that hold no percentages.
      note: below the table.
    """
    head, kinds, columns = list(labels), [PLAIN] * len(labels), []

    def add(name, kind, cells):
        head.append(name)
        kinds.append(kind)
        columns.append(cells)

    def cells(values):
        return [_cell(values.get(row), row in amounts, decimals) for row in rows]

    def differences(own, paper):
        return [
            _difference(own.get(row), paper.get(row), row in amounts, decimals)
            for row in rows
        ]

    left = dict(ours)
    for column, paper in papers.items():
        add(column, PLAIN, cells(paper))
        for model in [model for model in left if match(column, model)]:
            own = left.pop(model)
            add(f"ours: {model.label}", OURS, cells(own))
            add(f"difference from {column}", DIFFERENCE, differences(own, paper))
    for model, own in left.items():
        add(f"ours: {model.label}", OURS, cells(own))
    if not ours:
        add("ours", OURS, cells({}))
        add("difference", DIFFERENCE, cells({}))
    body = tuple((*row, *found) for row, *found in zip(rows, *columns, strict=True))
    return Table(title, tuple(head), body, tuple(kinds), labels=len(labels), note=note)


def _cell(value: Value | None, amount: bool, decimals: int) -> str:
    if value is None:
        return NONE
    mean, spread = value
    if isinstance(mean, str):
        return mean
    return number(mean) if amount else with_spread(mean, spread, decimals)


def _difference(
    own: Value | None, paper: Value | None, amount: bool, decimals: int
) -> str:
    if own is None or paper is None or isinstance(paper[0], str):
        return NONE
    return signed(own[0] - paper[0], 0 if amount else decimals)
