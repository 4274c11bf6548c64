"""Tables of what runs did and scored, each as it was recorded."""

import re
from collections.abc import Sequence

from vit_jax.report import compute
from vit_jax.report.pages import results
from vit_jax.report.pages.blocks import (
    NONE,
    OURS,
    PLAIN,
    Block,
    Matrix,
    Number,
    Table,
    Text,
    number,
    percent,
    with_spread,
)
from vit_jax.report.pages.results import Result
from vit_jax.report.pages.runs import Run

# Metrics that are fractions of examples, shown in percent.
_FRACTIONS = ("top1", "top5", "class_mean", "ece")
_WORST = 20  # Classes whose accuracies are listed.


def compute_blocks(runs: Sequence[Run]) -> tuple[Block, ...]:
    """Returns the compute of the training runs, and how it is counted."""
    rows = []
    for run in runs:
        if (told := run.training) is None:
            continue
        used = told.get("compute", {})
        device = f"{used['devices']} x {used['device_kind']}" if used else NONE
        seen = f"{used['images_seen']:,}" if used else NONE
        amounts = ("exaflops", "device_days", "tpuv3_core_days")
        rows.append(
            (
                run.name,
                told.get("variant", NONE),
                told.get("dataset", NONE),
                f"{told['steps']:,}",
                seen,
                number(used.get(amounts[0])),
                device,
                *(number(used.get(name)) for name in amounts[1:]),
            )
        )
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
            "in it. The equivalent in TPUv3-core-days is the exaFLOPs divided by "
            f"{compute.exaflops_a_core_day():.2f}, what a core of the paper's own runs "
            "did in a day: 1567 + 4262 exaFLOPs in 680 + 2500 core-days (L/16 and "
            "H/14, 14 epochs of JFT-300M; tables 6 and 2). One of the two alone would "
            "give 2.30 or 1.70, so it is good to about a quarter; it says what the "
            "paper's hardware and code would have taken, not how fast these runs were."
        ),
    )


def accuracies(found: Sequence[Result]) -> tuple[Block, ...]:
    """Returns all accuracies, those without a place in the paper's tables too."""
    rows = tuple(
        (
            result.run,
            result.model.label,
            result.model.pretraining or NONE,
            result.dataset,
            with_spread(result.value, result.spread),
            result.how,
        )
        for result in found
    )
    head = ("run", "model", "pretrained on", "data set", "top-1 in %", "how")
    title = "All accuracies of these runs"
    kinds = (PLAIN,) * 4 + (OURS, PLAIN)
    return (Table(title, head, rows, kinds),) if rows else ()


def transfers(runs: Sequence[Run]) -> tuple[Block, ...]:
    """Returns the sweep of every transfer, and the tasks that VTAB-1k lacks."""
    found: list[Block] = []
    for run in runs:
        if (told := run.transfer) is not None:
            found.append(_sweep(run, told))
        if (told := run.vtab) is not None:
            found += _vtab(run, told)
    return tuple(found)


def _sweep(run: Run, told: dict) -> Table:
    trials = told.get("trials", [])
    best = (told.get("best") or {}).get("rate")
    rows = [
        (
            f"rate {trial['rate']:g}{', chosen' if trial['rate'] == best else ''}",
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
    return Table(
        f"{run.name}: {told['variant']} ({results.short(told['model'])}) on "
        f"{told['dataset']}",
        ("trial or run", "scored on", "top-1 in %", "seconds"),
        tuple(rows),
        note=f"Mean {_fraction(told['mean'])} %, standard deviation "
        f"{_fraction(told.get('std'))}.",
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
    found: list[Block] = [Table(f"{run.name}: VTAB-1k by group", head, tuple(rows))]
    absent = {
        results.TASKS.get(task, task): about["absent"]
        for task, about in told["tasks"].items()
        if "absent" in about
    }
    if absent:
        table = Table(
            f"{run.name}: tasks whose data is absent",
            ("task", "how to prepare it"),
            tuple(absent.items()),
        )
        found.append(table)
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
        title = f"{run.name}: {told['variant']} ({results.short(told['model'])})"
        found.append(_metrics(title, told["results"]))
        for name, rows in run.confusions.items():
            found += _classes(run, name, rows)
    return tuple(found)


def _metrics(title: str, scores: dict) -> Table:
    """Lays scores out, one row an evaluation, set of parameters and metric."""
    rows = tuple(
        (name, kind, metric, _metric(metric, value))
        for name, kinds in scores.items()
        for kind, values in kinds.items()
        for metric, value in values.items()
    )
    return Table(title, ("evaluation", "parameters", "metric", "value"), rows, labels=3)


def _metric(name: str, value: Number) -> str:
    if name in _FRACTIONS or "shot" in name.partition("_")[0] or name.endswith("top1"):
        return f"{100 * value:.2f} %"
    return f"{value:,}" if isinstance(value, int) else number(value)


def _classes(run: Run, name: str, rows: list[list[str]]) -> list[Block]:
    """Returns the accuracy of each class, the worst first, and what it is taken for."""
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
        re.sub(r"\W", "_", f"confusion_{run.name}_{name}"),
        f"{run.name}: {name}",
        tuple(names),
        tuple(tuple(int(count) for count in row[3:]) for row in body),
    )
    return [table, picture]


def _fraction(value: Number | None) -> str:
    return percent(None if value is None else 100 * value)
