import dataclasses
import functools
import json
import math
import re

import numpy as np
import pytest

from vit_jax.data.config import DataConfig
from vit_jax.data.sources import open as opening
from vit_jax.data.sources import vtab
from vit_jax.data.sources.arrays import ArraySource
from vit_jax.data.splits import Numbering
from vit_jax.errors import UserError
from vit_jax.tools.sweeps import fine_tuning, recipes, split_guard, transfer
from vit_jax.tools.sweeps import runs as sweep_runs
from vit_jax.tools.sweeps import vtab as benchmarks

OVERRIDES = {"batch_size": 8, "total_steps": 2, "optim.warmup_steps": 1}
NAMES = ("dtd", "sun397", "dmlab")  # Natural, natural, structured.
STRUCTURED = [name for name, task in vtab.TASKS.items() if task.group == "structured"]


@pytest.mark.parametrize(
    ("dataset", "names"),
    [
        ("vtab", [*vtab.TASKS]),
        ("vtab/dmlab,vtab/dtd", ["dtd", "dmlab"]),
        ("vtab/dmlab,dtd", ["dtd", "dmlab"]),
        ("vtab/structured,vtab/dmlab", STRUCTURED),
        # A comma too many is no word for all tasks.
        ("vtab/dtd,", ["dtd"]),
        (",vtab/dtd", ["dtd"]),
        ("vtab/dtd, ,vtab", [*vtab.TASKS]),
    ],
)
def test_tasks_are_named_alone_by_group_or_all(dataset, names):
    assert benchmarks.tasks(dataset) == names


@pytest.mark.parametrize("name", ["vtab/", "vtab/dmlabs"])
def test_a_task_that_there_is_not_is_refused(name):
    with pytest.raises(UserError, match=f"'{name}': VTAB-1k has no such task"):
        benchmarks.tasks(f"vtab/dtd,{name}")


def runs(*tops):
    return [{"seed": i, "top1": top} for i, top in enumerate(tops)]


def test_means_are_of_groups_and_of_all_tasks_with_intervals_over_seeds():
    found = {
        "a": {"group": "natural", "runs": runs(0.5, 0.6, 0.7)},
        "b": {"group": "natural", "runs": runs(0.7, 0.6, 0.5)},
        "c": {"group": "structured", "runs": runs(0.1, 0.3, 0.2)},
        "d": {"group": "specialised", "absent": "..."},
    }
    summary = benchmarks.means(found)
    natural, structured = (summary["groups"][g] for g in ("natural", "structured"))
    # The seeds' means are equal, though each task's scores are not.
    assert natural["mean"] == pytest.approx(0.6)
    assert natural["interval"] == pytest.approx(0, abs=1e-12)
    # t of 2 degrees of freedom at 97.5 %: 4.302653.
    assert structured["interval"] == pytest.approx(4.302653 * 0.1 / math.sqrt(3))
    assert "specialised" not in summary["groups"]
    # Of all tasks, not of the groups' means.
    assert summary["mean"] == pytest.approx((0.6 + 0.6 + 0.2) / 3)
    assert (summary["tasks_run"], natural["tasks"]) == (3, 2)
    assert sweep_runs.interval([0.25]) == (0.25, None)  # Of one seed.


SIZES = {"train": 800, "test": 11, "validation": 200}


def stand_in(name, split, sizes):
    """Returns a split of a task, with the numbers of its records, as black images."""
    task = vtab.TASKS[name]
    numbering = Numbering.of(task.splits[split], sizes, name)
    images = np.zeros((len(numbering), 8, 8, 3), np.uint8)
    labels = np.arange(len(images)) % task.num_classes
    return ArraySource(name, images, labels, (), numbering)


@pytest.mark.parametrize("name", vtab.TASKS)
def test_val200_has_no_image_of_the_test_split(name):
    """Checks by the numbers of records, whatever the splits are called."""
    keeper = split_guard.TestSplitGuard("test")
    keeper.release()
    sizes = {"train": 737_280, "test": 24_300, "validation": 15_000}
    for role in ("train800", "val200", "train800val200", "test"):
        open_it = functools.partial(stand_in, name, role, sizes)
        keeper(DataConfig(name=name), role, open_it)


@pytest.fixture
def opened(monkeypatch):
    """Puts small sets in the place of dtd and dmlab; notes what is opened of them."""
    found = []

    def find_prepared(tfds_name, data_dir):
        return None if data_dir or "sun397" in tfds_name else tfds_name

    def open_task(data, split):
        found.append((data.name, split))
        return stand_in(data.name.removeprefix("vtab/"), split, SIZES)

    kind = dataclasses.replace(opening.SOURCES["vtab/..."], open=open_task)
    monkeypatch.setitem(opening.SOURCES, "vtab/...", kind)
    monkeypatch.setattr(benchmarks.tfds_source, "find_prepared", find_prepared)
    monkeypatch.setattr(benchmarks.tfds_source, "is_readable", lambda builder: True)
    return found


