"""The compute of runs, also of those inside transfers, VTAB-1k and studies."""

import os
from collections.abc import Sequence

from vit_jax.report import compute
from vit_jax.report.pages.blocks import NONE, Block, Table, Text, number
from vit_jax.report.pages.runs import Run

_SUMS = ("images_seen", "exaflops", "device_days", "tpuv3_core_days")


def blocks(runs: Sequence[Run]) -> tuple[Block, ...]:
    """Returns the compute of the training runs, and how it is counted."""
    given = {_place(run.path) for run in runs}
    rows = []
    for run in runs:
        if (told := run.training) is not None:
            about = told.get("variant", NONE), told.get("dataset", NONE)
            used = told.get("compute", {})
            rows.append(_row(run.name, *about, f"{told['steps']:,}", [used]))
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
            f"{compute.exaflops_a_core_day():.2f}, what a core of the paper's own runs "
            "did in a day: 1567 + 4262 exaFLOPs in 680 + 2500 core-days (L/16 and "
            "H/14, 14 epochs of JFT-300M; tables 6 and 2). One of the two alone would "
            "give 2.30 or 1.70, so it is good to about a quarter; it says what the "
            "paper's hardware and code would have taken, not how fast these runs were."
        ),
    )


def _row(name: str, variant: str, data: str, steps: str, used: list[dict]):
    """Returns a row of one or several runs; what one of them lacks is not summed."""
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
    """Returns a row of runs alike, () if none has recorded its compute."""
    runs = [run for run in runs if run.get("compute")]
    if not runs:
        return ()
    steps = runs[0].get("steps")
    steps = NONE if steps is None else f"{steps:,}"
    many = len(runs)
    if many > 1:
        steps = f"{many} x {steps}"
    words = f"{name}: {many} {what}{'s' * (many != 1)}"
    return _row(words, variant, data, steps, [run["compute"] for run in runs])


def _of_study(run: Run, given: set[str]) -> list[tuple[str, ...]]:
    """Returns a row for each run of a study that is not in the report by itself."""
    rows = []
    for point in run.study["points"]:
        first = {key: point[key] for key in _SUMS if point.get(key) is not None}
        parts = point.get("compute", {"pretrain": first})  # Of older studies.
        for part, used in parts.items():
            folder = f"{point['model']}-{point['images']}/{part}"
            if _place(run.path / folder) in given:
                continue
            about = point.get("variant", NONE), NONE, NONE
            rows.append(_row(f"{run.name}: {folder}", *about, [used]))
    return rows


def _place(path) -> str:
    return os.fspath(path) if "://" in str(path) else os.path.realpath(path)
