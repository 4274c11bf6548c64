"""Tables of what runs scored and computed: accuracies, transfers, evaluations, compute."""

import os
from collections.abc import Sequence

from vit_jax.analysis.charts import Matrix, Number
from vit_jax.evaluators import result_tables
from vit_jax.tools.report import results
from vit_jax.tools.report.blocks import (
    NONE,
    OURS,
    PLAIN,
    Block,
    Table,
    Text,
    number,
    percent,
    stem,
    with_spread,
)
from vit_jax.tools.report.results import Result, Run
from vit_jax.training import run_report

_WORST = 20  # Classes in the table of accuracies per class.
_SUMS = ("images_seen", "exaflops", "device_days", "tpuv3_core_days")


def accuracies(found: Sequence[Result]) -> tuple[Block, ...]:
    """Returns a table of all accuracies, comparable with the paper or not."""
    rows = tuple(
        (
            result.run,
            result.dataset,
            with_spread(result.value, result.spread),
            result.model.label,
            result.model.pretraining or NONE,
            result.how,
        )
        for result in found
    )
    head = ("run", "data set", "top-1 in %", "model", "pretrained on", "how")
    title = "All accuracies of these runs"
    kinds = (PLAIN, PLAIN, OURS, PLAIN, PLAIN, PLAIN)
    return (Table(title, head, rows, kinds),) if rows else ()


def transfers(runs: Sequence[Run]) -> tuple[Block, ...]:
    """Returns the sweep of every transfer, and the results and gaps of VTAB-1k."""
    found: list[Block] = []
    for run in runs:
        if (told := run.transfer) is not None:
            found.append(_sweep(run, told))
        if (told := run.vtab) is not None:
            found += _vtab(run, told)
    return tuple(found)


def _sweep(run: Run, told: dict) -> Table:
    trials = told.get("trials", [])
    best = (told.get("best") or {}).get("learning_rate")
    rows = [
        (
            f"rate {trial['learning_rate']:g}{', chosen' if trial['learning_rate'] == best else ''}",
            "held-out part of train",
            "diverged" if "diverged" in trial else _fraction(trial.get("score")),
            number(trial.get("seconds")),
        )
        for trial in trials
    ]
    rows += [
        (
            f"seed {one['seed']}",
            "test",
            percent(100 * one["top1"]),
            number(one.get("seconds")),
        )
        for one in told["runs"]
    ]
    stated = ", ".join(f"{k}={v}" for k, v in told.get("overrides", {}).items())
    return Table(
        f"{run.name}: {told['variant']} ({results.short_name(told['model'])}) on "
        f"{told['dataset']}",
        ("trial or run", "scored on", "top-1 in %", "seconds"),
        tuple(rows),
        note=f"Mean {_fraction(told['mean'])} %, standard deviation "
        f"{_fraction(told.get('std'))}. Mode: {results.describe_settings(told)}"
        f"{f'; set: {stated}' if stated else ''}.",
    )


def _vtab(run: Run, told: dict) -> list[Block]:
    groups = told.get("groups", {})
    rows = [
        (
            name,
            str(group.get("tasks", NONE)),
            _fraction(group.get("mean")),
            _fraction(group.get("interval")),
        )
        for name, group in groups.items()
    ]
    head = ("group", "tasks", "mean top-1 in %", "half of the 95 % interval")
    title = f"{run.name}: VTAB-1k by group"
    note = f"Mode: {results.describe_settings(told)}."
    found: list[Block] = [Table(title, head, tuple(rows), note=note)]
    for key, title, column in (
        ("absent", "tasks whose data is absent", "how to prepare it"),
        ("failed", "tasks that failed", "why"),
    ):
        listed = tuple(
            (results.TASKS.get(task, task), about[key])
            for task, about in told["tasks"].items()
            if key in about
        )
        if listed:
            found.append(Table(f"{run.name}: {title}", ("task", column), listed))
    return found


def evaluations(runs: Sequence[Run]) -> tuple[Block, ...]:
    """Returns every metric of every evaluation, and confusion matrices."""
    found: list[Block] = []
    for run in runs:
        if run.training is not None and run.training["final"]:
            title = f"{run.name}: scores at the end of training"
            found.append(_metrics(title, run.training["final"]))
        if run.evaluate is None:
            continue
        told = run.evaluate
        title = f"{run.name}: {told['variant']} ({results.short_name(told['model'])})"
        found.append(_metrics(title, told["results"]))
        for name, rows in run.confusions.items():
            found += _classes(run, name, rows)
    return tuple(found)


def _metrics(title: str, scores: dict) -> Table:
    """Returns a table with a row per evaluation, parameters and metric."""
    rows = tuple(
        (name, kind, metric, result_tables.text(metric, value))
        for name, kinds in scores.items()
        for kind, values in kinds.items()
        for metric, value in values.items()
    )
    return Table(title, ("evaluation", "parameters", "metric", "value"), rows, labels=3)


