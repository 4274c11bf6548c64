"""What a study says of a disk that is full or broken."""

import errno
from unittest.mock import Mock

import pytest

from vit_jax.errors import Diverged, UserError
from vit_jax.tools.sweeps import runs
from vit_jax.training.config import TrainConfig
from vit_jax.training.optim import SgdConfig
from vit_jax.training.sweep import SweepSetups

ROWS = [{"learning_rate": 0.5, "score": None}]


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda to: runs.write_json(to, "vtab.json", {}), "vtab.json"),
        (lambda to: runs.write_table(to, "trials", ROWS), "trials.jsonl"),
        (
            lambda to: runs.write_hparams(to, "runs/seed0", {}, {}),
            "tensorboard/runs/seed0",
        ),
    ],
    ids=["json", "table", "hparams"],
)
def test_a_broken_disk_is_one_line_with_the_remedy(tmp_path, write, name):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / name
    remedy = "fix that, then start again: no run is repeated"
    with pytest.raises(UserError, match=rf"{place} cannot be written \(.*\): {remedy}"):
        write(tmp_path / "file")


def test_that_a_run_diverged_may_not_fit_the_disk(tmp_path, monkeypatch):
    config = TrainConfig(optim=SgdConfig(learning_rate=0.1))

    def train(*_, **__):
        raise Diverged("the loss is NaN")

    def replace_text(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runs.loop, "train", train)
    monkeypatch.setattr(runs, "replace_text", replace_text)
    with pytest.raises(UserError, match=r"diverged.json cannot be .*\(No space left"):
        runs.train(config, tmp_path, Mock(SweepSetups), keep=True)
