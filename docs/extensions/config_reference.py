"""The reference of config keys, data sets and transforms, made from the code."""

from collections.abc import Iterable, Sequence

from vit_jax.config import fields
from vit_jax.config.fields import Choice, Key, Named, Section
from vit_jax.data.sources import tfds
from vit_jax.data.sources.base import SOURCES
from vit_jax.data.transforms import parse


def markdown(cls: type) -> str:
    """Returns the reference as Markdown, with headings from the second level on.

    Args:
      cls: dataclass of the whole config.
    """
    parts = ["## The run itself", _table(cls), *_sections(cls, "")]
    return "\n\n".join(filter(None, [*parts, *_sources(), *_transforms()]))


def _sources() -> list[str]:
    kinds = {f"`{name}`": kind for name, kind in sorted(SOURCES.items())}
    kinds["any other name"] = tfds.TYPE
    rows = [
        (name, "yes" if kind.needs_files else "no", kind.help)
        for name, kind in kinds.items()
    ]
    heading = ("name", "needs files", "what it reads")
    return ["## Data sets, by `data.name`", _rows(heading, rows)]


def _transforms() -> list[str]:
    rows = []
    for name, cls in parse.all_transforms().items():
        where = "device" if cls.runs_on == "device" else "loader"
        where += ", also for evaluation" if getattr(cls, "in_eval", False) else ""
        rows.append((f"`{parse.usage(name, cls)}`", _doc(cls), where))
    return [
        "## Transforms, in `data.train_transform` and `data.eval_transform`",
        "A line of them is read from left to right: `inception_crop | flip`.",
        _rows(("transform", "what it does", "where it runs"), rows),
    ]


def _sections(cls: type, where: str) -> list[str]:
    """Returns the reference of all sections inside one."""
    parts = []
    for name, about in fields.fields(cls).items():
        path = f"{where}{name}"
        if isinstance(about, Named):
            parts += _choice(f"{path}.NAME", about.choice, about.help)
        elif isinstance(about, Choice):
            parts += _choice(path, about, "")
        elif isinstance(about, Section):
            parts += [f"## `{path}`", _doc(about.cls), _table(about.cls)]
            parts += _sections(about.cls, f"{path}.")
    return parts


def _choice(path: str, about: Choice, help: str) -> list[str]:
    """Returns the keys that all dataclasses of a choice have, then those of each."""
    types = list(about.types.values())
    shared = set.intersection(*({*fields.fields(cls)} for cls in types)) - {
        about.text_key
    }
    first = fields.defaults(types[0])
    parts = [f"## `{path}`, by `{about.text_key}`", help]
    parts += [_table(types[0], shared), *_sections(types[0], f"{path}.")]
    for name, cls in about.types.items():
        title = _doc(cls) if about.patterns else f'`{about.text_key}="{name}"`'
        parts.append(f"### {title.rstrip('.')}")
        if not about.patterns:
            parts.append(_doc(cls))
        own = {
            key: default
            for key, default in fields.defaults(cls).items()
            if key not in shared or default != first[key]
        }
        parts.append(_table(cls, own.keys() - {about.text_key}))
    return parts


def _doc(cls: type) -> str:
    return (cls.__doc__ or "").split("\n")[0]


def _table(cls: type, keys: Iterable[str] | None = None) -> str:
    """Returns a table of the keys of a dataclass; all if none are given."""
    rows = [
        (f"`{name}`", f"`{fields.defaults(cls)[name]!r}`", _meaning(about))
        for name, about in fields.fields(cls).items()
        if not isinstance(about, Section) and (keys is None or name in keys)
    ]
    return _rows(("key", "default", "meaning"), rows) if rows else ""


def _rows(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ("---",) * len(heading), *rows]
    # A bar would end a cell.
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
        for line in lines
    )


def _meaning(about: Key) -> str:
    """Returns the help of a key, and under which choice alone it is read."""
    only = [
        f"{other}={' or '.join(values)}"
        for other, values in (about.only_if or {}).items()
    ]
    return " ".join([about.help, *(f"Only with `{words}`." for words in only)])