def _classes(run: Run, name: str, rows: list[list[str]]) -> list[Block]:
    """Returns the accuracy per class, the worst first, and the confusion matrix."""
    (_, _, _, *names), *body = rows
    scored = sorted((row for row in body if row[2]), key=lambda row: float(row[2]))
    table = Table(
        f"{run.name}: {name}, accuracy by class",
        ("class", "examples", "top-1 in %"),
        tuple(
            (row[0], row[1], percent(100 * float(row[2]))) for row in scored[:_WORST]
        ),
        note=f"The worst {_WORST} of {len(scored)} classes."
        if len(scored) > _WORST
        else "",
    )
    picture = Matrix(
        stem("confusion", run.name, name),
        f"{run.name}: {name}",
        tuple(names),
        tuple(tuple(int(count) for count in row[3:]) for row in body),
    )
    return [table, picture]


def _fraction(value: Number | None) -> str:
    return percent(None if value is None else 100 * value)


def compute_blocks(runs: Sequence[Run]) -> tuple[Block, ...]:
    """Returns a table of the compute of all training runs, and how it is counted."""
    given = {_place(run.path) for run in runs}
    rows = []
    for run in runs:
        if (told := run.training) is not None:
            about = told.get("variant", NONE), told.get("dataset", NONE)
            used = told.get("compute", {})
            rows.append(_compute_row(run.name, *about, f"{told['steps']:,}", [used]))
        if run.transfer is not None:
            rows += _of_transfer(run.name, run.transfer)
        if run.vtab is not None:
            rows += _of_vtab(run.name, run.vtab)
        if run.study is not None:
            rows += _of_study(run, given)
    head = ("run", "model", "data", "steps", "images seen", "exaFLOPs", "devices")
    head += ("device-days", "TPUv3-core-days, equivalent")
    if not rows:
        return ()
    return (
        Table("Compute of the training runs", head, tuple(rows)),
        Text(
            "exaFLOPs: 6 x multiply-accumulates of the forward pass of an image x "
            "images seen, as in table 6 of the paper. Device-days: the time for which "
            "the devices were taken, compiling, evaluating and saving with it, summed "
            "over all starts; what a killed start did after its last checkpoint is not "
            "in it, nor what a run did that diverged. A row of several runs has their "
            "sums. The equivalent in TPUv3-core-days is the exaFLOPs divided by "
            f"{run_report.exaflops_a_core_day():.2f}, what a core of the paper's own runs "
            "did in a day: 1567 + 4262 exaFLOPs in 680 + 2500 core-days (L/16 and "
            "H/14, 14 epochs of JFT-300M; tables 6 and 2). One of the two alone would "
            "give 2.30 or 1.70, so it is good to about a quarter; it says what the "
            "paper's hardware and code would have taken, not how fast these runs were."
        ),
    )


def _compute_row(name: str, variant: str, data: str, steps: str, used: list[dict]):
    """Returns a row for one or several runs; sums need the number of each run."""
    first = used[0]
    sums = {
        key: sum(one[key] for one in used)
        for key in _SUMS
        if all(key in one for one in used)
    }
    device = NONE
    if "device_kind" in first:
        device = f"{first['devices']} x {first['device_kind']}"
    seen = f"{sums['images_seen']:,}" if "images_seen" in sums else NONE
    amounts = [number(sums.get(key)) for key in _SUMS[1:]]
    return (name, variant, data, steps, seen, amounts[0], device, *amounts[1:])


def _of_transfer(name: str, told: dict) -> list[tuple[str, ...]]:
    about = told["variant"], told["dataset"]
    return [
        row
        for what, key in (("trial", "trials"), ("final run", "runs"))
        if (row := _of_runs(name, what, *about, told.get(key, [])))
    ]


def _of_vtab(name: str, told: dict) -> list[tuple[str, ...]]:
    found = []
    for task, about in told["tasks"].items():
        data = f"vtab/{task}"
        row = _of_runs(
            name, "final run", told.get("variant", NONE), data, about.get("runs", [])
        )
        found += [row] * bool(row)
    return found


def _of_runs(name, what, variant, data, runs) -> tuple[str, ...]:
    """Returns a row for equal runs, () if none has recorded its compute."""
    runs = [run for run in runs if run.get("compute")]
    if not runs:
        return ()
    steps = runs[0].get("steps")
    steps = NONE if steps is None else f"{steps:,}"
    many = len(runs)
    if many > 1:
        steps = f"{many} x {steps}"
    words = f"{name}: {many} {what}{'s' * (many != 1)}"
    return _compute_row(words, variant, data, steps, [run["compute"] for run in runs])


def _of_study(run: Run, given: set[str]) -> list[tuple[str, ...]]:
    """Returns a row for the trials and one for the runs of each stage of each point.

    Runs that are themselves in the report are left out, and so are stages that a point
    shares with one before it.
    """
    rows, seen = [], set()
    for point in run.study["points"]:
        for stage, outcome in point["stages"].items():
            done = [r for r in outcome["runs"] if r["folder"] not in seen]
            seen |= {one["folder"] for one in done}
            if not done:
                continue
            about = done[0]["variant"], done[0]["dataset"]
            others = [t for t in outcome["trials"] if t["choice"] != outcome["chosen"]]
            done = [r for r in done if _place(run.path / r["folder"]) not in given]
            for what, those in (("other trial", others), ("run", done)):
                title = f"{run.name}: {point['name']}, {stage}"
                rows.append(_of_runs(title, what, *about, those))
    return [row for row in rows if row]


def _place(path) -> str:
    return os.fspath(path) if "://" in str(path) else os.path.realpath(path)
