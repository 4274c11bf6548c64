"""Studies: one recipe over values of its arguments, each tuned and repeated with seeds.

A file under configs/study/ is a recipe with a second function, `get_study`, that
returns plain data: the arguments of `get_config` to vary (the axes), the keys to tune
on validation images at each point, the number of seeds, and the scores to report. Every
run of a study is therefore also a config that can be trained or compiled separately. A
killed study resumes when it is started again.
"""

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from etils import epath

from vit_jax.command_line import progress
from vit_jax.command_line.files import read_json
from vit_jax.command_line.printing import print_error
from vit_jax.config import fields, loading
from vit_jax.data.sources.open import opened_by
from vit_jax.errors import UserError
from vit_jax.tools.sweeps import runs, step_cost, study_config
from vit_jax.tools.sweeps.runs import say
from vit_jax.tools.sweeps.split_guard import SplitCache
from vit_jax.tools.sweeps.stage import Stage, file_name, score_of, words
from vit_jax.tools.sweeps.study_config import StudyConfig
from vit_jax.training import lock, run_report
from vit_jax.training.config import TrainConfig, complete
from vit_jax.training.sweep import SweepSetups

FILE, TABLE = "study.json", "points"
_RUN_FILES = (run_report.FILE, runs.DIVERGED, step_cost.MEASURED)
# Keys that the study sets for each run.
_SET_BY_STUDY = ("seed", "name", "init", "init.checkpoint")


class Point(NamedTuple):
    """One combination of the values of the axes.

    Attributes:
      name: values of the axes, such as "vit-s,3000".
      axes: values by argument of `get_config`.
      recipes: raw configs by stage, as nested dicts.
    """

    name: str
    axes: dict[str, object]
    recipes: dict[str, dict]


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
        """Runs what is not finished, and writes `study.json` after each stage.

        Returns:
          The content of study.json: the study's config and its points. A point has its
          axes; trials, chosen values and runs of each stage; exaFLOPs of the first
          stage; and for each score the values, their mean, and half of its 95 %
          interval.

        Raises:
          UserError: the workdir holds another study, a run does not have a score, or a
            run is invalid (see `loop.train`).
          Preempted: SIGTERM was received; repeat the command to resume.
        """
        with lock.held(self.workdir):
            runs.check_command(
                self.workdir, self._command(), begun=self._begun(), grows="points"
            )
            path = epath.Path(self.workdir) / FILE
            held = read_json(path)["points"] if path.exists() else []
            rows, done = {row["name"]: row for row in held}, {}
            caches = {stage: SweepSetups() for stage in self.config.stages}
            with opened_by(SplitCache()):
                for number, point in enumerate(
                    progress.each(self.points, "points", "points"), 1
                ):
                    say(f"point {number} of {len(self.points)}: {point.name}")
                    # A point in the file is replaced only when all its stages are done.
                    replaces = point.name in rows
                    for row in self._rows(point, done, caches):
                        if not replaces:
                            self._write(rows | {point.name: row})
                    rows[point.name] = row
                    if replaces:
                        self._write(rows)
            report = self._report(rows)
            for line in summary(report):
                say(line)
            return report

    def _rows(
        self, point: Point, done: dict[str, dict], caches: Mapping[str, SweepSetups]
    ) -> Iterator[dict]:
        """Yields the row of a point after each of its stages.

        `done` holds the outcomes of stages that several points share; it is extended.
        """
        outcomes, starts = {}, {}
        for stage in self.config.stages:
            grid = self.config.grid(stage, point.axes)
            recipe = {k: v for k, v in point.recipes[stage].items() if k != "name"}
            key = json.dumps([stage, recipe, grid, starts], sort_keys=True, default=str)
            if key not in done:
                done[key] = self._run_stage(point, stage, grid, starts, caches[stage])
            outcomes[stage] = done[key]
            starts = {run["seed"]: run["folder"] for run in done[key]["runs"]}
            yield _row(point, dict(outcomes), self.config)
            if not starts:
                return  # All diverged: the next stage has no initial weights.

    def _run_stage(
        self,
        point: Point,
        name: str,
        grid: list[dict],
        starts: Mapping[int, str],
        shared: SweepSetups,
    ) -> dict:
        """Returns the outcome of a stage; `starts` has earlier folders by seed."""

        def final(choice, seed):
            start = os.path.join(self.workdir, starts[seed]) if starts else ""
            config = _config(point.recipes[name], choice, seed, start)
            folders = file_name(point.name), name, file_name(words(choice)) or "run"
            return "/".join([*folders, f"seed{seed}"]), config

        stages = self.config.stages
        stage = Stage(
            self.workdir,
            grid,
            self.config.tune_by,
            sorted(starts) or range(self.config.seeds),
            final,
            # Later stages start from the checkpoints of earlier ones.
            keep=name != stages[-1] or len(stages) == 1,
            measure=study_config.MEASURES[self.config.measure],
        )
        trials = list(stage.trials(shared))
        best = stage.choose(trials)
        finals = list(stage.finals(best["choice"], shared)) if best else []
        return {
            "trials": trials,
            "chosen": best and best["choice"],
            "runs": [run for run in finals if "diverged" not in run],
            "diverged": [run for run in finals if "diverged" in run],
        }

    def _write(self, rows: Mapping[str, dict]) -> None:
        report = self._report(rows)
        runs.write_json(self.workdir, FILE, report)
        runs.write_table(self.workdir, TABLE, [_flat(row) for row in report["points"]])

    def _report(self, rows: Mapping[str, dict]) -> dict:
        # In the order of the axes, regardless of `--only`.
        names = map(_name, itertools.product(*self.config.axes.values()))
        points = [rows[name] for name in names if name in rows]
        about = dataclasses.asdict(self.config)
        return {"kind": "study", "name": self.name, "config": about, "points": points}

    def _command(self) -> dict:
        """Returns what determines the results; seeds and points may be added later."""
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
      only: texts of the values to run, by axis; missing axes are run completely.
      seeds: number of runs per point; 0 for the number in the file.
      overrides: values for all runs, by dotted config key.

    Raises:
      UserError: the file has no study, an axis or one of its values is unknown, or an
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
    chosen = _chosen(config.axes, only or {})
    points = []
    for values in itertools.product(*chosen.values()):
        axes = dict(zip(chosen, values, strict=True))
        given = [f"{axis}={value}" for axis, value in axes.items()] + [rest]
        recipes = {}
        for stage in config.stages:
            of_stage = [f"stage={stage}"] * (len(config.stages) > 1)
            text = ",".join(filter(None, [*given, *of_stage]))
            recipes[stage] = loading.read(TrainConfig, f"{path}:{text}")
        points.append(Point(_name(values), axes, recipes))
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
                "--only, and the number of seeds with --seeds"
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
    raw = dict(recipe)
    changes = {**choice, "seed": seed}
    if start:
        changes["init.checkpoint"] = start
    loading.override(TrainConfig, raw, changes, tell=lambda line: None)
    return complete(raw)


