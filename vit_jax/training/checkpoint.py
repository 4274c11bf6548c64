"""Checkpoints of the whole training state, by Orbax: asynchronous and atomic."""

import concurrent.futures
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

from vit_jax.config import fields
from vit_jax.data.sources.base import Source
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import multihost
from vit_jax.errors import Interrupted, Preempted, UserError
from vit_jax.files import replace_text
from vit_jax.printing import print_error
from vit_jax.training import leftovers, resume_check
from vit_jax.training.config import TrainConfig
from vit_jax.training.resume_check import Restored
from vit_jax.training.train_state import TrainState
from vit_jax.weights import workdir as layout

_LOOK_SECONDS = 0.2
_numbers = itertools.count()  # Of saves; the same in all processes.


class Checkpointer:
    """Saves and restores the state of one run under `workdir/checkpoints`.

    A save that is killed or fails leaves the step before it the latest; what it wrote
    is removed. A failure is said aloud and does not end the run: the next interval
    tries again. Use as a context manager: leaving it waits for the save in progress.

    Args:
      workdir: folder of the run.
      config: complete config; goes with every checkpoint.
      source: training split; its size, class names and fingerprint go with every
        checkpoint.
      metadata: `TrainSetup.metadata`; goes with every checkpoint.

    Attributes:
      failures: saves of this start that failed.
      data: fingerprint of the training split.
      latest: the newest finished step, the same on all processes, or None.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        config: TrainConfig,
        source: Source,
        metadata: dict,
    ):
        self._workdir = workdir
        self._folder = layout.absolute(workdir) / layout.FOLDER
        self._keep, self._check = config.checkpoint, config.data.check
        self._source, self.data = source, resume_check.data_read(config.data, source)
        self._about = {
            "config": fields.to_json(config),
            "class_names": list(source.class_names),
            "examples": len(source),
            "data": self.data,
            layout.SUMMED: True,
            **metadata,
        }
        self._best, self._tidying = {}, threading.Lock()
        self._damaged, self._unreadable = [], {}  # Steps; and why, by step.
        self.failures = 0
        self._saving = None
        layout.silence_orbax()
        if jax.process_index() == 0:
            for line in leftovers.remove_unfinished(self._folder):
                print_error(f"warning: {line}")
        meshes.process_allgather(removed=True)  # Before the others look.
        self.latest = max(layout.steps(workdir), default=None)
        self._last = self.latest  # Finished or under way.
        self._good = time.monotonic()  # When `latest` was saved, or this start began.

    def verify(self) -> None:
        """Sets `latest` to the newest checkpoint that is intact.

        Raises:
          UserError: there are checkpoints, and none is intact.
        """
        self.latest, self._damaged = resume_check.newest_intact(
            self._workdir, self._unreadable
        )
        self._last = self.latest

    def put_damaged_aside(self) -> list[str]:
        """Renames the damaged checkpoints that `verify` has found; returns notes on them."""
        for step in self._damaged if jax.process_index() == 0 else ():
            aside = leftovers.put_aside(layout.path_of(self._workdir, step), "damaged")
            print_error(
                f"error: going on from step {self.latest}; the damaged one is kept as {aside}"
            )
        return [f"the checkpoint of step {step} is damaged" for step in self._damaged]

    def restore(self, shapes: TrainState, shardings: TrainState) -> Restored:
        """Reads the latest checkpoint; `verify` comes before.

        Args:
          shapes: the state as `jax.eval_shape` gives it.
          shardings: sharding of each array, whatever it was when saved.

        Returns:
          The state and what goes with it; without a state if it cannot be read, so that
          the next `verify` takes it for damaged.

        Raises:
          UserError: the data set has changed since then, unless `data.check` is off.
        """
        step, state, why = self.latest, None, ""
        path = layout.path_of(self._workdir, step)
        try:
            stored = ocp.metadata(path).custom_metadata
            notes = resume_check.check_data(
                stored["data"],
                self.data,
                self._source,
                self._workdir,
                check=self._check,
            )
            state = self.load(step, shapes, shardings)
            if int(state.step) != step:
                why = f"it is the checkpoint of step {int(state.step)}"
        except (UserError, MemoryError):
            raise
        except Exception as error:  # Of Orbax, TensorStore, or of metadata.
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            why = describe_failure(error)
        if meshes.process_allgather(failed=bool(why))["failed"].any():
            self._unreadable[step] = f"{path} cannot be restored: {why}"
            print_error(f"error: the checkpoint {self._unreadable[step]}")
            return Restored(None, 0, 0.0, 0.0, [])
        notes = [f"resume: step {step} of {self._workdir}", *notes]
        seconds, device_seconds = stored["seconds"], stored["device_seconds"]
        return Restored(state, step, seconds, device_seconds, notes)

    def load(self, step: int, shapes: TrainState, shardings: TrainState) -> TrainState:
        """Reads the state of a checkpoint; `shapes`, `shardings` as of `restore`."""
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            shardings,
        )
        tree = ocp.load(layout.path_of(self._workdir, step), _as_tree(like))
        return shapes.replace(**({"average": None, "extra": None} | tree))

    def keep_best(self, record: dict) -> None:
        """Keeps a checkpoint, in place of the one that was kept so before.

        Args:
          record: step, metric and score, of a step that is saved or will be next; from
            then on the workdir hands that one on, see `workdir.best`. Empty: none, so
            that the workdir hands on the newest.
        """
        self._best = record
        self._tidy()

    def save(
        self, step: int, state: TrainState, seconds: float, device_seconds: float = 0.0
    ) -> None:
        """Begins to save, after the previous save has ended.

        A failure, now or later, is printed and counted; `wait` and `demand` tell it.

        Args:
          step: optimiser steps taken.
          state: the whole state; it is copied before this returns.
          seconds: trained so far.
          device_seconds: the same, each start's times its devices.
        """
        self.wait()
        if step == self._last:
            return
        if self.failures and jax.process_index() == 0:
            leftovers.remove_unfinished(self._folder)
        self._last = step
        self._saving = Save(
            layout.path_of(self._workdir, step),
            _as_tree(state),
            self._about | {"seconds": seconds, "device_seconds": device_seconds},
            self._lack_of_disk(state),
            lambda reason: self._settle(step, reason),
        )

    def wait(self) -> str | None:
        """Waits for the save in progress; returns None or why the last one failed."""
        if self._saving is None:
            return None
        reason = self._saving.result()
        if reason is not None:
            self._last = self.latest  # The same step may be tried again.
        return reason

    def demand(self, step: int, doing: str) -> None:
        """Waits until a step is saved, because nothing comes after it.

        Args:
          step: optimiser steps taken, given to `save` before.
          doing: for the message: what ends here.

        Raises:
          UserError: it could not be saved.
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
        # Else the other processes wait for the reason, and a save may take minutes; this
        # process is about to end (distributed/multihost.py).

    def _settle(self, step: int, reason: str | None) -> None:
        """Ends a save, in its background: keeps what is to be kept, or says why not."""
        first = jax.process_index() == 0
        if reason is None:
            self.latest, self._good = step, time.monotonic()
            self._tidy()
            return
        self.failures += 1
        if first:
            ago = time.monotonic() - self._good
            print_error(
                f"error: the checkpoint of step {step} could not be saved ({reason}); "
                f"{self._remedy()}; training continues and the next save tries again; "
                f"{ago:.0f} s of training are not saved"
            )
            leftovers.remove_unfinished(self._folder, again_after=1.0)

    def _tidy(self) -> None:
        """Writes which checkpoint is best, once it is there, and removes old ones."""
        if jax.process_index() == 0:
            with self._tidying:  # A save may end meanwhile.
                self._write_best()
                self._remove_old()

    def _write_best(self) -> None:
        path, record = self._folder.parent / layout.BEST_FILE, self._best
        if layout.best(self._workdir) == record:
            return
        try:
            if not record:
                path.unlink(missing_ok=True)
            elif record["step"] in layout.steps(self._workdir):
                replace_text(path, json.dumps(record))
        except OSError as error:
            print_error(
                f"warning: {path} cannot be written ({describe_failure(error)}); the next "
                "save tries again"
            )

    def _remove_old(self) -> None:
        kept = layout.best(self._workdir).get("step")
        try:
            paths = [
                layout.path_of(self._workdir, s) for s in layout.steps(self._workdir)
            ]
            # One without checksums may be somebody else's.
            own = [path for path in paths if layout.has_checksums(path)]
            for path in own[: -self._keep.max_to_keep]:
                period = self._keep.keep_period
                step = int(path.name)
                if step != kept and not (period and step % period == 0):
                    leftovers.remove(path)
        except OSError as error:  # The next save tries again.
            print_error(
                f"warning: old checkpoints under {self._folder} could not be removed "
                f"({describe_failure(error)})"
            )

    def _lack_of_disk(self, state: TrainState) -> str | None:
        """Returns what is missing, the same on all processes, or None."""
        if "://" in str(self._folder):
            return None  # A bucket has no end.
        # The new checkpoint is whole before an old one goes.
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        places = (self._folder, *self._folder.parents)
        try:
            free = shutil.disk_usage(next(p for p in places if p.exists())).free
        except OSError:
            free = needed  # Let the save say what is the matter.
        free = int(meshes.process_allgather(free=free)["free"].min())
        if free >= needed:
            return None
        return f"not enough disk: it takes {_readable(needed)}, {_readable(free)} free"

    def _remedy(self) -> str:
        return f"{self.safe()}; free space or lower checkpoint.max_to_keep"

    def safe(self) -> str:
        """Returns which checkpoint is good, for a message."""
        if self.latest is None:
            return f"there is no checkpoint in {self._workdir}"
        return f"the checkpoint of step {self.latest} is safe in {self._workdir}"


