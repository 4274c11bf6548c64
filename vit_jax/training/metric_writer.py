"""Writes metrics to disk: `metrics.jsonl`, `metrics.csv`, TensorBoard events."""

import contextlib
import csv
import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from vit_jax.command_line.files import replace_text
from vit_jax.training.trackers.tracker import Arrays, MetricWriter

# If PyTorch is installed, tensorboardX imports it to recognise its tensors, which adds
# 1.2 to 2.5 s to every start. PyTorch is not needed here, so it is hidden during the
# import.
_hide_torch = "torch" not in sys.modules
if _hide_torch:
    sys.modules["torch"] = None  # An import fails as if PyTorch were not installed.
try:
    from tensorboardX import event_file_writer, summary
    from tensorboardX.proto import event_pb2, summary_pb2
finally:
    if _hide_torch:
        del sys.modules["torch"]


class Events:
    """Appends to a new TensorBoard event file in a folder, in the calling thread.

    tensorboardX's writer has a thread that dies on a full disk; after ten more
    events its caller waits forever. Here the caller gets the error.

    Args:
      folder: folder of the event file.
      purge: first step that TensorBoard ignores in earlier files of the folder.
    """

    def __init__(self, folder: epath.Path, purge: int):
        if "://" not in str(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._file = event_file_writer.EventsWriter(str(folder / "events"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(event_pb2.Event(step=purge, session_log=start))

    def add(self, step: int, summary: summary_pb2.Summary) -> None:
        """Writes a number, image or text, as converted by `tensorboardX.summary`."""
        self._write(event_pb2.Event(step=step, summary=summary))

    def flush(self) -> None:
        """Writes buffered events."""
        self._file.flush()

    def close(self) -> None:
        """Closes the file; events that cannot be written are lost."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _write(self, event: event_pb2.Event) -> None:
        event.wall_time = time.time()
        self._file.write_event(event)


class WorkdirWriter(MetricWriter):
    """Writes the metrics of one run; a no-op in all processes but the first.

    A full disk does not end the run: an error is printed, and missing metrics are
    written as soon as the disk can be written again.

    Args:
      workdir: folder of the run. Lines of an earlier start are kept up to `step`; later
        lines are dropped, because their steps are taken again.
      step: number of steps taken when this start begins.
      active: whether this process writes.

    Attributes:
      lines: lines written so far, dicts of "step" and the metrics by name.
    """

    def __init__(self, workdir: str | os.PathLike, step: int, *, active: bool = True):
        self.lines: list[dict] = []
        self._folder = epath.Path(workdir)
        # Scores before the first step are written again, too.
        self._active, self._purge = active, step + 1 if step else 0
        self._events = None
        self._unwritten = []  # Pairs of step and summary for TensorBoard.
        self._columns = {"step": None}  # Columns of the table in order.
        self._complete = set()  # Names of files that lack at most the last line.
        path = self._folder / "metrics.jsonl"
        if step and path.exists():
            lines = map(_parse, path.read_bytes().splitlines())
            self.lines = [line for line in lines if line and line["step"] <= step]
        if active:
            self._try(lambda: self._folder.mkdir(parents=True, exist_ok=True))
            self._write_files()

    def has(self, step: int, part: str) -> bool:
        """Returns whether a metric with `part` in its name is written for a step."""
        return any(
            line["step"] == step and any(part in name for name in line)
            for line in self.lines
        )

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        if self._active:
            self.lines.append({"step": step, **scalars})
            self._write_files()
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
        if self._active:
            self._unwritten += [(step, each) for each in summaries]
            self._try(self._write_events)

    def _try(self, write: Callable, *args) -> None:
        try:
            write(*args)
        except OSError as error:
            print(
                f"error: {self._folder}: metrics are not written "
                f"({error.strerror or error}); training continues, and the metrics are "
                "written as soon as the disk can be written again",
                file=sys.stderr,
                flush=True,
            )

    def _write_files(self) -> None:
        columns = len(self._columns)
        for line in self.lines[-1:] if self._complete else self.lines:
            self._columns |= dict.fromkeys(line)
        if len(self._columns) > columns:
            self._complete.discard("metrics.csv")
        self._try(self._write_lines, "metrics.jsonl", _as_json)
        self._try(self._write_lines, "metrics.csv", self._as_csv)

    def _write_lines(self, name: str, as_text: Callable[[list, bool], str]) -> None:
        """Appends the last line to a file, or writes all lines."""
        path, append = self._folder / name, name in self._complete
        self._complete.discard(name)
        # Lines cannot be appended to objects in a bucket, or after a partial line.
        if append and "://" not in str(path):
            with path.open("a") as file:
                file.write(as_text(self.lines[-1:], True))
        else:
            replace_text(path, as_text(self.lines, False))
        self._complete.add(name)

    def _as_csv(self, lines: list[dict], append: bool) -> str:
        text = io.StringIO()
        table = csv.DictWriter(text, self._columns, restval="", lineterminator="\n")
        if not append:
            table.writeheader()
        table.writerows(lines)
        return text.getvalue()

    def _write_events(self) -> None:
        try:
            if self._events is None:
                self._events = Events(self._folder / "tensorboard", self._purge)
            for step, each in self._unwritten:
                self._events.add(step, each)
            self._events.flush()
            self._unwritten = []
        except OSError:
            # The file may end in a partial event, so later events need a new file.
            self.close()
            raise


def _as_json(lines: list[dict], append: bool) -> str:
    del append
    return "".join(json.dumps(line) + "\n" for line in lines)


def _parse(line: bytes) -> dict | None:
    """Parses a line; returns None for a partial line of a killed process."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and "step" in values else None
