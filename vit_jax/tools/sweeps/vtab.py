"""VTAB-1k (arXiv:1910.04867): 19 tasks of 1,000 images, in three groups."""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence

import jax
from etils import epath

from vit_jax.command_line import progress
from vit_jax.command_line.files import read_json
from vit_jax.data import catalogue
from vit_jax.data.sources import tfds as tfds_source
from vit_jax.data.sources import vtab
from vit_jax.errors import UserError
from vit_jax.tools.sweeps import runs
from vit_jax.tools.sweeps.runs import say
from vit_jax.training import lock
from vit_jax.training.sweep import SweepSetups

FILE = "vtab.json"
_COLUMNS = {"task": "", "group": "", "learning_rate": "g", "mean": ".2%", "std": ".2%"}
# Keys of a task's report that are copied to vtab.json.
_KEPT = ("resolution", "overrides", "best", "runs", "mean", "std", "failed")
GROUPS = ("natural", "specialised", "structured")


def tasks(dataset: str) -> list[str]:
    """Returns the names of tasks without "vtab/", in the benchmark's order.

    `dataset` is "vtab" for all tasks, or "vtab/TASK" or "vtab/GROUP", separated by commas.

    Raises:
      UserError: a task is unknown.
    """
    wanted = set()
    for word in filter(None, map(str.strip, dataset.split(","))):
        name = word.removeprefix("vtab/")
        members = {
            n for n, t in vtab.TASKS.items() if word == "vtab" or name == t.group
        }
        wanted |= members or {name}
        if not members:
            vtab.task(f"vtab/{name}")
    return [name for name in vtab.TASKS if name in wanted]


def absent(name: str, data_dir: str) -> str:
    """Returns how to prepare the data of a task; "" if `data_dir` has it."""
    task = vtab.TASKS[name]
    for tfds_name in filter(None, (task.tfds, task.newer)):
        builder = tfds_source.find_prepared(tfds_name, data_dir)
        if builder is not None and tfds_source.is_readable(builder):
            return ""
    where = data_dir or "~/tensorflow_datasets"
    return catalogue.ENTRIES[f"vtab/{name}"].how(where)


def run(
    names: Sequence[str],
    transfer: Callable[[str, str, SweepSetups], dict],
    workdir: str | os.PathLike,
    about: Mapping[str, object],
    data_dir: str = "",
) -> dict:
    """Fine-tunes a checkpoint on tasks; finished runs are not repeated.

    Args:
      names: names of the tasks.
      transfer: function that returns the report of a task (see `transfer.run`), called
        with its name, its workdir, and the setups that tasks share.
      workdir: folder for all tasks.
      about: model, variant and settings, which cannot change within a workdir.
      data_dir: value of `data.data_dir`.

    Returns:
      The content of vtab.json, which is written after every task: for each task of this
      and earlier starts its runs, how to prepare its data ("absent") or why it
      "failed"; the means of groups and of all tasks that ran, with intervals.

    Raises:
      UserError: no task has data, the workdir holds another benchmark, or a task failed
        (raised after the others have run).
      Preempted: a run was preempted (see `transfer.run`).
    """
    with lock.held(workdir):
        path = epath.Path(workdir) / FILE
        results = read_json(path)["tasks"] if path.exists() else {}
        missing = {name: how for name in names if (how := absent(name, data_dir))}
        ready = [name for name in names if name not in missing]
        if not ready:
            raise _all_absent(missing)
        # Tasks that only failed, or that have no data, leave nothing to resume.
        begun = runs.has_begun(*epath.Path(workdir).glob("*/*/*"))
        begun = begun or any("runs" in task for task in results.values())
        results = results if begun else {}
        runs.check_command(workdir, dict(about), begun=begun)
        for name, how in missing.items():
            _add(results, name, {"absent": how})
        shared, failed = SweepSetups(), {}
        for number, name in enumerate(progress.each(ready, "vtab", "tasks"), 1):
            say(f"task {number} of {len(ready)}: vtab/{name}")
            try:
                done = transfer(name, os.path.join(workdir, name), shared)
            except UserError as error:
                # Other tasks could run, but other processes may still be in this one.
                if jax.process_count() > 1:
                    raise
                say(f"error: vtab/{name}: {error}")
                failed[name] = str(error)
                done = {"failed": str(error)}
            _add(results, name, {key: done[key] for key in _KEPT if key in done})
            ordered = {one: results[one] for one in vtab.TASKS if one in results}
            report = {"kind": "vtab", **about, "tasks": ordered, **means(ordered)}
            runs.write_json(workdir, FILE, report)
        say(table(report))
    if failed:
        name, reason = next(iter(failed.items()))
        raise UserError(
            f"{_count(len(failed))} failed ({', '.join(failed)}), vtab/{name}: "
            f"{reason}; repeat the command to resume with what is not done"
        )
    return report


def _all_absent(missing: Mapping[str, str]) -> UserError:
    """Returns the error for no data for any task; lists several on standard output."""
    if len(missing) == 1:
        ((name, how),) = missing.items()
        return UserError(f"the data of vtab/{name} do not exist: {how}")
    say(_how(missing))
    return UserError(
        f"none of the {len(missing)} tasks has data: prepare some, as listed above"
    )


def _add(results: dict[str, dict], name: str, task: dict) -> None:
    """Adds a task, but keeps the runs of an earlier start if it has none."""
    if "runs" in task or "runs" not in results.get(name, {}):
        results[name] = {"group": vtab.TASKS[name].group, **task}


def table(report: dict) -> str:
    """Formats a report as text, including missing and failed tasks."""
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
    tasks = report["tasks"].items()
    if missing := {name: task["absent"] for name, task in tasks if "absent" in task}:
        lines += ["", _how(missing)]
    failed = {name: task["failed"] for name, task in tasks if "failed" in task}
    lines += [f"failed: vtab/{name}: {why}" for name, why in failed.items()]
    return "\n".join(lines)


def _how(missing: Mapping[str, str]) -> str:
    """Returns a list of tasks without data, and how to prepare them."""
    lines = [f"absent: the data of {_count(len(missing))}; to prepare it:"]
    return "\n".join(lines + [f"vtab/{name}: {how}" for name, how in missing.items()])


def _count(tasks: int) -> str:
    return f"{tasks} task{'s' * (tasks != 1)}"


def means(tasks: Mapping[str, dict]) -> dict:
    """Returns the mean top-1 over tasks, for each group ("groups") and over all tasks.

    Tasks are averaged for each seed; means and "interval", half of the 95 % interval,
    are over seeds. Tasks without "runs" are skipped; if all are, the mean is None.
    """

    def over_seeds(members: Sequence[Mapping]) -> tuple[float, float | None]:
        scores = [[run["top1"] for run in task["runs"]] for task in members]
        by_seed = zip(*scores, strict=True)
        return runs.interval([statistics.fmean(one) for one in by_seed])

    ran = [task for task in tasks.values() if "runs" in task]
    groups = {}
    for group in GROUPS:
        if members := [task for task in ran if task["group"] == group]:
            mean, half = over_seeds(members)
            groups[group] = {"mean": mean, "interval": half, "tasks": len(members)}
    mean, half = over_seeds(ran) if ran else (None, None)
    return {"groups": groups, "mean": mean, "interval": half, "tasks_run": len(ran)}
