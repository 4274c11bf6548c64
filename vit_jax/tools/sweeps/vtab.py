"""VTAB-1k (arXiv:1910.04867): 19 tasks of 1,000 images, in three groups."""

import dataclasses
import os
import statistics
from collections.abc import Callable, Mapping, Sequence

import jax
from etils import epath

from vit_jax import progress
from vit_jax.config import fields
from vit_jax.data import catalogue
from vit_jax.data.sources import tfds as tfds_source
from vit_jax.data.sources import vtab
from vit_jax.errors import UserError
from vit_jax.files import read_json
from vit_jax.tools.sweeps import runs
from vit_jax.tools.sweeps.runs import say
from vit_jax.tools.sweeps.transfer import Study
from vit_jax.training import lock
from vit_jax.training.sweep import SweepSetups

FILE = "vtab.json"
_COLUMNS = {"task": "", "group": "", "learning_rate": "g", "mean": ".2%", "std": ".2%"}
# Keys of a task's report that are copied to vtab.json.
_KEPT = ("resolution", "overrides", "best", "runs", "mean", "std", "failed")
GROUPS = ("natural", "specialised", "structured")


def tasks(dataset: str) -> list[str]:
    """Parses a list of tasks.

    Args:
      dataset: "vtab" for all tasks, or "vtab/TASK" or "vtab/GROUP", separated by commas:
        "vtab/dtd,vtab/structured".

    Returns:
      Names of tasks without "vtab/", in the benchmark's order.

    Raises:
      UserError: a task is unknown.
    """
    wanted = set()
    for word in dataset.split(","):
        if not (word := word.strip()):
            continue
        name = word.removeprefix("vtab/")
        members = [
            n for n, task in vtab.TASKS.items() if word == "vtab" or name == task.group
        ]
        if not members:
            vtab.task(f"vtab/{name}")
        wanted.update(members or [name])
    return [name for name in vtab.TASKS if name in wanted]


