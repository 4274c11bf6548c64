"""Checkpoints of the whole training state, by Orbax: asynchronous and atomic."""

import os
import shutil
import time

import jax
from orbax.checkpoint import v1 as ocp

from vit_jax.config import fields
from vit_jax.data.fingerprint import fingerprint
from vit_jax.data.sources import Source
from vit_jax.errors import Interrupted, Preempted, UserError
from vit_jax.parallel import distributed
from vit_jax.training import leftovers, resuming, saving
from vit_jax.training.config import TrainConfig
from vit_jax.training.state import TrainState
from vit_jax.weights import workdir as layout


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
    ):
        self._workdir = workdir
        self._folder = layout.absolute(workdir) / layout.FOLDER
        self._keep, self._check = config.keep, config.data.check
        self._source, self.data = source, fingerprint(source)
        self._about = {
            "config": fields.to_json(config),
            "class_names": list(source.class_names),
            "examples": len(source),
            "data": self.data,
            layout.SUMMED: True,
        }
        self.failures = 0
        self._saving = None
        saving.silence_orbax()
        if jax.process_index() == 0:
            for line in leftovers.remove_unfinished(self._folder):
                resuming.say(f"warning: {line}")
        distributed.gather(removed=True)  # Before the others look.
        self.latest = max(layout.steps(workdir), default=None)
        self._last = self.latest  # Finished or under way.
        self._good = time.monotonic()  # When `latest` was saved, or this start began.

    def verify(self) -> list[str]:
        """Lets `latest` be the newest checkpoint that is intact; puts others aside.

        Returns:
          Notes on what is unusual about it.

        Raises:
          UserError: there are checkpoints, and none is intact.
        """
        self.latest, notes = resuming.newest_intact(self._workdir)
        self._last = self.latest
        return notes

    def restore(self, shapes: TrainState, shardings: TrainState) -> resuming.Restored:
        """Reads the latest checkpoint; `verify` comes before.

        Args:
          shapes: the state as `jax.eval_shape` gives it.
          shardings: of each of its arrays, whatever they were when it was saved.

        Returns:
          The state and what goes with it.

        Raises:
          UserError: the data set has changed since then, unless `data.check` is off.
        """
        step = self.latest
        path = layout.path_of(self._workdir, step)
        stored = ocp.metadata(path).custom_metadata
        notes = resuming.check_data(
            stored, self._about, self._source, self._workdir, check=self._check
        )
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            shardings,
        )
        tree = ocp.load(path, _as_tree(like))
        state = shapes.replace(**({"average": None} | tree))
        notes = [f"resume: step {step} of {self._workdir}", *notes]
        seconds = stored["seconds"]
        # Older checkpoints tell the seconds alone.
        devices = stored.get("device_seconds", seconds * jax.device_count())
        return resuming.Restored(state, step, seconds, devices, notes)

    def save(
        self, step: int, state: TrainState, seconds: float, device_seconds: float = 0.0
    ) -> None:
        """Begins to save, after the previous save has ended.

        A failure, now or later, is printed and counted; `wait` and `demand` tell it.

        Args:
          step: optimiser steps taken.
          state: to save; it is copied before this returns.
          seconds: trained so far.
          device_seconds: the same, each start's times its devices.
        """
        self.wait()
        if step == self._last:
            return
        if self.failures and jax.process_index() == 0:
            leftovers.remove_unfinished(self._folder)
        self._last = step
        self._saving = saving.Save(
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
        # process is about to end (parallel/together.py).

    def _settle(self, step: int, reason: str | None) -> None:
        """Ends a save, in its background: keeps what is to be kept, or says why not."""
        first = jax.process_index() == 0
        if reason is None:
            self.latest, self._good = step, time.monotonic()
            if first:
                self._remove_old()
            return
        self.failures += 1
        if first:
            ago = time.monotonic() - self._good
            resuming.say(
                f"error: the checkpoint of step {step} could not be saved ({reason}); "
                f"{self._remedy()}; training goes on and the next save tries again; "
                f"{ago:.0f} s of training are not saved"
            )
            leftovers.remove_unfinished(self._folder, again_after=1.0)

    def _remove_old(self) -> None:
        try:
            paths = [
                layout.path_of(self._workdir, s) for s in layout.steps(self._workdir)
            ]
            # One without checksums may be somebody else's.
            own = [path for path in paths if layout.has_checksums(path)]
            for path in own[: -self._keep.last]:
                if not (self._keep.every and int(path.name) % self._keep.every == 0):
                    leftovers.remove(path)
        except OSError as error:  # The next save tries again.
            resuming.say(
                f"warning: old checkpoints under {self._folder} could not be removed "
                f"({saving.reason(error)})"
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
        free = int(distributed.gather(free=free)["free"].min())
        if free >= needed:
            return None
        return f"not enough disk: it takes {_readable(needed)}, {_readable(free)} free"

    def _remedy(self) -> str:
        return f"{self.safe()}; free space or lower keep.last"

    def safe(self) -> str:
        """Says which checkpoint is good, for a message."""
        if self.latest is None:
            return f"there is no checkpoint in {self._workdir}"
        return f"the checkpoint of step {self.latest} is safe in {self._workdir}"


def _as_tree(state: TrainState) -> dict:
    tree = {
        "step": state.step,
        "params": state.params,
        "opt_state": state.opt_state,
        "average": state.average,
        "key": state.key,
    }
    return {name: value for name, value in tree.items() if value is not None}


def _readable(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
