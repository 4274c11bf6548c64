"""Programs on a mesh: what lies where, and what is held how long."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_config

from vit_jax.data import pipeline
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError
from vit_jax.training import train_setup

B, BFLOAT16 = 16, jnp.dtype("bfloat16")
VIT = {"variant": "Ti/4", "width": 96, "depth": 1, "num_heads": 4, "mlp_dim": 384}
DEEP = (("depth", 3),)
SCAN = (*DEEP, ("scan", True))


@functools.cache
def build(model=(), data=1, fsdp=1, model_axis=1, task="classification"):
    """Returns config, mesh and setup; `model` is pairs of options."""
    sizes = {"data": data, "fsdp": fsdp, "model": model_axis}
    config = tiny_config(
        batch_size=B,
        model=VIT | dict(model),
        task=task,
        optim={"mu_dtype": "bfloat16"},
        mesh=sizes,
        sharding={"min_size": 100},
    )
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = meshes.create(MeshConfig(**sizes), devices)
    return config, mesh, train_setup.build(config, mesh, num_examples=20)


def numbers(tree):
    """Returns the tree with plain numbers in place of random keys."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, numbers(one), numbers(other))


@pytest.mark.slow
def test_the_first_state_is_drawn_in_parts():
    _, _, split = build(fsdp=8)
    compiled = jax.jit(
        lambda: split.first.init()[0], out_shardings=split.layout.shardings.params
    ).lower()
    # No device ever holds an array that is larger than its own part of any.
    found = re.findall(r"[fsu]\d\d\[([\d,]+)\]", compiled.compile().as_text())
    sizes = [math.prod(map(int, shape.split(","))) for shape in found]
    assert max(sizes) == 96 * 384 // 8

    state = split.initial_state()
    _, _, alone = build()
    assert_equal(jax.device_get(state), jax.device_get(alone.initial_state()))
    kernel = state.params["Transformer"]["encoderblock_0"]["MlpBlock_3"]["Dense_0"][
        "kernel"
    ]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(96, 384 // 8)}


@pytest.mark.slow
def test_a_given_start_is_sent_in_parts_and_stacked_if_there_is_a_scan():
    _, _, alone = build(model=DEEP)
    params = jax.device_get(alone.initial_state().params)
    for model in (DEEP, SCAN):
        _, _, split = build(model=model, fsdp=8)
        state = split.state_from(params)
        for array, sharding in zip(
            jax.tree.leaves(state), jax.tree.leaves(split.layout.shardings), strict=True
        ):
            assert array.sharding.is_equivalent_to(sharding, array.ndim)
        assert_equal(jax.device_get(split.layout.disk.to_disk(state).params), params)


@pytest.mark.slow
def test_stacked_blocks_lie_one_by_one_on_disk_and_come_back():
    _, _, scan = build(model=SCAN, data=2, fsdp=2)
    _, _, alone = build(model=DEEP)
    state = scan.initial_state()
    assert state.params["Transformer"]["encoderblock"]["LayerNorm_0"]["bias"].ndim == 2
    disk = scan.layout.disk.to_disk(state)
    assert_equal(jax.device_get(disk), jax.device_get(alone.initial_state()))
    assert_equal(
        jax.device_get(scan.layout.disk.from_disk(disk)), jax.device_get(state)
    )


def test_the_step_uses_up_its_state_and_makes_the_shapes_that_were_foretold():
    config, mesh, split = build(data=2, fsdp=4)
    source = open_source(config.data, "train")
    with pipeline.train_batches(
        source, config.data, batch_size=B, seed=0, start=0, stop=1
    ) as batches:
        host = {k: v for k, v in next(iter(batches)).items() if k != "skipped"}
    batch = meshes.to_devices(host, mesh)
    for name, array in batch.items():
        foretold = split.layout.batch[name]
        assert (array.shape, array.dtype) == (foretold.shape, foretold.dtype)
        assert array.sharding.is_equivalent_to(foretold.sharding, array.ndim)
    state = split.initial_state()
    after, _ = split.train_step(state, batch)
    assert all(array.is_deleted() for array in jax.tree.leaves(state))
    for array, shape, sharding in zip(
        *map(jax.tree.leaves, (after, split.layout.shapes, split.layout.shardings)),
        strict=True,
    ):
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
    split.train_step(after, batch)
    assert split.train_step._cache_size() == 1  # The second step compiled nothing.


def test_the_first_moment_can_be_bfloat16():
    _, _, program = build()
    adam = program.layout.shapes.opt_state[0]
    assert {x.dtype for x in jax.tree.leaves(adam.mu)} == {BFLOAT16}
    assert {x.dtype for x in jax.tree.leaves(adam.nu)} == {jnp.dtype("float32")}
    config = tiny_config(optim={"name": "sgd", "mu_dtype": "bfloat16"})
    mesh = meshes.create(MeshConfig(data=1), jax.devices()[:1])
    momentum = train_setup.build(config, mesh, 20).layout.shapes.opt_state[0].trace
    assert {x.dtype for x in jax.tree.leaves(momentum)} == {BFLOAT16}


def test_a_batch_must_split_over_both_batch_axes():
    config = tiny_config(batch_size=12, sharding={"min_size": 100})
    mesh = meshes.create(MeshConfig(data=2, fsdp=4))
    with pytest.raises(UserError, match="batch_size=12 is not a multiple of 8 devices"):
        train_setup.build(config, mesh, 20)
