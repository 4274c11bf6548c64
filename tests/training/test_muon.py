"""Muon: which matrices, which steps, and on which devices they are orthogonalised."""

import functools

import jax
import numpy as np
import optax
import pytest
from helpers import tiny_config

from vit_jax import models
from vit_jax.config.lengths import RunLength
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.models import stacking
from vit_jax.training import optim

RUN = RunLength(100, 7.0)
D, H, K, F = 12, 3, 4, 20


def config_of(**keys):
    keys = {"learning_rate": 0.1, "weight_decay_mask": ("kernel$",)} | keys
    return tiny_config(optim={"name": "muon", **keys}).optim


def transformation(params, **keys):
    return optim.optimizer(
        config_of(**keys), params, lambda step: 0.1, RUN, tiny_config().model
    )


def draw(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), shapes)


@functools.cache
def shapes_of(variant, **keys):
    model = models.create(variant=variant, num_classes=5, channels=3, **keys)
    return jax.eval_shape(model.init, jax.random.key(0))


def vit(depth=2):
    return shapes_of(
        "Ti/4", image_size=(8, 12), width=D, depth=depth, num_heads=H, mlp_dim=F
    )


def flat(tree):
    leaves = jax.tree.leaves_with_path(tree)
    return {"/".join(key.key for key in keys): leaf for keys, leaf in leaves}


def matrices(shapes, **keys):
    """Returns path -> (inputs, outputs) of the parameters that have Muon's steps."""
    config, found = config_of(**keys), {}
    for path, leaf in flat(shapes).items():
        if leading := config.inputs(path, len(leaf.shape)):
            found[path] = (
                int(np.prod(leaf.shape[:leading])),
                int(np.prod(leaf.shape[leading:])),
            )
    return found


def test_matrices_of_blocks_are_taken_as_they_are_multiplied():
    attention = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1"
    mlp = "Transformer/encoderblock_1/MlpBlock_3"
    found = matrices(vit())
    assert {path: shape for path, shape in found.items() if "_1/M" in path} == {
        f"{attention}/query/kernel": (D, H * K),
        f"{attention}/key/kernel": (D, H * K),
        f"{attention}/value/kernel": (D, H * K),
        f"{attention}/out/kernel": (H * K, D),
        f"{mlp}/Dense_0/kernel": (D, F),
        f"{mlp}/Dense_1/kernel": (F, D),
    }
    assert len(found) == 12
    more = matrices(vit(), patch_embedding=True)
    assert more.keys() - found.keys() == {"embedding/kernel"}
    assert more["embedding/kernel"] == (4 * 4 * 3, D)


@pytest.mark.parametrize(
    ("variant", "keys", "some", "number"),
    [
        (
            "R50+B/16",
            {
                "image_size": (32, 32),
                "depth": 1,
                "stage_depths": (1,),
                "stem_width": 32,
            },
            {"block1/unit1/conv2/kernel": (3 * 3 * 32, 32)},
            6 + 4,
        ),
        (
            "Mixer-B/16",
            {"image_size": (32, 32), "depth": 1},
            {"MixerBlock_0/token_mixing/Dense_0/kernel": (4, 384)},
            4,
        ),
        (
            "Swin-T",
            {"image_size": (32, 32)},
            {
                "stage_0/block_0/attn/qkv/kernel": (96, 288),
                "stage_0/merge/kernel": (384, 192),
            },
            4 * 12 + 3,
        ),
    ],
)
def test_networks_of_other_kinds_have_their_matrices(variant, keys, some, number):
    found = matrices(shapes_of(variant, **keys))
    assert some.items() <= found.items()
    assert len(found) == number
    assert not any(word in path for path in found for word in ("head", "bias"))


def test_all_classifiers_and_maps_to_embeddings_are_heads():
    inputs = config_of().inputs
    for path in ("head_dist", "projection", "text/head", "patch_head/last_layer"):
        assert inputs(f"{path}/kernel", 2) == 0, path
    assert inputs("network/Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel", 2)


