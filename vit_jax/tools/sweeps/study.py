"""Studies: one recipe over values of its arguments, each tuned and repeated with seeds.

A file under configs/study/ is a recipe with a second function, `get_study`, that returns
plain data: the arguments of `get_config` to vary (the axes), the keys to tune on
validation images at each point, the number of seeds, and the scores to report. So every
run of a study is also a config that can be trained or compiled alone. A killed study
resumes when it is started again.
"""

import copy
import dataclasses
import itertools
import json
import numbers
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from etils import epath

from vit_jax import progress
from vit_jax.config import fields, loading
from vit_jax.data.sources.open import opened_by
from vit_jax.errors import UserError
from vit_jax.files import read_json
from vit_jax.printing import print_error
from vit_jax.tools.sweeps import runs, step_cost, study_config
from vit_jax.tools.sweeps.runs import SplitCache, say
from vit_jax.tools.sweeps.study_config import StudyConfig
from vit_jax.training import lock, run_report
from vit_jax.training.actions import lower_is_better
from vit_jax.training.config import TrainConfig, complete
from vit_jax.training.sweep import SweepSetups

FILE, TABLE = "study.json", "points"
_RUN_FILES = (run_report.FILE, runs.DIVERGED, step_cost.MEASURED)
# Keys that the study sets for each run.
_SET_BY_STUDY = ("seed", "name", "init", "init.checkpoint")


@dataclasses.dataclass(frozen=True)
class Point:
    """One combination of the values of the axes.

    Attributes:
      axes: argument of `get_config` -> value.
      recipes: stage -> raw config, as nested dicts.
    """

    axes: Mapping[str, object]
    recipes: Mapping[str, dict]

    @property
    def name(self) -> str:
        """Returns the values, as "vit-s,3000"."""
        return _name(self.axes.values())


