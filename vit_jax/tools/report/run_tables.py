"""Tables of runs: accuracies, transfers, evaluations and compute."""

import os
from collections.abc import Iterator, Sequence

from vit_jax.analysis.charts import Matrix, Number
from vit_jax.evaluators import metric_names
from vit_jax.tools.report import results
from vit_jax.tools.report.blocks import (
    MEASURED,
    NONE,
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

_WORST = 20  # Number of classes in the table of accuracies by class.
_SUMS = ("images_seen", "exaflops", "device_days", "tpuv3_core_days")


def accuracies(measured: Sequence[Result]) -> tuple[Block, ...]:
    """Returns a table of all accuracies, whether comparable with the paper or not."""
    rows = tuple(
        (
            result.run,
            result.dataset,
            with_spread(result.value, result.spread),
            result.model.label,
            result.model.pretraining or NONE,
            result.how,
        )
        for result in measured
    )
    head = ("run", "data set", "top-1 in %", "model", "pretrained on", "how")
    kinds = (PLAIN, PLAIN, MEASURED, PLAIN, PLAIN, PLAIN)
    return (Table("All accuracies of these runs", head, rows, kinds),) if rows else ()


def transfers(runs: Sequence[Run]) -> tuple[Block, ...]:
    """Returns the runs of every transfer, and scores and missing tasks of VTAB-1k."""
    blocks: list[Block] = []
    for run in runs:
        if run.transfer is not None:
            blocks.append(_sweep(run, run.transfer))
        if run.vtab is not None:
            blocks += _vtab(run, run.vtab)
    return tuple(blocks)


def _sweep(run: Run, transfer: dict) -> Table:
    best = (transfer.get("best") or {}).get("learning_rate")
    rows = []
    for trial in transfer.get("trials", []):
        name = f"rate {trial['learning_rate']:g}"
        name += ", chosen" * (trial["learning_rate"] == best)
        top1 = "diverged" if "diverged" in trial else _fraction(trial.get("score"))
        seconds = number(trial.get("seconds"))
        rows.append((name, "held-out part of train", top1, seconds))
    rows += [
        (
            f"seed {one['seed']}",
            "test",
            _fraction(one["top1"]),
            number(one.get("seconds")),
        )
        for one in transfer["runs"]
    ]
    changes = ", ".join(f"{k}={v}" for k, v in transfer.get("overrides", {}).items())
    return Table(
        f"{run.name}: {transfer['variant']} ({results.short_name(transfer['model'])}) on "
        f"{transfer['dataset']}",
        ("trial or run", "scored on", "top-1 in %", "seconds"),
        tuple(rows),
        note=f"Mean {_fraction(transfer['mean'])} %, standard deviation "
        f"{_fraction(transfer.get('std'))}. Mode: {results.describe_settings(transfer)}"
        f"{f'; set: {changes}' if changes else ''}.",
    )


def _vtab(run: Run, vtab: dict) -> list[Block]:
    rows = [
        (
            name,
            str(group.get("tasks", NONE)),
            _fraction(group.get("mean")),
            _fraction(group.get("interval")),
        )
        for name, group in vtab.get("groups", {}).items()
    ]
    head = ("group", "tasks", "mean top-1 in %", "half of the 95 % interval")
    title = f"{run.name}: VTAB-1k by group"
    note = f"Mode: {results.describe_settings(vtab)}."
    blocks: list[Block] = [Table(title, head, tuple(rows), note=note)]
    for key, title, column in (
        ("absent", "tasks whose data are missing", "how to prepare them"),
        ("failed", "tasks that failed", "why"),
    ):
        listed = tuple(
            (results.vtab_tasks().get(task, task), about[key])
            for task, about in vtab["tasks"].items()
            if key in about
        )
        if listed:
            blocks.append(Table(f"{run.name}: {title}", ("task", column), listed))
    return blocks


def evaluations(runs: Sequence[Run]) -> tuple[Block, ...]:
    """Returns every metric of every evaluation, and confusion matrices."""
    blocks: list[Block] = []
    for run in runs:
        if run.training is not None and run.training["final"]:
            title = f"{run.name}: scores at the end of training"
            blocks.append(_metrics(title, run.training["final"]))
        if (report := run.evaluate) is None:
            continue
        model = f"{report['variant']} ({results.short_name(report['model'])})"
        blocks.append(_metrics(f"{run.name}: {model}", report["results"]))
        for name, rows in run.confusions.items():
            blocks += _classes(run, name, rows)
    return tuple(blocks)


def _metrics(title: str, scores: dict) -> Table:
    """Returns a table with a row per evaluation, parameters and metric."""
    rows = tuple(
        (name, kind, metric, metric_names.text(metric, value))
        for name, kinds in scores.items()
        for kind, values in kinds.items()
        for metric, value in values.items()
    )
    return Table(title, ("evaluation", "parameters", "metric", "value"), rows, labels=3)


def _classes(run: Run, name: str, rows: list[list[str]]) -> list[Block]:
    """Returns the accuracy per class, worst first, and the confusion matrix."""
    (_, _, _, *names), *body = rows
    scored = sorted((row for row in body if row[2]), key=lambda row: float(row[2]))
    note = f"The worst {_WORST} of {len(scored)} classes."
    table = Table(
        f"{run.name}: {name}, accuracy by class",
        ("class", "examples", "top-1 in %"),
        tuple((row[0], row[1], _fraction(float(row[2]))) for row in scored[:_WORST]),
        note=note if len(scored) > _WORST else "",
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
    given = {_real_path(run.path) for run in runs}
    rows = []
    for run in runs:
        if (report := run.training) is not None:
            about = report.get("variant", NONE), report.get("dataset", NONE)
            used = report.get("compute", {})
            rows.append(_compute_row(run.name, *about, f"{report['steps']:,}", [used]))
        rows += [row for group in _groups(run, given) if (row := _of_runs(*group))]
    head = ("run", "model", "data", "steps", "images seen", "exaFLOPs", "devices")
    head += ("device-days", "TPUv3-core-days, equivalent")
    if not rows:
        return ()
    return (
        Table("Compute of the training runs", head, tuple(rows)),
        Text(
            "exaFLOPs: 6 x multiply-accumulates of an image's forward pass x images seen, "
            "as in table 6 of the paper. Device-days: the time for which the devices were "
            "in use, including compiling, evaluating and saving, summed over all starts; "
            "work of a killed start after its last checkpoint, and runs that diverged, "
            "are not included. A row for several runs has their sums. The equivalent in "
            "TPUv3-core-days is the exaFLOPs divided by "
            f"{run_report.exaflops_a_core_day():.2f}, the exaFLOPs per core and day of the "
            "paper's runs: 1567 + 4262 exaFLOPs in 680 + 2500 core-days (L/16 and "
            "H/14, 14 epochs of JFT-300M; tables 6 and 2). Either of the two gives 2.30 or "
            "1.70, so it is accurate to about a quarter; it estimates the time on the "
            "paper's hardware and code, not the speed of these runs."
        ),
    )


def _compute_row(name: str, variant: str, data: str, steps: str, used: list[dict]):
    """Returns a row for one or several runs; a sum needs the number of every run."""
    sums = {
        key: sum(one[key] for one in used)
        for key in _SUMS
        if all(key in one for one in used)
    }
    device = NONE
    if "device_kind" in used[0]:
        device = f"{used[0]['devices']} x {used[0]['device_kind']}"
    seen = f"{sums['images_seen']:,}" if "images_seen" in sums else NONE
    exaflops, *days = (number(sums.get(key)) for key in _SUMS[1:])
    return (name, variant, data, steps, seen, exaflops, device, *days)


def _groups(run: Run, given: set[str]) -> Iterator[tuple]:
    """Yields runs with the same config inside a run: title, kind, variant, data, runs."""
    if run.transfer is not None:
        about = run.transfer["variant"], run.transfer["dataset"]
        yield run.name, "trial", *about, run.transfer.get("trials", [])
        yield run.name, "final run", *about, run.transfer["runs"]
    if run.vtab is not None:
        variant = run.vtab.get("variant", NONE)
        for task, about in run.vtab["tasks"].items():
            yield run.name, "final run", variant, f"vtab/{task}", about.get("runs", [])
    if run.study is not None:
        yield from _study_groups(run, given)


def _of_runs(name, what, variant, data, runs) -> tuple[str, ...]:
    """Returns a row for runs of one config; () if none has recorded its compute."""
    runs = [run for run in runs if run.get("compute")]
    if not runs:
        return ()
    count, steps = len(runs), runs[0].get("steps")
    text = f"{count} x " * (count > 1) + (NONE if steps is None else f"{steps:,}")
    title = f"{name}: {count} {what}{'s' * (count != 1)}"
    return _compute_row(title, variant, data, text, [run["compute"] for run in runs])


def _study_groups(run: Run, given: set[str]) -> Iterator[tuple]:
    """Yields the trials and the runs of each stage of each point.

    Runs that are themselves part of the report are left out, and so are stages that a
    point shares with an earlier one.
    """
    seen = set()
    for point in run.study["points"]:
        for stage, outcome in point["stages"].items():
            done = [r for r in outcome["runs"] if r["folder"] not in seen]
            seen |= {one["folder"] for one in done}
            if not done:
                continue
            about = done[0]["variant"], done[0]["dataset"]
            others = [t for t in outcome["trials"] if t["choice"] != outcome["chosen"]]
            done = [r for r in done if _real_path(run.path / r["folder"]) not in given]
            title = f"{run.name}: {point['name']}, {stage}"
            yield title, "other trial", *about, others
            yield title, "run", *about, done


def _real_path(path) -> str:
    return os.fspath(path) if "://" in str(path) else os.path.realpath(path)
