"""From folders of runs to a report."""

import dataclasses
import os
from collections.abc import Sequence

from etils import epath

from vit_jax.report.pages import (
    curves,
    details,
    draw,
    figures,
    html,
    markdown,
    results,
    runs,
    spent,
    study,
    tables,
)
from vit_jax.report.pages.blocks import Chart, Matrix, Section, Text
from vit_jax.report.writer import replace_bytes, replace_text, writing_out

TITLE = "vit_jax: runs beside the paper"
PLOTS = "plots"  # Folder of the pictures, in that of the report.


def make(paths: Sequence[str | os.PathLike], out: str | os.PathLike) -> list[str]:
    """Writes index.html, report.md and plots/ (PNG, SVG and CSV).

    Args:
      paths: of workdirs, and of folders that evaluations, transfers and studies wrote.
      out: folder of the report; what is in the way is written anew.

    Returns:
      The files, relative to `out`.

    Raises:
      UserError: a folder holds nothing that is known, matplotlib is missing, or the
        report cannot be written.
    """
    read = runs.read(paths)
    parts = sections(read)
    out = epath.Path(out)
    with writing_out(out):
        (out / PLOTS).mkdir(parents=True, exist_ok=True)
    pictures = [b for s in parts for b in s.blocks if isinstance(b, Chart | Matrix)]
    drawn, files = {}, {}
    for picture in pictures:
        figure, data = draw.figure(picture), draw.table(picture)
        text = draw.svg(figure)
        drawn[picture.name] = draw.inline(text, picture.name), data
        stem = f"{PLOTS}/{picture.name}"
        files[f"{stem}.svg"], files[f"{stem}.csv"] = text, data
        files[f"{stem}.png"] = draw.png(figure)
    names = ", ".join(run.name for run in read)
    subtitle = (
        f"Made from {names}. The published numbers are those of arXiv:2010.11929v2; "
        f"{details.NONE} stands where there is no number. What is ours is shaded."
    )
    files["report.md"] = markdown.page(TITLE, subtitle, parts, PLOTS)
    files["index.html"] = html.page(TITLE, subtitle, parts, drawn)
    with writing_out(out):
        _write(out, files)
    return sorted(files)


def sections(read: Sequence[runs.Run]) -> list[Section]:
    """Returns the parts of the report that these runs give something for.

    No two pictures have one name, whether or not a disk tells capitals apart.
    """
    found = results.collect(read)
    paper = tables.make(found, read)
    charts = [
        chart
        for chart in figures.charts(found)
        if any(not series.hollow for series in chart.series)
    ]
    studies = [
        block for r in read if r.study for block in study.blocks(r.name, r.study)
    ]
    parts = [
        Section("Beside the paper's tables", paper),
        Section("All accuracies", details.accuracies(found)),
        Section("Compute", spent.blocks(read)),
        Section("Training curves", (*curves.charts(read), *curves.inner_charts(read))),
        Section("Accuracy against compute and pretraining size", tuple(charts)),
        Section("Scaling study", tuple(studies)),
        Section("Transfer", details.transfers(read)),
        Section("Evaluations", details.evaluations(read)),
    ]
    missing = [part.title for part in parts if not part.blocks]
    parts = _apart([part for part in parts if part.blocks])
    if missing:
        text = f"These runs hold nothing for: {', '.join(missing)}."
        parts.append(Section("Not in this report", (Text(text),)))
    return parts


def _apart(parts: list[Section]) -> list[Section]:
    """Numbers the pictures whose names an earlier one has."""
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


def _write(out: epath.Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        if isinstance(content, str):
            replace_text(out / name, content)
        else:
            replace_bytes(out / name, content)