@dataclasses.dataclass(frozen=True)
class Study:
    """A study with the configs of all its points.

    Attributes:
      name: name of the config file.
      config: axes, tuned keys, seeds and scores, from its `get_study`.
      points: points in the order in which they are run.
      workdir: folder of the study.
    """

    name: str
    config: StudyConfig
    points: tuple[Point, ...]
    workdir: str | os.PathLike

    def run(self) -> dict:
        """Runs what is not done yet, and writes `study.json` after each stage.

        Returns:
          The content of study.json: the study's config and its points. A point has its
          axes; trials, chosen values and runs of each stage; exaFLOPs of the first stage;
          and for each score the values, their mean, and half the mean's 95 % interval.

        Raises:
          UserError: the workdir holds another study, a run has no such score, or a run is
            invalid (see `loop.train`).
          Preempted: SIGTERM came; the same command resumes.
        """
        with lock.held(self.workdir):
            runs.check_command(
                self.workdir, self._command(), begun=self._begun(), grows="points"
            )
            rows, done = self._earlier(), {}
            caches = {stage: SweepSetups() for stage in self.config.stages}
            with opened_by(SplitCache()):
                for number, point in enumerate(
                    progress.each(self.points, "points", "points"), 1
                ):
                    say(f"point {number} of {len(self.points)}: {point.name}")
                    # A point in the file is replaced only once all its stages are done.
                    replaces = point.name in rows
                    begun = _row(point, self.config)
                    for row in self._stages(point, begun, done, caches):
                        if not replaces:
                            self._write(rows | {point.name: row})
                    rows[point.name] = row
                    if replaces:
                        self._write(rows)
            report = self._report(rows)
            for line in summary(report):
                say(line)
            return report

    def _earlier(self) -> dict[str, dict]:
        """Returns name -> row of the points in the file that earlier starts wrote."""
        path = epath.Path(self.workdir) / FILE
        rows = read_json(path)["points"] if path.exists() else []
        return {row["name"]: row for row in rows}

    def _stages(
        self, point: Point, row: dict, done: dict, caches: dict[str, SweepSetups]
    ) -> Iterator[dict]:
        """Yields the row of a point after each of its stages.

        `done` holds the outcomes of stages that several points share, and is extended.
        """
        starts: dict[int, str] = {}  # Seed -> folder that the stage starts from.
        for stage in self.config.stages:
            recipe = point.recipes[stage]
            grid = self.config.grid(stage, point.axes)
            unnamed = {key: value for key, value in recipe.items() if key != "name"}
            key = json.dumps(
                [stage, unnamed, grid, starts], sort_keys=True, default=str
            )
            if key not in done:
                folder = f"{_file_name(point.name)}/{stage}"
                done[key] = self._stage(
                    recipe, grid, folder, starts, stage, caches[stage]
                )
            outcome = done[key]
            row = row | {"stages": row["stages"] | {stage: outcome}}
            starts = {run["seed"]: run["folder"] for run in outcome["runs"]}
            yield _scored(row, self.config)
            if not starts:
                return  # All diverged: the next stage has no weights to start from.

    def _stage(
        self,
        recipe: dict,
        grid: list[dict],
        folder: str,
        starts: dict[int, str],
        stage: str,
        shared: SweepSetups,
    ) -> dict:
        """Tries every combination with the first seed, and the best with all seeds."""
        first = min(starts, default=0)
        # A later stage starts from the checkpoints of this one.
        last = stage == self.config.stages[-1] and len(self.config.stages) > 1

        def train(choice: dict, seed: int) -> dict:
            run_folder = f"{folder}/{_words(choice)}/seed{seed}"
            config = _config(recipe, choice, seed, self._path(starts.get(seed, "")))
            measure = study_config.MEASURES[self.config.measure]
            report = measure(config, self._path(run_folder), shared, keep=not last)
            run = {"seed": seed, "folder": run_folder}
            if "diverged" in report:
                say(f"{run_folder} diverged: {report['diverged']}")
                return run | {"diverged": report["diverged"]}
            return run | {
                "variant": report["variant"],
                "dataset": report["dataset"],
                "steps": report["steps"],
                "seconds": report["wall_seconds"],
                "compute": report["compute"],
                "final": report["final"],
            }

        trials = []
        for number, choice in enumerate(grid, 1):
            if len(grid) > 1:
                say(f"trial {number} of {len(grid)}: {_words(choice)}")
            run = train(choice, first)
            score = None
            if len(grid) > 1 and "diverged" not in run:
                score = score_of(run["final"], self.config.tune_by)
            trials.append({"choice": choice, "score": score, "run": run})
        best = self._choose(trials)
        if best is None:
            return {"trials": _reported(trials), "chosen": None, "runs": []}
        for trial in trials:
            if trial is not best:
                runs.drop_checkpoints(self._path(trial["run"]["folder"]))
        if len(grid) > 1:
            say(on_choice(best, grid, self.config.tune_by))
        finished = [best["run"]] + [
            train(best["choice"], seed) for seed in self._seeds(starts, first)
        ]
        return {
            "trials": _reported(trials),
            "chosen": best["choice"],
            "runs": [run for run in finished if "diverged" not in run],
            "diverged": [run for run in finished if "diverged" in run],
        }

    def _path(self, folder: str) -> str:
        """Returns the path of a folder in the workdir; "" if the name is empty."""
        return os.path.join(self.workdir, folder) if folder else ""

    def _seeds(self, starts: dict[int, str], first: int) -> list[int]:
        """Returns the seeds but the first, if the stage before has weights of them."""
        seeds = sorted(starts) or range(self.config.seeds)
        return [seed for seed in seeds if seed != first]

    def _choose(self, trials: list[dict]) -> dict | None:
        """Returns the best trial, the first of equals; None if all diverged."""
        done = [trial for trial in trials if "diverged" not in trial["run"]]
        sign = -1 if lower_is_better(self.config.tune_by) else 1
        return max(done, key=lambda t: sign * (t["score"] or 0), default=None)

    def _write(self, rows: Mapping[str, dict]) -> None:
        report = self._report(rows)
        runs.write_json(self.workdir, FILE, report)
        runs.write_table(self.workdir, TABLE, [_flat(row) for row in report["points"]])

    def _report(self, rows: Mapping[str, dict]) -> dict:
        points = [rows[name] for name in _names(self.config) if name in rows]
        about = dataclasses.asdict(self.config)
        return {"kind": "study", "name": self.name, "config": about, "points": points}

    def _command(self) -> dict:
        """Returns what decides the results; more seeds or points only add runs."""
        return {
            "study": self.name,
            "axes": ", ".join(self.config.axes),
            "measure": self.config.measure,
            "tune": json.loads(json.dumps(self.config.tune)),
            "tune_by": self.config.tune_by,
            "points": {
                point.name: {
                    stage: _decisive(complete(recipe))
                    for stage, recipe in point.recipes.items()
                }
                for point in self.points
            },
        }

    def _begun(self) -> bool:
        """Returns whether an earlier start left results."""
        files = epath.Path(self.workdir).glob("*/*/*/seed*/*.json")
        return any(file.name in _RUN_FILES for file in files)


