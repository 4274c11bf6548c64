"""What is drawn in the training step, and what follows from a step: new, not old."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recorded_draws
from flax.traverse_util import flatten_dict
from helpers import first_state, tiny_config

from vit_jax.distributed import mesh as meshes
from vit_jax.tasks.classification import Classification, ClassificationConfig
from vit_jax.training import train_setup, train_state

B = 8


def build(**sections):
    """Returns the setup of a run on one device, and a batch of it."""
    task = sections.pop("recording", None)
    config = tiny_config(batch_size=B, evals={}, **sections)
    if task is not None:
        config = dataclasses.replace(config, task=task)
    mesh = meshes.create(config.mesh, jax.devices()[:1])
    setup = train_setup.build(config, mesh, num_examples=20)
    rng = np.random.default_rng(0)
    batch = {
        name: rng.integers(0, 5, spec.shape).astype(spec.dtype)
        for name, spec in setup.layout.batch.items()
    }
    batch["index"] = np.arange(B, dtype=np.uint32)
    return setup, meshes.to_devices(batch, mesh)


@pytest.fixture
def drawn(monkeypatch):
    """Returns a list that grows by (function, key) with each draw of a network."""
    return recorded_draws.record(monkeypatch)


ALL = {"dropout": 0.1, "drop_path_rate": 0.2, "depth": 3}
# Per pass: the embedding, and in each block after attention, in the MLP and after it;
# and two branches of each block, the first of which never drops.
SITES = {"bits": 1 + 3 * 3, "bernoulli": 2 * 3}


@pytest.mark.parametrize(
    "model",
    [
        ALL,
        pytest.param(ALL | {"scan": True}, marks=pytest.mark.slow),
        pytest.param(ALL | {"patch_dropout": 0.5}, marks=pytest.mark.slow),
    ],
    ids=["blocks", "scan", "patch dropout"],
)
def test_each_layer_site_microbatch_and_step_draws_by_itself(model, drawn):
    optim = {"grad_accum_steps": 2, "name": "sgd"}
    setup, batch = build(model=model, optim=optim, data={"train_transform": ""})
    step = jax.jit(setup.train_step.__wrapped__)
    state = first_state(setup)
    for _ in range(2):
        state, _ = step(state, batch)
    jax.effects_barrier()
    again = collections.Counter(drawn)
    assert set(again.values()) == {1}
    counts = collections.Counter(name for name, *_ in drawn)
    extra = {"uniform": 1} if "patch_dropout" in model else {}
    assert counts == {name: 2 * 2 * n for name, n in (SITES | extra).items()}
    drawn.clear()
    step(first_state(setup), batch)
    jax.effects_barrier()
    assert set(drawn) < set(again) and len(drawn) == len(again) // 2


def of_seed(seed):
    """Returns what a seed gives: initial values, transformed images, and the loss."""
    model, data = {"dropout": 0.5, "depth": 1}, {"train_transform": "flip | mixup(3.0)"}
    setup, batch = build(model=model, data=data, seed=seed)
    params, extra = setup.first.init()
    augment_key, dropout_key = jax.random.split(train_state.run_key(seed))
    prepared = setup.task.prepare(batch, augment_key)
    same = first_state(setup).params  # Of any seed.
    plain = setup.task.prepare(batch, jax.random.key(0))
    loss, _ = setup.task.loss(same, extra, plain, dropout_key)
    return jax.device_get((params, prepared["image"], loss))


def test_initial_values_augmentation_and_dropout_each_follow_the_seed():
    first, again, other = map(of_seed, (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    pairs = zip(*(flatten_dict(each[0]).items() for each in (first, other)))
    alike = {path for (path, a), (_, b) in pairs if (a == b).all()}
    # Zeros or ones at first, whatever the seed.
    assert {path[-1] for path in alike} == {"bias", "scale", "cls", "kernel"}
    assert {path for path in alike if path[-1] == "kernel"} == {("head", "kernel")}
    assert (first[1] != other[1]).any()
    assert first[2] != other[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordingConfig(ClassificationConfig):
    def build(self, model, data, run, saved=None):
        return Recording(self, model, data)


class Recording(Classification):
    """A task that keeps what `update` gets."""

    def init(self, rng):
        params, _ = super().init(rng)
        return params, {"seen": params, "step": jnp.int32(-1)}

    def backbone(self, params, extra):
        return params

    def outputs(self, params, extra, batch, rng):
        return super().outputs(params, None, batch, rng)

    def update(self, extra, params, stats, step):
        return {"seen": params, "step": step}


def test_averages_tasks_and_norms_get_the_parameters_after_the_step():
    optim = {"name": "sgd", "momentum": 0.0, "learning_rate": 0.5, "schedule": "linear"}
    ema = {"decay": 0.75, "warmup": False}
    setup, batch = build(optim=optim, ema=ema, recording=RecordingConfig())
    before = jax.device_get(first_state(setup))
    after, metrics = jax.device_get(setup.train_step(first_state(setup), batch))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before.params, after.params)
    assert max(jax.tree.leaves(moved)) > 0.01
    jax.tree.map(np.testing.assert_array_equal, after.extra["seen"], after.params)
    assert (int(after.extra["step"]), int(after.step)) == (1, 1)
    jax.tree.map(
        lambda old, new, average: np.testing.assert_allclose(
            average, 0.75 * old + 0.25 * new, atol=1e-6
        ),
        *(before.params, after.params, after.average),
    )
    squares = [
        np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(after.params)
    ]
    assert metrics["param_norm"] == pytest.approx(np.sqrt(sum(squares)), rel=1e-6)
    # The rate of this step and the gradient that it was taken with.
    gradient = jax.tree.map(lambda a, b: (a - b) / 0.5, before.params, after.params)
    squares = [
        np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(gradient)
    ]
    assert metrics["learning_rate"] == 0.5
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(sum(squares)), rel=1e-4)


def test_the_norm_of_the_gradients_is_of_those_that_move_in_the_step():
    optim = {"name": "sgd", "momentum": 0.0, "learning_rate": 0.5, "warmup_steps": 0}
    optim |= {"schedule": "constant", "freeze": ("^(?!head/)",), "freeze_steps": 3}
    setup, batch = build(optim=optim)
    before = jax.device_get(first_state(setup).params)
    after, metrics = jax.device_get(setup.train_step(first_state(setup), batch))
    moved = jax.tree.map(lambda a, b: (a - b) / 0.5, before, after.params)
    squares = [np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(moved)]
    assert sum(squares) > 0 and not np.any(moved["cls"])
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(sum(squares)), rel=1e-4)
