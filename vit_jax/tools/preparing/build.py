"""Builds a data set from a job: staging, shards in processes, description, manifest."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from vit_jax.command_line import progress
from vit_jax.command_line.files import lock_folder
from vit_jax.command_line.printing import print_line
from vit_jax.data import workers
from vit_jax.errors import UserError, keep_warnings_from_raising
from vit_jax.tools.preparing import metadata, shards
from vit_jax.tools.preparing.shards import Shard, Skipped, WrittenShard

SUFFIX = ".incomplete"
_STATE = ".state"  # Folder with a note for each finished shard; removed at the end.
_PLAN = "plan.json"
_REPORT_EVERY = 64  # Number of records between two reports of a worker.
_POLL_SECONDS = 0.2
_ANEW = (
    "add --verify to check it, or remove it or choose another --data_dir to prepare it "
    "anew"
)


class Staging:
    """An unfinished data set, which `begin` opens and locks.

    Attributes:
      target: final folder.
      folder: unfinished folder next to it.
      state: folder with a note for each finished shard.
    """

    def __init__(self, target: pathlib.Path):
        self.target = target
        self.folder = target.with_name(target.name + SUFFIX)
        self.state = self.folder / _STATE

    def finished(self, file_name: str) -> dict | None:
        """Returns the note on a finished shard; None if the shard is not finished."""
        try:
            note = json.loads((self.state / f"{file_name}.json").read_text())
            size = (self.folder / file_name).stat().st_size
        except (OSError, ValueError):
            return None
        return note if note["written"]["file_bytes"] == size else None

    def note(self, file_name: str, note: Mapping) -> None:
        """Marks a shard as finished."""
        metadata.save_json(self.state / f"{file_name}.json", note)

    def finish(self) -> dict:
        """Renames the complete folder, and returns its manifest."""
        content = metadata.load_manifest(self.folder)
        shutil.rmtree(self.state, ignore_errors=True)
        _sync(self.folder)
        refuse_existing(self.target)
        self.folder.rename(self.target)
        _sync(self.target.parent)
        return content

    def reserve(self, size: int) -> None:
        """Raises UserError unless the disk has room for `size` more bytes."""
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise UserError(
                f"the disk of {self.target.parent} has {free / 1e6:,.1f} MB free, but "
                f"about {size / 1e6:,.1f} MB will be written: make room or choose "
                "another --data_dir"
            )


@contextlib.contextmanager
def begin(target: pathlib.Path, plan: Mapping) -> Iterator[Staging]:
    """Starts a data set, or resumes one that was interrupted.

    Args:
      target: final folder.
      plan: input and options as plain values; only a set with an equal plan is resumed.

    Raises:
      UserError: the target exists, another process is writing it, it was started with
        another plan, or the folder cannot be created.
    """
    staging = Staging(target)
    refuse_existing(target, plan)
    try:
        staging.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot create {staging.folder}: {error.strerror}; choose another --data_dir"
        ) from error
    busy = f"another process is preparing {target}: wait for it"
    with lock_folder(staging.folder, busy) as handle:
        # Another process may have renamed it between opening and locking.
        if not staging.folder.exists() or not os.path.samestat(
            os.fstat(handle), os.stat(staging.folder)
        ):
            raise UserError(busy)
        _compare_plan(staging, plan)
        yield staging


class Exists(UserError):
    """The set exists as a folder with a manifest, and was made as requested."""

    def __init__(self, target: pathlib.Path, content: dict):
        super().__init__(f"{target} exists: {_ANEW}")
        self.target, self.content = target, content


def refuse_existing(target: pathlib.Path, plan: Mapping = MappingProxyType({})) -> None:
    """Checks that the target does not exist.

    Raises:
      Exists: the target was made with this plan, which may be known only in part.
      UserError: the target exists.
    """
    if not target.exists():
        return
    try:
        content = metadata.load_manifest(target)
    except UserError:
        content = {}
    made_from = content.get("made_from", {})
    others = [key for key in plan if plan[key] != made_from.get(key)]
    if plan and not others:
        raise Exists(target, content)
    how = ""
    if made_from and others:
        how = f", made from other input or with other flags ({', '.join(others)})"
    raise UserError(f"{target} exists{how}: {_ANEW}")


def digest(items: Iterable) -> str:
    """Returns a checksum of plain values, for a plan."""
    total = hashlib.sha256()
    for item in items:
        total.update(json.dumps(item).encode() + b"\n")
    return total.hexdigest()


def _compare_plan(staging: Staging, plan: Mapping) -> None:
    plan = json.loads(json.dumps(plan))
    for folder in (staging.folder, staging.state):
        for stale in folder.glob(f"*{shards.PART}"):
            stale.unlink()
    if (staging.folder / metadata.MANIFEST).exists():  # Only the renaming is missing.
        begun = metadata.load_manifest(staging.folder)["made_from"]
    elif (staging.state / _PLAN).exists():
        begun = json.loads((staging.state / _PLAN).read_text())
    else:
        begun = plan
        staging.state.mkdir(exist_ok=True)
        metadata.save_json(staging.state / _PLAN, plan)
    if begun != plan:
        keys = [key for key in plan if plan[key] != begun.get(key)]
        raise UserError(
            f"{staging.folder} was started with other input or other flags "
            f"({', '.join(keys)}): remove it to start again, or use the former ones"
        )


def _sync(folder: pathlib.Path) -> None:
    """Flushes a folder's names to disk, so that they survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@runtime_checkable
