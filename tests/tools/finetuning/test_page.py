"""The parts that the pages of all kinds of annotation share."""

import dataclasses
import json
import re
import sys

import numpy as np
import pytest
from helpers import tiny_config

from vit_jax.analysis.charts import Chart, Matrix, Series
from vit_jax.tools.finetuning import page
from vit_jax.tools.finetuning.kind import Result
from vit_jax.tools.finetuning.labelled import Labels

SCORES = {"top1": 0.75, "loss": 0.5, "balanced_accuracy": 0.5, "examples": 8}
SCORES |= {"worst_class_recall": 0.25, "majority_baseline": 0.75}


@pytest.fixture
def result(tmp_path):
    """The result of a run in a workdir with its files."""
    lines = [{"step": k, "train/loss": 1 / k, "train/top1": k / 9} for k in range(1, 5)]
    lines += [{"step": k, "val/ema/loss": 1.5, "val/ema/top1": 0.25} for k in (2, 4)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    report = {"config": "finetune", "steps": 4, "final": {"val": {"ema": SCORES}}}
    report |= {"commit": "0a1b2c3d", "examples": 31, "devices": 1, "device_kind": "cpu"}
    report |= {"wall_seconds": 61.2, "best": {"step": 2}, "class_names": ["a", "b"]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    command = {"images": "/my photos/birds.csv", "--model": "deit:Ti/16"}
    command |= {"--minutes": 2.5, "config": {"seed": "3"}}
    (tmp_path / "command.json").write_text(json.dumps(command))
    counts = {"common": 12, "rare": 3}
    given = report, "val", "top1", SCORES, 15, 2, str(tmp_path), Labels(False)
    return Result(*given, folds=3, counts=counts)


def write(result, **values):
    """Returns the page of a run, with nothing of its kind."""
    optim = {"name": "sgd", "learning_rate": 0.1}
    address = "https://me:secret@host/x.npz"
    config = tiny_config(init=address, batch_size=7, optim=optim)
    accuracy = {"top1": "accuracy"}
    common = page.common(config, result, "accuracy 75%", "2 classes", accuracy)
    path = page.write("finetuning/frame.html", common, result.workdir, **values)
    with open(path, encoding="utf-8") as file:
        return common, file.read()


def test_a_page_has_the_name_of_the_task_its_curves_settings_and_commands(result):
    common, text = write(result)
    assert "<h1>birds: 2 classes</h1>" in text and "Accuracy 75%.</p>" in text
    assert "4 steps of 7 images; the network of step 2; 0:01:01 on 1 x cpu" in text
    assert "commit 0a1b2c3d" in text and "secret" not in text
    assert ">training batches</text>" in text and ">accuracy in %</text>" in text
    assert len(common.curves) == 2 and common.curves[1].label == "accuracy"
    keys = [key for key, _ in common.settings.rows]
    assert ("batch_size", "7") in common.settings.rows and len(keys) == len({*keys})
    assert ("optim.name", "sgd") in common.settings.rows  # Not the default kind.
    again = (
        f"python -m vit_jax.finetune '/my photos/birds.csv' --workdir={result.workdir}"
    )
    assert common.again == (
        f"{again} --model=deit:Ti/16 --minutes=7.5 --folds=3 --config.seed=3"
    )
    predict = f"python -m vit_jax.predict --model={result.workdir} IMAGES"
    assert ("classify", predict) in common.commands
    assert not re.search(r'(src|href)="(?!data:|#)', text)  # One file.


def test_without_matplotlib_a_page_says_what_to_install(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert page.draw(Chart("a", "b", "x", "y", ())) is None
    common, text = write(result)
    assert common.curves == [None, None]
    assert text.count("pip install -e '.[plots]'") == 1


def test_colours_of_charts_are_those_of_the_page():
    counts = ((8, 1), (0, 3))
    for chart in (
        Chart("c", "t", "x", "y", (Series("a", (1, 2), (3, 4)),)),
        Matrix("m", "", ("a", "b"), counts),
    ):
        drawing = page.draw(chart)
        assert "var(--c0)" in drawing.svg and "var(--ink)" in drawing.svg
        assert 200 < drawing.width < 420
    assert "<image" not in drawing.svg  # It would have colours of its own.
    many = Matrix(
        "m",
        "",
        tuple(f"class {k}" for k in range(100)),
        tuple(map(tuple, np.eye(100).tolist())),
    )
    assert 1_000 < page.draw(many).width <= 1_248  # The page in a window of 1,280.


def test_scored_classes_of_unequal_size_show_the_balanced_accuracy_first(result):
    assert result.is_uneven
    line = result.kind.headline(result)
    assert line.startswith(
        "balanced accuracy 50.00%, recall of the worst class 25.00%, "
    )
    assert line.endswith("; always common: 80.00%)")
    even = dataclasses.replace(result, counts={"common": 9, "rare": 3})
    assert not even.is_uneven and even.kind.headline(even).startswith("accuracy 75.00%")
    chosen = dataclasses.replace(even, chosen_by="balanced_accuracy", counts={})
    assert chosen.is_uneven
    assert "; always the most frequent class: 75.00%)" in chosen.kind.headline(chosen)
