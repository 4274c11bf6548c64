"""What happens beside the training steps: a run, and the protocol of what acts on it.

The loop's own actions (actions.py, metric_logger.py), trackers and a user's callbacks are
all a `Callback`. The loop does not know which there are.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import jax

from vit_jax.errors import Diverged


@dataclasses.dataclass(kw_only=True)
class Run:
    """A run that trains.

    A callback reads the attributes up to `state`, and keeps no array: the next step
    overwrites its memory. The others serve the loop's own actions.

    Attributes:
      config: complete config, a `TrainConfig`.
      workdir: folder of checkpoints and metrics.
      start: steps that were taken before, 0 unless the run resumes.
      total_steps: steps of the whole run.
      num_parameters: of the network and what its task has beside it.
      step: steps taken.
      state: the `TrainState` after them; the device may still be computing it.
      last_step: at which this start ends.
      setup: the `TrainSetup`.
      checkpoints, logger, clock, watchdog, preemption: of the run.
      callbacks: all of them.
      notes: lines for the user, of what was found before the first step.
      final: scores of the newest evaluations.
      best: step, metric and score of the checkpoint that is handed on; may be empty.
    """

    # The modules of these classes import the trackers, which are callbacks.
    config: Any
    workdir: str
    start: int
    total_steps: int
    num_parameters: int
    step: int
    state: Any
    last_step: int
    setup: Any
    checkpoints: Any
    logger: Any
    clock: Any
    watchdog: Any
    preemption: Any
    callbacks: "Callbacks"
    notes: list[str]
    final: dict = dataclasses.field(default_factory=dict)
    best: dict = dataclasses.field(default_factory=dict)
    _metrics: dict = dataclasses.field(default_factory=dict)
    _fetched: bool = True

    def take(self, step: int, state: Any, metrics: dict[str, jax.Array]) -> None:
        """Takes what a step returned, and waits for the step before it.

        The device never waits for the host: it has the next step already.
        """
        self.logger.step_started(metrics)
        self.metrics()
        self.step, self.state = step, state
        self._metrics, self._fetched = metrics, False

    def metrics(self) -> dict[str, float]:
        """Waits for the metrics of the last step.

        Raises:
          Diverged: one is not finite.
        """
        if not self._fetched:
            found = jax.device_get(self._metrics)
            self._metrics = {name: float(v) for name, v in found.items()}
            self._fetched = True
            self._check_finite()
            self.logger.step_done(self.step)
            self.watchdog.reset(f"step {self.step}", step=True)
        return self._metrics

    def _check_finite(self) -> None:
        bad = {
            k: value for k, value in self._metrics.items() if not math.isfinite(value)
        }
        if bad:
            self.checkpoints.wait()  # The one under way is of finite numbers.
            what = ", ".join(f"{name}={value}" for name, value in bad.items())
            raise Diverged(
                f"training stopped at step {self.step}: {what}; "
                f"{self.checkpoints.safe()}; lower optim.learning_rate or set "
                "optim.grad_clip_norm in another --workdir, or set debug_nans=True here "
                "to name the operation"
            )

    def save(self) -> None:
        """Begins to save the state, unless this step is saved."""
        state = self.setup.to_disk(self.state)
        self.checkpoints.save(self.step, state, *self.clock.elapsed())


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
        """Is called before the first step of a start.

        Args:
          run: what begins.
        """

    def after_step(self, step: int) -> None:
        """Is called after every step is given to the device, which may be computing it.

        Args:
          step: steps taken.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Is called with what `metrics.jsonl` gets of a step.

        Args:
          step: steps taken.
          metrics: by name, as "train/loss".
        """

    def evaluate(self, step: int, scores: Mapping[str, float]) -> None:
        """Is called after evaluations.

        Args:
          step: steps taken.
          scores: by name, as "test/params/top1".
        """

    def checkpoint(self, step: int) -> None:
        """Is called when a save has begun, which continues while the run does.

        Args:
          step: steps taken.
        """

    def finish(self) -> None:
        """Is called after the last step, before the report is made."""

    def end(self, report: Mapping) -> None:
        """Is called when the run is done.

        Args:
          report: what `vit_jax.train` returns.
        """


class Callbacks(Callback):
    """Calls callbacks one after another, those that this process has to call.

    Args:
      callbacks: to call.
    """

    def __init__(self, callbacks: Iterable[Callback]):
        first = jax.process_index() == 0
        self._callbacks = [each for each in callbacks if first or each.on_every_host]

    def begin(self, run: Run) -> None:
        for each in self._callbacks:
            each.begin(run)

    def after_step(self, step: int) -> None:
        for each in self._callbacks:
            each.after_step(step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for each in self._callbacks:
            each.log(step, dict(metrics))

    def evaluate(self, step: int, scores: Mapping[str, float]) -> None:
        for each in self._callbacks:
            each.evaluate(step, dict(scores))

    def checkpoint(self, step: int) -> None:
        for each in self._callbacks:
            each.checkpoint(step)

    def finish(self) -> None:
        for each in self._callbacks:
            each.finish()

    def end(self, report: Mapping) -> None:
        for each in self._callbacks:
            each.end(report)
