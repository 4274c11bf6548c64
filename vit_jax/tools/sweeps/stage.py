"""A stage of a sweep: trials on validation images, then final runs with the best.

A transfer is one stage, VTAB-1k has one per task, and a study one or more per point.
Finished runs are not repeated, so that a killed sweep resumes when it is started again.
"""

import dataclasses
import numbers
import os
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence

from vit_jax.command_line import progress
from vit_jax.config import fields
from vit_jax.errors import UserError
from vit_jax.evaluators.metric_names import lower_is_better
from vit_jax.tools.sweeps import runs
from vit_jax.tools.sweeps.runs import say
from vit_jax.training import run_report
from vit_jax.training.config import TrainConfig
from vit_jax.training.sweep import SweepSetups

Choice = Mapping[str, object]  # Values by dotted config key.


@dataclasses.dataclass(frozen=True)
class Stage:
    """Values to choose from, and the runs with the best of them.

    Attributes:
      workdir: folder of the sweep.
      grid: combinations to choose from; the first is chosen in case of a tie.
      tune_by: "EVALUATION/METRIC" of the trials, which chooses.
      seeds: seeds of the final runs.
      final: function from a combination and a seed to the folder in the workdir and the
        complete config of a final run.
      trial: function from a combination to folder and config of its trial; if None, the
        final run with the first seed is the trial.
      keep: whether final runs keep their last checkpoint.
      measure: function that trains, with the interface of `runs.train`.
    """

    workdir: str | os.PathLike
    grid: Sequence[Choice]
    tune_by: str
    seeds: Sequence[int]
    final: Callable[[Choice, int], tuple[str, TrainConfig]]
    trial: Callable[[Choice], tuple[str, TrainConfig]] | None = None
    keep: bool = True
    measure: Callable[..., dict] = runs.train

    def trials(self, shared: SweepSetups) -> Iterator[dict]:
        """Yields the trial of each combination; none if there is only one combination.

        A trial has the keys of a run (see `finals`) except "final"; and its "score",
        None if it diverged.
        """
        if len(self.grid) == 1:
            return
        trial = self.trial or (lambda choice: self.final(choice, self.seeds[0]))
        keep = self.keep and not self.trial
        for number, choice in enumerate(
            progress.each(self.grid, "trials", "runs", leave=False), 1
        ):
            say(f"trial {number} of {len(self.grid)}: {words(choice)}")
            run = self._train(choice, *trial(choice), shared, keep=keep)
            final = run.pop("final", None)
            score = None if final is None else score_of(final, self.tune_by)
            yield run | {"score": score}

    def choose(self, trials: Sequence[dict]) -> dict | None:
        """Returns the best trial; None if all diverged. Deletes other checkpoints.

        Without trials, the result has only the "choice".
        """
        if not trials:
            if only := words(self.grid[0]):
                say(f"{only} is the only one: nothing to choose")
            return {"choice": self.grid[0]}
        say(_table(trials))
        done = [trial for trial in trials if trial["score"] is not None]
        if not done:
            return None
        sign = -1 if lower_is_better(self.tune_by) else 1
        best = max(done, key=lambda trial: sign * trial["score"])
        if not self.trial:
            for trial in trials:
                if trial is not best:
                    runs.drop_checkpoints(os.path.join(self.workdir, trial["folder"]))
        say(_on_choice(best, trials, self.tune_by))
        return best

    def finals(self, choice: Choice, shared: SweepSetups) -> Iterator[dict]:
        """Yields the run of a combination with each seed.

        A run has its "choice", "seed" and "folder", and the content of its report; or
        the reason why it "diverged".
        """
        for number, seed in enumerate(
            progress.each(self.seeds, "final runs", "runs", leave=False), 1
        ):
            text = ", ".join(filter(None, (words(choice), f"seed {seed}")))
            say(f"final run {number} of {len(self.seeds)}: {text}")
            yield self._train(choice, *self.final(choice, seed), shared, keep=self.keep)

    def _train(
        self,
        choice: Choice,
        folder: str,
        config: TrainConfig,
        shared: SweepSetups,
        *,
        keep: bool,
    ) -> dict:
        path = os.path.join(self.workdir, folder)
        report = self.measure(config, path, shared, keep=keep)
        run = {"choice": dict(choice), "seed": config.seed, "folder": folder}
        if "diverged" in report:
            say(f"{folder} diverged: {report['diverged']}")
            return run | {"diverged": report["diverged"]}
        return run | {
            "variant": report["variant"],
            "dataset": report["dataset"],
            "steps": report["steps"],
            "seconds": report["wall_seconds"],
            "start_seconds": sum(report.get("startup", {}).values()),
            "compute": report.get("compute"),
            "final": report["final"],
        }


def words(choice: Choice) -> str:
    """Returns a combination as text: "learning_rate=0.001"."""
    return ",".join(f"{key.rpartition('.')[2]}={v}" for key, v in choice.items())


def file_name(text: str) -> str:
    """Returns a text as the name of a folder; different texts have different names."""
    return urllib.parse.quote(text, safe="=,+")


def score_of(final: Mapping[str, dict], path: str) -> float:
    """Returns a score of a run.

    Args:
      final: value by evaluation, parameters and metric, from the run's report.
      path: "EVALUATION/METRIC", for averaged parameters if the run has them, or
        "EVALUATION/params/METRIC" or "EVALUATION/ema/METRIC".

    Raises:
      UserError: the run does not have the score; the message lists the existing ones.
    """
    evaluation, *parameters, metric = path.split("/")
    kinds = final.get(evaluation, {})
    scores = (
        kinds.get(parameters[0], {})
        if parameters
        else run_report.quoted_scores(kinds)[1]
    )
    if metric not in scores:
        known = {name for metrics in kinds.values() for name in metrics}
        raise UserError(
            f"the study scores {path!r}, but {evaluation} has "
            f"{', '.join(sorted(known)) or 'no scores'}"
        )
    return scores[metric]


def _on_choice(best: dict, trials: Sequence[dict], metric: str) -> str:
    """Returns a line about the choice, with ties and values at an edge of the grid."""
    text = f"{words(best['choice'])} is best by {metric}: {best['score']:.4g}"
    tied = [
        words(trial["choice"])
        for trial in trials
        if trial["score"] == best["score"] and trial is not best
    ]
    if tied:
        text += f"; tied with {', '.join(tied)}, the first is chosen"
    for key, value in best["choice"].items():
        if not fields.is_number(value, numbers.Real):
            continue
        tried = sorted({trial["choice"][key] for trial in trials})
        if len(tried) > 1 and value in (tried[0], tried[-1]):
            side = "below" if value == tried[0] else "above"
            text += (
                f"; warning: a better {key} may lie {side} {value:g}: try more values, "
                "in another --workdir"
            )
    return text


def _table(trials: Sequence[dict]) -> str:
    rows = [trial | {"trial": words(trial["choice"])} for trial in trials]
    formats = {"trial": "", "steps": "d", "score": ".4g"}
    return runs.format_table(rows, formats | {"seconds": ".1f", "start_seconds": ".1f"})
