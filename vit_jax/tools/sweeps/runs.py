"""Training runs of a sweep, each trained once, and the files that a sweep writes."""

import contextlib
import csv
import io
import json
import math
import os
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax
from etils import epath

from vit_jax.command_line.files import read_json, replace_text
from vit_jax.command_line.printing import print_line
from vit_jax.config import fields, loading
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import Diverged, UserError
from vit_jax.training import loop, resume_check, run_report
from vit_jax.training.config import TrainConfig
from vit_jax.training.metric_writer import Events, summary
from vit_jax.training.sweep import SweepSetups
from vit_jax.weights import checkpoint_folders

_COMMAND, DIVERGED = "command.json", "diverged.json"
_HPARAMS = "tensorboard"
_CONFIDENCE = 0.95
Row = Mapping[str, object]


def train(
    config: TrainConfig, folder: str | os.PathLike, shared: SweepSetups, *, keep: bool
) -> dict:
    """Trains in a folder, resumes, or returns the report of a finished run.

    The runs of a sweep share compiled steps and evaluations. `keep` is whether to keep
    the last checkpoint of the finished run.

    Returns:
      The run's report; {"diverged": message} if values became non-finite.

    Raises:
      UserError: the run is invalid (see `loop.train`), or the folder cannot be written.
      Preempted: the run was preempted (see `loop.train`).
    """
    done = _outcome(folder)
    if not done:
        try:
            done = loop.train(config, folder, setup=shared.build(config, folder))
        except Diverged as error:
            done = {"diverged": str(error)}
            write_json(folder, DIVERGED, done, "only this run")
    if not keep:
        drop_checkpoints(folder)
    return done


def drop_checkpoints(folder: str | os.PathLike) -> None:
    """Deletes the checkpoints of a finished run, in process 0.

    Raises:
      UserError: the checkpoints cannot be deleted.
    """
    if jax.process_index() == 0:
        checkpoints = checkpoint_folders.absolute(folder) / checkpoint_folders.FOLDER
        with _writing(checkpoints):
            checkpoints.rmtree(missing_ok=True)


def recorded(workdir: str | os.PathLike) -> dict:
    """Returns the command that `check_command` recorded, or {}."""
    path = epath.Path(workdir) / _COMMAND
    return read_json(path) if path.exists() else {}


def has_begun(*folders: str | os.PathLike) -> bool:
    """Returns whether any of the folders has a run that took a step, or diverged."""
    return any(
        checkpoint_folders.has_checkpoint(folder)
        or run_report.read_report(folder) is not None
        or (epath.Path(folder) / DIVERGED).exists()
        for folder in folders
    )


def check_command(
    workdir: str | os.PathLike,
    command: dict,
    *,
    begun: bool,
    grows: str = "",
    free: Collection[str] = (),
) -> None:
    """Records the command of a sweep; rejects another command in the same workdir.

    Args:
      workdir: folder of the sweep.
      command: JSON value with everything that determines the results.
      begun: whether the recorded command left results; if not, it is replaced.
      grows: key of a dict in the command whose keys may differ between starts; the
        union over all starts is recorded.
      free: config keys that may differ, because they do not change results.

    Raises:
      UserError: the recorded command differs; the message lists the differences.
    """
    path = epath.Path(workdir) / _COMMAND
    if begun and (before := recorded(workdir)):
        if grows:
            earlier = before.get(grows, {})
            before[grows] = command[grows] | earlier
            command = command | {grows: earlier | command[grows]}
        changed = [
            line
            for line in fields.differences(before, command)
            if line.partition(": ")[0].removeprefix("config.") not in free
            and not loading.is_former(line)
        ]
        if changed:
            moved = ""
            if any(line.startswith("--data_dir:") for line in changed):
                moved = f"; if the same data was moved, set its new path in {path}"
            raise UserError(
                f"{workdir} holds a study with another command "
                f"({'; '.join(changed[:4])}): choose another --workdir, or repeat that "
                f"command{moved}"
            )
        if not grows:
            return
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(workdir, _COMMAND, command)


def say(text: str) -> None:
    """Prints lines, in process 0."""
    if text and jax.process_index() == 0:
        for line in text.split("\n"):
            print_line(line)


def decisive(config: TrainConfig) -> dict[str, str]:
    """Returns the config keys that determine the result of a run, with their values."""
    return {name: str(value) for name, value in resume_check.decisive(config).items()}


def _outcome(folder: str | os.PathLike) -> dict | None:
    """Returns the outcome of a finished run, or None; the same in all processes."""
    diverged = epath.Path(folder) / DIVERGED
    outcome = run_report.read_report(folder)
    if not outcome and diverged.exists():
        outcome = read_json(diverged)
    seen = meshes.process_allgather(done=bool(outcome))["done"]
    if seen.any() != seen.all():
        raise UserError(
            f"{folder} is not the same on all hosts: --workdir must be a folder that "
            "they share"
        )
    return outcome


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and half of its 95 % interval (Student's t); None for one value."""
    from scipy import special

    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return mean, None
    t = float(special.stdtrit(n - 1, (1 + _CONFIDENCE) / 2))
    return mean, t * statistics.stdev(values) / math.sqrt(n)


@contextlib.contextmanager
def _writing(path: str | os.PathLike, repeated: str = "no run") -> Iterator[None]:
    """Converts an OSError to a UserError that names what the next start repeats."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}): fix that, then "
            f"start again: {repeated} is repeated"
        ) from error


def write_json(
    workdir: str | os.PathLike, name: str, content: dict, repeated: str = "no run"
) -> None:
    """Writes a JSON file of a sweep, in process 0.

    Raises:
      UserError: the workdir is missing, full or read-only; the message says that the
        next start repeats `repeated`.
    """
    path = epath.Path(workdir) / name
    with _writing(path, repeated):
        if jax.process_index() == 0:
            replace_text(path, json.dumps(content, indent=2) + "\n")


def write_table(workdir: str | os.PathLike, name: str, rows: Sequence[Row]) -> None:
    """Writes rows to NAME.jsonl and NAME.csv atomically, in process 0.

    In the CSV file, nested values become columns such as "compute.exaflops".

    Raises:
      UserError: the workdir is missing, full or read-only.
    """
    if jax.process_index():
        return
    text = io.StringIO()
    flat = [fields.flatten(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(flat)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for suffix, content in (("jsonl", lines), ("csv", text.getvalue())):
        path = epath.Path(workdir) / f"{name}.{suffix}"
        with _writing(path):
            replace_text(path, content)


def format_table(rows: Sequence[Row], formats: Mapping[str, str]) -> str:
    """Formats rows as a text table; missing values are "-".

    `formats` has the format of each column, such as ".2%", in the order of the columns.
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


def write_hparams(
    workdir: str | os.PathLike, name: str, settings: Row, scores: Mapping[str, float]
) -> None:
    """Writes a run for TensorBoard's hparams view, replacing its earlier entry.

    All runs of a sweep must have the same keys in `settings`.

    Raises:
      UserError: the workdir is missing, full or read-only.
    """
    if jax.process_index():
        return
    folder = epath.Path(workdir) / _HPARAMS / name
    with _writing(folder):
        folder.rmtree(missing_ok=True)
        events = Events(folder, 0)
        # The plugin's order: the experiment, then the start and end of the session.
        for part in summary.hparams(dict(settings), dict(scores)):
            events.add(0, part)
        for tag, value in scores.items():
            events.add(0, summary.scalar(tag, value))
        events.flush()
        events.close()
