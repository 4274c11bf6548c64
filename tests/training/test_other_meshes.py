"""Checkpoints that are restored on another mesh than they were saved on."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from helpers import first_state, open_checkpoints, tiny_config
from test_train_setup import DEEP, SCAN, assert_equal, build

from vit_jax.config import fields
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError
from vit_jax.training import resume_check

ROOT = pathlib.Path(__file__).parents[2]
WAYS = {
    "8-way fsdp": {"fsdp": 8},
    "1 device": {},
    "2 x 4 stacked": {"model": SCAN, "data": 2, "fsdp": 4},
    "2 x 2 x 2": {"data": 2, "fsdp": 2, "model_axis": 2},
}


def program_of(way):
    task = "center_loss:CenterLossConfig"  # It has state beside the parameters.
    return build(**{"model": DEEP, "task": task} | WAYS[way])


def open_folder(workdir, config, program):
    return open_checkpoints(workdir, config, program, open_source(config.data, "train"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "others"),
    [
        ("8-way fsdp", ("1 device", "2 x 4 stacked", "2 x 2 x 2")),
        ("1 device", ("8-way fsdp",)),
    ],
)
def test_a_checkpoint_is_restored_on_any_mesh(saved, others, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    config, _, program = program_of(saved)
    # Numbers that tell one element from another, also where a start has zeros.
    state = jax.jit(_distinct, out_shardings=program.layout.shardings)(
        first_state(program)
    )
    assert state.extra["centers"].any()
    state = state.replace(step=state.step + 7)
    disk = jax.device_get(program.layout.disk.to_disk(state))
    with open_folder(tmp_path, config, program) as checkpoints:
        checkpoints.save(7, state, seconds=1.5)
    for other in others:
        config, _, program = program_of(other)
        resume_check.check_workdir(tmp_path, config)  # A mesh may change.
        with open_folder(tmp_path, config, program) as checkpoints:
            found = checkpoints.restore()
        assert (found.step, found.seconds) == (7, 1.5)
        restored = found.state
        for array, sharding in zip(
            *map(jax.tree.leaves, (restored, program.layout.shardings)), strict=True
        ):
            assert array.sharding.is_equivalent_to(sharding, array.ndim)
        assert_equal(jax.device_get(program.layout.disk.to_disk(restored)), disk)


def test_a_run_begun_before_a_key_was_there_goes_on(tmp_path, monkeypatch):
    config = tiny_config()
    stored = fields.to_json(config)
    del stored["optim"]["mu_dtype"], stored["mesh"], stored["model"]["scan"]
    read = lambda workdir: {"config": stored, "task": {}}
    monkeypatch.setattr(resume_check.folders, "has_checkpoint", lambda workdir: True)
    monkeypatch.setattr(resume_check.folders, "read_metadata", read)
    resume_check.check_workdir(tmp_path, config)
    other = tiny_config(optim={"mu_dtype": "bfloat16"})
    with pytest.raises(UserError, match="optim.mu_dtype: float32 -> bfloat16"):
        resume_check.check_workdir(tmp_path, other)
    # What is left out is compared with the data, wherever the list lies.
    stored["data"]["exclude"] = "here/listed.txt"
    moved = tiny_config(data={"exclude": "elsewhere/listed.txt", "data_dir": "there"})
    resume_check.check_workdir(tmp_path, moved)


def test_a_run_goes_on_with_the_same_tokenizer_wherever_it_lies(tmp_path):
    data = tiny_config().data
    source = open_source(data, "train")

    def read(name, words):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vocab.txt").write_text(words)
        place = dataclasses.replace(data, tokenizer=str(tmp_path / name))
        return resume_check.data_read(place, source)

    stored, moved, other = read("a", "[PAD]\na"), read("b", "[PAD]\na"), read("c", "b")
    check = lambda now: resume_check.check_data(stored, now, source, "run", check=True)
    assert check(moved) == []
    with pytest.raises(UserError, match="the files of data.tokenizer"):
        check(other)


def _distinct(state):
    def number(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) or x.ndim == 0:
            return x
        steps = np.arange(x.size).reshape(x.shape) % 251
        return (x + steps).astype(x.dtype)

    return jax.tree.map(number, state)
