"""Every way of splitting a run gives the run of one device."""

import functools
import math

import jax
import numpy as np
import pytest
from helpers import first_state, tiny_config

from vit_jax.config import fields
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.training import config as configuration
from vit_jax.training import train_setup

STEPS, B = 5, 16
ONE = {"data": 1}
THREE_AXES = {"data": 2, "fsdp": 2, "model": 2}
SGD = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}
ADAM = {
    "name": "adam",
    "learning_rate": 0.003,
    # With the usual 1e-8 Adam makes whole steps of the gradient of the keys' bias, which
    # is 0 but for rounding, because the softmax cancels it.
    "eps": 1e-4,
    "weight_decay": 0.1,
    "grad_clip_norm": 0.5,
    "grad_accum_steps": 2,
}
VIT = {"variant": "Ti/4", "width": 24, "depth": 2, "num_heads": 4, "mlp_dim": 40}
RANDOM = VIT | {"dropout": 0.1, "drop_path_rate": 0.2, "patch_dropout": 0.3}


def build(sizes, optim=SGD, model=VIT, **data):
    """Returns a program and its mesh; parameters of 100 elements are split."""
    data = {"train_transform": "flip | mixup(0.3)"} | data
    split = {"mesh": sizes, "sharding": {"min_size": 100}, "ema": {"decay": 0.9}}
    lengths = {"batch_size": B, "total_steps": STEPS}
    config = tiny_config(data=data, optim=optim, **split, **lengths)
    config = configuration.complete(fields.to_dict(config) | {"model": model})
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = meshes.create(MeshConfig(**sizes), devices)
    return train_setup.build(config, mesh, num_examples=37), mesh


def batch(program, mesh):
    """Returns a batch on the devices, the same for every mesh."""
    rng = np.random.default_rng(0)
    height, width, channels = program.model.image_shape
    host = {
        "image": rng.integers(0, 256, (B, height, width, channels), np.uint8),
        "label": rng.integers(0, 5, B).astype(np.int32),
        "index": np.arange(B, dtype=np.uint32),
    }
    return meshes.to_devices(host, mesh)


def train(sizes, steps=STEPS, **options):
    """Returns the state after some steps as it is on disk, and the last metrics."""
    program, mesh = build(sizes, **options)
    state, images = first_state(program), batch(program, mesh)
    for _ in range(steps):
        state, metrics = program.train_step(state, images)
    return jax.device_get((program.layout.disk.to_disk(state), metrics))


@functools.cache
def on_one_device():
    return train(ONE, optim=ADAM, model=RANDOM)


def assert_near(one, other, atol):
    near = functools.partial(np.testing.assert_allclose, rtol=0, atol=atol)
    for name in ("params", "opt_state", "average"):
        jax.tree.map(near, *(getattr(state, name) for state, _ in (one, other)))
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(near, one[1], other[1])


# The others, of one or two of these axes, are in benchmarks/reliability/equality.py.
@pytest.mark.slow
@pytest.mark.parametrize("model", [{}, {"scan": True, "remat_policy": "full"}])
def test_steps_are_those_of_one_device(model):
    other = train(THREE_AXES, optim=ADAM, model=RANDOM | model)
    assert_near(on_one_device(), other, atol=1e-5)


@pytest.mark.slow
def test_a_hybrid_split_over_fsdp_trains_as_on_one_device():
    stem = {"variant": "R50+B/16", "stage_depths": (1,), "stem_width": 32}
    options = {
        "model": VIT | {"depth": 1} | stem,
        "image_size": (16, 16),
        "optim": SGD | {"learning_rate": 0.01},
    }
    one = train(ONE, **options)
    assert_near(one, train({"data": 2, "fsdp": 4}, **options), atol=1e-5)
