"""A task of the user's whose parameters hold more than the network.

Everything that reads a workdir must find the network, as evaluation and fine-tuning do. And
a network from elsewhere must come to its place in the task.
"""

import functools
import operator
import sys

import jax
import numpy as np
import pytest
from helpers import (
    begin,
    evaluated,
    kill_after,
    slow_but,
    tiny_config,
    train,
    write_workdir,
)
from orbax.checkpoint import v1 as ocp

from vit_jax import weights
from vit_jax.errors import UserError
from vit_jax.training import loop

MODULE = '''
import dataclasses

import jax
import jax.numpy as jnp

from vit_jax.tasks.classification import Classification, ClassificationConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColourConfig(ClassificationConfig):
    """Classes, and the mean colour, which a decoder tells from the features."""

    def build(self, model, data, run, saved=None):
        return Colour(self, model, data)


class Colour(Classification):
    def init(self, rng):
        network, _ = super().init(rng)
        shape = network["head"]["kernel"].shape[0], 3
        kernel = 0.1 * jax.random.normal(jax.random.fold_in(rng, 7), shape)
        return {"network": network, "decoder": {"kernel": kernel}}, None

    def loss(self, params, extra, batch, rng):
        outputs = self.model.apply(
            params["network"], batch["image"], train=True, key=rng
        )
        found = outputs["pre_logits"] @ params["decoder"]["kernel"]
        error = jnp.square(found - batch["image"].mean((1, 2))).mean()
        loss = error + self.base_loss(outputs["logits"], batch)
        return loss, ({"loss": loss, "error": error}, None)

    def backbone(self, params, extra):
        return params["network"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwinsConfig(ClassificationConfig):
    """The same, with a moving average of the parameters as what is handed on."""

    def build(self, model, data, run, saved=None):
        return Twins(self, model, data)


class Twins(Colour):
    def init(self, rng):
        params, _ = super().init(rng)
        return params, {"twin": jax.tree.map(jnp.copy, params)}

    def update(self, extra, params, stats, step):
        mean = lambda old, new: 0.5 * (old + new)
        return {"twin": jax.tree.map(mean, extra["twin"], params)}

    def backbone(self, params, extra):
        return extra["twin"]["network"]

    def with_backbone(self, params, extra, network):
        params = params | {"network": network}
        return params, {"twin": jax.tree.map(jnp.copy, params)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScatteredConfig(ClassificationConfig):
    """A backbone that is put together from two places."""

    def build(self, model, data, run, saved=None):
        return Scattered(self, model, data)


class Scattered(Classification):
    def init(self, rng):
        network, _ = super().init(rng)
        return {"head": network.pop("head"), "rest": network}, None

    def backbone(self, params, extra):
        return params["rest"] | {"head": params["head"]}
'''
PLACES = {"Colour": "params/network", "Twins": "extra/twin/network"}


@pytest.fixture(autouse=True, scope="module")
def module(tmp_path_factory):
    """Writes the module where Python finds it."""
    folder = tmp_path_factory.mktemp("module")
    (folder / "colours.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def config_of(name="Colour", **sections):
    if name:
        sections["task"] = {"name": f"colours:{name}Config"}
    keys = {"total_steps": 2, "checkpoint_every_steps": 1, "ema": {"decay": 0.9}}
    return tiny_config(**keys | sections)


@pytest.fixture(scope="module", params=PLACES)
def run(request, module, tmp_path_factory):
    """Trains a task: its name, its workdir and the report."""
    workdir = tmp_path_factory.mktemp("runs") / request.param
    report = loop.train(config_of(request.param), workdir)
    return request.param, workdir, report


@pytest.fixture(scope="module")
def classifier(module, tmp_path_factory):
    """Returns the workdir of a classification."""
    workdir = tmp_path_factory.mktemp("runs") / "classification"
    write_workdir(config_of(name="", total_steps=1, evals={}), workdir)
    return workdir


def stored(workdir, path):
    """Reads a dict of parameters of the last checkpoint, without this project."""
    folder = max((workdir / "checkpoints").iterdir(), key=lambda p: int(p.name))
    names = path.split("/")
    found = functools.reduce(operator.getitem, names, ocp.metadata(folder).metadata)
    target = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), found)
    for name in reversed(names):
        target = {name: target}
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        return functools.reduce(operator.getitem, names, ocp.load(folder, target))


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
def test_what_is_handed_on_is_what_was_evaluated(run, tmp_path, capsys):
    name, workdir, report = run
    found = weights.open_pretrained(workdir)
    path = PLACES[name].replace("params", "average")
    assert_equal(found.params, stored(workdir, path))
    if name == "Colour":
        raw = weights.open_pretrained(workdir, use_ema=False)
        assert_equal(raw.params, stored(workdir, "params/network"))
    scores = evaluated(workdir, tmp_path, capsys)
    ended = report["final"]["val"]["ema"]
    assert {key: scores[key] for key in ended} == pytest.approx(ended, rel=1e-5)


@pytest.mark.slow
def test_a_scan_and_a_resume_save_the_same(run, tmp_path):
    name, workdir, _ = run
    config = config_of(name, model={"scan": True})
    scanned = train(config, tmp_path)
    one, other = (weights.open_pretrained(w).params for w in (workdir, tmp_path))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), one, other)
    kill_after(1, tmp_path)
    resumed = train(config, tmp_path)
    assert resumed["params_sha256"] == scanned["params_sha256"]
    _, state, _ = begin(config_of(name), workdir)
    assert_equal(state.params, stored(workdir, "params"))


@pytest.mark.slow
def test_it_is_the_init_of_a_classification(run, tmp_path):
    _, workdir, _ = run
    config = config_of(name="", init={"checkpoint": str(workdir), "head": "keep"})
    _, state, _ = begin(config, tmp_path)
    loaded = weights.open_pretrained(workdir).params
    assert_equal(state.params, loaded)


@pytest.mark.parametrize("name", slow_but(["Colour"], PLACES))
def test_a_classification_is_its_init(name, classifier, tmp_path):
    config = config_of(name, init={"checkpoint": str(classifier), "head": "keep"})
    setup, state, _ = begin(config, tmp_path)
    loaded = weights.open_pretrained(classifier).params
    assert_equal(state.params["network"], loaded)
    assert_equal(state.average, state.params)
    drawn = jax.device_get(jax.jit(setup.first.init)())[0]
    assert_equal(state.params["decoder"], drawn["decoder"])
    if name == "Twins":
        assert_equal(state.extra["twin"], state.params)


def test_a_network_in_several_places_is_refused(tmp_path):
    message = (
        "Scattered.backbone returns parameters of several parts of the state: keep"
    )
    with pytest.raises(UserError, match=message):
        loop.train(config_of("Scattered"), tmp_path / "run")
