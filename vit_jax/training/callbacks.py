"""What happens beside the training steps: a run, and the protocol of what acts on it.

The actions of the loop (actions.py, metric_logger.py), trackers and a user's callbacks are
all a `Callback`. The loop does not know which there are.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import jax

from vit_jax.errors import Diverged

if TYPE_CHECKING:  # These modules import the trackers, which are callbacks.
    import vit_jax.training.checkpoint
    import vit_jax.training.config
    import vit_jax.training.guards
    import vit_jax.training.metric_logger
    import vit_jax.training.timers
    import vit_jax.training.train_setup
    import vit_jax.training.train_state


@dataclasses.dataclass(kw_only=True)
class Run:
    """A run that trains.

    A callback reads the attributes up to `state`, and keeps no array: the next step
    overwrites its memory. The others serve the actions of the loop.

    Attributes:
      config: complete config.
      workdir: folder of checkpoints and metrics.
      commit: of this code, see `run_report.commit`.
      start: steps taken by earlier starts, 0 unless the run resumes.
      total_steps: steps of the whole run.
      num_parameters: number of parameters, those of the task included.
      step: steps taken.
      state: state after them; the device may still be computing it.
      last_step: step at which this start ends.
      setup: functions and data of the run.
      checkpoints, logger, clock, watchdog, preemption: helpers that the loop opened.
      callbacks: all callbacks, in the order in which they are called.
      notes: lines for the user from before the first step.
      final: scores of the newest evaluations.
      best: step, metric and score of the best checkpoint; empty without one.
      ending: whether a signal ends the run when all callbacks have been called.
    """

    config: "vit_jax.training.config.TrainConfig"
    workdir: str
    commit: str | None
    start: int
    total_steps: int
    num_parameters: int
    step: int
    state: "vit_jax.training.train_state.TrainState"
    last_step: int
    setup: "vit_jax.training.train_setup.TrainSetup"
    checkpoints: "vit_jax.training.checkpoint.Checkpointer"
    logger: "vit_jax.training.metric_logger.MetricLogger"
    clock: "vit_jax.training.timers.RunClock"
    watchdog: "vit_jax.training.guards.Watchdog"
    preemption: "vit_jax.training.guards.Preemption"
    callbacks: Sequence["Callback"]
    notes: list[str]
    final: dict = dataclasses.field(default_factory=dict)
    best: dict = dataclasses.field(default_factory=dict)
    ending: bool = False
    _metrics: dict = dataclasses.field(default_factory=dict)
    _fetched: bool = True

    def notify(self, event: str, *args) -> None:
        """Calls a method of every callback that runs on this process.

        Args:
          event: method of `Callback`.
          *args: its arguments.
        """
        for each in self.callbacks:
            if each.on_every_host or jax.process_index() == 0:
                getattr(each, event)(*args)

    def take(self, step: int, state: object, metrics: dict[str, jax.Array]) -> None:
        """Takes what a step returned, and waits for the step before it.

        The device never waits for the host: it has the next step already.
        """
        self.logger.step_started(metrics)
        self.metrics()
        self.step, self.state = step, state
        self._metrics, self._fetched = metrics, False

    def metrics(self) -> dict[str, float]:
        """Waits for the metrics of the last step and returns them.

        Raises:
          Diverged: one is not finite.
        """
        if not self._fetched:
            values = jax.device_get(self._metrics)
            self._metrics = {name: float(value) for name, value in values.items()}
            self._fetched = True
            self._check_finite()
            self.logger.step_done(self.step)
            self.watchdog.reset(f"step {self.step}", step=True)
        return self._metrics

    def _check_finite(self) -> None:
        metrics = self._metrics.items()
        bad = [f"{name}={x}" for name, x in metrics if not math.isfinite(x)]
        if bad:
            self.checkpoints.wait()  # The one in progress has finite numbers.
            raise Diverged(
                f"training stopped at step {self.step}: {', '.join(bad)}; "
                f"{self.checkpoints.safe()}; lower optim.learning_rate or set "
                "optim.grad_clip_norm in another --workdir, or set debug_nans=True here "
                "to name the operation"
            )

    def save(self) -> None:
        """Begins to save the state, unless this step is saved."""
        self.checkpoints.save(self.step, self.state, *self.clock.elapsed())


class Callback:
    """Base of callbacks, whose methods do nothing.

    With several hosts, callbacks are called on process 0 alone unless `on_every_host`. An
    error that one raises ends the run; the next start resumes from the last checkpoint.

    Example:
      >>> import vit_jax
      >>> class Best(vit_jax.Callback):
      ...     top1 = 0.0
      ...
      ...     def evaluate(self, step, scores):
      ...         self.top1 = max(self.top1, scores["test/params/top1"])
      >>> best = Best()
      >>> best.evaluate(10, {"test/params/top1": 0.5})
      >>> best.top1
      0.5
    """

    on_every_host: ClassVar[bool] = False

    def begin(self, run: Run) -> None:
        """Is called before the first step of a start."""

    def after_step(self, step: int) -> None:
        """Is called when the device has received step `step`, and may be computing it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Is called with what `metrics.jsonl` gets after a step, named as "train/loss"."""

    def evaluate(self, step: int, scores: Mapping[str, float]) -> None:
        """Is called after evaluations, with scores named as "test/params/top1"."""

    def checkpoint(self, step: int) -> None:
        """Is called when a save has begun, which continues while the run does."""

    def finish(self) -> None:
        """Is called after the last step, before the report is made."""

    def end(self, report: Mapping) -> None:
        """Is called when the run is done, with what `vit_jax.train` returns."""
