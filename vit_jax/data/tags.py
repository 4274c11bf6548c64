"""Several labels in one cell of a table: a list, its text, or names with separators."""

import ast
import contextlib
import json
import re

_BETWEEN = re.compile(r"[|;,]")


def labels_in(value: object, separator: str = "") -> list:
    """Returns the labels in a cell: a list, the text of a list, or names with separators.

    Args:
      value: content of the cell.
      separator: `data.label_separator`.
    """
    if isinstance(value, list):
        return value
    if not isinstance(value, str):
        return [value]
    if (found := list_in(value)) is not None:
        return found
    return value.split(separator) if separator else _BETWEEN.split(value)


def list_in(text: str) -> list | None:
    """Returns the list of a text such as '["a", "b"]' (JSON) or "['a']" (pandas)."""
    if not (text.startswith("[") and text.rstrip().endswith("]")):
        return None
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = read(text)
            if isinstance(found, list):
                return found
    return None
