"""Tables of what runs did and scored, each as it was recorded."""

from collections.abc import Sequence

from vit_jax.report import evaluations as formats
from vit_jax.report.pages import pretrained, results
from vit_jax.report.pages.blocks import (
    NONE,
    OURS,
    PLAIN,
    Block,
    Matrix,
    Number,
    Table,
    number,
    percent,
    stem,
    with_spread,
)
from vit_jax.report.pages.results import Result
from vit_jax.report.pages.runs import Run

_WORST = 20  # Classes whose accuracies are listed.


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
    stated = ", ".join(f"{k}={v}" for k, v in told.get("overrides", {}).items())
    return Table(
        f"{run.name}: {told['variant']} ({pretrained.short(told['model'])}) on "
        f"{told['dataset']}",
        ("trial or run", "scored on", "top-1 in %", "seconds"),
        tuple(rows),
        note=f"Mean {_fraction(told['mean'])} %, standard deviation "
        f"{_fraction(told.get('std'))}. Mode: {results.settings(told)}"
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
    note = f"Mode: {results.settings(told)}."
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
        title = f"{run.name}: {told['variant']} ({pretrained.short(told['model'])})"
        found.append(_metrics(title, told["results"]))
        for name, rows in run.confusions.items():
            found += _classes(run, name, rows)
    return tuple(found)


def _metrics(title: str, scores: dict) -> Table:
    """Lays scores out, one row an evaluation, set of parameters and metric."""
    rows = tuple(
        (name, kind, metric, formats.text(metric, value))
        for name, kinds in scores.items()
        for kind, values in kinds.items()
        for metric, value in values.items()
    )
    return Table(title, ("evaluation", "parameters", "metric", "value"), rows, labels=3)


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
        stem("confusion", run.name, name),
        f"{run.name}: {name}",
        tuple(names),
        tuple(tuple(int(count) for count in row[3:]) for row in body),
    )
    return [table, picture]


def _fraction(value: Number | None) -> str:
    return percent(None if value is None else 100 * value)
