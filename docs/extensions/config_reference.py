"""The reference of config keys, data sets and transforms, made from the code."""

from collections.abc import Sequence

from vit_jax.config import reference
from vit_jax.config.reference import KeyGroup
from vit_jax.data.sources import SOURCES, tfds
from vit_jax.data.transforms import KNOWN, parse


def markdown(cls: type) -> str:
    """Returns the reference as Markdown, with headings from the second level on.

    Args:
      cls: dataclass of the whole config.
    """
    parts = [part for group in reference.groups(cls) for part in _section(group)]
    return "\n\n".join(filter(None, [*parts, *_sources(), *_transforms()]))


def _sources() -> list[str]:
    kinds = {f"`{name}`": kind for name, kind in sorted(SOURCES.items())}
    kinds["any other name"] = tfds.TFDS
    rows = [
        (name, "yes" if kind.needs_files else "no", kind.help)
        for name, kind in kinds.items()
    ]
    heading = ("name", "needs files", "what it reads")
    return ["## Data sets, by `data.name`", _rows(heading, rows)]


def _transforms() -> list[str]:
    rows = []
    for name, cls in KNOWN.items():
        where = "device" if cls.runs_on == "device" else "loader"
        where += ", also for evaluation" if getattr(cls, "in_eval", False) else ""
        rows.append((f"`{parse.usage(name, cls)}`", reference.summary(cls), where))
    return [
        "## Transforms, in `data.train_transform` and `data.eval_transform`",
        "A line of them is read from left to right: `random_resized_crop | flip`.",
        _rows(("transform", "what it does", "where it runs"), rows),
    ]


def _section(group: KeyGroup) -> list[str]:
    """Returns heading, meaning and table of a group of keys."""
    if not group.section:
        parts = ["## The run itself"]
    elif not group.choice:
        parts = [f"## `{group.section}`", group.doc]
    elif not group.name:
        parts = [f"## `{group.section}`, by `{group.choice}`", group.doc]
    elif group.doc:
        parts = [f'### `{group.choice}="{group.name}"`', group.doc]
    else:
        parts = [f"### {group.name.rstrip('.')}"]
    rows = [
        (f"`{name}`", f"`{default!r}`", meaning)
        for name, (default, meaning) in group.keys.items()
    ]
    return parts + ([_rows(("key", "default", "meaning"), rows)] if rows else [])


def _rows(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ("---",) * len(heading), *rows]
    # A bar would end a cell.
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
        for line in lines
    )
