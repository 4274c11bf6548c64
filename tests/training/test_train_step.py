import functools

import jax
import numpy as np
import pytest
from helpers import first_state, tiny_config

from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.training import train_setup

B = 16


@functools.cache
def run(devices=1, accumulate=1, dropout=0.0):
    """Takes three steps; returns the state and the last metrics."""
    optim = {"learning_rate": 0.01, "name": "sgd", "schedule": "constant"}
    optim["grad_accum_steps"] = accumulate
    data, model = {"train_transform": "flip | mixup(3.0)"}, {"dropout": dropout}
    config = tiny_config(batch_size=B, data=data, optim=optim, model=model)
    mesh = meshes.create(MeshConfig(data=devices), jax.devices()[:devices])
    program = train_setup.build(config, mesh, num_examples=20)
    state = first_state(program)
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


def weighted(loss="softmax", **data):
    labels = np.array([1, 1, 1, 0, 2, 0, 2, 0], np.int32)
    if data:
        labels = np.random.default_rng(1).integers(0, 2, (8, 3)).astype(np.int32)
    task = {"loss": loss, "class_weights": (1.0, 10.0, 3.0)}
    return {"task": task, "data": data}, {"label": labels}


def masked():
    """Nearly all pixels of half of the images are ignored."""
    maps = np.random.default_rng(1).integers(0, 3, (8, 8, 12)).astype(np.int16)
    maps[:4, 2:] = -1
    task = {"name": "segmentation", "head": "pyramid", "width": 8}
    return {"task": task, "data": {"mask_key": "masks"}}, {"label_map": maps}


CASES = {
    "class weights": weighted(),
    "several labels": weighted("sigmoid", multi_label=True),
    "ignored pixels": masked(),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_of_unequal_weights_do_not_depend_on_microbatches(case):
    """The case `accumulation` of public reports: the update of SGD and its metrics."""
    sections, batch = CASES[case]

    def after(parts):
        config = tiny_config(
            optim={"name": "sgd", "momentum": 0.0, "grad_accum_steps": parts},
            data={"num_classes": 3, "train_transform": ""} | sections["data"],
            task=sections["task"],
            model={"depth": 1},
            evals={},
        )
        mesh = meshes.create(config.mesh, jax.devices()[:1])
        setup = train_setup.build(config, mesh, num_examples=8)
        assert setup.notes == ()
        images = np.random.default_rng(0).integers(0, 256, (8, 8, 12, 3), np.uint8)
        given = {"image": images, "index": np.arange(8, dtype=np.uint32)} | batch
        return setup.train_step(first_state(setup), meshes.to_devices(given, mesh))

    (whole, metrics), (parts, same) = after(1), after(4)
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
        config = tiny_config(model={"depth": 2}, optim={"name": "sgd"} | optim)
        mesh = meshes.create(MeshConfig(data=1), jax.devices()[:1])
        program = train_setup.build(config, mesh, num_examples=20)
        lowered = program.train_step.lower(program.layout.shapes, program.layout.batch)
        return lowered.compile().cost_analysis()["flops"]

    # A forward pass is a third.
    assert flops(freeze=("^(?!head/)",)) < 0.45 * flops()
    assert flops(freeze=("^(?!head/)",), freeze_steps=3) > 0.95 * flops()
