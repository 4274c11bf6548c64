import re

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.training import run_report


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
    message = r"run/report.json cannot be written \(No such file or directory\): mend"
    with pytest.raises(UserError, match=message):
        run_report.write_report(tmp_path / "run", {})


def test_table_shows_each_evaluation_and_set_of_parameters():
    scores = {"top1": 0.12345, "loss": 1.5, "examples": 3}
    report = {
        "config": "tiny",
        "commit": None,
        "devices": 8,
        "device_kind": "cpu",
        "steps": 6,
        "wall_seconds": 1.25,
        "images_per_second": None,
        "params_sha256": "f" * 64,
        "final": {"val": {"params": scores, "ema": scores}},
    }
    table = run_report.format_report(report)
    assert re.search(r"val +params +12.3[45]% +1.5000", table)
    assert re.search(r"val +ema ", table)
    assert "images/s       not measured in this start" in table


def test_commit_is_that_of_this_code_or_none(tmp_path):
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", run_report.commit() or "0" * 40)


def test_line_names_every_accuracy():
    scores = {"test": {"params": {"top1": 0.5, "loss": 1.0}, "ema": {"top1": 0.25}}}
    assert (
        run_report.scores_line(scores) == "top-1: test/params 50.00%, test/ema 25.00%"
    )
