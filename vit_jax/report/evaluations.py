"""What evaluations gave: `evaluate.json`, a table, and confusion matrices."""

import io
import json
import os
import re

import numpy as np
from etils import epath

from vit_jax.printing import printable
from vit_jax.report import confusion as confusions
from vit_jax.report import result
from vit_jax.report.confusion import Confusion
from vit_jax.report.writer import replace_bytes, replace_text, writing_out

FILE = "evaluate.json"
# Metrics that are fractions; further strengths and deviations of few shots too.
_FRACTION = re.compile(r"\d+shot.*|(.*_)?top[15](_overlap)?|ece|class_mean")


def prepare(folder: str | os.PathLike) -> None:
    """Makes the folder and tries it, so that no evaluation is done in vain.

    Raises:
      UserError: it cannot be written.
    """
    trial = epath.Path(folder) / f".{FILE}.new"
    with writing_out(folder):
        trial.parent.mkdir(parents=True, exist_ok=True)
        trial.write_text("")
        trial.unlink()


def write(
    folder: str | os.PathLike, report: dict, tables: dict[str, Confusion]
) -> list[str]:
    """Writes the report, and of each confusion matrix a picture and the numbers.

    Args:
      folder: made if it is missing.
      report: what evaluate.json holds.
      tables: evaluation to its confusion matrix.

    Returns:
      The names of the files.

    Raises:
      UserError: the folder cannot be written.
    """
    folder, written = epath.Path(folder), []
    with writing_out(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            picture, numbers = f"{name}_confusion.png", f"{name}_confusion.csv"
            stream = io.BytesIO()
            confusions.draw(table).save(stream, "PNG")
            replace_bytes(folder / picture, stream.getvalue())
            replace_text(folder / numbers, confusions.to_csv(table))
            written += [picture, numbers]
        replace_text(folder / FILE, json.dumps(report, indent=2) + "\n")
    return [FILE, *written]


def table(results: dict, tables: dict[str, Confusion]) -> str:
    """Lays evaluations out for a terminal, a metric a line.

    Args:
      results: evaluation to set of parameters to metrics.
      tables: evaluation to its confusion matrix, of which the least accurate classes
        are shown.
    """
    lines = []
    for name, kinds in results.items():
        for metrics in kinds.values():
            for metric, value in metrics.items():
                if metric.endswith("shot_short"):  # Stands beside the accuracies.
                    continue
                line = f"{name:<16} {metric:<16} {text(metric, value):>12}"
                lines.append(line + result.fewer_images(metric, metrics))
        if name in tables:
            lines += [f"{name:<16} {line}" for line in _worst(tables[name])]
    return "\n".join(lines)


def text(metric: str, value: int | float) -> str:  # noqa: PYI041 (beartype knows)
    """Returns a metric as people read it: a count, a percentage or a number."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2%}" if _FRACTION.fullmatch(metric) else f"{value:.6g}"


def _worst(table: Confusion, most: int = 3) -> list[str]:
    accuracies = table.accuracies
    there = np.flatnonzero(~np.isnan(accuracies))
    order = there[np.argsort(accuracies[there], kind="stable")][:most].tolist()
    return [
        f"least accurate   {accuracies[i]:>12.2%} {printable(table.name(i))}"
        for i in order
    ]
