"""The reference of config keys, out of vit_jax/schema.py: its values and its comments.

The schema is read as text, because the meaning of a key is the comment beside or above
it. Nothing of the project is imported.
"""

import ast
import io
import tokenize
from typing import NamedTuple


class Key(NamedTuple):
    """One entry of a dict of the schema.

    Attributes:
      default: Python text of its value; "" where it holds keys.
      meaning: the comment beside it, after what stands above it.
      keys: what it holds, by name.
    """

    default: str
    meaning: str
    keys: dict


def read(source: str) -> dict[str, dict[str, Key]]:
    """Returns the dicts of a schema by their names: COMMON, EVALS, FORMS, CHOICES ...

    Args:
      source: text of schema.py.
    """
    found, comments = {}, _comments(source)
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign):
            (target,) = statement.targets
            # What stands above the name is about all of it.
            beside = {k: v for k, v in comments.items() if k >= statement.lineno}
            found[target.id] = _keys(statement.value, beside, found)
    return found


def markdown(source: str) -> str:
    """Returns the reference as Markdown, with headings from the second level on."""
    schema = read(source)
    parts = []
    for section, key in schema["COMMON"].items():
        title = f"`{section}`" if section else "The run itself"
        parts.append(_section(title, key))
    parts.append("## `evals.NAME`, by kind")
    for kind, key in schema["EVALS"].items():
        parts.append(_section(f'`kind="{kind}"`', key, level=3))
    parts.append("## `model`, by the form of its variant (FORMS)")
    for key in schema["FORMS"].values():  # What stands above each is its title.
        parts.append(_section(key.meaning, key._replace(meaning=""), level=3))
    parts.append("## Keys that exist under one choice alone")
    for choice, key in schema["CHOICES"].items():
        rows = [
            row for option, inner in key.keys.items() for row in _rows(inner, option)
        ]
        name = ".".join(filter(None, ast.literal_eval(choice)))
        if rows:
            parts += [f"### `{name}`", _table(("value", "key"), rows)]
        else:
            options = ", ".join(f"`{option}`" for option in key.keys)
            parts.append(f"### `{name}`\n\nOne of {options}. {key.meaning}".rstrip())
    return "\n\n".join(parts)


def _section(title: str, key: Key, level: int = 2) -> str:
    words = [f"{'#' * level} {title}"]
    if key.meaning:
        words.append(key.meaning)
    rows = [row[1:] for row in _rows(key, "")]
    words.append(_table(("key",), rows) if rows else "")
    return "\n\n".join(filter(None, words))


def _rows(key: Key, option: str) -> list[tuple[str, ...]]:
    """Returns option, key, default and meaning of each key; one row of none at all."""
    if not key.keys and not option:
        return []
    rows = [
        (f"`{option}`", f"`{name}`", f"`{inner.default}`", inner.meaning)
        for name, inner in key.keys.items()
    ]
    if rows and option and key.meaning:
        rows[0] = (f"`{option}`: {key.meaning}", *rows[0][1:])
    return rows


def _table(first: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head = (*first, "default", "meaning")
    lines = [head, ("---",) * len(head), *rows]
    # A bar would end a cell.
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
        for line in lines
    )


def _keys(node: ast.expr, comments: dict, found: dict) -> dict[str, Key]:
    """Returns the keys of a dict, of a union of dicts, or of one that has a name."""
    if isinstance(node, ast.BinOp):
        left, right = (_keys(n, comments, found) for n in (node.left, node.right))
        for name in left.keys() & right.keys():  # Another default, the same meaning.
            said = right[name].meaning or left[name].meaning
            right[name] = right[name]._replace(meaning=said)
        return left | right
    if isinstance(node, ast.Name):
        return found[node.id]
    if not isinstance(node, ast.Dict):
        return {}
    keys = {}
    for key, value in zip(node.keys, node.values, strict=True):
        name = key.value if isinstance(key, ast.Constant) else ast.unparse(key)
        # A comment beside several keys is the outermost one's.
        rest = {k: v for k, v in comments.items() if k > key.lineno}
        inner = _keys(value, rest, found)
        holds = isinstance(value, (ast.Dict, ast.BinOp, ast.Name))
        default = "" if holds else ast.unparse(value)
        line = key.lineno if holds else value.end_lineno
        keys[name] = Key(default, _meaning(key.lineno, line, comments), inner)
    return keys


def _meaning(first: int, last: int, comments: dict) -> str:
    """Joins the comments above a line, which stand alone, and that beside another."""
    words = []
    above = first - 1
    while above in comments and comments[above][1]:
        words.insert(0, comments[above][0])
        above -= 1
    if last in comments and not comments[last][1]:
        words.append(comments[last][0])
    return " ".join(words)


def _comments(source: str) -> dict[int, tuple[str, bool]]:
    """Returns line -> comment, and whether it stands there alone."""
    return {
        token.start[0]: (
            token.string.lstrip("# "),
            not token.line[: token.start[1]].strip(),
        )
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
