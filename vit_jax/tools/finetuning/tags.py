"""Recognises several labels in one row of a table: tags, and columns of flags."""

import collections
import re
from collections.abc import Sequence

from vit_jax.config import fields
from vit_jax.data.sources import table
from vit_jax.data.tags import list_in

# A separator may also be part of a class name, as a comma often is. It separates labels
# if this fraction of the parts occurs in another cell too, alone or with other parts.
_ELSEWHERE = {"|": 0.5, ";": 0.5, ",": 0.95}
_DECIMAL = re.compile(r"\s*-?\d+,\d+\s*")
_KEY = "--config.data.multi_label"


def recognise(of: table.Table, columns: Sequence[str]) -> tuple[dict, str]:
    """Returns how the labels of a table are read.

    Args:
      of: training table.
      columns: `data.label_key`: one column, or one per class.

    Returns:
      Keys of `config.data`, and a few words for the log.
    """
    if len(columns) > 1:
        flags = ([table.flag(row.get(k)) for k in columns] for row in of.rows)
        if all(row.count(1) == 1 for row in flags):
            return {"multi_label": False}, ""
        return {"multi_label": True}, "several per row"
    return of_cells([row.get(columns[0]) for row in of.rows])


def of_cells(cells: Sequence) -> tuple[dict, str]:
    """Returns how the labels in the cells of a column are read, see `recognise`."""
    texts = {cell for cell in cells if isinstance(cell, str)}
    lists = [cell for cell in cells if isinstance(cell, list)]
    lists += [cell for cell in texts if list_in(cell) is not None]
    if lists:
        return {
            "multi_label": True
        }, f"lists of labels; {_KEY}=False reads each as a class"
    about = ""
    for separator in _ELSEWHERE:
        joined = [text for text in texts if separator in text]
        if not joined:
            continue
        shown = fields.shown(min(joined))
        if _are_tags(texts, separator):
            return {"multi_label": True, "label_separator": separator}, (
                f"several per row, separated by {separator!r}, such as {shown}; "
                f"{_KEY}=False reads each row as one class"
            )
        about = f"one per row, such as {shown}; {_KEY}=True separates them"
    return {"multi_label": False}, about


def _are_tags(texts: set[str], separator: str) -> bool:
    """Returns whether the parts of texts occur in other texts too."""
    if separator == "," and all(map(_DECIMAL.fullmatch, texts)):
        return False  # 3,5 is a number.
    divided = [{*_divided(text, separator)} for text in texts]
    counts = collections.Counter(part for parts in divided for part in parts)
    parts = [part for each in divided if len(each) > 1 for part in each]
    elsewhere = sum(counts[part] > 1 for part in parts)
    return elsewhere >= _ELSEWHERE[separator] * len(parts) > 0


def _divided(text: str, separator: str) -> list[str]:
    return list(filter(None, map(table.text_of, text.split(separator))))


def unused_separator(names: Sequence[str]) -> str:
    """Returns a separator that is in none of some names."""
    candidates = ("|", ";", "\t", " | ", " || ")
    return next(each for each in candidates if not any(each in name for name in names))
