"""What devices send each other in a step: gradients and scalars, and what losses need.

Steps are built as for GPUs and compiled for CPUs, whose partitioner is the same.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ALIKE, RECIPES, slow_but
from jax.sharding import NamedSharding, PartitionSpec

from vit_jax.config import fields
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.models.layers import PatchEmbedding
from vit_jax.tasks import dino_losses, similarities
from vit_jax.tools.planning import analysis, costs, hlo
from vit_jax.training import config as configuration
from vit_jax.training import train_setup

IMAGES = 7  # Per device: no size of a network is a multiple of it.
DEVICES = 4
# What a step of a recipe sends beside gradients and scalars (docs/compile.md).
NEEDS = {
    "contrastive": ("clip", "siglip_lit_coco"),
    "koleo": ("dinov2", "dinov3"),
    "sinkhorn": ("dinov3",),
    "mixup": ("bit_hyperrule", "deit", "distill_features", "mixer", "swin", "vit5"),
    "muon": ("cifar10",),
}
WHOLE_GROUPS = {"model.drop_path_group": IMAGES, "task.mask_group": IMAGES}
KEYS = dict.fromkeys(("dinov2", "dinov3"), WHOLE_GROUPS)
# Their own steps are lowered by test_lowering.py.
COMPILED = [name for name in RECIPES if name not in ALIKE]


def collectives_of(recipe, monkeypatch, **keys):
    """Compiles a recipe's quick step; returns its collectives.

    Arrays of more than one number that are not of a size of the state are "the batch".
    """
    keys = {"batch_size": DEVICES * IMAGES, **KEYS.get(recipe, {}), **keys}
    config = configuration.load(f"configs/{recipe}.py:quick", keys)
    if hasattr(config.model, "attention_impl"):  # CPUs have no cuDNN.
        config = fields.replace(config, {"model.attention_impl": "einsum"})
    if hasattr(config.model, "depth"):  # One block has all operations.
        config = fields.replace(config, {"model.depth": 1})
    build = configuration.TrainConfig.build_model
    as_for_gpus = lambda config, platform: build(config, "gpu")
    monkeypatch.setattr(configuration.TrainConfig, "build_model", as_for_gpus)
    monkeypatch.setattr(costs, "_SCALARS_BYTES", 4)
    mesh = meshes.create(config.mesh, jax.devices()[:DEVICES])
    setup = train_setup.build(config, mesh, 1_000)
    lowered = setup.train_step.lower(setup.layout.shapes, setup.layout.batch)
    module = hlo.parse(lowered.compile().as_text())
    return costs.find_collectives(module, [0] * DEVICES, analysis.state_sizes(setup))


def growing(collectives):
    """Returns the collectives that no loss needs and that grow with the batch."""
    unknown = (one for one in collectives if one.purpose == costs.BATCH)
    return [one for one in unknown if one.bytes % IMAGES == 0]


def purposes(collectives):
    sent = {one.purpose for one in collectives} - {costs.BATCH, costs.SCALARS}
    return sent - {costs.GRADIENTS}


@pytest.mark.parametrize("recipe", slow_but(["b16_i21k"], COMPILED))
def test_a_step_sends_gradients_and_scalars_only(recipe, monkeypatch):
    found = collectives_of(recipe, monkeypatch)
    assert any(one.purpose == costs.GRADIENTS for one in found)
    assert growing(found) == []
    assert purposes(found) == {need for need, names in NEEDS.items() if recipe in names}


def test_a_recipe_that_is_not_compiled_is_like_one_that_is():
    def parts_of(recipe):
        config = configuration.load(f"configs/{recipe}.py:quick")
        sections = config.task, config.model, config.optim
        loss = getattr(config.task, "loss", "")
        return *map(type, sections), loss, bool(config.optim.sam_rho)

    for recipe, other in ALIKE.items():
        assert other in COMPILED
        assert parts_of(recipe) == parts_of(other), recipe


def _sinkhorn(x, targets):
    return -jnp.sum(dino_losses.sinkhorn_knopp(targets, 0.1) * jax.nn.log_softmax(x))


def _softmax(x, texts):
    one = jnp.float32(1)
    return similarities.softmax(x, texts, one, one, chunk=IMAGES)[0]


# A group of KoLeo has the images of two devices.
LOSSES = {
    "koleo": lambda x, _: dino_losses.koleo(x, 2 * IMAGES),
    "sinkhorn": _sinkhorn,
    "contrastive": _softmax,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_over_all_images_needs_no_more_on_more_devices(name):
    compiled, sent = [], []
    for count in (DEVICES, 2 * DEVICES):
        mesh = meshes.create(meshes.MeshConfig(), jax.devices()[:count])

        def step(x, other, mesh=mesh):
            with sharding.activations(mesh):
                return LOSSES[name](x, other)

        rows = jax.ShapeDtypeStruct(
            (count * IMAGES, 12), jnp.float32, sharding=meshes.batched(mesh)
        )
        whole, split = meshes.replicated(mesh), meshes.batched(mesh)
        both = jax.jit(jax.value_and_grad(step), out_shardings=(whole, split))
        compiled.append(both.lower(rows, rows).compile())
        module = hlo.parse(compiled[-1].as_text())
        found = costs.find_collectives(module, [0] * count)
        sent.append([(one.kind, one.bytes, one.times) for one in found])
    few, many = (one.memory_analysis().temp_size_in_bytes for one in compiled)
    assert many <= few * 1.05
    # The captions visit each device.
    times = 2 if name == "contrastive" else 1
    once = [kind == "all-reduce" for kind, *_ in sent[0]]
    expected = [
        (kind, size, count * (1 if alone else times))
        for (kind, size, count), alone in zip(sent[0], once, strict=True)
    ]
    assert sent[0] and sent[1] == expected


# In tiny networks XLA gathers what a wide last layer reads, if that is less than the layer.
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["b16_i21k", "mae"])
def test_a_step_with_fsdp_sends_parameters_and_gradients_only(recipe, monkeypatch):
    keys = {"mesh.data": 1, "mesh.fsdp": DEVICES, "sharding.min_size": 64}
    if recipe == "b16_i21k":
        keys["data.num_classes"] = 12
    found = collectives_of(recipe, monkeypatch, **keys)
    assert growing(found) == []
    assert purposes(found) == {costs.PARAMETERS}


@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 2, 2)])
def test_patches_in_row_major_order_stay_on_their_device(sizes):
    mesh = meshes.create(
        meshes.MeshConfig(**dict(zip(meshes.AXES, sizes, strict=True))),
        jax.devices()[: sizes[0] * sizes[1] * sizes[2]],
    )
    embedding = PatchEmbedding(10, 4, row_major=True)
    images = jax.random.normal(jax.random.key(0), (28, 8, 12, 3))
    params = jax.jit(embedding.init)(jax.random.key(1), images)

    def loss(params, images):
        with sharding.activations(mesh):
            return jnp.square(embedding.apply(params, images)).sum()

    split = NamedSharding(mesh, PartitionSpec(meshes.BATCH_AXES))
    whole = meshes.replicated(mesh)
    step = jax.jit(
        jax.value_and_grad(loss), in_shardings=(whole, split), out_shardings=whole
    )
    compiled = step.lower(params, images).compile()
    found = costs.find_collectives(hlo.parse(compiled.as_text()), [0] * mesh.size)
    assert {one.kind for one in found} == {"all-reduce"}
    assert sum(one.bytes for one in found) == 4 * (4 * 4 * 3 * 10 + 10 + 1)
    plain = embedding.clone(row_major=False)
    wanted = jax.value_and_grad(lambda p: jnp.square(plain.apply(p, images)).sum())(
        params
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, step(params, images), wanted)