def plan(
    spec: str,
    workdir: str | os.PathLike,
    *,
    only: Mapping[str, Sequence[str]] | None = None,
    seeds: int = 0,
    overrides: Mapping[str, object] | None = None,
) -> Study:
    """Reads and checks the configs of all runs of a study.

    Args:
      spec: path or name of a config file with `get_study`; arguments that are not axes
        may follow a colon.
      workdir: folder of the study.
      only: axis -> values to run, as text; axes that are absent run whole.
      seeds: runs per point; 0 for the number in the file.
      overrides: dotted config key -> value, for all runs.

    Raises:
      UserError: the file has no study, an axis or a value of it is unknown, or an
        override sets what the study varies.
    """
    path, _, rest = spec.partition(":")
    raw = loading.read_study(path, rest or None)
    config = study_config.complete(raw, path)
    if seeds:
        config = dataclasses.replace(config, seeds=seeds)
    for axis in config.axes:
        if re.search(rf"(^|,){axis}(=|,|$)", rest):
            raise UserError(
                f"--config={spec}: the study varies {axis!r}; choose with "
                f"--only={axis}=VALUE"
            )
    _refuse_one_folder(_names(config))
    chosen = _chosen(config.axes, only or {})
    points = []
    for values in itertools.product(*chosen.values()):
        axes = dict(zip(chosen, values, strict=True))
        given = [f"{axis}={value}" for axis, value in axes.items()] + [rest]
        recipes = {}
        for stage in config.stages:
            words = [*given, f"stage={stage}"] if len(config.stages) > 1 else given
            text = ",".join(filter(None, words))
            recipes[stage] = loading.read(TrainConfig, f"{path}:{text}")
        points.append(Point(axes, recipes))
    _refuse_varied(points, config, overrides or {})
    dropped = []
    for point in points:
        for stage, recipe in point.recipes.items():
            loading.override(TrainConfig, recipe, overrides or {}, dropped.append)
            for choice in config.grid(stage, point.axes):
                _check_scores(_config(recipe, choice, 0, ""), stage, config)
    for line in dict.fromkeys(dropped):
        print_error(line)
    name = os.path.splitext(os.path.basename(path))[0]
    return Study(name, config, tuple(points), workdir)


def _chosen(axes: Mapping[str, Sequence], only: Mapping[str, Sequence[str]]) -> dict:
    """Returns the axes, each with the values that `only` selects."""
    for axis, texts in only.items():
        if axis not in axes:
            raise UserError(f"--only={axis}=...: the axes are {', '.join(axes)}")
        known = [str(value) for value in axes[axis]]
        for text in texts:
            if text not in known:
                raise UserError(
                    f"--only={axis}={text}: the study has {', '.join(known)}"
                )
    return {
        axis: tuple(v for v in values if str(v) in only.get(axis, [str(v)]))
        for axis, values in axes.items()
    }