class Job(Protocol):
    """A data set to make; pickled for worker processes.

    Attributes:
      dataset: TFDS name, without configuration and version.
      shards: all shards, split by split, in order.
      plan: plain values that identify its input and options, including "source", its
        folder, and "on_error", "skip" to omit records that cannot be used.
      size: approximate size of the finished set, in bytes.
      unit: unit of `start` and `stop` of a shard: "records" or "B" (bytes of the
        input).
    """

    dataset: str
    shards: Sequence[Shard]
    plan: Mapping
    size: int
    unit: str

    def records(self, shard: Shard) -> Iterator[bytes | Skipped]:
        """Yields serialised examples, or `Skipped` for unusable records."""

    def describe(
        self, folder: pathlib.Path, splits: Mapping[str, Sequence[WrittenShard]]
    ) -> None:
        """Writes TFDS's description of the written shards."""


class _Stopped(Exception):
    """Another process failed."""


def build(job: Job, target: pathlib.Path, processes: int = 1) -> dict:
    """Builds a data set, or resumes one that was interrupted.

    Args:
      job: the data set to make.
      target: final folder.
      processes: number of processes that write shards.

    Returns:
      The content of the manifest.

    Raises:
      UserError: the input is bad, the disk has no room, or the target exists.
    """
    with begin(target, job.plan) as staging:
        if not (staging.folder / metadata.MANIFEST).exists():
            notes = _make_shards(job, staging, processes)
            splits, skipped = {}, []
            for shard, note in zip(job.shards, notes, strict=True):
                written = WrittenShard(**note["written"])
                splits.setdefault(shard.split, []).append(written)
                skipped += note["skipped"]
            for name, written in splits.items():
                if not any(shard.records for shard in written):
                    raise UserError(
                        f"split {name!r} has no readable record: leave it out "
                        "with --splits or repair its files"
                    )
            job.describe(staging.folder, splits)
            _check_opens(staging.folder, splits)
            metadata.write_manifest(staging.folder, job.plan, splits, skipped)
        return staging.finish()


