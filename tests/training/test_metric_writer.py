import json
import os

import pytest
from etils import epath
from helpers import ROOT, run_python

from vit_jax.command_line.files import replace_bytes
from vit_jax.training.metric_writer import WorkdirWriter


def lines(folder):
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_keeps_what_was_before_and_drops_what_comes_again(tmp_path):
    first = WorkdirWriter(tmp_path, 0)
    for step in (5, 10, 15):
        first.write_scalars(step, {"train/loss": step / 10})
    first.close()
    again = WorkdirWriter(tmp_path, 10)
    again.write_scalars(15, {"train/loss": 9.0})
    again.close()
    found = [(x["step"], x["train/loss"]) for x in lines(tmp_path)]
    assert found == [(5, 0.5), (10, 1.0), (15, 9.0)]


@pytest.mark.parametrize(
    "damage", [b'{"step": 7, "los', b"\xff\xfe", b"3", b'{"a": 1}']
)
def test_lines_that_a_kill_or_a_bad_disk_damaged_are_dropped(tmp_path, damage):
    good = b'{"step": 5, "train/loss": 0.5}\n'
    (tmp_path / "metrics.jsonl").write_bytes(good + damage)
    WorkdirWriter(tmp_path, 10).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == good


def test_other_processes_know_what_is_written_but_write_nothing(tmp_path):
    writer = WorkdirWriter(tmp_path, 0)
    writer.write_scalars(5, {"val/params/top1": 0.5})
    writer.close()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    other = WorkdirWriter(tmp_path, 5, active=False)
    assert other.has(5, "val/params/")
    assert not other.has(5, "test/params/")
    assert not other.has(4, "val/params/")
    other.write_scalars(6, {"val/params/top1": 0.6})
    other.close()
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_pytorch_is_not_imported_where_it_is_installed_and_can_be_later(tmp_path):
    (tmp_path / "torch.py").write_text("print('PyTorch is imported')")
    code = "from vit_jax.training import metric_writer; print('no'); import torch"
    done = run_python("-c", code, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.stdout.split("\n")[:2] == ["no", "PyTorch is imported"]


def test_what_cannot_be_replaced_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        replace_bytes(epath.Path(tmp_path / "folder"), b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