def _refuse_one_folder(names: Sequence[str]) -> None:
    """Raises UserError if two points would have one folder."""
    folders: dict[str, str] = {}
    for name in names:
        other = folders.setdefault(_file_name(name), name)
        if other != name:
            raise UserError(
                f"the points {other} and {name} would have one folder, "
                f"{_file_name(name)}: give one of them another value"
            )


def _refuse_varied(
    points: Sequence[Point], config: StudyConfig, overrides: Mapping[str, object]
) -> None:
    """Raises UserError if an override sets a key that differs between points."""
    varied = {*_SET_BY_STUDY, *(key for keys in config.tune.values() for key in keys)}
    for stage in config.stages:
        recipes = [fields.flatten(point.recipes[stage]) for point in points]
        for key in {name for recipe in recipes for name in recipe}:
            if len({str(recipe.get(key)) for recipe in recipes}) > 1:
                varied.add(key)
    for key in overrides:
        if any(f"{one}.".startswith(f"{key}.") for one in varied):
            raise UserError(
                f"--config.{key}: the study sets it for each run; choose points with "
                "--only, the number of seeds with --seeds"
            )


def _check_scores(run: TrainConfig, stage: str, config: StudyConfig) -> None:
    """Raises UserError if a score needs an evaluation that the stage does not have."""
    wanted = [
        path
        for of_stage, path in map(config.stage_and_path, config.scores.values())
        if of_stage == stage
    ]
    if stage in config.tune:
        wanted.append(config.tune_by)
    for path in wanted:
        known = run.evals if config.measure == "train" else (config.measure,)
        if path.partition("/")[0] not in known:
            raise UserError(
                f"the study scores {path!r}, but the evaluations of {stage} are "
                f"{', '.join(known) or 'none'}"
            )


def _config(recipe: dict, choice: Mapping, seed: int, start: str) -> TrainConfig:
    """Returns the complete config of a run, which starts from the workdir `start`."""
    raw = copy.deepcopy(recipe)
    changes = {**choice, "seed": seed}
    if start:
        changes["init.checkpoint"] = start
    loading.override(TrainConfig, raw, changes, tell=lambda line: None)
    return complete(raw)


def _decisive(config: TrainConfig) -> dict[str, object]:
    """Returns the keys that decide the scores of a run, its evaluations among them."""
    evals = fields.to_json(config)["evals"]
    return runs.decisive(config) | {
        f"evals.{name}": json.dumps(evaluation, sort_keys=True)
        for name, evaluation in evals.items()
    }


def _names(config: StudyConfig) -> list[str]:
    """Returns the names of all points of a study, whatever `--only` selects."""
    return list(map(_name, itertools.product(*config.axes.values())))


def _name(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


def _words(choice: Mapping[str, object]) -> str:
    """Returns a combination as the name of a folder: "learning_rate=0.001"."""
    parts = [f"{key.rpartition('.')[2]}={value}" for key, value in choice.items()]
    return _file_name(",".join(parts)) or "run"


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=,+-]", "_", text)


