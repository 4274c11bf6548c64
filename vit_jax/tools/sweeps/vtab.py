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
from vit_jax.tools.sweeps.transfer import Study, say
from vit_jax.training import lock
from vit_jax.training.sweep import SweepSetups

FILE = "vtab.json"
_COLUMNS = {"task": "", "group": "", "learning_rate": "g", "mean": ".2%", "std": ".2%"}
# Keys of a task's report that vtab.json keeps.
_KEPT = ("resolution", "overrides", "best", "runs", "mean", "std", "failed")
GROUPS = ("natural", "specialised", "structured")


def tasks(dataset: str) -> list[str]:
    """Parses a list of tasks.

    Args:
      dataset: "vtab" for all, or "vtab/" with a task or a group, several between
        commas: "vtab/dtd,vtab/structured".

    Returns:
      Names of tasks without "vtab/", in the benchmark's order.

    Raises:
      UserError: there is no such task.
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
    """Returns how to prepare the data of a task; "" if it is there.

    Args:
      name: of the task.
      data_dir: as data.data_dir.
    """
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
      model: where the checkpoint is.
      variant: of its network.
      names: of the tasks.
      study: makes the study of a task, given its name and its workdir.
      workdir: folder of all.
      data_dir: as data.data_dir.
      settings: what makes the tasks comparable, as mode, seeds and resolution; a
        workdir is of one choice of them.
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

        Tasks of earlier starts, which may have been others, stay in the file.

        Returns:
          What the file holds: each task's runs, or what its data lacks ("absent"), or
          why it "failed"; the groups' means and the mean of all tasks that ran, with
          intervals.

        Raises:
          UserError: no task's data is there, or the workdir holds another benchmark;
            or, after all tasks that can, one failed.
          Preempted: as `Study.run`.
        """
        with lock.held(self.workdir):
            return self._run()

    def _run(self) -> dict:
        found = self._held()
        missing = {name: absent(name, self.data_dir) for name in self.names}
        there = [name for name in self.names if not missing[name]]
        absent_now = {
            name: {"group": vtab.TASKS[name].group, "absent": how}
            for name, how in missing.items()
            if how
        }
        if not there:
            _refuse_all(absent_now)
        _add(found, absent_now)
        shared, report, failed = SweepSetups(), {}, {}
        for number, name in enumerate(progress.each(there, "vtab", "tasks"), 1):
            say(f"task {number} of {len(there)}: vtab/{name}")
            try:
                folder = os.path.join(self.workdir, name)
                done = self.study(name, folder).run(shared)
            except UserError as error:
                # The other tasks have nothing to do with it; other processes may.
                if jax.process_count() > 1:
                    raise
                say(f"error: vtab/{name}: {error}")
                failed[name] = str(error)
                done = {"failed": str(error)}
            kept = {key: done[key] for key in _KEPT if key in done}
            _add(found, {name: {"group": vtab.TASKS[name].group, **kept}})
            report = self._report(found)
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
        own = {"model": self.model, **self.settings}
        told = {key: held.get(key, value) for key, value in own.items()}
        if changed := fields.differences(told, own):
            raise UserError(
                f"{self.workdir} holds VTAB-1k by another command "
                f"({'; '.join(changed)}): choose another --workdir, or repeat that "
                "command"
            )
        return held["tasks"]

    def _report(self, found: Mapping[str, dict]) -> dict:
        ordered = {name: found[name] for name in vtab.TASKS if name in found}
        return {
            "kind": "vtab",
            "model": self.model,
            "variant": self.variant,
            **self.settings,
            "tasks": ordered,
            **means(ordered),
        }


def _add(found: dict[str, dict], tasks: Mapping[str, dict]) -> None:
    """Adds tasks; results of earlier starts stay unless a task ran again."""
    for name, task in tasks.items():
        if "runs" in task or "runs" not in found.get(name, {}):
            found[name] = task


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
    """Formats a report as text, with absent and failed tasks."""
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


def _how(found: Mapping[str, dict]) -> str:
    """Returns a list of absent tasks and how to prepare them, "" if there are none."""
    missing = {n: task["absent"] for n, task in found.items() if "absent" in task}
    lines = [f"absent: the data of {_count(len(missing))}; to prepare it:"]
    lines += [f"vtab/{name}: {how}" for name, how in missing.items()]
    return "\n".join(lines) if missing else ""


def _count(tasks: int) -> str:
    return f"{tasks} task{'s' * (tasks != 1)}"


def means(found: Mapping[str, dict]) -> dict:
    """Returns the mean top-1 over tasks, per group and over all, with intervals.

    The mean of a seed is over tasks; means and intervals are over seeds.

    Args:
      found: task -> "group" and "runs", in the order of the seeds; tasks without runs
        do not count.

    Returns:
      "groups": group -> "mean", "interval" and number of "tasks"; and "mean",
      "interval" and "tasks_run" over all tasks. Intervals are half widths of 95 %
      intervals, None for one seed. Without runs the mean is None.
    """
    ran = {name: task for name, task in found.items() if "runs" in task}
    groups = {}
    for group in GROUPS:
        members = [task for task in ran.values() if task["group"] == group]
        if members:
            mean, half = runs.interval(_by_seed(members))
            groups[group] = {"mean": mean, "interval": half, "tasks": len(members)}
    mean, half = runs.interval(_by_seed(list(ran.values()))) if ran else (None, None)
    return {"groups": groups, "mean": mean, "interval": half, "tasks_run": len(ran)}


def _by_seed(members: Sequence[Mapping]) -> list[float]:
    """Returns the mean over tasks, per seed."""
    scores = [[run["top1"] for run in task["runs"]] for task in members]
    return [statistics.fmean(one) for one in zip(*scores, strict=True)]
