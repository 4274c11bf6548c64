"""Writes a report of runs: index.html, report.md and the plots of both."""

import base64
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Sequence

from etils import epath

from vit_jax.analysis import charts
from vit_jax.analysis.charts import Chart, Matrix
from vit_jax.errors import UserError
from vit_jax.files import replace_bytes, replace_text, writing_out
from vit_jax.tools.report import (
    paper_tables,
    results,
    run_charts,
    run_tables,
    study_blocks,
)
from vit_jax.tools.report.blocks import MEASURED, NONE, Block, Section, Table, Text
from vit_jax.tools.report.results import Run

TITLE = "vit_jax: runs beside the paper"
PLOTS = "plots"  # Subfolder of the pictures.


def write_report(
    paths: Sequence[str | os.PathLike], out: str | os.PathLike
) -> list[str]:
    """Writes index.html, report.md and plots/ (PNG, SVG and CSV).

    Args:
      paths: workdirs, and output folders of evaluate, transfer and study.
      out: folder of the report; its files are overwritten.

    Returns:
      The files, relative to `out`.

    Raises:
      UserError: a folder has none of the known files, matplotlib or Jinja2 is missing,
        or the report cannot be written.
    """
    runs = results.read_runs(paths)
    parts = sections(runs)
    out = epath.Path(out)
    with writing_out(out):
        (out / PLOTS).mkdir(parents=True, exist_ok=True)
    pictures = [b for s in parts for b in s.blocks if isinstance(b, Chart | Matrix)]
    drawn, files = {}, {}
    for picture in pictures:
        figure, data = charts.draw(picture), charts.to_csv(picture)
        text = charts.to_svg(figure)
        inline = charts.to_inline_svg(text, picture.name)
        drawn[picture.name] = {"svg": inline, "csv": data}  # For the HTML page.
        stem = f"{PLOTS}/{picture.name}"
        files[f"{stem}.svg"], files[f"{stem}.csv"] = text, data
        files[f"{stem}.png"] = charts.to_png(figure)
    names = ", ".join(run.name for run in runs)
    subtitle = (
        f"Made from {names}. Published numbers are from arXiv:2010.11929v2; measured "
        f"ones are shaded; {NONE} means no number."
    )
    files["report.md"] = _markdown(TITLE, subtitle, parts)
    files["index.html"] = (
        _environment()
        .get_template("page.html")
        .render(title=TITLE, subtitle=subtitle, sections=parts, drawn=drawn)
    )
    with writing_out(out):
        for name, content in files.items():
            write = replace_text if isinstance(content, str) else replace_bytes
            write(out / name, content)
    return sorted(files)


def sections(runs: Sequence[Run]) -> list[Section]:
    """Returns the sections of the report for which the runs have data.

    Names of pictures are distinct, also on case-insensitive file systems.
    """
    measured = results.collect(runs)
    figures = [
        chart
        for chart in run_charts.paper_figures(measured)
        if any(not series.hollow for series in chart.series)
    ]
    curves = *run_charts.training_curves(runs), *run_charts.inner_training_curves(runs)
    studies = [
        block for run in runs if run.study for block in study_blocks.study_blocks(run)
    ]
    papers = paper_tables.paper_tables(measured, runs)
    parts = [
        Section("All accuracies", run_tables.accuracies(measured)),
        Section("Training curves", curves),
        Section("Evaluations", run_tables.evaluations(runs)),
        Section("Transfer", run_tables.transfers(runs)),
        Section("Compute", run_tables.compute_blocks(runs)),
        Section("Studies", tuple(studies)),
        Section("Accuracy against compute and pretraining size", tuple(figures)),
        Section("Beside the paper's tables", tuple(map(_folded, papers))),
    ]
    missing = [part.title for part in parts if not part.blocks]
    parts = _with_distinct_names([part for part in parts if part.blocks])
    if missing:
        text = f"These runs have nothing for: {', '.join(missing)}."
        parts.append(Section("Not in this report", (Text(text),)))
    return parts


