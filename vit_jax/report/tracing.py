"""A trace of a few steps, for xprof and TensorBoard."""

import contextlib
import os
import tempfile

import jax
from etils import epath

from vit_jax.errors import UserError

FOLDER = "tensorboard"  # Under the workdir, where the metrics are as well.


def check(steps: tuple[int, ...], total: int) -> None:
    """Raises UserError if a trace is asked for of steps that a run does not take.

    Args:
      steps: as for `Trace`.
      total: steps of the run.
    """
    if any(steps) and steps[1] > total:
        raise UserError(
            f"profile={steps} asks for a trace of steps that the run of {total} does not "
            f"take: set it to steps from 1 to {total}"
        )


class Trace:
    """Records what host and device do in some steps; use as a context manager.

    The trace lies in `workdir/tensorboard/plugins/profile/steps_FIRST_to_LAST/`. Only
    the first process records: the others compute the same, and a trace of a pod would
    be too large to open.

    Args:
      steps: first and last step; () or zeros record none.
      workdir: folder of the run.
      start: steps taken when this start begins.
      active: whether this process records.

    """

    def __init__(
        self,
        steps: tuple[int, ...],
        workdir: str | os.PathLike,
        start: int,
        *,
        active: bool,
    ):
        self._first, self._last = steps if any(steps) else (0, 0)
        self._place = epath.Path(workdir) / FOLDER
        self._recording = False
        self.note = ""
        if self._first and start >= self._first:
            self.note = (
                f"profile={steps}: this start begins after step {start}: no trace"
            )
            active = False
        self._active = active and bool(self._first)
        self._local = None

    def around(self, step: int) -> contextlib.AbstractContextManager:
        """Marks a step in the trace; the first one begins it."""
        if self._active and step == self._first:
            self._begin()
        if not self._recording:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def after(self, step: int, metrics: object) -> str:
        """Ends the trace after its last step.

        Args:
          step: that was given to the device.
          metrics: arrays of the step; they are there when it is done.

        Returns:
          Where the trace is, as a line, or "".
        """
        if not self._recording or step < self._last:
            return ""
        jax.block_until_ready(metrics)
        self._end()
        return (
            f"trace of steps {self._first} to {self._last} under {self._place}: "
            f"xprof --logdir={self._place}"
        )

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        if self._recording:  # The run ends early; what there is may tell why.
            self._end()

    def _begin(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.session_id = f"steps_{self._first}_to_{self._last}"
        folder = self._place
        if "://" in str(folder):  # The profiler writes to disks only.
            self._local = tempfile.TemporaryDirectory()
            folder = self._local.name
        jax.profiler.start_trace(os.fspath(folder), profiler_options=options)
        self._recording = True

    def _end(self) -> None:
        self._recording = False
        jax.profiler.stop_trace()
        if self._local is None:
            return
        here = epath.Path(self._local.name)
        for path in filter(epath.Path.is_file, here.rglob("*")):
            target = self._place / path.relative_to(here)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.copy(target)
        self._local.cleanup()
