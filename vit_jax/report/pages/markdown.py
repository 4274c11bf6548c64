"""A report as Markdown, with its pictures in files beside it."""

from collections.abc import Sequence

from vit_jax.report.pages.blocks import Chart, Matrix, Section, Table, Text


def page(title: str, subtitle: str, sections: Sequence[Section], plots: str) -> str:
    """Returns the page.

    Args:
      title: of the report.
      subtitle: a paragraph below it.
      sections: in their order.
      plots: folder of the pictures, relative to the page.
    """
    parts = [f"# {title}", _escaped(subtitle)]
    for section in sections:
        parts.append(f"## {section.title}")
        for block in section.blocks:
            if isinstance(block, Text):
                parts.append(_escaped(block.text))
            elif isinstance(block, Table):
                parts.append(_table(block))
            elif isinstance(block, Chart | Matrix):
                stem = f"{plots}/{block.name}"
                files = f"[SVG]({stem}.svg), [CSV]({stem}.csv)"
                note = f"{_escaped(block.note)} {files}".strip()
                parts.append(f"![{block.title}]({stem}.png)\n\n{note}")
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    rule = [":--" if i < table.labels else "--:" for i in range(len(table.head))]
    rows = [table.head, rule, *table.rows]
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    text = f"**{_escaped(table.title)}**\n\n" + "\n".join(lines)
    return f"{text}\n\n{_escaped(table.note)}" if table.note else text


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|") or " "


def _escaped(text: str) -> str:
    """Keeps names with * or _ as they are."""
    for letter in "\\*_<`":
        text = text.replace(letter, f"\\{letter}")
    return text.replace("\n", " ")
