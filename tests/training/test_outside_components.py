"""Components in a module of the user's: named in a config, trained, resumed, refused."""

import json
import sys

import pytest
from helpers import tiny_config

from vit_jax.config import fields
from vit_jax.errors import UserError
from vit_jax.training import loop

# As docs/extending.md has them.
OPTIMIZER = '''
"""Lion (arXiv:2302.06675)."""

import dataclasses

import optax

from vit_jax.config.fields import key
from vit_jax.training.optim import OptimConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(OptimConfig):
    """Signs of an interpolated momentum."""

    b1: float = key(0.9, "Weight of the momentum in a step.", below=1)
    b2: float = key(0.99, "Decay of the momentum, a step.", below=1)

    def moments(self):
        return [optax.scale_by_lion(self.b1, self.b2, mu_dtype=self.moment_dtype)]
'''
EVALUATOR = '''
"""How often the class is among the best few."""

import dataclasses

from vit_jax.config.fields import key
from vit_jax.evaluation.classification import Scored
from vit_jax.evaluation.kinds import Need
from vit_jax.evaluation.passes import TOPS
from vit_jax.evaluation.readings import EvalConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopConfig(EvalConfig):
    """Accuracy of the best few classes."""

    split: str = key("val", "To classify.")
    k: int = key(3, "How many of the best classes.", at_least=1, at_most=5)

    def open(self, name, readings, classes):
        return Top(self, readings.open(name, self, self.split, of_model=True))


class Top:
    def __init__(self, spec, reading):
        self._spec, self._reading, self.splits = spec, reading, (reading,)

    def needs(self):
        return {"all": Need(self._reading, frozenset((TOPS,)))}

    def score(self, outputs, stop):
        found = outputs["all"]
        best = found.values[TOPS][:, : self._spec.k]
        hit = (best == found.labels[:, None]).any(1)
        return Scored({f"top{self._spec.k}": float(hit.mean())})
'''


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
    outside(my_lion=OPTIMIZER, my_top=EVALUATOR)
    sections = {
        "optim": {"name": "my_lion:Lion", "rate": 1e-3, "b2": 0.95},
        "evals": {"val": "val", "top": {"kind": "my_top:TopConfig", "k": 5}},
    }
    config = tiny_config(total_steps=4, **sections)
    assert (type(config.optim).__name__, config.optim.b2) == ("Lion", 0.95)
    first = loop.train(config, tmp_path / "run")
    assert first["final"]["top"]["ema"] == {"top5": 1.0}
    stored = fields.to_json(config)
    assert stored["optim"]["name"] == "my_lion:Lion"
    again = loop.train(config, tmp_path / "run")
    assert again["params_sha256"] == first["params_sha256"]
    changed = tiny_config(
        total_steps=4, **sections | {"optim": sections["optim"] | {"b2": 0.9}}
    )
    with pytest.raises(UserError, match=r"another config \(optim.b2: 0.95 -> 0.9\)"):
        loop.train(changed, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["top/ema/top5"] == 1.0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent:Lion", "", "optim.name='absent:Lion' cannot be imported: Module"),
        ("mine:Lion", "", "cannot be imported: AttributeError: .* 'Lion'"),
        ("mine:Lion", "1 / 0", "cannot be imported: ZeroDivisionError"),
        (
            "mine:Lion",
            "Lion = 3",
            "is 3: it must be a frozen dataclass of config field",
        ),
        ("mine:Lion", OPTIMIZER, "unknown config key optim.b3; .* is optim.b"),
    ],
)
def test_what_is_no_component_is_refused_with_its_key(outside, name, text, message):
    outside(mine=text)
    with pytest.raises(UserError, match=message):
        tiny_config(optim={"name": name, "rate": 0.1, "b3": 0.5})


def test_bounds_of_a_key_of_ones_own_are_checked(outside):
    outside(mine=OPTIMIZER)
    with pytest.raises(UserError, match=r"optim.b1=1.0 must be below 1"):
        tiny_config(optim={"name": "mine:Lion", "rate": 0.1, "b1": 1})
