"""`load_nnx`: trained, split, merged, saved, and back to a dict of Flax Linen."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import ROOT, TINY, write_weights
from orbax.checkpoint import v1 as ocp

import vit_jax
from vit_jax.api import nnx_networks
from vit_jax.data.preprocess import Preprocess

SIZES = TINY | {"variant": "Ti/8", "num_classes": 3, "image_size": (16, 24)}
IMAGES = jnp.asarray(np.random.default_rng(0).standard_normal((5, 16, 24, 3), "f4"))
LABELS = np.arange(5) % 3


def loss_of(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


def trained(network, step):
    """Trains a module for three steps; returns its losses."""
    optimizer = nnx.Optimizer(network, optax.adam(1e-2, eps=1e-4), wrt=nnx.Param)
    return [float(step(network, optimizer)) for _ in range(3)]


def train_step(network, optimizer):
    def loss_fn(network):
        return loss_of(network(IMAGES, train=True)["logits"])

    loss, grads = nnx.value_and_grad(loss_fn)(network)
    optimizer.update(network, grads)
    return loss


def same(ours, theirs, **how):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **how), ours, theirs)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("nnx") / "weights.safetensors"
    write_weights(path, **SIZES)
    return str(path)


def test_a_module_trains_as_in_linen_and_goes_back(path, tmp_path):
    module, params = vit_jax.load_flax(path, tell=str)
    network = vit_jax.load_nnx(path, tell=str)
    same(network(IMAGES), module.apply({"params": params}, IMAGES), rtol=0)
    graph, tree = vit_jax.load_nnx(path, tell=str), vit_jax.load_nnx(path, tell=str)
    losses = trained(graph, nnx.jit(train_step))
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        step = nnx.jit(train_step)
        np.testing.assert_allclose(trained(tree, step), losses, rtol=1e-6)

    optimizer = optax.adam(1e-2, eps=1e-4)
    state = optimizer.init(params)
    function = jax.jit(
        jax.value_and_grad(
            lambda p: loss_of(module.apply({"params": p}, IMAGES, train=True)["logits"])
        )
    )
    for loss in losses:
        value, grads = function(params)
        np.testing.assert_allclose(value, loss, rtol=1e-5)
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
    back = nnx.to_pure_dict(nnx.state(graph, nnx.Param))
    same(back, params, atol=1e-5)
    outputs = module.apply({"params": back}, IMAGES)
    same(outputs, graph(IMAGES), atol=1e-6)

    definition, variables = nnx.split(graph)
    same(nnx.merge(definition, variables)(IMAGES), outputs, atol=1e-6)
    ocp.save(tmp_path / "saved", back)
    restored = nnx.state(network, nnx.Param)
    nnx.replace_by_pure_dict(restored, ocp.load(tmp_path / "saved", back))
    nnx.update(network, restored)
    same(network(IMAGES), outputs, atol=1e-6)


def test_keys_of_dropout_and_running_means_are_variables(path, monkeypatch):
    rngs = nnx.Rngs(dropout=0)
    network = vit_jax.load_nnx(path, dropout=0.5, num_classes=7, rngs=rngs, tell=str)
    first, second = (network(IMAGES, train=True)["pre_logits"] for _ in range(2))
    assert abs(first - second).max() > 1e-3
    assert network(IMAGES)["logits"].shape == (5, 7)

    module = nn.BatchNorm(use_running_average=True)  # As in a network of a user.
    variables = jax.device_get(module.init(jax.random.key(0), IMAGES))
    variables["batch_stats"]["mean"] = np.array([1.0, 2.0, 3.0], np.float32)
    flat = variables["params"] | {"batch_stats": variables["batch_stats"]}
    monkeypatch.setattr(nnx_networks, "load_flax", lambda source: (module, flat))
    network = vit_jax.load_nnx("")
    same(nnx.to_pure_dict(nnx.state(network, nnx.BatchStat)), variables["batch_stats"])
    same(network(IMAGES), module.apply(variables, IMAGES), rtol=0)


def test_the_program_of_the_page_runs(tmp_path, capsys):
    text = (ROOT / "docs" / "nnx.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    how = Preprocess((8, 8), mean=(0.5,), std=(0.5,))
    sizes = TINY | {"variant": "Ti/4", "channels": 1, "num_classes": 10}
    write_weights(tmp_path / "a.safetensors", (), how, **sizes | {"image_size": (8, 8)})
    program = program.replace("runs/digits", str(tmp_path / "a.safetensors"))
    exec(compile(program, "docs/nnx.md", "exec"), {})  # noqa: S102
    numbers = [float(line) for line in capsys.readouterr().out.splitlines()[-2:]]
    assert np.isfinite(numbers).all()
