"""What a sweep says of a disk that is full or broken."""

import errno
from unittest.mock import Mock

import pytest

from vit_jax.errors import Diverged, UserError
from vit_jax.tools.sweeps import runs


def train(workdir):
    runs.train(None, workdir, Mock(), keep=True)


@pytest.mark.parametrize(
    ("write", "name", "repeated"),
    [
        (lambda to: runs.write_json(to, "vtab.json", {}), "vtab.json", "no run"),
        (lambda to: runs.write_table(to, "trials", []), "trials.jsonl", "no run"),
        (
            lambda to: runs.write_hparams(to, "runs/seed0", {}, {}),
            "tensorboard/runs/seed0",
            "no run",
        ),
        (train, "diverged.json", "only this run"),
    ],
    ids=["json", "table", "hparams", "diverged"],
)
def test_a_full_disk_is_one_line_with_the_remedy(
    tmp_path, monkeypatch, write, name, repeated
):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(runs.loop, "train", Mock(side_effect=Diverged("NaN")))
    monkeypatch.setattr(runs, "replace_text", Mock(side_effect=full))
    monkeypatch.setattr(runs, "Events", Mock(side_effect=full))
    place = tmp_path / name
    remedy = f"fix that, then start again: {repeated} is repeated"
    with pytest.raises(
        UserError, match=rf"{place} cannot be written \(No .*: {remedy}"
    ):
        write(tmp_path)