@pytest.fixture
def start(checkpoint, pretrained, opened, tmp_path):
    """Runs tasks in the folder vtab of `tmp_path`; `transfers` replaces training."""

    def train(name, folder, shared):
        recipe = recipes.find(f"vtab/{name}")
        options = {"resolution": (8, 8), "rates": (0.02, 0.1), "overrides": OVERRIDES}
        task = fine_tuning.task(pretrained, recipe, **options)
        return transfer.run(checkpoint, task, folder, 2, shared)

    def run(names=NAMES, transfers=train, data_dir="", mode="full"):
        about = {"model": checkpoint, "variant": "Ti/4", "mode": mode}
        return benchmarks.run(names, transfers, tmp_path / "vtab", about, data_dir)

    return run


def scripted(tops):
    """Returns a transfer that comes to a top-1, or fails with words, by task."""

    def run(name, folder, shared):
        if isinstance(tops[name], str):
            raise UserError(tops[name])
        told = {"best": {"learning_rate": 0.1}, "mean": tops[name], "std": None}
        return told | {"runs": runs(tops[name])}

    return run


def written(tmp_path):
    return json.loads((tmp_path / "vtab" / "vtab.json").read_text())


@pytest.mark.slow
def test_tasks_that_are_there_run_and_the_others_say_how(
    start, opened, tmp_path, capsys
):
    report = start()
    for name in ("vtab/dtd", "vtab/dmlab"):
        own = [split for asked, split in opened if asked == name]
        # Chosen on val200 alone; then trained on all 1,000 and scored on test alone.
        assert own == ["train800", "val200", "train800val200", "test"]

    assert written(tmp_path) == report
    tasks = report["tasks"]
    assert list(tasks) == list(NAMES)
    assert tasks["sun397"]["group"] == "natural"
    assert (
        "python -m vit_jax.prepare --dataset=sun397/tfds" in tasks["sun397"]["absent"]
    )
    for name in ("dtd", "dmlab"):
        assert len(tasks[name]["runs"]) == 2
        correct = [run["top1"] * SIZES["test"] for run in tasks[name]["runs"]]
        np.testing.assert_allclose(correct, np.round(correct), atol=1e-5)
    assert {g: found["tasks"] for g, found in report["groups"].items()} == {
        "natural": 1,
        "structured": 1,
    }
    out = capsys.readouterr().out
    assert "absent: the data of 1 task; to prepare it:\nvtab/sun397: " in out
    assert "mean of all (2 tasks): " in out


def test_without_any_data_nothing_is_written_and_all_tasks_are_listed(
    start, tmp_path, capsys
):
    empty = str(tmp_path)
    with pytest.raises(
        UserError, match="of vtab/dtd do not exist: python -m vit_jax.p"
    ):
        start(["dtd"], data_dir=empty)
    with pytest.raises(UserError, match="none of the 3 tasks has data"):
        start(data_dir=empty)
    out = capsys.readouterr().out
    for name, tfds in (("dtd", "dtd"), ("sun397", "sun397/tfds"), ("dmlab", "dmlab")):
        assert re.search(
            f"vtab/{name}: python -m vit_jax.prepare --dataset={tfds}", out
        )
    assert not (tmp_path / "vtab").exists()


def test_a_task_that_fails_does_not_stop_the_others(start, tmp_path, capsys):
    tops = {"dtd": "the disk is full", "dmlab": 0.25}
    with pytest.raises(
        UserError, match=r"1 task failed \(dtd\), vtab/dtd: the disk is"
    ):
        start(transfers=scripted(tops))
    report = written(tmp_path)
    assert list(report["tasks"]) == list(NAMES)
    assert report["tasks"]["dtd"] == {"group": "natural", "failed": "the disk is full"}
    assert (report["mean"], report["tasks_run"]) == (0.25, 1)
    out = capsys.readouterr().out
    assert "error: vtab/dtd: the disk is full" in out
    assert out.splitlines()[-1] == "failed: vtab/dtd: the disk is full"


def test_when_all_tasks_fail_the_file_says_why(start, tmp_path):
    with pytest.raises(UserError, match=r"2 tasks failed \(dtd, dmlab\)"):
        start(transfers=scripted(dict.fromkeys(NAMES, "the disk is full")))
    report = written(tmp_path)
    assert (report["mean"], report["groups"], report["tasks_run"]) == (None, {}, 0)
    # Nothing is left of them that another command could not replace.
    start(["dtd"], scripted({"dtd": 0.5}), mode="head")
    assert list(written(tmp_path)["tasks"]) == ["dtd"]


def test_what_the_workdir_holds_of_other_tasks_stays(start, tmp_path):
    start(["dmlab"], scripted({"dmlab": 0.25}))
    # Tasks that fail, or whose data is gone, leave what they once came to.
    with pytest.raises(UserError, match=r"1 task failed \(dmlab\)"):
        start(transfers=scripted({"dtd": 0.75, "dmlab": "the disk is full"}))
    report = written(tmp_path)
    assert [report["tasks"][name].get("mean") for name in NAMES] == [0.75, None, 0.25]
    assert (report["mode"], report["mean"]) == ("full", 0.5)
    with pytest.raises(
        UserError, match=r"with another command .*\(mode: full -> head\)"
    ):
        start(["dtd"], scripted({}), mode="head")
    (tmp_path / "vtab" / "vtab.json").write_text("{")
    with pytest.raises(UserError, match=r"vtab.json is damaged .*remove it and repeat"):
        start(["dtd"], scripted({}))