def absent(name: str, data_dir: str) -> str:
    """Returns how to prepare the data of a task, "" if `data_dir` has it."""
    task = vtab.TASKS[name]
    for tfds_name in filter(None, (task.tfds, task.newer)):
        builder = tfds_source.find_prepared(tfds_name, data_dir)
        if builder is not None and tfds_source.is_readable(builder):
            return ""
    where = data_dir or "~/tensorflow_datasets"
    return catalogue.ENTRIES[f"vtab/{name}"].how(where)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A checkpoint fine-tuned on several tasks.

    Attributes:
      model: name or path of the checkpoint.
      variant: variant of its network.
      names: names of the tasks.
      study: function that returns the study of a task, from its name and workdir.
      workdir: folder of all studies.
      data_dir: value of `data.data_dir`.
      settings: settings of all tasks, such as mode, seeds and resolution; they cannot
        change within a workdir.
    """

    model: str
    variant: str
    names: Sequence[str]
    study: Callable[[str, str], Study]
    workdir: str | os.PathLike
    data_dir: str = ""
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def run(self) -> dict:
        """Runs what is not done yet, and writes `vtab.json` after every task.

        Other tasks that earlier starts ran stay in the file.

        Returns:
          The content of vtab.json: for each task its runs, how to prepare its data
          ("absent") or why it "failed"; the means of groups and of all tasks that ran,
          with intervals.

        Raises:
          UserError: no task has data, the workdir holds another benchmark, or a task
            failed (raised after the others have run).
          Preempted: see `Study.run`.
        """
        with lock.held(self.workdir):
            return self._run()

    def _run(self) -> dict:
        results = self._held()
        missing = {name: absent(name, self.data_dir) for name in self.names}
        ready = [name for name in self.names if not missing[name]]
        absent_now = {
            name: {"group": vtab.TASKS[name].group, "absent": how}
            for name, how in missing.items()
            if how
        }
        if not ready:
            _refuse_all(absent_now)
        _add(results, absent_now)
        shared, report, failed = SweepSetups(), {}, {}
        for number, name in enumerate(progress.each(ready, "vtab", "tasks"), 1):
            say(f"task {number} of {len(ready)}: vtab/{name}")
            try:
                folder = os.path.join(self.workdir, name)
                done = self.study(name, folder).run(shared)
            except UserError as error:
                # Other tasks can still run, but other processes may be in this one.
                if jax.process_count() > 1:
                    raise
                say(f"error: vtab/{name}: {error}")
                failed[name] = str(error)
                done = {"failed": str(error)}
            kept = {key: done[key] for key in _KEPT if key in done}
            _add(results, {name: {"group": vtab.TASKS[name].group, **kept}})
            report = self._report(results)
            runs.write_json(self.workdir, FILE, report)
        say(table(report))
        if failed:
            name, reason = next(iter(failed.items()))
            raise UserError(
                f"{_count(len(failed))} failed ({', '.join(failed)}), vtab/{name}: "
                f"{reason}; the same command resumes with what is not done"
            )
        return report

    def _held(self) -> dict[str, dict]:
        """Returns the tasks in the vtab.json of the workdir."""
        path = epath.Path(self.workdir) / FILE
        if not path.exists():
            return {}
        held = read_json(path)
        settings = {"model": self.model, **self.settings}
        recorded = {key: held.get(key, value) for key, value in settings.items()}
        if changed := fields.differences(recorded, settings):
            raise UserError(
                f"{self.workdir} holds VTAB-1k by another command "
                f"({'; '.join(changed)}): choose another --workdir, or repeat that "
                "command"
            )
        return held["tasks"]

    def _report(self, results: Mapping[str, dict]) -> dict:
        ordered = {name: results[name] for name in vtab.TASKS if name in results}
        return {
            "kind": "vtab",
            "model": self.model,
            "variant": self.variant,
            **self.settings,
            "tasks": ordered,
            **means(ordered),
        }


def _add(results: dict[str, dict], tasks: Mapping[str, dict]) -> None:
    """Adds tasks, but keeps runs of earlier starts where a task has none."""
    for name, task in tasks.items():
        if "runs" in task or "runs" not in results.get(name, {}):
            results[name] = task


def _refuse_all(missing: Mapping[str, dict]) -> None:
    first = next(iter(missing))
    if len(missing) == 1:
        raise UserError(
            f"the data of vtab/{first} is not there: {missing[first]['absent']}"
        )
    say(_how(missing))
    raise UserError(
        f"the data of none of the {len(missing)} tasks is there: prepare some, as "
        "listed above"
    )


def table(report: dict) -> str:
    """Formats a report as text, absent and failed tasks included."""
    rows = [
        {"task": name, "learning_rate": task["best"]["learning_rate"], **task}
        for name, task in report["tasks"].items()
        if "runs" in task
    ]
    lines = [runs.format_table(rows, _COLUMNS), ""] if rows else []
    groups = dict(report["groups"])
    if rows:
        groups["all"] = report | {"tasks": report["tasks_run"]}
    for name, mean in groups.items():
        half = mean["interval"]
        half = "" if half is None else f" ± {100 * half:.2f} (95 % over seeds)"
        many = _count(mean["tasks"])
        lines.append(f"mean of {name} ({many}): {mean['mean']:.2%}{half}")
    if how := _how(report["tasks"]):
        lines += ["", how]
    for name, task in report["tasks"].items():
        if "failed" in task:
            lines.append(f"failed: vtab/{name}: {task['failed']}")
    return "\n".join(lines)


def _how(tasks: Mapping[str, dict]) -> str:
    """Returns a list of absent tasks and how to prepare them, or ""."""
    missing = {n: task["absent"] for n, task in tasks.items() if "absent" in task}
    lines = [f"absent: the data of {_count(len(missing))}; to prepare it:"]
    lines += [f"vtab/{name}: {how}" for name, how in missing.items()]
    return "\n".join(lines) if missing else ""


def _count(tasks: int) -> str:
    return f"{tasks} task{'s' * (tasks != 1)}"


def means(tasks: Mapping[str, dict]) -> dict:
    """Returns the mean top-1 over tasks, per group and over all, with intervals.

    Tasks are averaged for each seed; means and intervals are over seeds.

    Args:
      tasks: task -> "group" and "runs", in the order of the seeds; tasks without runs
        are skipped.

    Returns:
      "groups": group -> "mean", "interval" and number of "tasks"; and "mean",
      "interval" and "tasks_run" over all tasks. "interval" is half of the 95 % interval,
      None for one seed. Without runs the mean is None.
    """
    ran = [task for task in tasks.values() if "runs" in task]
    groups = {}
    for group in GROUPS:
        members = [task for task in ran if task["group"] == group]
        if members:
            mean, half = runs.interval(_by_seed(members))
            groups[group] = {"mean": mean, "interval": half, "tasks": len(members)}
    mean, half = runs.interval(_by_seed(ran)) if ran else (None, None)
    return {"groups": groups, "mean": mean, "interval": half, "tasks_run": len(ran)}


def _by_seed(members: Sequence[Mapping]) -> list[float]:
    """Returns the mean over tasks, per seed."""
    scores = [[run["top1"] for run in task["runs"]] for task in members]
    return [statistics.fmean(one) for one in zip(*scores, strict=True)]
