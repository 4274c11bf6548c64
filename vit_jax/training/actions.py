"""Callbacks of the loop that save, evaluate and record a trace after steps.

They are called on every host, in the order of the list in loop.py.
"""

import math
import os
import tempfile
from collections.abc import Iterable, Mapping

import jax
from etils import epath

from vit_jax.errors import UserError
from vit_jax.evaluators.metric_names import lower_is_better
from vit_jax.training.callbacks import Callback, Run
from vit_jax.training.config import TrainConfig
from vit_jax.training.run_report import flatten_scores
from vit_jax.training.train_setup import TrainSetup
from vit_jax.weights import checkpoint_folders as folders


class Interval:
    """Interval of an action: every `steps` steps, every `epochs` epochs, last step.

    0 steps or 0 epochs turn that interval off; the last step is always included.
    """

    def __init__(self, steps: int, epochs: float, setup: TrainSetup):
        intervals = steps, round(epochs * setup.length.steps_per_epoch)
        self._intervals = [i for i in intervals if i]
        self._total_steps = setup.total_steps

    def is_due(self, step: int) -> bool:
        """Returns whether the action is due after a step."""
        return step >= self._total_steps or any(not step % i for i in self._intervals)


class Saving(Callback):
    """Saves the state in the workdir."""

    on_every_host = True

    def begin(self, run: Run) -> None:
        self._run = run
        every = run.config.checkpoint_every_steps, run.config.checkpoint_every_epochs
        self._interval = Interval(*every, run.setup)

    def after_step(self, step: int) -> None:
        run = self._run
        if not self._interval.is_due(step):
            return
        run.metrics()  # Raises if they are not finite.
        with run.logger.pause("checkpoint"):
            run.save()
            run.notify("checkpoint", step)
            run.watchdog.reset(f"waiting for a save at step {step}")

    def finish(self) -> None:
        run = self._run
        if run.checkpoints.wait():  # The last save failed: try once more.
            run.save()
        run.watchdog.reset("the save of the last step")


class Evaluating(Callback):
    """Evaluates the state, keeps the best checkpoint and stops early."""

    on_every_host = True

    def __init__(self, config: TrainConfig, setup: TrainSetup):
        self._intervals, self._at_start = {}, config.eval_at_start
        for name, evaluation in config.evals.items():
            every = evaluation.every, evaluation.every_epochs
            if not any(every):
                every = config.eval_every_steps, config.eval_every_epochs
            self._intervals[name] = Interval(*every, setup)

    def begin(self, run: Run) -> None:
        self._run = run
        saved = [*folders.steps(run.workdir), run.start]
        self._best = BestCheckpoint(run.config, run.logger.history, saved)

    def catch_up(self) -> bool:
        """Runs the evaluations that are due at the start and not scored yet.

        They are those in which the previous start was interrupted, or, with
        `eval_at_start`, those of a new run. This is called after `begin` of all
        callbacks.

        Returns:
          Whether there were any.
        """
        run = self._run
        names = self._due(run.start)
        owed = not all(run.logger.has_scores(run.start, name) for name in names)
        if owed:
            if not self._evaluate(names):
                return owed
            self._best.update(run.start, run.final)
        run.checkpoints.keep_best(self._best.record)
        if self._best.record and self._best.step == run.start:
            run.save()  # The best state may be on local disks only.
        if self._best.is_exhausted:
            run.last_step = run.start
        return owed

    def after_step(self, step: int) -> None:
        run, best = self._run, self._best
        names = self._due(step)
        if not names:
            return
        run.metrics()
        with run.logger.pause("evaluation"):
            if not self._evaluate(names):
                return
            if best.update(step, run.final) or best.is_exhausted:
                run.checkpoints.keep_best(best.record)
                run.save()
                run.notify("checkpoint", step)
        if best.is_exhausted:
            run.last_step = step

    def finish(self) -> None:
        run, best, last = self._run, self._best, self._run.last_step
        metric = run.config.checkpoint.best_metric
        if run.start == last:
            run.logger.info(f"this run is finished ({last} steps): evaluating only")
        elif last < run.total_steps:
            run.logger.info(
                f"stopped early at step {last}/{run.total_steps}: "
                f"{run.config.early_stopping_evals} evaluations were no better by "
                f"{metric} than step {best.step}"
            )
        chosen = best.step if best.step in folders.steps(run.workdir) else last
        if chosen != best.step:  # There is no best step, or it could not be saved.
            run.checkpoints.keep_best({})
        elif best.record:
            run.best = best.record
        if chosen != last:
            run.checkpoints.demand(last, "the training is done")
            run.logger.info(
                f"restoring step {chosen}, the best by {metric} ({best.score:.4f})"
            )
            run.state = None  # The devices may not have memory for two states.
            run.state = run.checkpoints.load(chosen)
        # Whether all evaluations that are due at the end have run.
        scored = run.final and last == run.total_steps
        if chosen != last or (run.start == last and not scored):
            self._evaluate(self._due(run.total_steps), at=chosen)

    def _due(self, step: int) -> list[str]:
        """Returns the names of the evaluations to run after a step, or before step 1."""
        if not step:
            return list(self._intervals) if self._at_start else []
        return [name for name, each in self._intervals.items() if each.is_due(step)]

    def _evaluate(self, names: list[str], at: int | None = None) -> bool:
        """Evaluates the state and sets `run.final` to the scores.

        Args:
          names: names of the evaluations.
          at: step of the state; None: `run.step`.

        Returns:
          Whether the evaluations were completed. False if a signal was received; then
          `run.ending` is set.
        """
        run, state, suite = self._run, self._run.state, self._run.setup.suite
        step = run.step if at is None else at
        params = {"params": (state.params, state.extra)}
        if state.average is not None:
            params["ema"] = (state.average, state.extra)

        def stop():
            run.watchdog.reset(f"a part of the evaluation of step {step}")
            return run.preemption.reached()

        scores = suite.run(params, stop, names)
        if scores is None:
            run.ending = True
            return False
        run.logger.log_scores(step, scores, suite.confusions, suite.pictures)
        run.final = scores
        return True


