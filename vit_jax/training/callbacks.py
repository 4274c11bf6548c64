"""Callbacks: what else happens when a run begins, logs, evaluates, saves and ends."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import jax


@dataclasses.dataclass(frozen=True)
class Run:
    """What a callback is told of the run that begins.

    Attributes:
      config: complete config, a `TrainConfig`.
      workdir: folder of checkpoints and metrics.
      start: steps that were taken before, 0 unless the run resumes.
      total_steps: steps of the whole run.
      num_parameters: of the network and what its task has beside it.
    """

    config: Any  # The module of TrainConfig imports the trackers, which are callbacks.
    workdir: str
    start: int
    total_steps: int
    num_parameters: int


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

    def end(self, report: Mapping) -> None:
        """Is called when the run is done.

        Args:
          report: what `vit_jax.train` returns.
        """


class Callbacks(Callback):
    """Calls callbacks one after another, those that this process has to call.

    Args:
      tracker: `config.tracker`, whose callback is the first of process 0.
      callbacks: to call.
    """

    def __init__(self, tracker: Any, callbacks: Iterable[Callback] = ()):
        first = jax.process_index() == 0
        self._callbacks = [tracker.callback()] if first else []
        self._callbacks += [each for each in callbacks if first or each.on_every_host]

    def begin(self, run: Run) -> None:
        for each in self._callbacks:
            each.begin(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for each in self._callbacks:
            each.log(step, dict(metrics))

    def evaluate(self, step: int, scores: Mapping[str, float]) -> None:
        for each in self._callbacks:
            each.evaluate(step, dict(scores))

    def checkpoint(self, step: int) -> None:
        for each in self._callbacks:
            each.checkpoint(step)

    def end(self, report: Mapping) -> None:
        for each in self._callbacks:
            each.end(report)