def _make_shards(job: Job, staging: Staging, processes: int) -> list[dict]:
    """Builds the shards that are not finished; returns the notes on all shards."""
    notes = {s: staging.finished(s.file_name(job.dataset)) for s in job.shards}
    todo = [shard for shard, note in notes.items() if note is None]
    total, left = (sum(s.stop - s.start for s in part) for part in (job.shards, todo))
    staging.reserve(job.size * left // max(1, total))
    if done := len(job.shards) - len(todo):
        print_line(f"{staging.folder}: {done} of {len(job.shards)} shards are finished")
    with progress.bar(total, job.dataset, job.unit, initial=total - left) as bar:
        if processes == 1:
            worker = _Worker(job, staging, bar.update, lambda: None)
            notes.update((shard, worker.make(shard)) for shard in todo)
        else:
            notes.update(_in_processes(job, staging, todo, processes, bar))
    return list(notes.values())


@dataclasses.dataclass(frozen=True)
class _Worker:
    """Builds one shard at a time.

    Attributes:
      count: function called with the progress, in units of the job.
      check: function that raises _Stopped if another process failed.
    """

    job: Job
    staging: Staging
    count: Callable[[int], object]
    check: Callable[[], None]

    def make(self, shard: Shard) -> dict:
        """Builds a shard; writes and returns the note on it."""
        file_name, skipped = shard.file_name(self.job.dataset), []
        records = self._usable(self._counted(shard), shard.split, skipped)
        written = shards.write(self.staging.folder / file_name, records)
        note = {"written": dataclasses.asdict(written), "skipped": skipped}
        self.staging.note(file_name, note)
        return note

    def _usable(self, records, split, skipped):
        for record in records:
            if not isinstance(record, Skipped):
                yield record
                continue
            if self.job.plan["on_error"] != "skip":
                path = os.path.join(self.job.plan["source"], record.record)
                raise UserError(
                    f"{path} {record.reason}: repair or remove it, or set "
                    "--on_error=skip to leave such images out"
                )
            skipped.append({"split": split, **dataclasses.asdict(record)})

    def _counted(self, shard):
        done = counted = 0
        for seen, record in enumerate(self.job.records(shard), 1):
            self.check()
            yield record
            of_bytes = self.job.unit == "B" and isinstance(record, bytes)
            done += len(record) if of_bytes else 1
            if seen % _REPORT_EVERY == 0:
                self.count(done - counted)
                counted = done
        self.count(shard.stop - shard.start - counted)  # Units without records too.


def _in_processes(job, staging, todo, processes, bar) -> Iterator[tuple]:
    """Yields (shard, note) as worker processes finish them."""
    # A forked process may hang if its parent has threads, and TFDS starts some.
    context = multiprocessing.get_context("spawn")
    with _blocked():  # This starts the resource tracker process of multiprocessing.
        counter, stop = context.Value("q", 0), context.Value("b", 0, lock=False)
    executor = concurrent.futures.ProcessPoolExecutor(
        min(processes, max(1, len(todo))),
        mp_context=context,
        initializer=_start_worker,
        initargs=(job, staging, counter, stop),
    )
    shown = 0
    try:
        with _blocked():  # This starts the workers.
            shard_of = {executor.submit(_make_in_worker, one): one for one in todo}
        waiting = set(shard_of)
        while waiting:
            finished, waiting = concurrent.futures.wait(
                waiting, _POLL_SECONDS, concurrent.futures.FIRST_COMPLETED
            )
            seen = counter.value
            bar.update(seen - shown)
            shown = seen
            for future in finished:
                yield shard_of[future], future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died (killed, or out of memory): repeat the command, "
            "perhaps with fewer --processes; finished shards are kept"
        ) from error
    finally:
        stop.value = 1
        executor.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Makes processes that are started inside ignore the signals that stop this one.

    Signals are often sent to a whole group of processes; this process stops the others.
    """
    ending = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(job, staging, counter, stop):
    """Initialises a worker process, which ends with its parent, even by SIGKILL."""
    global _worker
    workers.end_with_parent()
    keep_warnings_from_raising()

    def count(n):
        with counter.get_lock():
            counter.value += n

    def check():
        if stop.value:
            raise _Stopped

    _worker = _Worker(job, staging, count, check)


def _make_in_worker(shard):
    return _worker.make(shard)


def _check_opens(folder: pathlib.Path, splits: Mapping[str, Sequence]) -> None:
    """Checks that TFDS can read the set and finds the written number of records."""
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(folder)
    for name, written in splits.items():
        readable = len(builder.as_data_source(name))
        records = sum(shard.records for shard in written)
        if readable != records:
            raise UserError(
                f"{folder} split {name!r}: {records} records were written, but "
                f"TFDS finds {readable}"
            )
