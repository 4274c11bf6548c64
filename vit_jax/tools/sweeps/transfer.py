"""Fine-tuning with a sweep of learning rates, as in the paper.

The rate is chosen on a held-out part of train. Runs on all of train at the best rate,
with several seeds, are then each scored once on test (arXiv:2010.11929, section 4.1 and
table 4).
A killed sweep resumes when it is started again.
"""

import dataclasses
import os
import statistics
from collections.abc import Sequence

from etils import epath

from vit_jax import progress
from vit_jax.data.sources.open import opened_by
from vit_jax.errors import UserError
from vit_jax.tools.sweeps import runs
from vit_jax.tools.sweeps.fine_tuning import TransferTask, check_feasible
from vit_jax.tools.sweeps.runs import TestSplitGuard, say
from vit_jax.training import lock
from vit_jax.training.sweep import SweepSetups

FILE = "transfer.json"
_TRIALS = {"learning_rate": "g", "steps": "d", "score": ".2%"}
_TRIALS |= {"seconds": ".1f", "start_seconds": ".1f"}
_RUNS = {"seed": "d", "top1": ".2%", "seconds": ".1f"}


@dataclasses.dataclass(frozen=True)
class Study:
    """One checkpoint fine-tuned on one data set.

    Attributes:
      model: name or path of the checkpoint.
      task: data set and configs of the runs.
      workdir: folder of the study.
      seeds: number of final runs.
    """

    model: str
    task: TransferTask
    workdir: str | os.PathLike
    seeds: int = 3

    def run(self, shared: SweepSetups | None = None) -> dict:
        """Runs what is not done yet, and writes `transfer.json`.

        Args:
          shared: compiled step and evaluations to share with other studies.

        Returns:
          The content of transfer.json: trials, best, runs, mean, std and more.

        Raises:
          UserError: the workdir holds another study, all rates or a final run diverged,
            or a run is invalid (see `loop.train`).
          Preempted: SIGTERM came; the same command resumes.
        """
        with lock.held(self.workdir):
            return self._run(shared or SweepSetups())

    def _run(self, shared: SweepSetups) -> dict:
        task = self.task
        check_feasible(task)
        runs.check_command(self.workdir, self._command())
        for note in task.notes:
            say(note)
        guard = TestSplitGuard(task.recipe.test)
        with opened_by(guard):
            trials = self._choose(shared) if len(task.rates) > 1 else []
            best = choose(trials) if trials else {"learning_rate": task.rates[0]}
            say(on_choice(best, trials, task))
            guard.release()
            finals = self._test(best["learning_rate"], shared)
        scores = [run["top1"] for run in finals]
        report = {
            "kind": "transfer",
            "model": self.model,
            "variant": task.config.model.variant,
            "dataset": task.recipe.title,
            "resolution": list(task.config.data.image_size),
            "mode": task.mode,
            "layer_decay": task.config.optim.layer_decay,
            "overrides": dict(task.overrides),
            "steps": finals[0]["steps"],
            "trials": trials,
            "best": best,
            "runs": finals,
            "mean": statistics.fmean(scores),
            "std": statistics.stdev(scores) if len(scores) > 1 else None,
        }
        runs.write_json(self.workdir, FILE, report)
        say(runs.format_table(finals, _RUNS))
        say(
            f"{task.recipe.title}: {task.config.model.variant} at rate "
            f"{best['learning_rate']:g}: top-1 {spread(report['mean'], report['std'])}, "
            f"{len(scores)} runs"
        )
        return report

    def _command(self) -> dict:
        recipe = self.task.recipe
        return {
            "--model": self.model,
            "--data_dir": _absolute(recipe.data_dir),
            "--learning_rates": list(self.task.rates),
            "--seeds": self.seeds,
            "splits": [recipe.train, recipe.part, recipe.held_out, recipe.test],
            "config": runs.decisive(self.task.config),
        }

    def _choose(self, shared: SweepSetups) -> list[dict]:
        """Scores each rate on the held-out split."""
        trials, all_new = [], True
        for number, rate in enumerate(
            progress.each(self.task.rates, "trials", "runs"), 1
        ):
            say(f"trial {number} of {len(self.task.rates)}: rate {rate:g}")
            config = self.task.trial(rate)
            name = f"trials/rate{rate:g}"
            folder = epath.Path(self.workdir) / name
            all_new = all_new and not folder.exists()
            report = runs.train(config, folder, shared, keep=False)
            trial = {"learning_rate": rate, "steps": report.get("steps"), "score": None}
            if "diverged" in report:
                trial["diverged"] = report["diverged"]
                say(f"rate {rate:g} diverged: {report['diverged']}")
            else:
                trial["score"] = runs.scores(report, "held_out")["top1"]
                trial["seconds"] = report["wall_seconds"]
                trial["start_seconds"] = sum(report["startup"].values())
                trial["compute"] = report.get("compute")
            trials.append(trial)
            runs.write_table(self.workdir, "trials", trials)
            self._note(name, rate, config.seed, "held_out", trial["score"])
        say(runs.format_table(trials, _TRIALS))
        if all_new:  # An earlier start compiled and read the data for itself.
            say(sharing(trials))
        return trials

    def _test(self, rate: float, shared: SweepSetups) -> list[dict]:
        """Trains on the whole split and scores on test, once with each seed."""
        finals = []
        for seed in progress.each(range(self.seeds), "final runs", "runs"):
            say(f"final run {seed + 1} of {self.seeds}: rate {rate:g}, seed {seed}")
            name = f"runs/seed{seed}"
            report = runs.train(
                self.task.final(rate, seed),
                os.path.join(self.workdir, name),
                shared,
                keep=True,
            )
            if "diverged" in report:
                raise UserError(
                    f"the final run of seed {seed} at rate {rate:g} diverged "
                    f"({report['diverged']}): set lower --learning_rates in another --workdir"
                )
            score = runs.scores(report, "test")["top1"]
            finals.append(
                {
                    "seed": seed,
                    "learning_rate": rate,
                    "steps": report["steps"],
                    "top1": score,
                    "seconds": report["wall_seconds"],
                    "compute": report.get("compute"),
                }
            )
            self._note(name, rate, seed, "test", score)
        return finals

    def _note(self, name, rate, seed, part, score) -> None:
        settings = {"learning_rate": rate, "seed": seed, "part": part}
        scores = {} if score is None else {"top1": score}
        runs.write_hparams(self.workdir, name, settings, scores)


