"""Metrics to disk: `metrics.jsonl` for programs, TensorBoard events for people."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator

import numpy as np
from etils import epath

from vit_jax.errors import UserError
from vit_jax.report.events import Events
from vit_jax.report.tensorboard import summary


class MetricWriter:
    """Writes the metrics of one run; a no-op in all processes but the first.

    A disk that is full or gone does not end the run: it is said aloud, and what is
    missing is written as soon as that works again. Use as a context manager.

    Args:
      workdir: folder of the run. What an earlier start wrote stays up to `step`; later
        lines, of steps that are now taken again, go.
      step: steps taken when this start begins.
      active: whether this process writes.
    """

    def __init__(self, workdir: str | os.PathLike, step: int, *, active: bool = True):
        self._lines = []
        self._path = epath.Path(workdir) / "metrics.jsonl"
        self._active, self._purge = active, step + 1
        self._events = None
        self._unseen = []  # Step and summary of what TensorBoard's file lacks.
        self._whole = False  # Whether the file of lines lacks nothing but the last.
        if step and self._path.exists():
            lines = map(_parse, self._path.read_bytes().splitlines())
            self._lines = [line for line in lines if line and line["step"] <= step]
        if active:
            self._try(lambda: self._path.parent.mkdir(parents=True, exist_ok=True))
            self._try(self._write_lines)

    def has(self, step: int, part: str) -> bool:
        """Tells whether a metric with `part` in its name is written for a step."""
        return any(
            line["step"] == step and any(part in name for name in line)
            for line in self._lines
        )

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Writes numbers, named "part/metric", after `step` steps."""
        if not self._active:
            return
        self._lines.append({"step": step, **values})
        self._unseen += [
            (step, summary.scalar(name, value)) for name, value in values.items()
        ]
        self._try(self._write_lines)
        self._try(self._write_events)

    def text(self, name: str, text: str) -> None:
        """Shows a text in TensorBoard."""
        if self._active:
            self._unseen.append((0, summary.text(name, f"<pre>{text}</pre>")))
            self._try(self._write_events)

    def images(self, name: str, images: np.ndarray, step: int) -> None:
        """Shows up to 16 images, uint8 (B, Y, X, C), in TensorBoard."""
        if self._active:
            shown = images[:16].repeat(3 // images.shape[-1], axis=-1)
            image = summary.image(name, shown, dataformats="NHWC")
            self._unseen.append((step, image))
            self._try(self._write_events)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Writes what is buffered."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            print(
                f"error: {self._path.parent}: metrics are not written "
                f"({error.strerror or error}); training goes on, and they are written "
                "as soon as that works again",
                file=sys.stderr,
                flush=True,
            )

    def _write_lines(self) -> None:
        whole, self._whole = self._whole, False
        # Objects in a bucket cannot grow, and a line may have failed halfway.
        if not whole or "://" in str(self._path):
            text = "".join(json.dumps(line) + "\n" for line in self._lines)
            replace_text(self._path, text)
        else:
            with self._path.open("a") as file:
                file.write(json.dumps(self._lines[-1]) + "\n")
        self._whole = True

    def _write_events(self) -> None:
        try:
            if self._events is None:
                self._events = Events(self._path.parent / "tensorboard", self._purge)
            for step, what in self._unseen:
                self._events.add(step, what)
            self._events.flush()
            self._unseen = []
        except OSError:
            # The file may end in half an event: what follows needs another.
            self.close()
            raise


@contextlib.contextmanager
def writing_out(folder: str | os.PathLike) -> Iterator[None]:
    """Turns a failure to write what --out asks for into one line.

    Raises:
      UserError: the line.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--out={folder} cannot be written ({error.strerror or error}): choose "
            "another folder"
        ) from error


def replace_text(path: epath.Path, text: str) -> None:
    """Writes a file so that it is the old one or the new one, never half of it."""
    replace_bytes(path, text.encode())


def replace_bytes(path: epath.Path, content: bytes) -> None:
    """Does as `replace_text`."""
    new = path.parent / f".{path.name}.new"
    try:
        new.write_bytes(content)
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def _parse(line: bytes) -> dict | None:
    """Reads a line; a killed process may have left half of one."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and "step" in values else None
