"""Checkpoints of the whole training state with Orbax: asynchronous and atomic."""

import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp

from vit_jax.command_line.files import replace_text
from vit_jax.command_line.printing import print_error
from vit_jax.config import fields
from vit_jax.data.sources.base import Source
from vit_jax.distributed import agreement
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import Interrupted, Preempted, UserError
from vit_jax.training import leftovers, resume_check
from vit_jax.training.config import TrainConfig
from vit_jax.training.layout import DiskLayout
from vit_jax.training.resume_check import Restored
from vit_jax.training.train_state import TrainState
from vit_jax.weights import checkpoint_folders as folders

_POLL_SECONDS = 0.2
_STRAY_SECONDS = 1.0  # TensorStore's threads write for a moment after a failed save.
_numbers = itertools.count()  # Numbers of saves, the same in all processes.


class Checkpointer:
    """Saves and restores the state of one run under `workdir/checkpoints`.

    If a save is killed or fails, its files are removed, and the previous checkpoint
    remains the latest one. A failure is printed but does not end the run: the next
    interval tries again. It is a context manager that waits for the save in progress
    when it is closed.

    Every checkpoint also stores the config, `TrainSetup.metadata`, and the size, class
    names and fingerprint of the training split.

    Args:
      workdir: folder of the run.
      config: complete config.
      source: training split.
      metadata: `TrainSetup.metadata`.
      disk: form of the state in checkpoints.

    Attributes:
      failures: number of failed saves since this start.
      data: fingerprint of the training split.
      latest: step of the newest finished checkpoint, equal on all processes; None
        before the first.
      begun: step of the newest checkpoint that is finished or being saved, or None.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        config: TrainConfig,
        source: Source,
        metadata: dict,
        disk: DiskLayout,
    ):
        self._workdir = workdir
        self._folder = folders.absolute(workdir) / folders.FOLDER
        self._keep, self._check = config.checkpoint, config.data.check
        self._disk, self._source = disk, source
        self.data = resume_check.data_read(config.data, source)
        self._metadata = {
            "config": fields.to_json(config),
            "class_names": list(source.class_names),
            "examples": len(source),
            "data": self.data,
            folders.SUMMED: True,
            **metadata,
        }
        self._best, self._tidying = {}, threading.Lock()
        self._damaged, self._unreadable = [], {}  # List of steps; step to reason.
        self._saving, self.failures = None, 0
        folders.silence_orbax()
        if jax.process_index() == 0:
            for line in leftovers.remove_unfinished(self._folder):
                print_error(f"warning: {line}")
        # The other processes look for checkpoints only after the removal.
        meshes.process_allgather(removed=True)
        self.latest = max(folders.steps(workdir), default=None)
        self.begun = self.latest
        self._good = time.monotonic()  # Time of the last save, or of this start.

    def verify(self) -> None:
        """Sets `latest` to the newest intact checkpoint; each process checks some files.

        Raises:
          UserError: all checkpoints are damaged.
        """
        me, everyone = jax.process_index(), jax.process_count()
        self._damaged = []
        for step in reversed(folders.steps(self._workdir)):
            path = folders.path_of(self._workdir, step)
            if step not in self._unreadable:
                damage = folders.find_damage(path, me, everyone)
                if damage:
                    print_error(
                        f"error: the checkpoint {path} is damaged: {'; '.join(damage)}"
                    )
                if not meshes.process_allgather(n=len(damage))["n"].any():
                    self.latest = self.begun = step
                    return
            self._damaged.append(step)
        why = "".join(f"; {reason}" for reason in self._unreadable.values())
        raise UserError(
            f"no checkpoint under {self._folder} is intact (damaged: step "
            f"{', '.join(map(str, self._damaged))}{why}): move that folder away to "
            "start the run again"
        )

    def put_damaged_aside(self) -> list[str]:
        """Renames checkpoints that failed `verify`; returns notes on them."""
        for step in self._damaged if jax.process_index() == 0 else ():
            aside = leftovers.put_aside(folders.path_of(self._workdir, step), "damaged")
            print_error(
                f"error: resuming from step {self.latest}; the damaged checkpoint is kept "
                f"as {aside}"
            )
        return [f"the checkpoint of step {step} is damaged" for step in self._damaged]

    def restore(self) -> Restored:
        """Restores the latest checkpoint, which `verify` has chosen, on any mesh.

        If the checkpoint cannot be read, the result has no state, and the next `verify`
        treats the checkpoint as damaged.

        Raises:
          UserError: the data set has changed and `data.check` is on.
        """
        step, state, why = self.latest, None, ""
        path = folders.path_of(self._workdir, step)
        try:
            stored = ocp.metadata(path).custom_metadata
            known = stored["data"], self.data, self._source, self._workdir
            notes = resume_check.check_data(*known, check=self._check)
            state = self._read(step)
            if int(state.step) != step:
                why = f"its content is the checkpoint of step {int(state.step)}"
        except (UserError, MemoryError):
            raise
        except Exception as error:  # Orbax, TensorStore and metadata raise many kinds.
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            why = describe_failure(error)
        if meshes.process_allgather(failed=bool(why))["failed"].any():
            self._unreadable[step] = f"{path} cannot be restored: {why}"
            print_error(f"error: the checkpoint {self._unreadable[step]}")
            return Restored()
        notes = [f"resume: step {step} of {self._workdir}", *notes]
        seconds, device_seconds = stored["seconds"], stored["device_seconds"]
        state = self._disk.from_disk(state)
        return Restored(state, step, seconds, device_seconds, notes)

    def load(self, step: int) -> TrainState:
        """Reads the state of one checkpoint, in the form of the run."""
        return self._disk.from_disk(self._read(step))

    def _read(self, step: int) -> TrainState:
        """Reads the state of one checkpoint, in the form on disk."""
        shapes, shardings = self._disk.shapes, self._disk.shardings
        place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        like = jax.tree.map(place, shapes, shardings)
        tree = ocp.load(folders.path_of(self._workdir, step), _as_tree(like))
        return shapes.replace(**({"average": None, "extra": None} | tree))

    def keep_best(self, record: dict) -> None:
        """Sets the best checkpoint, which is kept and which commands load by default.

        Args:
          record: step, metric and score of the checkpoint, which is saved already or
            saved next. If empty, commands load the newest checkpoint.
        """
        self._best = record
        self._tidy()

    def save(
        self, step: int, state: TrainState, seconds: float, device_seconds: float = 0.0
    ) -> None:
        """Begins to save in the background, unless the step is saved already.

        The method first waits for the previous save, and copies the state before it
        returns. A failure is printed and counted; `wait` and `demand` report it.

        Args:
          step: number of steps taken.
          state: state after the step.
          seconds, device_seconds: times of the run, see `RunClock.elapsed`.
        """
        self.wait()
        if step == self.begun:
            return
        if self.failures and jax.process_index() == 0:
            leftovers.remove_unfinished(self._folder)
        self.begun, state = step, self._disk.to_disk(state)
        path, reason = folders.path_of(self._workdir, step), self._lack_of_disk(state)
        metadata = self._metadata | {
            "seconds": seconds,
            "device_seconds": device_seconds,
        }
        writing = None if reason else _start_writing(path, _as_tree(state), metadata)
        self._saving = _in_background(self._settle, step, path, writing, reason)

    def wait(self) -> str | None:
        """Waits for the save in progress; returns why it failed, or None."""
        if self._saving is None:
            return None
        reason = self._saving.result()
        if reason is not None:
            self.begun = self.latest  # The same step may be tried again.
        return reason

    def demand(self, step: int, doing: str) -> None:
        """Waits until the last step of this start is saved.

        Args:
          step: last step.
          doing: reason why the start ends, for the message.

        Raises:
          UserError: the step could not be saved.
        """
        reason = self.wait()
        if reason is not None and self.latest != step:
            raise UserError(
                f"{doing}, but step {step} could not be saved ({reason}): "
                f"{self._remedy()}, then start again"
            )

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        orderly = error is None or isinstance(error, Preempted | Interrupted)
        if orderly or jax.process_count() == 1:
            self.wait()
        # After an error on one of several processes, the others wait for its message,
        # but a save may take minutes, so this process ends at once
        # (distributed/ending.py).

    def _settle(self, step, path, writing, reason) -> str | None:
        """Completes a save in its background thread; returns why it failed, or None."""
        if reason is None:
            together = jax.process_count() > 1
            reason = (_finish_together if together else _finish)(path, writing)
        if reason is None:
            self.latest, self._good = step, time.monotonic()
            self._tidy()
            return None
        self.failures += 1
        if jax.process_index() == 0:
            ago = time.monotonic() - self._good
            print_error(
                f"error: the checkpoint of step {step} could not be saved ({reason}); "
                f"{self._remedy()}; training continues and the next save tries again; the "
                f"last {ago:.0f} s of training are not saved"
            )
            # If the removal fails, the next save or start tries again.
            with contextlib.suppress(Exception):
                leftovers.remove_unfinished(self._folder)
                time.sleep(_STRAY_SECONDS)
                leftovers.remove_unfinished(self._folder)
        return reason

    def _tidy(self) -> None:
        """Records the best checkpoint once it is saved, and removes old checkpoints."""
        if jax.process_index() == 0:
            try:
                with self._tidying:  # A save may end at the same time.
                    self._write_best()
                    self._remove_old()
            except Exception as error:  # noqa: BLE001 (buckets do not raise OSErrors)
                print_error(
                    f"warning: {folders.BEST_FILE} could not be written, or old checkpoints "
                    f"could not be removed, in {self._workdir} "
                    f"({describe_failure(error)}); the next save tries again"
                )

    def _write_best(self) -> None:
        path, record = self._folder.parent / folders.BEST_FILE, self._best
        if folders.best(self._workdir) != record:
            if not record:
                path.unlink(missing_ok=True)
            elif record["step"] in folders.steps(self._workdir):
                replace_text(path, json.dumps(record))

    def _remove_old(self) -> None:
        best = folders.best(self._workdir).get("step")
        period = self._keep.keep_period
        paths = [
            folders.path_of(self._workdir, s) for s in folders.steps(self._workdir)
        ]
        # Checkpoints without checksums may come from other code and are not removed.
        paths = [path for path in paths if folders.has_checksums(path)]
        for path in paths[: -self._keep.max_to_keep]:
            step = int(path.name)
            if step != best and not (period and step % period == 0):
                leftovers.remove(path)

    def _lack_of_disk(self, state: TrainState) -> str | None:
        """Returns why the disk is too small, equal on all processes, or None."""
        if "://" in str(self._folder):
            return None
        # The new checkpoint is complete before an old one is removed.
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        parents = (self._folder, *self._folder.parents)
        try:
            free = shutil.disk_usage(next(p for p in parents if p.exists())).free
        except OSError:
            free = needed  # The save itself reports the error.
        free = int(meshes.process_allgather(free=free)["free"].min())
        if free >= needed:
            return None
        return (
            f"not enough disk space: a checkpoint takes {_readable(needed)}, "
            f"{_readable(free)} are free"
        )

    def _remedy(self) -> str:
        return f"{self.safe()}; free space or lower checkpoint.max_to_keep"

    def safe(self) -> str:
        """Returns a phrase for messages: the checkpoint that a run can resume from."""
        if self.latest is None:
            return f"{self._workdir} has no checkpoint"
        return f"the checkpoint of step {self.latest} is safe in {self._workdir}"


def _as_tree(state: TrainState) -> dict:
    names = "step", "params", "opt_state", "average", "extra", "key"
    tree = {name: getattr(state, name) for name in names}
    return {name: value for name, value in tree.items() if value is not None}


def _readable(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def _start_writing(
    path: epath.Path, tree: dict, metadata: dict
) -> concurrent.futures.Future:
    """Copies arrays and begins to write them, with metadata, in the background."""
    context = ocp.Context()
    # A single process creates folders in this thread, where an error, such as a
    # read-only disk, is raised at once; in the background, threads would wait for the
    # folder and delay the end of the process for minutes. Several processes would all
    # wait here for the first one, so they create folders in the background.
    several = jax.process_count() > 1
    context.asynchronous.create_directories_asynchronously = several
    # `path` does not exist, and a check for it would synchronise all processes.
    context.file.skip_sync_file_validations = True
    try:
        if jax.process_index() == 0:
            leftovers.begin(path)
        # Several processes compare their paths, which transfers arrays.
        with context, jax.transfer_guard("allow"):
            response = ocp.save_async(path, tree, custom_metadata=metadata)
        return _in_background(response.result)
    except Exception as error:  # noqa: BLE001 (a disk may raise anything)
        failed = concurrent.futures.Future()
        failed.set_exception(error)
        return failed


def _finish(path: epath.Path, writing: concurrent.futures.Future) -> str | None:
    """Waits for the files and writes their checksums; returns an error, or None."""
    try:
        writing.result()
        folders.write_checksums(path, folders.compute_checksums(path))
        leftovers.end(path)
    except Exception as error:  # noqa: BLE001
        return describe_failure(error)
    return None


def _finish_together(
    path: epath.Path, writing: concurrent.futures.Future
) -> str | None:
    """Like `_finish`, for several processes that write one checkpoint.

    In Orbax each process waits for all others, forever if the disk of one fails. So
    each process publishes the result of its part, and process 0 publishes the result of
    the whole save. If a save fails, Orbax's waiting threads remain for up to 20
    minutes.
    """
    me, everyone = jax.process_index(), jax.process_count()
    board = f"vit_jax/saves/{next(_numbers)}"
    failed, done, end = (f"{board}/{name}" for name in ("failed", "done", "end"))
    read, publish = agreement.key_value_dir_get, agreement.key_value_set
    while not writing.done() and not read(failed):
        concurrent.futures.wait([writing], timeout=_POLL_SECONDS)
    try:
        if writing.done():
            writing.result()
            checksums = folders.compute_checksums(path, me, everyone)
            publish(f"{done}/{me}", json.dumps(checksums))
    except Exception as error:  # noqa: BLE001
        publish(f"{failed}/{me}", describe_failure(error))
    if me == 0:
        while len(parts := read(done)) < everyone and not read(failed):
            time.sleep(_POLL_SECONDS)
        reasons = [f"process {i} of {everyone}: {x}" for i, x in read(failed).items()]
        try:
            if not reasons:
                files = [json.loads(part).items() for part in parts.values()]
                folders.write_checksums(path, dict(itertools.chain(*files)))
                leftovers.end(path)
        except Exception as error:  # noqa: BLE001 (buckets do not raise OSErrors)
            reasons = [f"process 0 of {everyone}: {describe_failure(error)}"]
        publish(f"{end}/0", (reasons or [""])[0])
    while not (result := read(end)):
        time.sleep(_POLL_SECONDS)
    return result["0"] or None


def describe_failure(error: BaseException) -> str:
    """Returns a short description of an error in writing a file."""
    text = " ".join(str(error).split())
    # TensorStore's messages begin with long paths, before the reason.
    code = re.search(r"os_error_code='(\d+)'", text)
    if code:
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return text[:300] or type(error).__name__


def _in_background(work: Callable, *args) -> concurrent.futures.Future:
    """Runs a function in a daemon thread, which does not delay the process's end."""
    future = concurrent.futures.Future()

    def run():
        try:
            future.set_result(work(*args))
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="save").start()
    return future