def test_the_convolutions_of_a_stem_are_matrices():
    found = matrices(shapes_of("C+Ti/4", image_size=(8, 8), width=D, depth=1))
    assert found["stem_conv_0/kernel"][0] == 3 * 3 * 3
    assert "embedding/kernel" not in found


def test_steps_are_those_of_optax_on_the_same_matrices():
    params = draw(vit(depth=1))
    axes = lambda tree: jax.tree.map_with_path(_dimension_numbers, tree)
    pairs = []
    for rms in (0.2, None):
        ours = transformation(params, consistent_rms=rms, weight_decay=0.0)
        theirs = optax.contrib.muon(
            0.1, muon_weight_dimension_numbers=axes, consistent_rms=rms
        )
        pairs += [ours, theirs]

    @jax.jit
    def step(grads, states):
        found = [
            tx.update(grads, state, params)
            for tx, state in zip(pairs, states, strict=True)
        ]
        return [updates for updates, _ in found], [state for _, state in found]

    states = [tx.init(params) for tx in pairs]
    for seed in (1, 2, 3):
        updates, states = step(draw(vit(depth=1), seed), states)
        for one, other in (updates[:2], updates[2:]):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), one, other
            )


def _dimension_numbers(keys, leaf):
    path = "/".join(key.key for key in keys)
    leading = config_of().inputs(path, leaf.ndim)
    axes = tuple(range(leaf.ndim))
    return (
        optax.contrib.MuonDimensionNumbers(axes[:leading], axes[leading:])
        if leading
        else None
    )


def test_a_step_has_the_size_of_adams_and_the_decay_of_all():
    params, grads = draw(vit()), draw(vit(), 1)

    @jax.jit
    def step():
        both = transformation(params), transformation(params, weight_decay=0.3)
        return [tx.update(grads, tx.init(params), params)[0] for tx in both]

    updates, decayed = step()
    for path in matrices(vit()):
        rms = np.sqrt(np.mean(np.square(flat(updates)[path]))) / 0.1
        assert 0.12 < rms < 0.28, path  # Singular values end between 0.7 and 1.2.
    for path, value in flat(decayed).items():
        kernel = path.endswith("kernel")
        wanted = flat(updates)[path] - kernel * 0.1 * 0.3 * flat(params)[path]
        np.testing.assert_allclose(value, wanted, atol=1e-6)


def test_stacked_blocks_are_matrices_of_their_own():
    params, grads = draw(vit()), draw(vit(), 1)
    stacked = stacking.stack(params)

    @jax.jit
    def step(tree, grads):
        tx = transformation(tree, weight_decay=0.1)
        updates, state = tx.update(grads, tx.init(tree), tree)
        return stacking.unstack(updates), state

    results = step(params, grads), step(stacked, stacking.stack(grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *results)


def compiled(axes, depth=4):
    """Returns the compiled update of stacked matrices on a mesh."""
    shapes = shapes_of(
        "Ti/4", image_size=(8, 8), width=64, depth=depth, num_heads=4, mlp_dim=256
    )
    mesh = meshes.create(
        MeshConfig(**axes), jax.devices()[: int(np.prod(list(axes.values())))]
    )
    network = tiny_config().model
    places = sharding.parameters(shapes, mesh, network.model_axes, min_size=64)
    tx = transformation(shapes)
    state = jax.eval_shape(tx.init, shapes)
    state_places = sharding.like(state, (shapes, places))

    def update(grads, state, params):
        with sharding.activations(mesh):
            return tx.update(grads, state, params)

    jitted = jax.jit(
        update,
        in_shardings=(places, state_places, places),
        out_shardings=(places, state_places),
    )
    return jitted.lower(shapes, state, shapes).compile()


@pytest.mark.parametrize(
    "axes",
    [pytest.param({"data": 1, "fsdp": 8}, marks=pytest.mark.slow), {"data": 8}],
)
def test_each_device_orthogonalises_its_share(axes):
    flops = lambda program: program.cost_analysis()["flops"]
    one, eight = flops(compiled({"data": 1})), flops(compiled(axes))
    assert 0.9 < one / eight / 8 < 1.1
