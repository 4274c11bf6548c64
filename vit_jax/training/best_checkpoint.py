"""The best checkpoint of a run by the score of an evaluation, and early stopping."""

import math
from collections.abc import Iterable, Mapping

from vit_jax.errors import UserError
from vit_jax.training.config import TrainConfig
from vit_jax.training.run_report import flatten_scores


class BestCheckpoint:
    """Follows `checkpoint.best_metric` over the evaluations of a run.

    It is a function of the scores alone, so that a resumed run, which reads them from
    metrics.jsonl, chooses and stops as one that was never interrupted.

    Args:
      config: complete config.
      history: lines of metrics.jsonl, of the steps before this start and of its first.
      saved: steps that have a checkpoint. An earlier score whose checkpoint is lost
        cannot be chosen.

    Attributes:
      step: steps taken at the best evaluation; 0 if there was none.
      score: of that evaluation.
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
        # The average is what is handed on, if there is one.
        kind = "ema" if config.ema.decay else "params"
        self._prefix = f"{evaluation}/{kind}/"
        self._sign = -1 if lower_is_better(self._name) else 1
        saved = set(saved)
        for line in history:
            if self._prefix + self._name in line:
                score = line[self._prefix + self._name]
                self._take(line["step"], score, usable=line["step"] in saved)

    @property
    def record(self) -> dict:
        """Step, metric and score of the best evaluation; empty if there is none."""
        if not self.step:
            return {}
        return {"step": self.step, "metric": self._metric, "score": self.score}

    @property
    def is_exhausted(self) -> bool:
        """Whether `early_stopping_evals` evaluations in a row were no better."""
        return bool(self._patience) and self._since >= self._patience

    def update(self, step: int, scores: Mapping) -> bool:
        """Takes the scores after a step; returns whether they are the best so far.

        Args:
          step: steps taken; scores of the same step count once.
          scores: as of `Suite.run`; without the evaluation that decides they count not.

        Raises:
          UserError: that evaluation has no such metric.
        """
        if not self._metric or self._prefix.split("/")[0] not in scores:
            return False
        flat = flatten_scores(scores)
        name = self._prefix + self._name
        if name not in flat:
            known = [n.removeprefix(self._prefix) for n in flat]
            known = ", ".join(n for n, full in zip(known, flat) if full != n)
            raise UserError(
                f"checkpoint.best_metric={self._metric!r}: that evaluation gives {known}, "
                f"and no {self._name!r}"
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


def lower_is_better(metric: str) -> bool:
    """Returns whether the smallest value of a metric is best: of losses and errors."""
    return metric == "ece" or any(word in metric for word in ("loss", "error"))