def _decisive(config: TrainConfig) -> dict[str, object]:
    """Returns the keys that determine the scores of a run, including its evaluations."""
    evals = fields.to_json(config)["evals"]
    return runs.decisive(config) | {
        f"evals.{name}": json.dumps(evaluation, sort_keys=True)
        for name, evaluation in evals.items()
    }


def _name(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


def _row(point: Point, outcomes: Mapping[str, dict], config: StudyConfig) -> dict:
    """Returns a point in the form of study.json, with its stages' outcomes so far."""
    axes = [str(value) for value in point.axes.values()]
    labels = {
        name: texts[value]
        for name, texts in config.labels.items()
        for value in axes
        if value in texts
    }
    first = outcomes[config.stages[0]]["runs"]
    used = (first[0]["compute"] if first else None) or {}
    scores = {}
    for name, score in config.scores.items():
        stage, path = config.stage_and_path(score)
        done = outcomes.get(stage, {}).get("runs", [])
        if values := [score_of(run["final"], path) for run in done]:
            mean, half = runs.interval(values)
            scores[name] = {"values": values, "mean": mean, "half_interval": half}
    return {
        "name": point.name,
        "axes": point.axes,
        "labels": labels,
        "stages": outcomes,
        "images_seen": used.get("images_seen"),
        "exaflops": used.get("exaflops"),
        "scores": scores,
    }


def summary(report: dict) -> list[str]:
    """Returns the lines of a study's table, and one about runs that diverged."""
    rows, columns = [], {"point": ""}
    for row in report["points"]:
        cells = {"point": row["name"]}
        for stage, outcome in row["stages"].items():
            if outcome["trials"] and outcome["chosen"]:
                cells[f"chosen ({stage})"] = words(outcome["chosen"])
                columns.setdefault(f"chosen ({stage})", "")
        for name, score in row["scores"].items():
            half = score["half_interval"]
            cells[name] = f"{score['mean']:.4f}" + (
                "" if half is None else f" ± {half:.4f}"
            )
            columns.setdefault(name, "")
        rows.append(cells)
    lines = runs.format_table(rows, columns).split("\n")
    lost = []
    for row in report["points"]:
        for stage, outcome in row["stages"].items():
            name = f"{row['name']}, {stage}"
            if outcome["chosen"] is None:
                lost.append(f"{name} ({outcome['trials'][0]['diverged']})")
            for run in outcome["diverged"]:
                lost.append(f"{name}, seed {run['seed']} ({run['diverged']})")
    if lost:
        lines.append(
            f"diverged, not part of any mean: {'; '.join(lost)}; lower learning rates in "
            "the study's config, with another --workdir, may help"
        )
    return lines


def _flat(row: dict) -> dict:
    """Returns a point as a row of a table."""
    flat = {"point": row["name"]} | row["axes"] | row["labels"]
    flat |= {name: row[name] for name in ("images_seen", "exaflops")}
    for stage, outcome in row["stages"].items():
        for key, value in (outcome["chosen"] or {}).items():
            flat[f"{stage}.{key}"] = value
    for name, score in row["scores"].items():
        flat[name] = score["mean"]
        flat[f"{name} interval"] = score["half_interval"]
        flat[f"{name} seeds"] = len(score["values"])
    return flat
