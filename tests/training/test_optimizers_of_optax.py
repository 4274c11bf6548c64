"""Every optimiser of optax by its name, in the training step of a run."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import kill_after, tiny_config, train

from vit_jax.config import fields
from vit_jax.config.lengths import RunLength
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.tasks.classification import Classification
from vit_jax.training import checkpoint, optim, train_step
from vit_jax.training.optim import OPTIMIZERS
from vit_jax.weights import workdir as layout

B, RUN = 16, RunLength(100, 7.0)
OURS = ("adam", "adamw", "sgd", "lars", "lamb")
NAMES = [name for name in OPTIMIZERS if name not in OURS]
# One leaf of each kind is enough, and compiles in a second.
KEPT = "kernel|Dense_0/bias|cls"
LEFT_OUT = "/(key|value|out|Dense_1|embedding)/"
EVERYTHING = {
    "weight_decay": 0.1,
    "weight_decay_end": 0.2,
    "grad_clip_norm": 5.0,
    "grad_accum_steps": 2,
    "layer_decay": 0.7,
    "freeze": ("cls",),
}
pytestmark = pytest.mark.filterwarnings("ignore:`optimistic_adam` is deprecated")


@pytest.fixture
def quick(monkeypatch):
    """Puts few parameters and a function of them in the place of a network and its loss."""
    init = Classification.init

    def few(task, rng):
        params, extra = init(task, rng)
        return _few(params), extra

    def loss(task, params, extra, batch, rng):
        x = batch["image"].mean() / 100
        leaves = enumerate(jax.tree.leaves(stacking.separate(params)))
        value = sum(jnp.mean(jnp.sin(3 * p + x + i) * (2 + p)) for i, p in leaves)
        return value, ({"loss": value}, None)

    monkeypatch.setattr(Classification, "init", few)
    monkeypatch.setattr(Classification, "loss", loss)


def _few(tree, path=""):
    if not isinstance(tree, dict):
        return tree if re.search(KEPT, path) and not re.search(LEFT_OUT, path) else None
    inner = {name: _few(value, f"{path}/{name}") for name, value in tree.items()}
    return {name: value for name, value in inner.items() if value is not None} or None


def build(name, fsdp=1, scan=False, **keys):
    """Returns config, mesh and setup of a network of two blocks."""
    config = tiny_config(
        batch_size=B,
        optim={"name": name, "learning_rate": 0.01, "warmup_steps": 1, **keys},
        model={"num_heads": 4, "width": 16, "mlp_dim": 32, "depth": 2, "scan": scan},
        sharding={"min_size": 64},
        mesh={"data": 1, "fsdp": fsdp},
        evals={},
    )
    mesh = meshes.create(config.mesh, jax.devices()[:fsdp])
    return config, mesh, train_step.build_train_setup(config, mesh, num_examples=20)


@functools.cache
def drawn(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def start(setup):
    """Returns the first state, with the same parameters in any layout."""
    separate = jax.eval_shape(stacking.separate, setup.shapes.params)
    leaves, tree = jax.tree.flatten(separate)
    params = jax.tree.unflatten(tree, [drawn(x.shape, i) for i, x in enumerate(leaves)])
    params = stacking.join(params, setup.shapes.params)
    create = jax.jit(setup.create, out_shardings=setup.shardings)
    return create(jax.device_put(params, setup.shardings.params), None)


def steps(setup, mesh, state, count):
    """Takes steps with a batch for each, by their number."""
    for _ in range(count):
        pixels = 100 + 20 * int(state.step)
        batch = {
            "image": np.full((B, 8, 12, 3), pixels, np.uint8),
            "label": np.zeros(B, np.int32),
            "index": np.arange(B, dtype=np.uint32),
        }
        state, _ = setup.train_step(state, meshes.to_devices(batch, mesh))
        jax.block_until_ready(state.step)  # Or two steps wait for the same threads.
    return state


def plain(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.device_get(
        jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
    )


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, plain(one), plain(other))


def assert_near(one, other, atol=2e-5):
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=atol)
    jax.tree.map(near, plain(one), plain(other))


@pytest.mark.parametrize("name", NAMES)
def test_three_steps_a_kill_and_eight_devices(name, tmp_path, quick):
    config, mesh, setup = build(name, fsdp=8, **EVERYTHING)
    first = start(setup)
    begun = plain(first.params)
    two = steps(setup, mesh, first, 2)
    source = open_source(config.data, "train")
    with checkpoint.Checkpointer(tmp_path, config, source, setup.metadata) as saved:
        saved.save(2, setup.to_disk(two), seconds=1.0)
        saved.wait()
        three = steps(setup, mesh, two, 1)
        found = saved.load(2, setup.disk_shapes, setup.disk_shardings)
    assert_equal(steps(setup, mesh, setup.from_disk(found), 1), three)
    for a, b in zip(*map(jax.tree.leaves, (three, setup.shapes)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)

    _, mesh, alone = build(name, **EVERYTHING)
    one = steps(alone, mesh, start(alone), 3)
    assert_near(one.params, three.params)
    assert_near(one.average, three.average)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), begun, plain(three.params))
    assert moved.pop("cls") == 0
    assert 0 < sum(jax.tree.leaves(moved)) < 3  # It is a number.
