"""Training runs of a sweep: each trained once, on splits opened once, with tables.

A sweep is a job of several runs: a transfer, VTAB-1k, a scaling study.
"""

import contextlib
import csv
import io
import json
import math
import os
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
from etils import epath

from vit_jax.config import fields
from vit_jax.data import splits
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.base import Source
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import Diverged, UserError
from vit_jax.files import read_json, replace_text
from vit_jax.printing import print_line
from vit_jax.training import loop, resume_check, run_report
from vit_jax.training.config import TrainConfig
from vit_jax.training.metric_writer import Events, summary
from vit_jax.training.sweep import SweepSetups
from vit_jax.weights import workdir as layout

_COMMAND = "command.json"
DIVERGED = "diverged.json"
Row = Mapping[str, object]
_HPARAMS = "tensorboard"
_CONFIDENCE = 0.95
# Split -> numbers of its records, or ids of records if they have no numbers.
Records = dict[str, list[range]] | frozenset[str]


def train(
    config: TrainConfig, folder: str | os.PathLike, shared: SweepSetups, *, keep: bool
) -> dict:
    """Trains in a folder, resumes, or returns the report of a finished run.

    Args:
      config: complete config.
      folder: workdir of the run.
      shared: compiled step and evaluations that the runs of a sweep share.
      keep: whether to keep the last checkpoint of the finished run.

    Returns:
      The run's report; {"diverged": message} if its numbers became non-finite.

    Raises:
      UserError: the run is invalid (see `loop.train`), or the folder cannot be written.
      Preempted: see `loop.train`.
    """
    done = _outcome(folder)
    if not done:
        try:
            done = loop.train(config, folder, setup=shared.build(config, folder))
        except Diverged as error:
            done, path = {"diverged": str(error)}, epath.Path(folder) / DIVERGED
            with writing(path, "only this run"):
                _write(path, done)
    if not keep:
        drop_checkpoints(folder)
    return done


def drop_checkpoints(folder: str | os.PathLike) -> None:
    """Deletes the checkpoints of a finished run, in process 0.

    Raises:
      UserError: they cannot be deleted.
    """
    if jax.process_index() == 0:
        checkpoints = layout.absolute(folder) / layout.FOLDER
        with writing(checkpoints):
            checkpoints.rmtree(missing_ok=True)


def recorded(workdir: str | os.PathLike) -> dict:
    """Returns the command that `check_command` recorded, or {}."""
    path = epath.Path(workdir) / _COMMAND
    return read_json(path) if path.exists() else {}


def check_command(
    workdir: str | os.PathLike,
    command: dict,
    *,
    begun: bool = True,
    grows: str = "",
    free: Collection[str] = (),
) -> None:
    """Records the command of a sweep, or refuses another one in the same workdir.

    Args:
      workdir: folder of the sweep.
      command: JSON value with everything that decides the results.
      begun: whether the recorded command left results; if not, it is replaced.
      grows: key of a dict in the command whose keys may differ between starts; the union
        of all starts is recorded.
      free: config keys that may differ, because they change no result.

    Raises:
      UserError: the recorded command differs; the message lists the differences.
    """
    path = epath.Path(workdir) / _COMMAND
    if begun and path.exists():
        recorded = read_json(path)
        if grows:
            before = recorded.get(grows, {})
            recorded[grows] = command[grows] | before
            command = command | {grows: before | command[grows]}
        changed = [
            line
            for line in fields.differences(recorded, command)
            if line.partition(": ")[0].removeprefix("config.") not in free
        ]
        if changed:
            moved = ""
            if any(line.startswith("--data_dir:") for line in changed):
                moved = f"; if the same data was moved, set its new path in {path}"
            raise UserError(
                f"{workdir} holds a study by another command "
                f"({'; '.join(changed[:4])}): choose another --workdir, or repeat that "
                f"command{moved}"
            )
        if not grows:
            return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, command)
    except OSError as error:
        raise UserError(
            f"--workdir={workdir} cannot be written ({error.strerror or error}): choose "
            "another --workdir"
        ) from error


def say(text: str) -> None:
    """Prints lines, in process 0."""
    if text and jax.process_index() == 0:
        for line in text.split("\n"):
            print_line(line)


def decisive(config: TrainConfig) -> dict[str, str]:
    """Returns the config keys that decide the result of a run, with their values."""
    return {name: str(value) for name, value in resume_check.decisive(config).items()}


def scores(report: dict, evaluation: str) -> dict[str, float]:
    """Returns the scores of an evaluation, of averaged parameters if a run has them."""
    return run_report.quoted_scores(report["final"][evaluation])[1]


def write_json(workdir: str | os.PathLike, name: str, content: dict) -> None:
    """Writes a JSON file of a sweep, in process 0.

    Raises:
      UserError: the workdir is gone, full or read-only.
    """
    path = epath.Path(workdir) / name
    with writing(path):
        _write(path, content)


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


