"""Fine-tuning with a sweep of learning rates, as in the paper.

The learning rate is chosen on a held-out part of train. Runs on all of train with the
best rate and several seeds are then each scored once on test (arXiv:2010.11929, section
4.1 and table 4).
"""

import os
import statistics

from etils import epath

from vit_jax.data.sources.open import opened_by
from vit_jax.errors import UserError
from vit_jax.tools.sweeps import runs
from vit_jax.tools.sweeps.fine_tuning import TransferTask, check_feasible
from vit_jax.tools.sweeps.runs import say
from vit_jax.tools.sweeps.split_guard import TestSplitGuard
from vit_jax.tools.sweeps.stage import Stage, score_of
from vit_jax.training import lock
from vit_jax.training.sweep import SweepSetups

FILE = "transfer.json"
_RATE = "optim.learning_rate"
_RUNS = {"seed": "d", "top1": ".2%", "seconds": ".1f"}
_KEPT = ("seed", "steps", "score", "seconds", "start_seconds", "compute", "diverged")


def run(
    model: str,
    task: TransferTask,
    workdir: str | os.PathLike,
    seeds: int = 3,
    shared: SweepSetups | None = None,
) -> dict:
    """Fine-tunes a checkpoint on a data set; finished runs are not repeated.

    Args:
      model: name or path of the checkpoint.
      task: data set and configs of the runs.
      workdir: folder for all runs and `transfer.json`.
      seeds: number of final runs.
      shared: compiled step and evaluations to share with other transfers.

    Returns:
      The content of transfer.json: trials, best, runs, mean, std and more.

    Raises:
      UserError: the workdir holds another study, all rates or a final run diverged, or
        a run is invalid (see `loop.train`).
      Preempted: SIGTERM was received; repeat the command to resume.
    """
    recipe, config = task.recipe, task.config
    with lock.held(workdir):
        check_feasible(task)
        begun = runs.has_begun(*epath.Path(workdir).glob("*/*"))
        runs.check_command(workdir, _command(model, task, seeds), begun=begun)
        for note in task.notes:
            say(note)
        trials, best, finals = _tune_and_test(
            task, workdir, seeds, shared or SweepSetups()
        )
        scores = [one["top1"] for one in finals]
        report = {
            "kind": "transfer",
            "model": model,
            "variant": config.model.variant,
            "dataset": recipe.title,
            "resolution": list(config.data.image_size),
            "mode": task.mode,
            "layer_decay": config.optim.layer_decay,
            "overrides": dict(task.overrides),
            "steps": finals[0]["steps"],
            "trials": trials,
            "best": best,
            "runs": finals,
            "mean": statistics.fmean(scores),
            "std": statistics.stdev(scores) if len(scores) > 1 else None,
        }
        runs.write_json(workdir, FILE, report)
    say(runs.format_table(finals, _RUNS))
    spread = "" if report["std"] is None else f" ± {100 * report['std']:.2f}"
    say(
        f"{recipe.title}: {config.model.variant} at rate {best['learning_rate']:g}: "
        f"top-1 {report['mean']:.2%}{spread}, {seeds} runs"
    )
    return report


def _tune_and_test(
    task: TransferTask, workdir: str | os.PathLike, seeds: int, shared: SweepSetups
) -> tuple[list[dict], dict, list[dict]]:
    """Returns the trials, the best rate and the final runs, as in transfer.json."""
    stage = Stage(
        workdir,
        grid=[{_RATE: rate} for rate in task.rates],
        tune_by="held_out/top1",
        seeds=range(seeds),
        trial=lambda one: (f"trials/rate{one[_RATE]:g}", task.trial(one[_RATE])),
        final=lambda one, seed: (f"runs/seed{seed}", task.final(one[_RATE], seed)),
    )
    guard, trials, finals = TestSplitGuard(task.recipe.test), [], []
    with opened_by(guard):
        for trial in stage.trials(shared):
            trials.append(trial)
            runs.write_table(workdir, "trials", list(map(_row, trials)))
            _note(workdir, trial, "held_out", trial["score"])
        best = stage.choose(trials)
        if best is None:
            rates = ", ".join(f"{rate:g}" for rate in task.rates)
            raise UserError(
                f"every rate diverged ({rates}): set lower ones with --learning_rates"
            )
        guard.release()
        rate = best["choice"][_RATE]
        for run in stage.finals(best["choice"], shared):
            if "diverged" in run:
                raise UserError(
                    f"the final run with seed {run['seed']} at rate {rate:g} diverged "
                    f"({run['diverged']}): set lower --learning_rates in another --workdir"
                )
            finals.append(_row(run) | {"top1": score_of(run["final"], "test/top1")})
            _note(workdir, run, "test", finals[-1]["top1"])
    scored = {"score": best["score"]} if trials else {}
    return list(map(_row, trials)), {"learning_rate": rate} | scored, finals


def _row(run: dict) -> dict:
    """Returns a trial or a final run in the form of transfer.json."""
    kept = {key: run[key] for key in _KEPT if key in run}
    return {"learning_rate": run["choice"][_RATE], **kept}


def _note(
    workdir: str | os.PathLike, run: dict, part: str, score: float | None
) -> None:
    """Writes a run for TensorBoard."""
    settings = {"learning_rate": run["choice"][_RATE], "seed": run["seed"]}
    scores = {} if score is None else {"top1": score}
    runs.write_hparams(workdir, run["folder"], settings | {"part": part}, scores)


def _command(model: str, task: TransferTask, seeds: int) -> dict:
    recipe = task.recipe
    return {
        "--model": model,
        "--data_dir": _absolute(recipe.data_dir),
        "--learning_rates": list(task.rates),
        "--seeds": seeds,
        "splits": [recipe.train, recipe.part, recipe.held_out, recipe.test],
        "config": runs.decisive(task.config),
    }


def _absolute(data_dir: str) -> str:
    """Returns an absolute path; "" (TFDS's default) and URLs are unchanged."""
    if not data_dir or "://" in data_dir:
        return data_dir
    return os.path.abspath(os.path.expanduser(data_dir))
