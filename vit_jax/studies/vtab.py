"""VTAB-1k (arXiv:1910.04867): 19 tasks of 1,000 images, in three groups."""

import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence

import jax

from vit_jax.data import catalogue, tfds_source, vtab
from vit_jax.errors import UserError
from vit_jax.studies import runs, tables
from vit_jax.studies.transfer import Study, say
from vit_jax.training.shared import Shared

FILE = "vtab.json"
GROUPS = ("natural", "specialised", "structured")
_COLUMNS = {"task": "", "group": "", "rate": "g", "mean": ".2%", "std": ".2%"}
_CONFIDENCE = 0.95


def tasks(dataset: str) -> list[str]:
    """Reads which tasks are wanted.

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
        name = word.strip().removeprefix("vtab").removeprefix("/")
        members = [n for n, task in vtab.TASKS.items() if name in ("", task.group)]
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
    """One checkpoint on several tasks.

    Attributes:
      model: where the checkpoint is.
      variant: of its network.
      names: of the tasks.
      study: makes the study of a task, given its name and its workdir.
      workdir: folder of all.
      data_dir: as data.data_dir.
    """

    model: str
    variant: str
    names: Sequence[str]
    study: Callable[[str, str], Study]
    workdir: str | os.PathLike
    data_dir: str = ""

    def run(self) -> dict:
        """Runs what is not done yet, and writes `vtab.json` after every task.

        Returns:
          What the file holds: each task's runs or what its data lacks, the groups'
          means and the mean of all tasks that ran, with intervals.

        Raises:
          UserError: no task's data is there; or, after all tasks that can, one failed.
          Preempted: as `Study.run`.
        """
        missing = {name: absent(name, self.data_dir) for name in self.names}
        there = [name for name in self.names if not missing[name]]
        found = {
            name: {"group": vtab.TASKS[name].group, "absent": how}
            for name, how in missing.items()
            if how
        }
        if not there:
            first = self.names[0]
            if len(found) == 1:
                raise UserError(
                    f"the data of vtab/{first} is not there: {missing[first]}"
                )
            say(_how(found))
            raise UserError(
                f"the data of none of the {len(found)} tasks is there: prepare some, as "
                "listed above"
            )
        shared, report, failed = Shared(), {}, {}
        for number, name in enumerate(there, 1):
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
                continue
            found[name] = {
                "group": vtab.TASKS[name].group,
                **{k: done[k] for k in ("best", "runs", "mean", "std")},
            }
            ordered = {name: found[name] for name in self.names if name in found}
            report = self._report(ordered)
            runs.write_json(self.workdir, FILE, report)
        if report:
            say(table(report))
        if failed:
            name, reason = next(iter(failed.items()))
            raise UserError(
                f"{_count(len(failed))} failed ({', '.join(failed)}), vtab/{name}: "
                f"{reason}; the same command goes on with what is not done"
            )
        return report

    def _report(self, found: Mapping[str, dict]) -> dict:
        return {
            "kind": "vtab",
            "model": self.model,
            "variant": self.variant,
            "tasks": dict(found),
            **summary(found),
        }


def summary(found: Mapping[str, dict]) -> dict:
    """Returns the means over tasks, each the mean over seeds with an interval.

    A seed's mean is that of its runs of all tasks; the interval is of these means.

    Args:
      found: task to its group and its runs, in the order of the seeds; one that has no
        runs does not count.

    Returns:
      "groups": of each with a run, "mean", "interval" and how many "tasks" ran; and the
      same of all tasks. Intervals are half widths of 95 %, None with one seed.
    """
    ran = {name: task for name, task in found.items() if "runs" in task}
    groups = {}
    for group in GROUPS:
        members = [task for task in ran.values() if task["group"] == group]
        if members:
            mean, half = interval(_by_seed(members))
            groups[group] = {"mean": mean, "interval": half, "tasks": len(members)}
    mean, half = interval(_by_seed(list(ran.values())))
    return {"groups": groups, "mean": mean, "interval": half, "tasks_run": len(ran)}


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and the half width of its 95 % interval, by Student's t."""
    from scipy import special

    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return mean, None
    t = float(special.stdtrit(n - 1, (1 + _CONFIDENCE) / 2))
    return mean, t * statistics.stdev(values) / math.sqrt(n)


def table(report: dict) -> str:
    """Lays a report out for a terminal, and says what was absent."""
    rows = [
        {"task": name, "rate": task["best"]["rate"], **task}
        for name, task in report["tasks"].items()
        if "runs" in task
    ]
    lines = [tables.show(rows, _COLUMNS), ""]
    means = {**report["groups"], "all": report | {"tasks": report["tasks_run"]}}
    for name, mean in means.items():
        half = mean["interval"]
        half = "" if half is None else f" ± {100 * half:.2f} (95 % over seeds)"
        many = _count(mean["tasks"])
        lines.append(f"mean of {name} ({many}): {mean['mean']:.2%}{half}")
    if how := _how(report["tasks"]):
        lines += ["", how]
    return "\n".join(lines)


def _how(found: Mapping[str, dict]) -> str:
    """Lists what was absent and how to prepare it."""
    missing = {n: task["absent"] for n, task in found.items() if "absent" in task}
    lines = [f"absent: the data of {_count(len(missing))}; to prepare it:"]
    lines += [f"vtab/{name}: {how}" for name, how in missing.items()]
    return "\n".join(lines) if missing else ""


def _count(tasks: int) -> str:
    return f"{tasks} task{'s' * (tasks != 1)}"


def _by_seed(members: Sequence[Mapping]) -> list[float]:
    """Returns the mean over tasks of each seed."""
    scores = [[run["top1"] for run in task["runs"]] for task in members]
    return [statistics.fmean(one) for one in zip(*scores, strict=True)]