class BestCheckpoint:
    """Follows `checkpoint.best_metric` over the evaluations of a run.

    The result depends only on the scores. So a resumed run, which reads earlier scores
    from metrics.jsonl, chooses and stops like a run that was never interrupted. Scores
    of step 0 are ignored, because no checkpoint has the weights before the first step.

    Args:
      config: complete config.
      history: lines of metrics.jsonl up to the first step of this start.
      saved: steps that are saved; other steps cannot be chosen.

    Attributes:
      step: number of steps taken at the best evaluation; 0 before the first.
      score: value of the metric at that step.
    """

    def __init__(
        self, config: TrainConfig, history: Iterable[Mapping], saved: Iterable[int]
    ):
        self._metric = config.checkpoint.best_metric
        self._patience = config.early_stopping_evals
        self.step, self.score = 0, math.nan
        self._last, self._since = 0, 0
        if not self._metric:
            return
        evaluation, self._name = self._metric.split("/", 1)
        # Commands that read the workdir load the averaged parameters.
        kind = "ema" if config.has_average else "params"
        self._prefix = f"{evaluation}/{kind}/"
        self._sign = -1 if lower_is_better(self._name) else 1
        saved = set(saved)
        for line in history:
            if self._prefix + self._name in line:
                score = line[self._prefix + self._name]
                self._take(line["step"], score, usable=line["step"] in saved)

    @property
    def record(self) -> dict:
        """Step, metric and score of the best evaluation; empty before the first."""
        if not self.step:
            return {}
        return {"step": self.step, "metric": self._metric, "score": self.score}

    @property
    def is_exhausted(self) -> bool:
        """Whether the last `early_stopping_evals` evaluations were no improvement."""
        return bool(self._patience) and self._since >= self._patience

    def update(self, step: int, scores: Mapping) -> bool:
        """Adds the scores after a step; returns whether they are the best so far.

        A second call for the same step is ignored, and so are scores without the
        evaluation of `checkpoint.best_metric`.

        Raises:
          UserError: the evaluation does not compute the metric.
        """
        if not self._metric or self._prefix.split("/")[0] not in scores:
            return False
        flat = flatten_scores(scores)
        name = self._prefix + self._name
        if name not in flat:
            prefix = self._prefix
            known = [n.removeprefix(prefix) for n in flat if n.startswith(prefix)]
            raise UserError(
                f"checkpoint.best_metric={self._metric!r}: this evaluation does not "
                f"compute {self._name!r}: choose one of {', '.join(known)}"
            )
        return self._take(step, flat[name])

    def _take(self, step: int, score: float, *, usable: bool = True) -> bool:
        if step <= self._last:
            return False
        self._last = step
        worse = self.step and not self._sign * score > self._sign * self.score
        if worse or not usable or not math.isfinite(score):
            self._since += 1
            return False
        self.step, self.score, self._since = step, score, 0
        return True


class Tracing(Callback):
    """Records a profiler trace of some steps; a context manager around the steps.

    The trace is written to `workdir/tensorboard/plugins/profile/steps_FIRST_to_LAST/`.
    Only the first process records: the others compute the same, and a trace of a pod
    would be too large to open.

    Raises:
      UserError: the run does not have these steps.
    """

    on_every_host = True

    def __init__(self, config: TrainConfig, setup: TrainSetup):
        steps = config.profile_steps
        self._first, self._last = steps if any(steps) else (0, 0)
        if self._last > setup.total_steps:
            raise UserError(
                f"profile_steps={steps}: the run has only {setup.total_steps} steps: set "
                f"it to steps from 1 to {setup.total_steps}"
            )
        self._recording, self._local = False, None

    def begin(self, run: Run) -> None:
        self._run, self._folder = run, epath.Path(run.workdir) / "tensorboard"
        if self._first and run.start >= self._first:
            run.logger.info(
                f"profile_steps={run.config.profile_steps}: no trace, because this start "
                f"begins after step {run.start}"
            )

    def after_step(self, step: int) -> None:
        if self._recording and step == self._last:
            with self._run.logger.pause():
                self._run.metrics()  # Waits until the device has computed the step.
                self._end()
            self._run.logger.info(
                f"trace of steps {self._first} to {self._last} under {self._folder}: "
                f"xprof --logdir={self._folder}"
            )
        self._begin_before(step + 1)

    def __enter__(self):
        self._begin_before(self._run.start + 1)
        return self

    def __exit__(self, *_) -> None:
        if self._recording:  # The run ends early; the trace so far may show why.
            self._end()

    def _begin_before(self, step: int) -> None:
        if step != self._first or jax.process_index():
            return
        options = jax.profiler.ProfileOptions()
        options.session_id = f"steps_{self._first}_to_{self._last}"
        folder = self._folder
        if "://" in str(folder):  # The profiler can write to disks only.
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
            target = self._folder / path.relative_to(here)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.copy(target)
        self._local.cleanup()
