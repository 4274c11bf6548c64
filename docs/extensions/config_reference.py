"""The reference of config keys, out of the fields of the config dataclasses."""

import dataclasses

from vit_jax.config import fields
from vit_jax.config.fields import Choice, Key, Named, Section


def markdown(cls: type) -> str:
    """Returns the reference as Markdown, with headings from the second level on.

    Args:
      cls: dataclass of the whole config.
    """
    own = fields.fields(cls)
    parts = ["## The run itself", _table(own)]
    for name, (field, about) in own.items():
        if isinstance(about, Named):
            parts += _choice(f"{name}.NAME", about.choice, about.help)
        elif isinstance(about, Choice):
            parts += _choice(name, about, "")
        elif isinstance(about, Section):
            parts += [f"## `{name}`", *_said(field.default_factory)]
            parts.append(_table(fields.fields(field.default_factory)))
    return "\n\n".join(filter(None, parts))


def _choice(name: str, about: Choice, said: str) -> list[str]:
    """Returns the keys that all types of a choice have, then those of each."""
    types = {kind: fields.fields(cls) for kind, cls in about.types.items()}
    shared = set.intersection(*map(set, types.values())) - {about.by}
    first = types[next(iter(types))]
    parts = [f"## `{name}`, by `{about.by}`", said]
    parts.append(_table({k: first[k] for k in first if k in shared}))
    for kind, cls in about.types.items():
        title = _doc(cls) if about.patterns else f'`{about.by}="{kind}"`'
        parts.append(f"### {title.rstrip('.')}")
        if not about.patterns:
            parts += _said(cls)
        rest = {
            k: v
            for k, v in types[kind].items()
            if k not in shared or v[0].default != first[k][0].default
        }
        rest.pop(about.by, None)
        parts.append(_table(rest))
    return parts


def _said(cls: type) -> list[str]:
    return [_doc(cls)]


def _doc(cls: type) -> str:
    return (cls.__doc__ or "").split("\n")[0]


def _table(known: dict[str, tuple[dataclasses.Field, Key]]) -> str:
    rows = [
        (f"`{name}`", f"`{field.default!r}`", _meaning(about))
        for name, (field, about) in known.items()
        if not isinstance(about, Section)
    ]
    if not rows:
        return ""
    lines = [("key", "default", "meaning"), ("---",) * 3, *rows]
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
