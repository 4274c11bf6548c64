"""The object of a run, and the base class of callbacks that act after its steps.

The actions of the loop (actions.py, metric_logger.py), trackers and a user's callbacks
all derive from `Callback`. The loop itself treats them all in the same way.
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
    """A training run.

    A user's callback may read the attributes up to `state`. It must not keep arrays of
    the state, because the next step overwrites their memory. The attributes after
    `state` are for the actions of the loop.

    Attributes:
      config: complete config.
      workdir: folder of checkpoints and metrics.
      commit: commit of this code, see `run_report.commit`.
      start: number of steps taken by earlier starts; 0 for a new run.
      total_steps: number of steps of the whole run.
      num_parameters: number of parameters, including those of the task.
      step: number of steps taken.
      state: state after `step` steps; the device may still be computing it.
      last_step: step at which this start ends.
      setup: functions and data of the run.
      checkpoints, logger, clock, watchdog, preemption: helpers that the loop opened.
      callbacks: all callbacks, in the order in which they are called.
      notes: lines to be logged before the first step.
      final: scores of the newest evaluations.
      best: step, metric and score of the best checkpoint; empty without one.
      ending: whether to end the run after the callbacks, because a signal was received.
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
          *args: arguments of the method.
        """
        for each in self.callbacks:
            if each.on_every_host or jax.process_index() == 0:
                getattr(each, event)(*args)

    def take(self, step: int, state: object, metrics: dict[str, jax.Array]) -> None:
        """Stores the results of a step, and waits for the previous step.

        The device never waits for the host, because this step is already queued on it.
        """
        self.logger.step_started(metrics)
        self.metrics()
        self.step, self.state = step, state
        self._metrics, self._fetched = metrics, False

    def metrics(self) -> dict[str, float]:
        """Waits for the metrics of the last step and returns them.

        Raises:
          Diverged: a metric is not finite.
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
            self.checkpoints.wait()  # The save in progress has finite numbers.
            raise Diverged(
                f"training stopped at step {self.step}: {', '.join(bad)}; "
                f"{self.checkpoints.safe()}; lower optim.learning_rate or set "
                "optim.grad_clip_norm in another --workdir, or set debug_nans=True in "
                "this one to find the operation"
            )

    def save(self) -> None:
        """Begins to save the state, unless this step is saved already."""
        self.checkpoints.save(self.step, self.state, *self.clock.elapsed())


class Callback:
    """Base class of callbacks; its methods do nothing.

    With several hosts, a callback is called on process 0 only, unless `on_every_host`
    is True. An error in a callback ends the run; the next start resumes from the last
    checkpoint.

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
        """Called before the first step of a start."""

    def after_step(self, step: int) -> None:
        """Called when a step is queued on the device, which may still compute it."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with the metrics for `metrics.jsonl`, named like "train/loss"."""

    def evaluate(self, step: int, scores: Mapping[str, float]) -> None:
        """Called after evaluations, with scores named like "test/params/top1"."""

    def checkpoint(self, step: int) -> None:
        """Called when a save has begun, which continues in the background."""

    def finish(self) -> None:
        """Called after the last step, before the report is written."""

    def end(self, report: Mapping) -> None:
        """Called at the end of the run, with the report of `vit_jax.train`."""
