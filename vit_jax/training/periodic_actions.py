"""What the loop does now and then: fetch metrics, run evaluations."""

import jax

from vit_jax.evaluators.suite import Suite
from vit_jax.training import guards
from vit_jax.training.checkpoint import Checkpointer
from vit_jax.training.config import TrainConfig
from vit_jax.training.guards import Preemption
from vit_jax.training.metric_logger import MetricLogger
from vit_jax.training.train_state import TrainState
from vit_jax.training.train_step import TrainSetup
from vit_jax.training.watchdog import Watchdog


class Interval:
    """Every so many steps or epochs, and the last step.

    Args:
      steps: interval in steps; 0 for none.
      epochs: second interval, in epochs; 0 for none.
      setup: gives the steps per epoch and in total.
    """

    def __init__(self, steps: int, epochs: float, setup: TrainSetup):
        intervals = steps, round(epochs * setup.steps_per_epoch)
        self._intervals = [i for i in intervals if i]
        self._total_steps = setup.total_steps

    def is_due(self, step: int) -> bool:
        """Returns whether to act after a step."""
        return step == self._total_steps or any(not step % i for i in self._intervals)


class PendingMetrics:
    """The metrics of the last step, which the device may still be computing.

    They are fetched when the next step is dispatched, so that the device never waits
    for the host.
    """

    def __init__(
        self, checkpoints: Checkpointer, logger: MetricLogger, watchdog: Watchdog
    ):
        self._checkpoints, self._logger = checkpoints, logger
        self._watchdog = watchdog
        self._pending: tuple[int, dict] | None = None

    def put(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Holds the metrics of a step that was dispatched, and fetches those before."""
        if self._pending:
            self.fetch()
        self._pending = step, metrics

    def fetch(self) -> dict[str, float]:
        """Waits for the metrics that are held.

        Raises:
          Diverged: one is not finite.
        """
        (step, metrics), self._pending = self._pending, None
        values = {name: float(v) for name, v in jax.device_get(metrics).items()}
        guards.check_finite(step, values, self._checkpoints)
        self._logger.step_done(step)
        self._watchdog.reset(f"step {step}", step=True)
        return values


class Evaluations:
    """Evaluates the parameters of a state, and logs the scores.

    Args:
      suite: evaluations of the config.
      config: complete config; the interval of evaluations without their own is read.
      setup: of the run.
      logger: takes the scores.
      preemption: asked before every batch.
      watchdog: reset before every batch.
    """

    def __init__(
        self,
        suite: Suite,
        config: TrainConfig,
        setup: TrainSetup,
        logger: MetricLogger,
        preemption: Preemption,
        watchdog: Watchdog,
    ):
        self._suite, self._setup = suite, setup
        self._every = config.eval_every_steps, config.eval_every_epochs
        self._logger, self._preemption = logger, preemption
        self._watchdog = watchdog

    def due(self, step: int) -> list[str]:
        """Returns the names of the evaluations to run after a step."""
        setup = self._setup
        return self._suite.due(
            step, *self._every, total=setup.total_steps, epoch=setup.steps_per_epoch
        )

    def is_pending(self, start: int) -> bool:
        """Returns whether the evaluations of the step to start from are to be made up for.

        A start before this one may have ended between a save and the scores.
        """
        return start > 0 and not all(
            self._logger.has_scores(start, name) for name in self.due(start)
        )

    def run(
        self, step: int, state: TrainState, *, due_at: int | None = None
    ) -> dict | None:
        """Runs the evaluations that are due after a step.

        Args:
          step: steps taken.
          state: after them.
          due_at: those that are due after another step, as the last, which has all.

        Returns:
          Scores as of `Suite.run`, of the parameters ("params") and of their moving
          average ("ema") if there is one; None if preemption interrupted them.
        """
        params = {"params": (state.params, state.extra)}
        if state.average is not None:
            params["ema"] = (state.average, state.extra)

        def stop():
            self._watchdog.reset(f"a part of the evaluation of step {step}")
            return self._preemption.reached()

        names = self.due(step if due_at is None else due_at)
        scores = self._suite.run(params, stop, names)
        if scores is not None:
            self._logger.log_scores(
                step, scores, self._suite.confusions, self._suite.pictures
            )
        return scores
