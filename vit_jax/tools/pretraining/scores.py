"""Compares the features of a run with those of the weights that it started from."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping

from etils import epath

from vit_jax.evaluators.metric_names import lower_is_better, text
from vit_jax.training.callbacks import Callback, Run
from vit_jax.training.config import TrainConfig

# Metrics that are compared beside `checkpoint.best_metric`, as EVALUATION/METRIC, and
# their names for a reader.
RANK = "rank/rankme"
COMPARED = {
    "knn/top1": "k-NN accuracy",
    "val/loss": "held-out loss",
    "val/teacher_entropy": "teacher's entropy",
    RANK: "rank of features (RankMe)",
}
# With fewer images than this, pretraining is expected to overfit.
FEW = 1_000
# Smallest relative difference that counts; smaller ones of ranks are rounding.
_LEAST = {RANK: 0.01}


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of a run's evaluations.

    Attributes:
      by_step: step to scores by EVALUATION/METRIC; step 0 is the start of the run.
      metric: the metric that chooses the checkpoint, as EVALUATION/METRIC.
    """

    by_step: Mapping[int, Mapping[str, float]]
    metric: str

    @property
    def is_compared(self) -> bool:
        """Whether `metric` has values before the first step and after a later one."""
        has = [self.metric in row for _, row in sorted(self.by_step.items())]
        return 0 in self.by_step and has[0] and any(has[1:])

    @property
    def start(self) -> float:
        """Value of `metric` before the first step."""
        return self.by_step[0][self.metric]

    @property
    def best(self) -> tuple[int, float]:
        """Step after which `metric` was best, and its value there."""
        later = [
            (step, row[self.metric])
            for step, row in self.by_step.items()
            if step and self.metric in row
        ]
        sign = 1 if lower_is_better(self.metric) else -1
        return min(later, key=lambda item: (sign * item[1], item[0]))

    @property
    def is_better(self) -> bool:
        """Whether the best checkpoint is better than the start."""
        sign = -1 if lower_is_better(self.metric) else 1
        least = _LEAST.get(self.metric, 0.0) * abs(self.start)
        return sign * (self.best[1] - self.start) > least


def read(workdir: str | os.PathLike, config: TrainConfig) -> Scores:
    """Reads the scores of a run from its workdir."""
    rows = {}
    lines = (epath.Path(workdir) / "metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        if compared := _compared(line, config):
            rows.setdefault(line["step"], {}).update(compared)
    return Scores(rows, config.checkpoint.best_metric)


def _compared(flat: Mapping[str, object], config: TrainConfig) -> dict[str, float]:
    """Returns the scores that are compared, without the name of the parameters."""
    kind = "ema" if config.has_average else "params"
    scores = {}
    for name in dict.fromkeys((*COMPARED, config.checkpoint.best_metric)):
        evaluation, _, metric = name.partition("/")
        if (key := f"{evaluation}/{kind}/{metric}") in flat:
            scores[name] = flat[key]
    return scores


class Follow(Callback):
    """Prints the scores of each evaluation beside those of the start."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say

    def begin(self, run: Run) -> None:
        self._config, self._start = run.config, {}
        if run.start:
            self._start = read(run.workdir, run.config).by_step.get(0, {})

    def evaluate(self, step: int, scores: Mapping[str, float]) -> None:
        compared = _compared(scores, self._config)
        if not step:
            self._start = compared
            return
        words = [
            f"{_title(name)} {_text(name, value)} (start {_text(name, before)})"
            for name, value in compared.items()
            if (before := self._start.get(name)) is not None
        ]
        if words:
            self._say(f"after {step} steps: {', '.join(words)}")


def conclusion(scores: Scores, count: int, *, started: bool) -> str:
    """Returns the line about the best checkpoint, compared with the start.

    Args:
      scores: scores of the run.
      count: number of training images.
      started: whether the run started from weights.
    """
    if not scores.metric:
        return "nothing is compared with the start: checkpoint.best_metric is empty"
    if not scores.is_compared:
        return (
            f"nothing is compared with the start: checkpoint.best_metric="
            f"{scores.metric!r} has no value there or none later (eval_at_start)"
        )
    step, best = scores.best
    name = _title(scores.metric)
    now, before = _text(scores.metric, best), _text(scores.metric, scores.start)
    if scores.is_better:
        line = f"{name} {now} after {step} steps, {before} before"
        # The loss falls also with a new decoder or projector only.
        rows = scores.by_step[step], scores.by_step[0]
        if scores.metric == "val/loss" and all(RANK in row for row in rows):
            now, before = (_text(RANK, row[RANK]) for row in rows)
            line += f"; {_title(RANK)} {now}, {before} before"
        return line
    begun = "the weights that it started from" if started else "random weights"
    line = (
        f"no checkpoint is better than {begun}: {name} {before} before, at best {now} "
        f"after {step} steps"
    )
    if count < FEW:
        instead = ", or use the weights as they are" if started else ""
        return f"{line}; {count:,} images are few: give more{instead}"
    return f"{line}; train for longer (--minutes), or at a lower rate"


def table(scores: Scores) -> list[str]:
    """Returns the scores by step as the lines of a table."""
    known = dict.fromkeys((*COMPARED, scores.metric))
    names = [n for n in known if any(n in row for row in scores.by_step.values())]
    rows = [["steps", *map(_title, names)]]
    for step, row in sorted(scores.by_step.items()):
        values = (_text(name, row[name]) if name in row else "" for name in names)
        rows.append([str(step) if step else "0 (start)", *values])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = lambda row: "  ".join(map(str.ljust, row, widths)).rstrip()
    return [line(row) for row in rows]


def _title(name: str) -> str:
    return COMPARED.get(name, name)


def _text(name: str, value: float) -> str:
    return text(name.split("/")[1], value)