def score_of(final: Mapping[str, dict], path: str) -> float:
    """Returns a score of a run.

    Args:
      final: evaluation -> parameters -> metric -> value, from the run's report.
      path: "EVALUATION/METRIC", with averaged parameters if the run has them, or
        "EVALUATION/params/METRIC" or "EVALUATION/ema/METRIC".

    Raises:
      UserError: the run has no such score; the message lists those of the evaluation.
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


def on_choice(best: dict, grid: Sequence[dict], metric: str) -> str:
    """Returns a line on the choice, with a warning if it is at an edge of the grid."""
    text = f"{_words(best['choice'])} is best by {metric}: {best['score']:.4g}"
    for key, value in best["choice"].items():
        if not fields.is_number(value, numbers.Real):
            continue
        tried = sorted({choice[key] for choice in grid})
        if len(tried) > 1 and value in (tried[0], tried[-1]):
            side = "below" if value == tried[0] else "above"
            text += f"; warning: a better {key} may lie {side} {value:g}"
    return text


def _reported(trials: Sequence[dict]) -> list[dict]:
    """Returns the trials as study.json holds them."""
    return [
        {"choice": trial["choice"], "score": trial["score"]}
        | {k: v for k, v in trial["run"].items() if k in ("diverged", "compute")}
        for trial in trials
    ]


def _row(point: Point, config: StudyConfig) -> dict:
    """Returns the row of a point without results."""
    axes = {name: str(value) for name, value in point.axes.items()}
    labels = {
        name: texts[value]
        for name, texts in config.labels.items()
        for value in axes.values()
        if value in texts
    }
    return {
        "name": point.name,
        "axes": dict(point.axes),
        "labels": labels,
        "stages": {},
    }


def _scored(row: dict, config: StudyConfig) -> dict:
    """Returns a row with the compute and the scores of the stages that are done."""
    first = row["stages"][config.stages[0]]["runs"]
    used = first[0]["compute"] if first else {}
    scores = {}
    for name, score in config.scores.items():
        stage, path = config.stage_and_path(score)
        done = row["stages"].get(stage, {}).get("runs", [])
        values = [score_of(run["final"], path) for run in done]
        if values:
            mean, half = runs.interval(values)
            scores[name] = {"values": values, "mean": mean, "half_interval": half}
    used = {name: used.get(name) for name in ("images_seen", "exaflops")}
    return row | used | {"scores": scores}


def summary(report: dict) -> list[str]:
    """Returns the lines of a study's table, and one on runs that diverged."""
    rows, columns = [], {"point": ""}
    for row in report["points"]:
        cells = {"point": row["name"]}
        for stage, outcome in row["stages"].items():
            if len(outcome["trials"]) > 1 and outcome["chosen"]:
                cells[f"chosen ({stage})"] = _words(outcome["chosen"])
                columns.setdefault(f"chosen ({stage})", "")
        for name, score in row.get("scores", {}).items():
            cells[name] = with_interval(score)
            columns.setdefault(name, "")
        rows.append(cells)
    lines = runs.format_table(rows, columns).split("\n")
    lost = [
        f"{row['name']}, {stage}{reason}"
        for row in report["points"]
        for stage, outcome in row["stages"].items()
        for reason in _diverged(outcome)
    ]
    if lost:
        lines.append(
            f"diverged, in no mean: {'; '.join(lost)}; lower rates in the study's config, "
            "and another --workdir, may help"
        )
    return lines


def with_interval(score: dict) -> str:
    """Formats a score's mean and half interval: "0.9731 ± 0.0042"."""
    half = score["half_interval"]
    return f"{score['mean']:.4f}" + ("" if half is None else f" ± {half:.4f}")


def _diverged(outcome: dict) -> list[str]:
    """Returns why all trials of a stage diverged, or which seeds of the best and why."""
    if outcome["chosen"] is None:
        return [f" ({outcome['trials'][0]['diverged']})"]
    lost = outcome.get("diverged", [])
    return [f", seed {run['seed']} ({run['diverged']})" for run in lost]


def _flat(row: dict) -> dict:
    """Returns a point as a row of a table."""
    flat = {"point": row["name"]} | row["axes"] | row["labels"]
    flat |= {name: row.get(name) for name in ("images_seen", "exaflops")}
    for stage, outcome in row["stages"].items():
        for key, value in (outcome["chosen"] or {}).items():
            flat[f"{stage}.{key}"] = value
    for name, score in row.get("scores", {}).items():
        flat[name] = score["mean"]
        flat[f"{name} interval"] = score["half_interval"]
        flat[f"{name} seeds"] = len(score["values"])
    return flat