def _as_tree(state: TrainState) -> dict:
    tree = {
        "step": state.step,
        "params": state.params,
        "opt_state": state.opt_state,
        "average": state.average,
        "extra": state.extra,
        "key": state.key,
    }
    return {name: value for name, value in tree.items() if value is not None}


def _readable(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


class Save:
    """Writes a checkpoint in the background, with checksums once all of it is there.

    Several processes write one checkpoint together, and Orbax lets each of them wait
    for the others. One whose disk fails does not come. So each leaves word how its own
    part went, process 0 says how the whole went, and a process whose part is waiting
    in vain is told. Its waiting thread is left behind, for up to 20 minutes.

    Args:
      path: folder of the checkpoint, which does not exist.
      tree: arrays to save; they are copied before this returns.
      about: metadata, for JSON.
      trouble: why nothing should be written, the same on all processes; or None.
      settled: called at the end in this process's background, with None or the reason.
    """

    def __init__(
        self,
        path: epath.Path,
        tree: dict,
        about: dict,
        trouble: str | None,
        settled: Callable[[str | None], None],
    ):
        self._path = path
        self._settled = settled
        self._reason = trouble
        self._board = f"vit_jax/saves/{next(_numbers)}"
        self._writing = concurrent.futures.Future()
        if trouble is None:
            try:
                if jax.process_index() == 0:
                    leftovers.begin(path)
                # Several processes compare their paths.
                with _context(), jax.transfer_guard("allow"):
                    response = ocp.save_async(path, tree, custom_metadata=about)
                _start(self._write, response)
            except Exception as error:  # noqa: BLE001 (whatever a disk may say)
                self._writing.set_exception(error)
        self._end = _start(self._finish)

    def result(self) -> str | None:
        """Waits, and returns None or why it failed: the same on all processes."""
        self._end.join()
        return self._reason

    def _write(self, response) -> None:
        try:
            self._writing.set_result(response.result())
        except BaseException as error:  # noqa: BLE001
            self._writing.set_exception(error)

    def _finish(self) -> None:
        if self._reason is None:
            if jax.process_count() == 1:
                self._reason = self._finish_alone()
            else:
                self._reason = self._finish_together()
        self._settled(self._reason)

    def _finish_alone(self) -> str | None:
        try:
            self._writing.result()
            layout.write_checksums(self._path, layout.compute_checksums(self._path))
            leftovers.end(self._path)
        except Exception as error:  # noqa: BLE001
            return describe_failure(error)
        return None

    def _finish_together(self) -> str | None:
        me, everyone = jax.process_index(), jax.process_count()
        failed, done = f"{self._board}/failed", f"{self._board}/done"
        while not self._writing.done() and not multihost.key_value_dir_get(failed):
            concurrent.futures.wait([self._writing], timeout=_LOOK_SECONDS)
        try:
            if self._writing.done():
                self._writing.result()
                part = layout.compute_checksums(self._path, me, everyone)
                multihost.key_value_set(f"{done}/{me}", json.dumps(part))
        except Exception as error:  # noqa: BLE001
            multihost.key_value_set(f"{failed}/{me}", describe_failure(error))
        if me == 0:
            while len(
                parts := multihost.key_value_dir_get(done)
            ) < everyone and not multihost.key_value_dir_get(failed):
                time.sleep(_LOOK_SECONDS)
            multihost.key_value_set(
                f"{self._board}/end/0", self._declare(parts, everyone)
            )
        while not (end := multihost.key_value_dir_get(f"{self._board}/end")):
            time.sleep(_LOOK_SECONDS)
        return end["0"] or None

    def _declare(self, parts: dict[str, str], everyone: int) -> str:
        for process, why in multihost.key_value_dir_get(
            f"{self._board}/failed"
        ).items():
            return f"process {process} of {everyone}: {why}"
        try:
            files = [json.loads(part) for part in parts.values()]
            layout.write_checksums(
                self._path, {k: v for part in files for k, v in part.items()}
            )
            leftovers.end(self._path)
        except Exception as error:  # noqa: BLE001 (a bucket's are no OSErrors)
            return f"process 0 of {everyone}: {describe_failure(error)}"
        return ""


def _context() -> ocp.Context:
    context = ocp.Context()
    # In this thread, where a disk that is read-only shows at once: else threads wait for
    # the folder, and hold up the end of this process for minutes. Of several processes,
    # all would wait here for the first; they leave such threads behind.
    several = jax.process_count() > 1
    context.asynchronous.create_directories_asynchronously = several
    # `path` does not exist; looking for it is another place to wait for each other.
    context.file.skip_sync_file_validations = True
    return context


def describe_failure(error: BaseException) -> str:
    """Returns a short reason why writing failed."""
    text = " ".join(str(error).split())
    # TensorStore names long paths before it comes to the point.
    code = re.search(r"os_error_code='(\d+)'", text)
    if code:
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return text[:300] or type(error).__name__


def _start(work: Callable, *args) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True, name="save")
    thread.start()
    return thread
