"""Results of `python -m vit_jax.evaluate`: a table, JSON and confusion matrices."""

import io
import json
import os

import numpy as np
from etils import epath

from vit_jax.evaluators import classification
from vit_jax.evaluators.fewshot import fewer_images, is_beside
from vit_jax.evaluators.protocol import Confusion, is_fraction
from vit_jax.files import replace_bytes, replace_text, writing_out
from vit_jax.printing import printable

FILE = "evaluate.json"


def prepare(folder: str | os.PathLike) -> None:
    """Creates the folder and writes to it, before any evaluation runs.

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
    """Writes the report, and each confusion matrix as a picture and as numbers.

    Args:
      folder: created if it is missing.
      report: content of evaluate.json.
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
            classification.draw_confusion(table).save(stream, "PNG")
            replace_bytes(folder / picture, stream.getvalue())
            replace_text(folder / numbers, classification.confusion_to_csv(table))
            written += [picture, numbers]
        replace_text(folder / FILE, json.dumps(report, indent=2) + "\n")
    return [FILE, *written]


def table(results: dict, tables: dict[str, Confusion]) -> str:
    """Returns evaluations as a table for a terminal, one metric per line.

    Args:
      results: evaluation to set of parameters to metrics.
      tables: evaluation to its confusion matrix; its least accurate classes are shown.
    """
    lines = []
    for name, kinds in results.items():
        for metrics in kinds.values():
            for metric, value in metrics.items():
                if is_beside(metric):
                    continue
                line = f"{name:<16} {metric:<16} {text(metric, value):>12}"
                lines.append(line + fewer_images(metric, metrics))
        if name in tables:
            lines += [f"{name:<16} {line}" for line in _worst(tables[name])]
    return "\n".join(lines)


def text(metric: str, value: int | float) -> str:  # noqa: PYI041 (beartype knows)
    """Returns a metric as a count, a percentage or a number."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2%}" if is_fraction(metric) else f"{value:.6g}"


def _worst(table: Confusion, most: int = 3) -> list[str]:
    accuracies = table.accuracies
    there = np.flatnonzero(~np.isnan(accuracies))
    order = there[np.argsort(accuracies[there], kind="stable")][:most].tolist()
    return [
        f"least accurate   {accuracies[i]:>12.2%} {printable(table.name(i))}"
        for i in order
    ]
