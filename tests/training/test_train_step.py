import functools

import jax
import numpy as np
import pytest
from helpers import tiny_config

from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.training import train_step

B = 16


@functools.cache
def run(devices=1, accumulate=1, dropout=0.0):
    """Takes three steps; returns the state and the last metrics."""
    optim = {"learning_rate": 0.01, "name": "sgd", "schedule": "constant"}
    optim["grad_accum_steps"] = accumulate
    data, model = {"train_transform": "flip | mixup(3.0)"}, {"dropout": dropout}
    config = tiny_config(batch_size=B, data=data, optim=optim, model=model)
    mesh = meshes.create(MeshConfig(data=devices), jax.devices()[:devices])
    program = train_step.build_train_setup(config, mesh, num_examples=20)
    state = program.initial_state()
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.integers(0, 256, (B, 8, 12, 3), np.uint8),
        "label": rng.integers(0, 5, B).astype(np.int32),
        "index": np.arange(B, dtype=np.uint32),
    }
    for _ in range(3):
        state, metrics = program.train_step(state, meshes.to_devices(batch, mesh))
    return state, metrics


def near(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


def test_accumulation_equals_the_large_batch():
    whole, metrics = run()
    parts, same = run(accumulate=16)
    near(whole.params, parts.params, atol=1e-6)
    near(metrics, same, atol=1e-5)


@pytest.mark.slow
def test_accumulation_works_across_devices():
    whole, _ = run()
    parts, _ = run(devices=4, accumulate=2)
    near(whole.params, parts.params, atol=1e-6)


@pytest.mark.slow
def test_microbatches_draw_their_own_dropout():
    alike, _ = run(accumulate=1, dropout=0.5)
    other, _ = run(accumulate=2, dropout=0.5)
    differs = jax.tree.map(lambda a, b: np.abs(a - b).max(), alike.params, other.params)
    assert max(jax.tree.leaves(differs)) > 1e-5


def test_eight_devices_equal_one():
    one, metrics = run()
    eight, same = run(devices=8)
    near(one.params, eight.params, atol=1e-6)
    near(metrics, same, atol=1e-5)


@pytest.mark.slow
def test_a_frozen_body_costs_no_backward_pass():
    def flops(**optim):
        config = tiny_config(model={"depth": 3}, optim={"name": "sgd"} | optim)
        mesh = meshes.create(MeshConfig(data=1), jax.devices()[:1])
        program = train_step.build_train_setup(config, mesh, num_examples=20)
        lowered = program.train_step.lower(program.shapes, program.batch_shapes)
        return lowered.compile().cost_analysis()["flops"]

    # A forward pass is a third.
    assert flops(freeze=("^(?!head/)",)) < 0.45 * flops()
    assert flops(freeze=("^(?!head/)",), freeze_steps=3) > 0.95 * flops()
