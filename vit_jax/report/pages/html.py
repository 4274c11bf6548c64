"""A report as one HTML page that needs nothing else: no script, no other file."""

import base64
from collections.abc import Mapping, Sequence
from html import escape

from vit_jax.report.pages.blocks import (
    PLAIN,
    Block,
    Chart,
    Matrix,
    Section,
    Table,
    Text,
)

_STYLE = """
:root { --paper: #ffffff; --ink: #1b1b1b; --grid: #d0d0d0; --soft: #5c5c5c;
  --ours: #e8f1f8; --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b5568f;
  --c4: #2f8fc9; --c5: #b97f00; --c6: #7f7f7f; --c7: #8c564b; }
@media (prefers-color-scheme: dark) { :root { color-scheme: dark;
  --paper: #16181b; --ink: #e6e6e6; --grid: #44484d; --soft: #a8adb3;
  --ours: #1d2f3d; --c0: #5aaee8; --c1: #ff8a4c; --c2: #3cc79b; --c3: #e29ac6;
  --c4: #9ad4f5; --c5: #f0b840; --c6: #a9a9a9; --c7: #c9988e; } }
* { box-sizing: border-box; }
body { background: var(--paper); color: var(--ink); margin: 0 auto; padding: 1rem;
  max-width: 84rem; font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.25rem;
  margin-top: 2.2rem; border-bottom: 1px solid var(--grid); }
p { max-width: 48rem; } .note, figcaption, nav, footer { color: var(--soft);
  font-size: .85rem; }
a { color: var(--c0); } nav a { margin-right: 1rem; white-space: nowrap; }
.scroll { overflow-x: auto; margin: 0 0 .3rem; }
table { border-collapse: collapse; font-size: .85rem;
  font-variant-numeric: tabular-nums; overflow-wrap: normal; }
h3 { font-size: .95rem; margin: 1.6rem 0 .4rem; }
th, td { padding: .2rem .55rem; border-bottom: 1px solid var(--grid);
  text-align: right; }
td { white-space: nowrap; }
.words { text-align: left; } td.words { white-space: normal; min-width: 5.5rem; }
thead th { vertical-align: bottom; font-weight: 600; max-width: 11rem; }
tbody th { font-weight: 400; } th.label { text-align: left; min-width: 5.5rem; }
th.label:first-child { position: sticky; left: 0; background: var(--paper); }
tr th.label.ours, tr th.label.difference { background: var(--ours); }
.ours { background: var(--ours); font-weight: 600; }
.difference { background: var(--ours); font-style: italic; }
.plots { display: grid; gap: 1rem 1.5rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); }
figure { margin: .8rem 0; } figure svg { width: 100%; height: auto; display: block; }
@page { size: landscape; margin: 1.2cm; }
@media print { :root { color-scheme: light;
  --paper: #ffffff; --ink: #000000; --grid: #c4c4c4; --soft: #444444;
  --ours: #eef3f7; --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b5568f;
  --c4: #2f8fc9; --c5: #b97f00; --c6: #7f7f7f; --c7: #8c564b; }
  body { font-size: 9pt; max-width: none; padding: 0; }
  table { font-size: 7.5pt; } td, th { padding: .1rem .3rem; }
  nav, .files { display: none; } .scroll { overflow: visible; }
  figure, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
  .plots { grid-template-columns: 1fr 1fr; } }
"""


def page(
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    drawn: Mapping[str, tuple[str, str]],
) -> str:
    """Returns the page.

    Args:
      title: of the report.
      subtitle: a paragraph below it.
      sections: in their order.
      drawn: name of a picture to its SVG element and its CSV.
    """
    numbered = list(enumerate(sections))
    links = "".join(f'<a href="#s{i}">{escape(s.title)}</a>' for i, s in numbered)
    parts = [
        f'<section id="s{i}">\n<h2>{escape(s.title)}</h2>\n{_blocks(s.blocks, drawn)}'
        "</section>\n"
        for i, s in numbered
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(subtitle)}</p>\n<nav>{links}</nav>\n"
        f"{''.join(parts)}</body>\n</html>\n"
    )


def _blocks(blocks: Sequence[Block], drawn) -> str:
    parts, plots = [], []
    for block in (*blocks, None):
        if isinstance(block, Chart | Matrix):
            plots.append(_figure(block, *drawn[block.name]))
            continue
        if plots:  # Neighbours share rows where there is room.
            parts.append(f'<div class="plots">\n{"".join(plots)}</div>\n')
            plots = []
        if isinstance(block, Text):
            parts.append(f"<p>{escape(block.text)}</p>\n")
        elif isinstance(block, Table):
            parts.append(_table(block))
    return "".join(parts)


def _figure(picture: Chart | Matrix, svg: str, csv: str) -> str:
    label = escape(picture.title, quote=True)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    data = base64.b64encode(csv.encode()).decode()
    link = (
        f'<a class="files" download="{escape(picture.name, quote=True)}.csv" '
        f'href="data:text/csv;base64,{data}">CSV</a>'
    )
    note = f"{escape(picture.note)} " if picture.note else ""
    return f"<figure>\n{svg}\n<figcaption>{note}{link}</figcaption>\n</figure>\n"


def _table(table: Table) -> str:
    columns = range(len(table.head))
    words = [any(_is_word(row[i]) for row in table.rows) for i in columns]
    looks = [
        ("label" if i < table.labels else "words" if words[i] else "") for i in columns
    ]
    kinds = table.kinds or (PLAIN,) * len(columns)
    head = "".join(
        _cell("th", name, f"{look} {kind}", "col")
        for name, look, kind in zip(table.head, looks, kinds, strict=True)
    )
    body = "".join(_row(table, i, looks) for i in range(len(table.rows)))
    note = f'<p class="note">{escape(table.note)}</p>\n' if table.note else ""
    title = escape(table.title)
    return (
        f"<h3>{title}</h3>\n"
        f'<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(table.title, quote=True)}">\n<table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n</div>\n"
        f"{note}"
    )


def _row(table: Table, number: int, looks: Sequence[str]) -> str:
    cells = []
    for i, (text, look) in enumerate(zip(table.rows[number], looks, strict=True)):
        kind = f"{look} {table.kind(number, i)}"
        label = i < table.labels
        cells.append(_cell("th" if label else "td", text, kind, "row" if label else ""))
    return f"<tr>{''.join(cells)}</tr>\n"


def _is_word(text: str) -> bool:
    """Tells words from numbers, with or without a deviation or a sign."""
    return text[:1].isalpha()


def _cell(tag: str, text: str, look: str, scope: str = "") -> str:
    look = f' class="{look.strip()}"' if look.strip() else ""
    scope = f' scope="{scope}"' if scope else ""
    text = escape(text)
    for end in "/_" if tag == "th" else "":  # Where a long name may be broken.
        text = text.replace(end, f"{end}<wbr>")
    return f"<{tag}{look}{scope}>{text}</{tag}>"
