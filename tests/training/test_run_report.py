import json
import pathlib
import re

import numpy as np
import pytest

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.training import run_report

SHARED = pathlib.Path(__file__).parents[2] / "../shared/paper/tables.json"
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "paper_tables.json"
JFT = 303_000_000  # Images (paper, section 4.1).


def test_published_numbers_are_those_of_the_paper():
    found = run_report.published_tables()
    golden = json.loads(GOLDEN.read_text())
    assert found["table6"] == golden["table6"]
    assert found["table2"]["CIFAR-10"][0] == [99.5, 0.06]
    assert found["table5"]["ImageNet-21k"]["Pets"][-1] == 94.82
    assert len(found["table9"]["cols"]) == 20
    if SHARED.exists():
        whole = json.loads(SHARED.read_text())
        assert found == {key: whole[key] for key in found}


@pytest.mark.parametrize(
    ("variant", "name", "epochs", "within"),
    [
        ("B/16", "ViT-B/16", 7, 0.005),
        pytest.param("H/14", "ViT-H/14", 14, 0.005, marks=pytest.mark.slow),
        pytest.param("R50+B/16", "R50x1+ViT-B/16", 7, 0.01, marks=pytest.mark.slow),
        pytest.param("R50x1", "ResNet50x1", 7, 0.01, marks=pytest.mark.slow),
    ],
)
def test_exaflops_are_those_of_table_6(variant, name, epochs, within):
    rows = run_report.published_tables()["table6"]["rows"]
    (expected,) = (row[-1] for row in rows if row[:2] == [name, epochs])
    # JFT's 18,291 classes or none: the classifier is no part of what is compared.
    model = models.create(variant, num_classes=1_000)
    found = cost.training_exaflops(model, epochs * JFT)
    assert found == pytest.approx(expected, rel=within)


def test_a_core_day_is_what_the_papers_own_runs_did():
    found = run_report.exaflops_a_core_day()
    assert found == pytest.approx((1567 + 4262) / (680 + 2500))
    # Of a core's peak of 61.5 TFLOP/s it is about a third.
    assert found * 1e18 / 86_400 / 61.5e12 == pytest.approx(0.345, abs=0.001)


def test_a_record_counts_days_and_converts_exaflops():
    found = run_report.compute_record(
        images=192,
        flops_per_image=round(1e18 * run_report.exaflops_a_core_day() / 64),
        device_kind="TPU v5 lite",
        devices=5,
        device_seconds=43_200.0,
    )
    assert found == {
        "images_seen": 192,
        "exaflops": pytest.approx(3 * run_report.exaflops_a_core_day()),
        "device_kind": "TPU v5 lite",
        "devices": 5,
        "device_days": 0.5,
        "tpuv3_core_days": pytest.approx(3),
    }


def params(**changes):
    tree = {"b": {"kernel": np.arange(6.0, dtype="f").reshape(2, 3)}, "a": np.ones(4)}
    return tree | changes


def test_hash_does_not_depend_on_the_order_but_on_names_shapes_and_values():
    base = run_report.params_sha256(params())
    assert run_report.params_sha256(dict(reversed(params().items()))) == base
    for changed in (
        params(a=np.ones(4) * 1.0000001),
        params(a=np.ones((2, 2))),
        {"b": params()["b"], "c": params()["a"]},
    ):
        assert run_report.params_sha256(changed) != base


def test_a_workdir_that_is_gone_is_said_in_one_line(tmp_path):
    message = r"run/report.json cannot be written \(No such file or directory\): make"
    with pytest.raises(UserError, match=message):
        run_report.write_report(tmp_path / "run", {})


REPORT = {"config": "tiny", "commit": None, "steps": 6, "wall_seconds": 1.25}
REPORT |= {"devices": 8, "device_kind": "cpu", "images_per_second": None}
REPORT |= {"params_sha256": "f" * 64}


def test_table_shows_each_evaluation_and_set_of_parameters():
    scores = {"top1": 0.12345, "loss": 1.5, "examples": 3}
    report = REPORT | {"final": {"val": {"params": scores, "ema": scores}}}
    table = run_report.format_report(report)
    assert re.search(r"val +params +12.3[45]% +1.5000", table)
    assert re.search(r"val +ema ", table)
    assert "images/s       not measured in this start" in table


def test_commit_is_that_of_this_code_or_none(tmp_path):
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", run_report.commit() or "0" * 40)


def test_line_names_every_accuracy():
    scores = {"test": {"params": {"top1": 0.5, "loss": 1.0}, "ema": {"top1": 0.25}}}
    line = "top-1: test/params 50.00%, test/ema 25.00%"
    assert run_report.scores_line(scores) == line


UNEVEN = {"top1": 0.975, "loss": 0.5, "balanced_accuracy": 0.5}
UNEVEN |= {"worst_class_recall": 0.0, "majority_baseline": 0.97}


def test_balanced_accuracy_comes_first_if_it_chooses_the_checkpoint():
    scores, chosen = {"val": {"ema": UNEVEN}}, "val/balanced_accuracy"
    assert run_report.scores_line(scores, chosen) == (
        "balanced accuracy: val/ema 50.00% (worst class 0.00%)  "
        "top-1: val/ema 97.50% (majority class 97.00%)"
    )
    assert run_report.scores_line(scores, "val/top1") == "top-1: val/ema 97.50%"
    # Scores of an earlier version.
    earlier = {"val": {"ema": {"top1": 0.5, "balanced_accuracy": 0.25}}}
    line = "balanced accuracy: val/ema 25.00%  top-1: val/ema 50.00%"
    assert run_report.scores_line(earlier, chosen) == line
    report = REPORT | {"final": scores, "best": {"metric": chosen}}
    *_, head, row = run_report.format_report(report).splitlines()
    assert head.split()[2:] == ["balanced", "worst", "top-1", "majority", "loss"]
    assert row.split()[2:] == ["50.00%", "0.00%", "97.50%", "97.00%", "0.5000"]


def test_line_shows_mean_average_precision_instead_of_the_loss():
    scores = {"val": {"params": {"map": 0.625, "loss": 3.5, "micro_f1@0.5": 0.5}}}
    assert run_report.scores_line(scores) == "mAP: val/params 62.50% (F1 50.00% micro)"


def test_a_run_without_evaluations_has_no_table_of_them():
    lines = run_report.format_report(REPORT | {"final": {}}).splitlines()
    assert lines[-1].startswith("params sha256") and "evaluation" not in "".join(lines)
