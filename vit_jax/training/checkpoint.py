"""Checkpoints of the whole training state, by Orbax: asynchronous and atomic."""

import logging
import os
import pathlib
import re
import shutil

import jax
from ml_collections import ConfigDict
from orbax.checkpoint import v1 as ocp

from vit_jax import config as configuration
from vit_jax.data.sources import Source
from vit_jax.errors import Preempted, UserError
from vit_jax.training.state import TrainState
from vit_jax.weights import workdir as layout

_policies = ocp.training.preservation_policies


class Checkpointer:
    """Saves and restores the state of one run under `workdir/checkpoints`.

    A save that is killed leaves a temporary folder, which the next start removes; the
    step before it stays the latest. Use as a context manager: leaving it waits for the
    save in progress.

    Args:
      workdir: folder of the run.
      config: complete config; goes with every checkpoint.
      source: training split; its size and class names go with every checkpoint.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        config: ConfigDict,
        source: Source,
    ):
        self._workdir = workdir
        self._folder = layout.absolute(workdir) / layout.FOLDER
        self._about = {
            "config": configuration.to_json(config),
            "class_names": list(source.class_names),
            "examples": len(source),
        }
        self._saving = None
        self._last = self.latest  # Finished or under way.
        logging.getLogger("absl").addFilter(_not_of_a_failed_save)
        keep = [_policies.LatestN(config.keep.last)]
        if config.keep.every:
            keep.append(_policies.EveryNSteps(config.keep.every))
        self._orbax = ocp.training.Checkpointer(
            self._folder,
            # The loop says when: at its interval, at the end and on preemption.
            save_decision_policy=ocp.training.save_decision_policies.AnySavePolicy([]),
            preservation_policy=_policies.AnyPreservationPolicy(keep),
            cleanup_tmp_directories=True,
        )

    @property
    def latest(self) -> int | None:
        """The newest finished step, or None."""
        # From the disk: Orbax counts a save as soon as it begins.
        return max(layout.steps(self._workdir), default=None)

    def restore(
        self, shapes: TrainState, shardings: TrainState
    ) -> tuple[TrainState, float]:
        """Reads the latest checkpoint.

        Args:
          shapes: the state as `jax.eval_shape` gives it.
          shardings: of each of its arrays, whatever they were when it was saved.

        Returns:
          The state, and the seconds that had been trained when it was saved.

        Raises:
          UserError: the data set has changed since then.
        """
        latest = self.latest  # Each look lists the folder.
        stored = self._orbax.metadata(latest).custom_metadata
        for key, what in (("examples", "images"), ("class_names", "classes")):
            if stored[key] != self._about[key]:
                raise UserError(
                    f"the training split has changed since {self._workdir} was begun: "
                    f"{what} were {stored[key]}, now {self._about[key]}; restore the "
                    "data, or begin anew in another --workdir with --config.init="
                    f"{self._workdir}"
                )
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            shardings,
        )
        tree = self._orbax.load(latest, _as_tree(like))
        return shapes.replace(**({"average": None} | tree)), stored["seconds"]

    def save(self, step: int, state: TrainState, seconds: float) -> None:
        """Begins to save, after the previous save has ended.

        Args:
          step: optimiser steps taken.
          state: to save; it is copied before this returns.
          seconds: trained so far.

        Raises:
          UserError: there is not enough disk, before or while writing.
        """
        self.wait()
        if step == self._last:
            return
        self._check_disk(state)
        try:
            self._saving = self._orbax.save_async(
                step,
                _as_tree(state),
                force=True,
                custom_metadata=self._about | {"seconds": seconds},
            )
            self._last = step
        except OSError as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Waits for the save in progress.

        Raises:
          UserError: it failed.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.result()
        except Exception as error:
            raise self._failed(error) from error

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        orderly = error is None or isinstance(error, Preempted)
        if not orderly and jax.process_count() > 1:
            # The other processes wait for the reason, and a save may take minutes; this
            # process is about to end (parallel/together.py).
            return
        try:
            try:
                self.wait()
            finally:
                self._close()
        except UserError:
            if error is None:
                raise

    def _close(self) -> None:
        try:
            self._orbax.close()
        except Exception as error:  # It raises a failed save once more.
            raise self._failed(error) from error

    def _check_disk(self, state: TrainState) -> None:
        if "://" in str(self._folder):
            return  # A bucket has no end.
        # The new checkpoint is whole before an old one goes.
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise UserError(
                f"not enough disk to save a checkpoint: it takes {_readable(needed)}, "
                f"{self._folder} has {_readable(free)} free; {self._remedy()}"
            )

    def _failed(self, error: BaseException) -> UserError:
        reason = " ".join(str(error).split())
        # TensorStore names long paths before it comes to the point.
        code = re.search(r"os_error_code='(\d+)'", reason)
        reason = os.strerror(int(code[1])) if code else reason[:300]
        return UserError(
            f"the checkpoint could not be saved under {self._folder} ({reason}); "
            f"{self._remedy()}"
        )

    def _remedy(self) -> str:
        return f"{self.safe()}: free space or lower keep.last, then start again"

    def safe(self) -> str:
        """Says which checkpoint is good, for a message."""
        latest = self.latest
        if latest is None:
            return "no checkpoint was saved before"
        return f"the checkpoint of step {latest} is safe in {self._workdir}"


def check_workdir(workdir: str | os.PathLike, config: ConfigDict) -> None:
    """Refuses a workdir that cannot be written or holds a run of another config.

    Raises:
      UserError: with what stands in the way, or the keys that differ.
    """
    _check_writable(workdir)
    if not layout.has_checkpoint(workdir):
        return
    stored = layout.read_config(workdir)
    changed = [
        line
        for line in configuration.differences(stored, configuration.to_json(config))
        if not line.startswith(_MAY_CHANGE)
    ]
    if changed:
        raise UserError(
            f"{workdir} holds a run of another config ({'; '.join(changed[:6])}): "
            "choose another --workdir, or state the same config"
        )


def _check_writable(workdir: str | os.PathLike) -> None:
    if "://" in str(workdir):
        return  # A bucket tells when it is written.
    path = pathlib.Path(workdir).absolute()
    there = next(p for p in (path, *path.parents) if os.path.lexists(p))
    if not there.is_dir():
        raise UserError(
            f"--workdir={workdir}: {there} is a file, not a folder: choose another "
            "--workdir"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"--workdir={workdir}: {there} cannot be written: choose another --workdir "
            "or change its permissions"
        )


# What may differ between the parts of one run: it does not touch the result.
_MAY_CHANGE = (
    "every.",
    "keep.",
    "mesh.",
    "sharding.",
    "evals.",
    "optim.accumulate",
    "debug_nans",
    "init:",
    "data.data_dir",
    "data.workers",
    "data.threads",
    "data.prefetch",
)


def _as_tree(state: TrainState) -> dict:
    tree = {
        "step": state.step,
        "params": state.params,
        "opt_state": state.opt_state,
        "average": state.average,
        "key": state.key,
    }
    return {name: value for name, value in tree.items() if value is not None}


def _not_of_a_failed_save(record: logging.LogRecord) -> bool:
    """Drops the tracebacks that Orbax's threads log: `wait` raises the error."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def _readable(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