def _folded(table: Table) -> Table:
    """Folds a table of the paper without measured numbers."""
    measured = (
        text
        for i, row in enumerate(table.rows)
        for j, text in enumerate(row)
        if j >= table.labels and table.kind(i, j) == MEASURED
    )
    return dataclasses.replace(table, folded=all(text == NONE for text in measured))


def _with_distinct_names(parts: list[Section]) -> list[Section]:
    """Appends numbers to repeated names of pictures."""
    taken = set()

    def named(block):
        if not isinstance(block, Chart | Matrix):
            return block
        name, count = block.name, 1
        while name.lower() in taken:
            count += 1
            name = f"{block.name}_{count}"
        taken.add(name.lower())
        return dataclasses.replace(block, name=name)

    return [Section(part.title, tuple(map(named, part.blocks))) for part in parts]


@functools.cache
def _environment():
    try:
        import jinja2
        from markupsafe import Markup, escape
    except ImportError as error:
        raise UserError(
            "reports are rendered by Jinja2, which is not installed: "
            "pip install -e '.[plots]' in the clone, or jinja2 itself"
        ) from error

    def breakable(text: str) -> Markup:
        """Allows line breaks in long names, after / and _."""
        broken = str(escape(text)).replace("/", "/<wbr>").replace("_", "_<wbr>")
        return Markup(broken)

    def labelled(svg: str, label: str) -> Markup:
        tag = f'<svg role="img" aria-label="{escape(label)}"'
        return Markup(svg.replace("<svg", tag, 1))

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "base64": lambda text: base64.b64encode(text.encode()).decode(),
        "breakable": breakable,
        "column_looks": _column_looks,
        "labelled": labelled,
        "picture_groups": _picture_groups,
    }
    environment.tests["table"] = lambda block: isinstance(block, Table)
    return environment


def _picture_groups(blocks: Sequence[Block]) -> Iterator[tuple[bool, list[Block]]]:
    """Yields runs of blocks and whether they are pictures, which share rows."""
    for pictures, group in itertools.groupby(
        blocks, lambda block: isinstance(block, Chart | Matrix)
    ):
        yield pictures, list(group)


def _column_looks(table: Table) -> list[str]:
    """Returns a CSS class per column: labels, words or ("") numbers."""
    words = [
        any(row[i][:1].isalpha() for row in table.rows) for i in range(len(table.head))
    ]
    return [
        "label" if i < table.labels else "words" if word else ""
        for i, word in enumerate(words)
    ]


def _markdown(title: str, subtitle: str, parts: Sequence[Section]) -> str:
    lines = [f"# {title}", _escaped(subtitle)]
    for section in parts:
        lines.append(f"## {section.title}")
        for block in section.blocks:
            if isinstance(block, Text):
                lines.append(_escaped(block.text))
            elif isinstance(block, Table):
                lines.append(_markdown_table(block))
            elif isinstance(block, Chart | Matrix):
                stem = f"{PLOTS}/{block.name}"
                files = f"[SVG]({stem}.svg), [CSV]({stem}.csv)"
                note = f"{_escaped(block.note)} {files}".strip()
                lines.append(f"![{block.title}]({stem}.png)\n\n{note}")
    return "\n\n".join(lines) + "\n"


def _markdown_table(table: Table) -> str:
    rule = [":--" if i < table.labels else "--:" for i in range(len(table.head))]
    rows = [table.head, rule, *table.rows]
    lines = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    text = f"**{_escaped(table.title)}**\n\n" + "\n".join(lines)
    return f"{text}\n\n{_escaped(table.note)}" if table.note else text


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|") or " "


def _escaped(text: str) -> str:
    """Escapes the characters that Markdown reads as formatting."""
    for letter in "\\*_<`":
        text = text.replace(letter, f"\\{letter}")
    return text.replace("\n", " ")