def _write(path: epath.Path, content: dict) -> None:
    if jax.process_index() == 0:
        replace_text(path, json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def writing(path: str | os.PathLike, repeated: str = "no run") -> Iterator[None]:
    """Converts an OSError (disk full, missing or read-only) into a UserError.

    Args:
      path: file or folder that is written in the context.
      repeated: work that the next start repeats, for the message.

    Raises:
      UserError: the path cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}): fix that, then "
            f"start again: {repeated} is repeated"
        ) from error


class SplitCache:
    """Opens each split once; pass it to `opened_by`."""

    def __init__(self):
        self._sources: dict[str, Source] = {}

    def __call__(
        self, data: DataConfig, split: str, open_it: Callable[[], Source]
    ) -> Source:
        """Returns a split's source."""
        key = json.dumps([fields.to_json(data), split])
        if key not in self._sources:
            self._sources[key] = open_it()
        return self._sources[key]


class TestSplitGuard:
    """Opens splits for all runs of a sweep; pass it to `opened_by`.

    Until `release` is called, it refuses every split that overlaps the test split, so
    that no choice can depend on a test image. When the test split is opened, its records
    must not be in another split that was opened.

    Args:
      test: split expression.

    Attributes:
      opened: splits in the order in which they were opened.
    """

    def __init__(self, test: str):
        self._test, self._sealed = test, True
        self._kept = SplitCache()
        self._records: dict[str, Records] = {}
        self.opened: list[str] = []

    def __call__(
        self, data: DataConfig, split: str, open_it: Callable[[], Source]
    ) -> Source:
        """Returns a split's source.

        Raises:
          UserError: it overlaps the test split before `release`, or training and test
            have a record in common.
        """
        if self._sealed and overlap(split, self._test):
            raise UserError(
                f"split {split!r} of {data.name} is sealed: it has images of the test "
                f"split {self._test!r}, which stays shut until the rate is chosen"
            )

        def open_and_check():
            self.opened.append(split)
            source = open_it()
            self._check(data.name, split, source)
            return source

        return self._kept(data, split, open_and_check)

    def release(self) -> None:
        """Allows the test split to be opened, and drops the splits read so far."""
        self._sealed, self._kept = False, SplitCache()

    def _check(self, name: str, split: str, source: Source) -> None:
        self._records[split] = _records(source)
        for one, tested in self._records.items():
            for other, trained in self._records.items():
                if not overlap(one, self._test) or overlap(other, self._test):
                    continue
                if shared := _common(tested, trained):
                    raise UserError(
                        f"{name}: {shared} is in the split {one!r} to test on and in "
                        f"{other!r} to train or choose on: set another --test"
                    )


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and half its 95 % interval (Student's t); None of one value."""
    from scipy import special

    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return mean, None
    t = float(special.stdtrit(n - 1, (1 + _CONFIDENCE) / 2))
    return mean, t * statistics.stdev(values) / math.sqrt(n)


def overlap(split: str, test: str) -> bool:
    """Returns whether two split expressions name a split in common."""
    return not set(splits.names(split)).isdisjoint(splits.names(test))


def _records(source: Source) -> Records:
    if numbering := source.split_numbering():
        records = {}
        for name, numbers in numbering.parts:
            records.setdefault(name, []).append(numbers)
        return records
    return frozenset(source.record_id(i) for i in range(len(source)))


def _common(one: Records, other: Records) -> str:
    """Returns a record that is in both, or ""."""
    if isinstance(one, frozenset) or isinstance(other, frozenset):
        return min(one & other, default="") if type(one) is type(other) else ""
    for name in one.keys() & other.keys():
        for a in one[name]:
            for b in other[name]:
                first = max(a.start, b.start)
                if first < min(a.stop, b.stop):
                    return f"record {name}/{first}"
    return ""


def write_table(workdir: str | os.PathLike, name: str, rows: Sequence[Row]) -> None:
    """Writes rows to NAME.jsonl and NAME.csv atomically, in process 0.

    In the CSV file, nested values have columns such as "compute.exaflops".

    Raises:
      UserError: the workdir is gone, full or read-only.
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
        with writing(path):
            replace_text(path, content)


def format_table(rows: Sequence[Row], formats: Mapping[str, str]) -> str:
    """Formats rows as a text table.

    Args:
      rows: column -> value; missing values are shown as "-".
      formats: column -> format, such as ".2%", in the order of the columns.
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
    """Writes a run for TensorBoard's hparams view; replaces its earlier entry.

    Args:
      workdir: folder of the sweep.
      name: name of the run.
      settings: hyperparameters; the same keys for all runs of a sweep.
      scores: metric -> value.

    Raises:
      UserError: the workdir is gone, full or read-only.
    """
    if jax.process_index():
        return
    folder = epath.Path(workdir) / _HPARAMS / name
    with writing(folder):
        folder.rmtree(missing_ok=True)
        events = Events(folder, 0)
        # In the plugin's order: the experiment, then the session's start and end.
        for part in summary.hparams(dict(settings), dict(scores)):
            events.add(0, part)
        for tag, value in scores.items():
            events.add(0, summary.scalar(tag, value))
        events.flush()
        events.close()
