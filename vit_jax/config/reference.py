"""Lists the keys of a config with defaults and meanings, for --help and the docs."""

import textwrap
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from vit_jax.config import fields, loading
from vit_jax.config.fields import Choice, Key, Named, Section
from vit_jax.errors import UserError

_WIDTH, _INDENT = 88, 34  # Columns of a line, and the column where meanings begin.


class KeyGroup(NamedTuple):
    """Keys that are listed together.

    Attributes:
      section: dotted key of their section, with "NAME" for a name that the user
        chooses; "" for the config itself.
      choice: key that chooses the dataclass of the section; "" if it is not a choice.
      name: name or title of the dataclass that has these keys; "" if every dataclass of
        the choice has them.
      doc: meaning of the section, or of this choice.
      keys: name to default and meaning.
    """

    section: str
    choice: str
    name: str
    doc: str
    keys: dict[str, tuple[object, str]]


def groups(cls: type, section: str = "") -> Iterator[KeyGroup]:
    """Yields the keys of a config, or of the section with that dotted key."""
    yield KeyGroup(section, "", "", summary(cls) if section else "", _keys(cls))
    yield from _sections(cls, section)


def _sections(cls: type, where: str, without: Container = ()) -> Iterator[KeyGroup]:
    """Yields the keys of the sections of a dataclass."""
    for name, about in fields.fields(cls).items():
        if name in without:
            continue
        path = f"{where}.{name}".strip(".")
        if isinstance(about, Named):
            yield from _choice(f"{path}.NAME", about.choice, about.help)
        elif isinstance(about, Choice):
            if about.listed:
                yield from _choice(path, about, "")
        elif isinstance(about, Section):
            yield from groups(about.cls, path)


def _choice(path: str, about: Choice, doc: str) -> Iterator[KeyGroup]:
    """Yields the keys that all dataclasses of a choice have, then those of each."""
    types, by = list(about.types.values()), about.text_key
    shared = set.intersection(*({*fields.fields(cls)} for cls in types)) - {by}
    first = _keys(types[0])
    common = {name: one for name, one in first.items() if name in shared}
    yield KeyGroup(path, by, "", doc, common)
    yield from _sections(types[0], path)
    for name, cls in about.types.items():
        keys = {
            key: (default, meaning)
            for key, (default, meaning) in _keys(cls).items()
            if key != by and (key not in shared or default != first[key][0])
        }
        # The docstring explains more than a pattern.
        title, doc = (summary(cls), "") if about.patterns else (name, summary(cls))
        yield KeyGroup(path, by, title, doc, keys)
        yield from _sections(cls, path, without=fields.fields(types[0]))


def summary(cls: type) -> str:
    """Returns the first line of the docstring of a class; "" without one."""
    return (cls.__doc__ or "").split("\n")[0]


def _keys(cls: type) -> dict[str, tuple[object, str]]:
    defaults = fields.defaults(cls)
    return {
        name: (defaults[name], _meaning(about))
        for name, about in fields.fields(cls).items()
        if not isinstance(about, Section)
    }


def _meaning(about: Key) -> str:
    """Returns the help of a key, the only choices under which it is read, and its reason."""
    only = [
        f"Only with `{other}={' or '.join(values)}`."
        for other, values in (about.only_if or {}).items()
    ]
    reason = [f"For: {about.reason}."] if about.reason else []
    return " ".join([about.help, *only, *reason])


RUN = "run"  # Name of the keys that stand in no section.


def sections(cls: type) -> list[str]:
    """Returns the names of the sections of a config, and RUN."""
    about = fields.fields(cls).items()
    return [RUN, *(name for name, each in about if isinstance(each, Section))]


def text(cls: type, section: str = "") -> str:
    """Returns the keys of a config, or of a section, as lines of text, for --help.

    Raises:
      UserError: the config has no such section.
    """
    if section and section not in sections(cls):
        raise UserError(
            f"--help={section}: not a section of the config; choose all or one of "
            f"{', '.join(sections(cls))}"
        )
    lines = ["config keys with their defaults, each a flag as --config.seed=1:"]
    for group in groups(cls):
        if section and section != (group.section.partition(".")[0] or RUN):
            continue
        title = group.section
        if group.name:
            title += f", {group.choice}={group.name}"
        elif group.choice:
            title += f", by {group.section}.{group.choice}"
        heading = ": ".join(filter(None, (title, group.doc)))
        lines += ["", *textwrap.wrap(heading, _WIDTH)]
        lines += _lines(group.section, group.keys)
    return "\n".join(lines) + "\n"


def text_of(cls: type, recipe: str) -> str:
    """Returns the keys that a recipe sets as lines of text, for --help.

    Raises:
      UserError: the recipe cannot be read.
    """
    raw = loading.read(cls, recipe)
    config = loading.complete(cls, raw)
    lines = [f"keys that {recipe} sets:", ""]
    for path, about, value in fields.walk(config):
        if _is_set(raw, path):
            *section, name = path
            lines += _lines(".".join(section), {name: (value, _meaning(about))})
    return "\n".join(lines) + "\n"


def _is_set(raw: object, path: Sequence[str]) -> bool:
    for name in path:
        if not isinstance(raw, Mapping):
            return True  # A text was given for the section.
        if name not in raw:
            return False
        raw = raw[name]
    return True


def _lines(section: str, keys: Mapping[str, tuple[object, str]]) -> Iterator[str]:
    for name, (default, meaning) in keys.items():
        head = f"  {section}.{name}={default!r}".replace("  .", "  ")
        indent = " " * _INDENT
        lines = textwrap.wrap(
            meaning, _WIDTH, initial_indent=indent, subsequent_indent=indent
        )
        if len(head) < _INDENT - 1 and lines:
            head = f"{head:{_INDENT}}{lines.pop(0).strip()}"
        yield from (head, *lines)
