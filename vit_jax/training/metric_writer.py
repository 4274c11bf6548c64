"""Metrics to disk: `metrics.jsonl`, `metrics.csv` for tables, TensorBoard events."""

import contextlib
import csv
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from etils import epath

from vit_jax.files import replace_text
from vit_jax.training.trackers.tracker import Arrays, MetricWriter

# Where PyTorch is installed tensorboardX imports it, to recognise its tensors, which
# adds 1.2 to 2.5 s to every start. No tensor comes from here, so it is hidden meanwhile.
_hide_torch = "torch" not in sys.modules
if _hide_torch:
    sys.modules["torch"] = None  # To import it now fails as if it were not installed.
try:
    from tensorboardX import event_file_writer, summary
    from tensorboardX.proto import event_pb2, summary_pb2
finally:
    if _hide_torch:
        del sys.modules["torch"]


class Events:
    """Appends to a new TensorBoard event file in a folder, at once.

    tensorboardX's own writer has a thread, which dies on a full disk; after ten more
    events its caller waits for ever. Here the caller gets the error.

    Args:
      folder: made if it is missing.
      purge: TensorBoard forgets what earlier files hold from this step on.

    Raises:
      OSError: here and in `add`: it cannot be written.
    """

    def __init__(self, folder: epath.Path, purge: int):
        if "://" not in str(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._file = event_file_writer.EventsWriter(str(folder / "events"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(event_pb2.Event(step=purge, session_log=start))

    def add(self, step: int, summary: summary_pb2.Summary) -> None:
        """Writes what `tensorboardX.summary` makes of a number, an image or a text."""
        self._write(event_pb2.Event(step=step, summary=summary))

    def flush(self) -> None:
        """Sees to it that all is on the disk."""
        self._file.flush()

    def close(self) -> None:
        """Ends the file; what could not be written is lost."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, event: event_pb2.Event) -> None:
        event.wall_time = time.time()
        self._file.write_event(event)


class WorkdirWriter(MetricWriter):
    """Writes the metrics of one run; a no-op in all processes but the first.

    A full disk does not end the run: an error is printed, and what is missing is written
    as soon as that works again.

    Args:
      workdir: folder of the run. What an earlier start wrote stays up to `step`; later
        lines, of steps that are now taken again, go.
      step: steps taken when this start begins.
      active: whether this process writes.

    Attributes:
      lines: what is written so far: "step", and the metrics by name.
    """

    def __init__(self, workdir: str | os.PathLike, step: int, *, active: bool = True):
        self.lines: list[dict] = []
        self._path = epath.Path(workdir) / "metrics.jsonl"
        self._table = epath.Path(workdir) / "metrics.csv"
        self._active, self._purge = active, step + 1
        self._events = None
        self._unseen = []  # Step and summary of what TensorBoard's file lacks.
        self._columns = {"step": None}  # Of the table, in their order.
        # Whether the file of lines, and the table, lack nothing but the last.
        self._whole = self._whole_table = False
        if step and self._path.exists():
            lines = map(_parse, self._path.read_bytes().splitlines())
            self.lines = [line for line in lines if line and line["step"] <= step]
        if active:
            self._try(lambda: self._path.parent.mkdir(parents=True, exist_ok=True))
            self._try(self._write_lines)
            self._try(self._write_table)

    def has(self, step: int, part: str) -> bool:
        """Returns whether a metric with `part` in its name is written for a step."""
        return any(
            line["step"] == step and any(part in name for name in line)
            for line in self.lines
        )

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        if not self._active:
            return
        self.lines.append({"step": step, **scalars})
        self._try(self._write_lines)
        self._try(self._write_table)
        self._show(step, [summary.scalar(name, x) for name, x in scalars.items()])

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        shown = {name: f"<pre>{text}</pre>" for name, text in texts.items()}
        self._show(step, [summary.text(name, text) for name, text in shown.items()])

    def write_images(self, step: int, images: Arrays) -> None:
        for name, shown in images.items():
            shown = shown.reshape(-1, *shown.shape[-3:])
            shown = shown.repeat(3 // shown.shape[-1], axis=-1)
            self._show(step, [summary.image(name, shown, dataformats="NHWC")])

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    def _show(self, step: int, summaries: list) -> None:
        """Writes summaries for TensorBoard."""
        if self._active:
            self._unseen += [(step, each) for each in summaries]
            self._try(self._write_events)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            print(
                f"error: {self._path.parent}: metrics are not written "
                f"({error.strerror or error}); training continues, and they are written "
                "as soon as that works again",
                file=sys.stderr,
                flush=True,
            )

    def _write_lines(self) -> None:
        whole, self._whole = self._whole, False
        # Objects in a bucket cannot grow, and a line may have failed halfway.
        if not whole or "://" in str(self._path):
            text = "".join(json.dumps(line) + "\n" for line in self.lines)
            replace_text(self._path, text)
        else:
            with self._path.open("a") as file:
                file.write(json.dumps(self.lines[-1]) + "\n")
        self._whole = True

    def _write_table(self) -> None:
        whole, self._whole_table = self._whole_table, False
        known = len(self._columns)
        for line in self.lines[-1:] if whole else self.lines:
            self._columns |= dict.fromkeys(line)
        whole = whole and len(self._columns) == known and "://" not in str(self._table)
        text = io.StringIO()
        rows = csv.DictWriter(text, self._columns, restval="", lineterminator="\n")
        if whole:
            rows.writerow(self.lines[-1])
            with self._table.open("a") as file:
                file.write(text.getvalue())
        else:
            rows.writeheader()
            rows.writerows(self.lines)
            replace_text(self._table, text.getvalue())
        self._whole_table = True

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


class MultiWriter(MetricWriter):
    """Hands everything that a run writes to several writers."""

    def __init__(self, writers: Iterable[MetricWriter]):
        self._writers = tuple(writers)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        for each in self._writers:
            each.write_scalars(step, scalars)

    def write_images(self, step: int, images: Arrays) -> None:
        for each in self._writers:
            each.write_images(step, images)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        for each in self._writers:
            each.write_texts(step, texts)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        for each in self._writers:
            each.write_hparams(hparams)

    def flush(self) -> None:
        for each in self._writers:
            each.flush()

    def close(self) -> None:
        for each in self._writers:
            each.close()


def _parse(line: bytes) -> dict | None:
    """Reads a line; a killed process may have left half of one."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and "step" in values else None
