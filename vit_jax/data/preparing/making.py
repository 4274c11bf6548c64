"""Runs a job's shards, in one or several processes, and puts the set together."""

import concurrent.futures
import dataclasses
import multiprocessing
import pathlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol, runtime_checkable

import tqdm

from vit_jax.data import workers
from vit_jax.data.preparing import manifest, staging
from vit_jax.data.preparing import shards as sharding
from vit_jax.errors import UserError, keep_warnings_from_raising
from vit_jax.printing import printable

_REPORT_EVERY = 64  # Records, from a worker.
_LOOK_EVERY = 0.2  # Seconds.


@runtime_checkable
class Job(Protocol):
    """A data set to be made; travels to worker processes.

    Attributes:
      dataset: TFDS name, without configuration and version.
      shards: all of them, split by split, in order.
      plan: plain values that say from what and how it is made.
      size: of the finished set in bytes, roughly.
    """

    dataset: str
    shards: Sequence[sharding.Shard]
    plan: Mapping
    size: int

    def records(self, shard: sharding.Shard, skipped: list[dict]) -> Iterator[bytes]:
        """Yields serialized examples; notes in `skipped` what it leaves out."""

    def describe(
        self, folder: pathlib.Path, splits: Mapping[str, Sequence[sharding.Written]]
    ) -> None:
        """Writes TFDS's metadata for the shards as they turned out."""


class _Stopped(Exception):
    """Another process met an error."""


def make(job: Job, target: pathlib.Path, processes: int = 1) -> dict:
    """Makes a data set, or the rest of one that was interrupted.

    Args:
      job: what to make.
      target: its final folder.
      processes: that make shards at the same time.

    Returns:
      The content of its manifest.

    Raises:
      UserError: bad input, no room, or the target exists.
    """
    with staging.begin(target, job.plan) as place:
        if not (place.folder / manifest.NAME).exists():
            notes = _make_shards(job, place, processes)
            splits, skipped = {}, []
            for shard, note in zip(job.shards, notes, strict=True):
                written = sharding.Written(**note["written"])
                splits.setdefault(shard.split, []).append(written)
                skipped += note["skipped"]
            for name, written in splits.items():
                if not any(shard.records for shard in written):
                    raise UserError(
                        f"split {name!r} has no record that can be read: leave it out "
                        "with --splits or mend its files"
                    )
            job.describe(place.folder, splits)
            _check_opens(place.folder, splits)
            manifest.write(place.folder, job.plan, splits, skipped)
        content = manifest.load(place.folder)
        place.finish()
    return content


def _make_shards(job: Job, place: staging.Staging, processes: int) -> list[dict]:
    """Makes the shards that are not finished; returns the notes of all."""
    notes = {s: place.finished(s.file_name(job.dataset)) for s in job.shards}
    todo = [shard for shard, note in notes.items() if note is None]
    total = sum(shard.stop - shard.start for shard in job.shards)
    left = sum(shard.stop - shard.start for shard in todo)
    place.reserve(job.size * left // max(1, total))
    if len(todo) < len(job.shards):
        done = len(job.shards) - len(todo)
        print(
            printable(
                f"{place.folder}: {done} of {len(job.shards)} shards are finished"
            )
        )
    with tqdm.tqdm(
        total=total,
        initial=total - left,
        desc=job.dataset,
        unit=" records",
        disable=None,  # Unless standard error is a terminal.
    ) as bar:
        if processes == 1:
            worker = _Worker(job, place, bar.update, lambda: None)
            notes.update((shard, worker.make(shard)) for shard in todo)
        else:
            notes.update(_in_processes(job, place, todo, processes, bar))
    return list(notes.values())


@dataclasses.dataclass(frozen=True)
class _Worker:
    """Makes single shards.

    Attributes:
      job: what to make.
      place: where.
      count: is told how many more records were dealt with.
      check: raises _Stopped if it is time to stop.
    """

    job: Job
    place: staging.Staging
    count: Callable[[int], object]
    check: Callable[[], None]

    def make(self, shard: sharding.Shard) -> dict:
        """Makes a shard and notes that it is finished."""
        file_name, skipped = shard.file_name(self.job.dataset), []
        records = self._counted(self.job.records(shard, skipped), shard)
        written = sharding.write(self.place.folder / file_name, records)
        note = {"written": dataclasses.asdict(written), "skipped": skipped}
        self.place.note(file_name, note)
        return note

    def _counted(self, records, shard):
        told = 0
        for seen, record in enumerate(records, 1):
            self.check()
            yield record
            if seen - told == _REPORT_EVERY:
                self.count(seen - told)
                told = seen
        self.count(shard.stop - shard.start - told)  # With those that were skipped.


def _in_processes(job, place, todo, processes, bar) -> Iterator[tuple]:
    """Yields (shard, note) as worker processes finish them."""
    # Forking a process with threads (TFDS has some) may hang.
    context = multiprocessing.get_context("spawn")
    counter, stop = context.Value("q", 0), context.Value("b", 0, lock=False)
    executor = concurrent.futures.ProcessPoolExecutor(
        min(processes, max(1, len(todo))),
        mp_context=context,
        initializer=_start_worker,
        initargs=(job, place, counter, stop),
    )
    shown = 0
    try:
        shard_of = {executor.submit(_make_in_worker, shard): shard for shard in todo}
        waiting = set(shard_of)
        while waiting:
            finished, waiting = concurrent.futures.wait(
                waiting, _LOOK_EVERY, concurrent.futures.FIRST_COMPLETED
            )
            seen = counter.value
            bar.update(seen - shown)
            shown = seen
            for future in finished:
                yield shard_of[future], future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died (killed, or out of memory): give the same command "
            "again, perhaps with fewer --processes; finished shards are kept"
        ) from error
    finally:
        stop.value = 1
        executor.shutdown(cancel_futures=True)


def _start_worker(job, place, counter, stop):
    """Sets a worker process up; it ends when its parent does, even by SIGKILL."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent sees to it.
    workers.end_with_parent()
    keep_warnings_from_raising()

    def count(n):
        with counter.get_lock():
            counter.value += n

    def check():
        if stop.value:
            raise _Stopped

    _worker = _Worker(job, place, count, check)


def _make_in_worker(shard):
    return _worker.make(shard)


def _check_opens(folder: pathlib.Path, splits: Mapping[str, Sequence]) -> None:
    """Raises UserError unless TFDS reads the metadata and counts as we do."""
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(folder)
    for name, written in splits.items():
        found = len(builder.as_data_source(name))
        records = sum(shard.records for shard in written)
        if found != records:
            raise UserError(
                f"{folder} split {name!r}: {records} records were written, but "
                f"TFDS finds {found}"
            )