def choose(trials: Sequence[dict]) -> dict:
    """Returns the trial with the highest score, of equal ones that with the lowest rate.

    Args:
      trials: trials with "learning_rate" and "score", which is None if it diverged.

    Returns:
      "learning_rate" and "score"; "edge", whether it is the lowest or highest of several
      rates, so that a better one may lie outside; "tied", other rates with its score.

    Raises:
      UserError: all trials diverged.
    """
    scored = [trial for trial in trials if trial["score"] is not None]
    if not scored:
        rates = ", ".join(f"{trial['learning_rate']:g}" for trial in trials)
        raise UserError(
            f"every rate diverged ({rates}): set lower ones by --learning_rates"
        )
    best = max(scored, key=lambda trial: (trial["score"], -trial["learning_rate"]))
    rates = [trial["learning_rate"] for trial in trials]
    return {
        "learning_rate": best["learning_rate"],
        "score": best["score"],
        "edge": len(rates) > 1 and best["learning_rate"] in (min(rates), max(rates)),
        "tied": [
            trial["learning_rate"]
            for trial in scored
            if trial["score"] == best["score"] and trial is not best
        ],
    }


def _absolute(data_dir: str) -> str:
    """Returns an absolute path; "" (TFDS's default) and URLs unchanged."""
    if not data_dir or "://" in data_dir:
        return data_dir
    return os.path.abspath(os.path.expanduser(data_dir))


def sharing(trials: Sequence[dict]) -> str:
    """Returns a line on the times of the first and of later trials; "" of one trial."""
    first, *others = [trial for trial in trials if "seconds" in trial] or [None]
    if not others:
        return ""
    times = []
    for key, what in (("start_seconds", "to its first step"), ("seconds", "in all")):
        mean = statistics.fmean(trial[key] for trial in others)
        times.append(f"{first[key]:.1f} s {what}, each after it {mean:.1f}")
    return (
        f"the first trial took {'; '.join(times)}: they share the compiled step and "
        "the data"
    )


def spread(mean: float, std: float | None) -> str:
    """Formats a mean and its standard deviation, both fractions, in percent."""
    return f"{mean:.2%}" + ("" if std is None else f" ± {100 * std:.2f}")


def on_choice(best: dict, trials: Sequence[dict], task: TransferTask) -> str:
    """Returns a line on the choice of the rate, with ties and an edge of the sweep."""
    if not trials:
        return f"rate {best['learning_rate']:g} is the only one: nothing to choose"
    text = f"rate {best['learning_rate']:g} is best on {task.recipe.held_out}: {best['score']:.2%}"
    if best["tied"]:
        others = ", ".join(f"{rate:g}" for rate in best["tied"])
        text += f"; {others} score the same, and the lowest is taken"
    if best["edge"]:
        side = "below" if best["learning_rate"] == min(task.rates) else "above"
        text += (
            f"; warning: it is at the edge of the sweep, a better one may lie {side}: "
            "add --learning_rates (in another --workdir)"
        )
    return text
