"""Runs of a study as rows: for people, for programs, and TensorBoard's hparams."""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence

import jax
from etils import epath

from vit_jax.report.events import Events
from vit_jax.report.tensorboard import summary
from vit_jax.report.writer import replace_text
from vit_jax.studies import disk

Row = Mapping[str, object]
_HPARAMS = "tensorboard"


def write(workdir: str | os.PathLike, name: str, rows: Sequence[Row]) -> None:
    """Writes rows to NAME.jsonl and NAME.csv, whole, in the first process.

    In the second, what lies deeper is a column of its own: "compute.exaflops".

    Raises:
      UserError: the workdir is gone, full or read-only.
    """
    if jax.process_index():
        return
    text = io.StringIO()
    flat = [_flatten(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(flat)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for suffix, content in (("jsonl", lines), ("csv", text.getvalue())):
        path = epath.Path(workdir) / f"{name}.{suffix}"
        with disk.writing(path):
            replace_text(path, content)


def show(rows: Sequence[Row], formats: Mapping[str, str]) -> str:
    """Lays rows out for a terminal.

    Args:
      rows: with a value, or none, for each column.
      formats: column to its format, as ".2%"; in the order of the columns.
    """
    cells = [list(formats)]
    for row in rows:
        values = [(row.get(name), how) for name, how in formats.items()]
        cells.append(["-" if v is None else format(v, how) for v, how in values])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def hparams(
    workdir: str | os.PathLike, name: str, settings: Row, scores: Mapping[str, float]
) -> None:
    """Shows a run in TensorBoard's hparams view of a study: tensorboard --logdir=DIR.

    What an earlier start wrote of it is replaced.

    Args:
      workdir: of the study.
      name: of the run.
      settings: what was varied; a run has them all, so that they are one table.
      scores: what came out.

    Raises:
      UserError: the workdir is gone, full or read-only.
    """
    if jax.process_index():
        return
    folder = epath.Path(workdir) / _HPARAMS / name
    with disk.writing(folder):
        folder.rmtree(missing_ok=True)
        events = Events(folder, 0)
        # The plugin's own order: the experiment, and the session's start and end.
        for part in summary.hparams(dict(settings), dict(scores)):
            events.add(0, part)
        for tag, value in scores.items():
            events.add(0, summary.scalar(tag, value))
        events.flush()
        events.close()


def _flatten(row: Row, prefix: str = "") -> dict[str, object]:
    flat = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
