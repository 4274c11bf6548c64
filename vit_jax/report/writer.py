"""Metrics to disk: `metrics.jsonl` for programs, TensorBoard events for people."""

import json
import os

import numpy as np
import tensorboardX
from etils import epath


class MetricWriter:
    """Writes the metrics of one run; a no-op in all processes but the first.

    Args:
      workdir: folder of the run. What an earlier start wrote stays up to `step`; later
        lines, of steps that are now taken again, go.
      step: steps taken when this start begins.
      active: whether this process writes.
    """

    def __init__(self, workdir: str | os.PathLike, step: int, *, active: bool = True):
        self._lines = []
        self._path = epath.Path(workdir) / "metrics.jsonl"
        self._events = None
        if step and self._path.exists():
            lines = map(_parse, self._path.read_bytes().splitlines())
            self._lines = [line for line in lines if line and line["step"] <= step]
        if not active:
            return
        epath.Path(workdir).mkdir(parents=True, exist_ok=True)
        self._rewrite()
        self._events = tensorboardX.SummaryWriter(
            str(epath.Path(workdir) / "tensorboard"),
            purge_step=step + 1,
        )

    def has(self, step: int, part: str) -> bool:
        """Tells whether a metric with `part` in its name is written for a step."""
        return any(
            line["step"] == step and any(part in name for name in line)
            for line in self._lines
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Writes numbers, named "part/metric", after `step` steps."""
        if self._events is None:
            return
        self._lines.append({"step": step, **values})
        if "://" in str(self._path):
            self._rewrite()  # Objects in a bucket cannot grow.
        else:
            with self._path.open("a") as file:
                file.write(json.dumps(self._lines[-1]) + "\n")
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def text(self, name: str, text: str) -> None:
        """Shows a text in TensorBoard."""
        if self._events is not None:
            self._events.add_text(name, f"<pre>{text}</pre>", 0)

    def images(self, name: str, images: np.ndarray, step: int) -> None:
        """Shows up to 16 images, uint8 (B, Y, X, C), in TensorBoard."""
        if self._events is not None:
            shown = images[:16].repeat(3 // images.shape[-1], axis=-1)
            self._events.add_images(name, shown, step, dataformats="NHWC")

    def close(self) -> None:
        """Writes what is buffered."""
        if self._events is not None:
            self._events.close()

    def _rewrite(self) -> None:
        text = "".join(json.dumps(line) + "\n" for line in self._lines)
        replace_text(self._path, text)


def replace_text(path: epath.Path, text: str) -> None:
    """Writes a file so that it is the old one or the new one, never half of it."""
    new = path.parent / f".{path.name}.new"
    new.write_text(text)
    new.replace(path)


def _parse(line: bytes) -> dict | None:
    """Reads a line; a killed process may have left half of one."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and "step" in values else None
