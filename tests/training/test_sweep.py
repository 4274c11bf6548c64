import logging
import re

import jax
import pytest
from helpers import tiny_config

from vit_jax.config import fields
from vit_jax.data.sources.open import open_source, opened_by
from vit_jax.errors import UserError
from vit_jax.training import loop, sweep
from vit_jax.training.sweep import SweepSetups

SGD = {"name": "sgd", "grad_clip_norm": 1.0, "schedule": "cosine"}
STEPS = "step", "eval_step"


def config(rate, seed=3, **sections):
    optim = SGD | {"learning_rate": rate} | sections.pop("optim", {})
    return tiny_config(seed=seed, optim=optim, total_steps=4, **sections)


@pytest.mark.slow
def test_runs_that_share_give_what_they_give_alone(tmp_path):
    optim = {"schedule": "rsqrt", "weight_decay": 0.1, "layer_decay": 0.7}
    shared = SweepSetups()
    for rate, seed in ((0.03, 3), (0.1, 5)):
        c = config(rate, seed, optim=optim)
        alone = loop.train(c, tmp_path / f"alone{rate}{seed}")
        folder = tmp_path / f"shared{rate}{seed}"
        together = loop.train(c, folder, setup=shared.build(c, folder))
        assert alone["params_sha256"] == together["params_sha256"]
        assert alone["final"] == together["final"]


@pytest.mark.slow
def test_a_second_run_compiles_neither_step_nor_evaluation(tmp_path, caplog):
    def compiled(rate, seed, split="train[:12]", val="val"):
        c = config(rate, seed, data={"split": split}, evals={"val": val})
        caplog.clear()
        with caplog.at_level(logging.WARNING), jax.log_compiles():
            folder = tmp_path / f"{rate}{seed}{len(split)}"
            loop.train(c, folder, setup=shared.build(c, folder))
        text = caplog.text
        return [bool(re.search(rf"Compiling jit\({name}\)", text)) for name in STEPS]

    shared = SweepSetups()
    assert compiled(0.03, 3) == [True, True]
    assert compiled(0.1, 3) == [False, False]
    assert compiled(0.03, 5) == [False, False]
    # More images to train on are the same step; the evaluation is of another split.
    assert compiled(0.03, 5, "train", "test") == [False, True]


def test_what_changes_the_step_is_not_shared(tmp_path):
    def step(c, split="train"):
        c = fields.replace(c, {"data.split": split})
        return sweep._step_key(c, loop.build_setup(c, tmp_path))

    first = step(config(0.1))
    assert step(config(0.2, seed=8)) == first
    assert step(config(0.2, optim={"momentum": 0.8})) != first
    assert step(config(0.1, data={"num_classes": 7})) != first
    # Lengths in epochs depend on the number of images.
    for options, same in (({}, True), ({"warmup_epochs": 1.0}, False)):
        c = config(0.1, optim=options)
        assert (step(c) == step(c, "train[:16]")) == same


def test_an_opener_stands_before_every_split_and_may_refuse(tmp_path):
    asked = []

    def opener(data, split, open_it):
        asked.append((data.name, split))
        if split == "val":
            raise UserError(f"{split} stays shut")
        return open_it()

    with opened_by(opener), pytest.raises(UserError, match="val stays shut"):
        loop.train(config(0.1), tmp_path / "run")
    assert sorted(asked) == [("synthetic", "train"), ("synthetic", "val")]
    open_source(config(0.1).data, "val")
