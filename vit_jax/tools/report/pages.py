"""Writes a report about runs: index.html, report.md and the plots of both."""

import base64
import dataclasses
import os
from collections.abc import Sequence

from etils import epath

from vit_jax.analysis import charts
from vit_jax.analysis.charts import Chart, Matrix
from vit_jax.command_line.files import replace_bytes, replace_text, writing_out
from vit_jax.tools.report import (
    paper_tables,
    results,
    run_charts,
    run_tables,
    study_blocks,
    templates,
)
from vit_jax.tools.report.blocks import MEASURED, NONE, Section, Table, Text
from vit_jax.tools.report.results import Run

TITLE = "vit_jax: runs compared with the paper"
PLOTS = "plots"  # Subfolder of the pictures.


def write_report(
    paths: Sequence[str | os.PathLike], out: str | os.PathLike
) -> list[str]:
    """Writes index.html, report.md and plots/ (PNG, SVG and CSV).

    Args:
      paths: workdirs, and output folders of evaluate, transfer and study.
      out: folder of the report; existing files are overwritten.

    Returns:
      The names of the files, relative to `out`.

    Raises:
      UserError: a folder has none of the known files, matplotlib is missing, or the
        report cannot be written.
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
        csv = base64.b64encode(data.encode()).decode()
        drawn[picture.name] = {"svg": inline, "csv": csv}  # For the HTML page.
        stem = f"{PLOTS}/{picture.name}"
        files[f"{stem}.svg"], files[f"{stem}.csv"] = text, data
        files[f"{stem}.png"] = charts.to_png(figure)
    names = ", ".join(run.name for run in runs)
    subtitle = (
        f"Made from {names}. Published numbers are from arXiv:2010.11929v2; measured "
        f"numbers are shaded; {NONE} stands for a missing number."
    )
    content = {"title": TITLE, "subtitle": subtitle, "sections": parts}
    content |= {"drawn": drawn, "plots": PLOTS}
    for name, template in (("report.md", "page.md"), ("index.html", "page.html")):
        files[name] = templates.render(f"report/{template}", **content)
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
        Section("Comparison with the paper's tables", tuple(map(_folded, papers))),
    ]
    missing = [part.title for part in parts if not part.blocks]
    parts = _with_distinct_names([part for part in parts if part.blocks])
    if missing:
        text = f"These runs have no data for: {', '.join(missing)}."
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
