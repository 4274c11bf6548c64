"""Components in a module of the user's: named in a config, trained, resumed, refused."""

import json
import pathlib
import shutil
import sys

import numpy as np
import pytest
from helpers import tiny_config
from orbax.checkpoint import v1 as ocp

from vit_jax.config import fields
from vit_jax.errors import UserError
from vit_jax.training import loop

ROOT = pathlib.Path(__file__).parents[2]

EXAMPLES = ROOT / "docs/examples"  # As docs/extending.md shows them.
OPTIMIZER = (EXAMPLES / "lion.py").read_text()
EVALUATOR = (EXAMPLES / "top_k.py").read_text()


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Writes modules of the user's where Python finds them."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(**modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)

    return write


def test_an_optimiser_and_an_evaluator_of_ones_own_train_and_resume(outside, tmp_path):
    outside(my_lion=OPTIMIZER, top_k=EVALUATOR)
    sections = {
        "optim": {"name": "my_lion:LionConfig", "learning_rate": 1e-3, "b2": 0.95},
        "evals": {"val": "val", "top": {"kind": "top_k:TopKConfig", "k": 5}},
    }
    config = tiny_config(total_steps=4, **sections)
    assert (type(config.optim).__name__, config.optim.b2) == ("LionConfig", 0.95)
    first = loop.train(config, tmp_path / "run")
    assert first["final"]["top"]["ema"] == {"top5": 1.0}
    stored = fields.to_json(config)
    assert stored["optim"]["name"] == "my_lion:LionConfig"
    again = loop.train(config, tmp_path / "run")
    assert again["params_sha256"] == first["params_sha256"]
    changed = tiny_config(
        total_steps=4, **sections | {"optim": sections["optim"] | {"b2": 0.9}}
    )
    with pytest.raises(UserError, match=r"another config \(optim.b2: 0.95 -> 0.9\)"):
        loop.train(changed, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["top/ema/top5"] == 1.0


def test_a_schedule_of_ones_own_is_followed_and_resumed(outside, tmp_path):
    outside(polynomial=(EXAMPLES / "polynomial.py").read_text())
    schedule = {"name": "polynomial:PolynomialConfig", "power": 2.0}
    sections = {
        "optim": {"learning_rate": 0.1, "warmup_steps": 2, "schedule": schedule}
    }
    config = tiny_config(total_steps=6, log_every_steps=1, evals={}, **sections)
    first = loop.train(config, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    name = "train/learning_rate"
    rates = [json.loads(line)[name] for line in lines if name in line]
    wanted = [0, 0.05, *(0.1 * (1 - step / 4) ** 2 for step in range(4))]
    assert rates == pytest.approx(wanted)
    again = loop.train(config, tmp_path / "run")
    assert again["params_sha256"] == first["params_sha256"]
    schedule["power"] = -1
    with pytest.raises(UserError, match=r"optim.schedule.power=-1.0 must be above 0"):
        tiny_config(**sections)


def test_a_task_of_ones_own_keeps_its_state_in_checkpoints(outside, tmp_path):
    outside(center_loss=(EXAMPLES / "center_loss.py").read_text())
    task = {"name": "center_loss:CenterLossConfig", "weight": 0.1, "decay": 0.5}
    keys = {
        "task": task,
        "evals": {},
        "optim": {"grad_accum_steps": 2},
        "batch_size": 16,
    }
    whole = loop.train(
        tiny_config(**keys, checkpoint_every_steps=2), tmp_path / "whole"
    )
    workdir = tmp_path / "run"
    loop.train(tiny_config(**keys, checkpoint_every_steps=2), workdir)
    folder = workdir / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["4", "6"]
    target = {"extra": {"centers": np.empty((5, 12), np.float32)}}
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        centers = ocp.load(folder / "4", target)["extra"]["centers"]
    assert (np.abs(centers).sum(axis=1) > 0).all()  # Of every class there were images.
    shutil.rmtree(folder / "6")  # As after a kill in step 5.
    (workdir / "report.json").unlink()
    resumed = loop.train(tiny_config(**keys, checkpoint_every_steps=2), workdir)
    assert resumed["params_sha256"] == whole["params_sha256"]
    with pytest.raises(UserError, match=r"task.decay: 0.5 -> 0.25"):
        loop.train(tiny_config(**keys | {"task": task | {"decay": 0.25}}), workdir)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent:Lion", "", "optim.name='absent:Lion': no module 'absent'"),
        ("mine:Lion", "", "optim.name='mine:Lion': .*mine.py has no 'Lion'"),
        ("mine:Lion", "1 / 0", "runs the code of that module, which raised ZeroDiv"),
        (
            "mine:Lion",
            "Lion = 3",
            "is 3: it must be a frozen dataclass of config field",
        ),
        ("mine:LionConfig", OPTIMIZER, "unknown config key optim.b3; .* is optim.b"),
    ],
)
def test_what_is_no_component_is_refused_with_its_key(outside, name, text, message):
    outside(mine=text)
    with pytest.raises(UserError, match=message):
        tiny_config(optim={"name": name, "learning_rate": 0.1, "b3": 0.5})


def test_bounds_of_a_key_of_ones_own_are_checked(outside):
    outside(mine=OPTIMIZER)
    with pytest.raises(UserError, match=r"optim.b1=1.0 must be below 1"):
        tiny_config(optim={"name": "mine:LionConfig", "learning_rate": 0.1, "b1": 1})
