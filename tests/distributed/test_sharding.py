import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from helpers import slow_but
from jax.sharding import AbstractMesh, AxisType

from vit_jax import models
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.errors import UserError
from vit_jax.models import stacking, variants
from vit_jax.models.layers import MODEL_AXES

SMALLEST = 32_768


def mesh_of(data=1, fsdp=1, model=1):
    return AbstractMesh((data, fsdp, model), meshes.AXES, (AxisType.Auto,) * 3)


@functools.cache
def shapes_of(variant="S/16", num_classes=21_843, image_size=(224, 224), **options):
    options = {"depth": 3} | options if "x" not in variant else options
    size = {"num_classes": num_classes, "image_size": image_size}
    model = models.create(variant, **size, **options)
    return jax.eval_shape(model.init, jax.random.key(0))


def place(shapes, mesh, *rules):
    return sharding.parameters(shapes, mesh, MODEL_AXES, rules, SMALLEST)


def specs_of(shapes, mesh, *rules):
    flat = flatten_dict(place(shapes, mesh, *rules), sep="/")
    return {path: tuple(leaf.spec) for path, leaf in flat.items()}


def sizes(shapes, shardings):
    """Returns elements in all, and on one device."""
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    parts = [(x.size, math.prod(s.shard_shape(x.shape))) for x, s in pairs]
    return tuple(map(sum, zip(*parts, strict=True)))


@functools.cache
def fast_shapes(variant, **options):
    """Shapes of every kind of layer that a variant has, of few layers."""
    parsed = variants.parse(variant)
    if parsed.size:
        options["depth"] = 1
    if parsed.resnet:
        options["stage_depths"] = (2,) * len(parsed.resnet.stage_depths)
    image_size = (224, 224) if parsed.resnet else (parsed.patch_size * 8,) * 2
    return shapes_of(variant, image_size=image_size, **options)


FAST = ("Ti/16", "So400m/14", "H/14", "R50+B/16", "R152x2")
# A variant of each width: the size of patches changes nothing but the embedding.
OTHERS = {name.partition("/")[0]: name for name in variants.NAMES}
EVERY = slow_but(FAST, dict.fromkeys([*FAST, *OTHERS.values()]))


@pytest.mark.parametrize("variant", EVERY)
def test_the_default_splits_every_variant_over_any_usual_number(variant):
    shapes = fast_shapes(variant)
    for fsdp in (2, 4, 8, 16, 32, 64):
        whole, part = sizes(shapes, place(shapes, mesh_of(2, fsdp)))
        small = sum(x.size for x in jax.tree.leaves(shapes) if x.size < SMALLEST)
        assert part == small + (whole - small) / fsdp
        assert small < 0.02 * whole  # Biases, LayerNorms and the like.


@pytest.mark.parametrize("variant", EVERY)
def test_heads_and_hidden_units_are_split_in_every_encoder(variant):
    if variants.parse(variant).size is None:
        pytest.skip("a ResNet has none")
    shapes = fast_shapes(variant)
    heads = variants.parse(variant).size.num_heads
    for model in (2, 3, 4, 8, 16):
        if heads % model:
            message = rf"mesh.model={model}: {model} devices do not divide"
            with pytest.raises(UserError, match=message):
                place(shapes, mesh_of(1, 1, model))
            continue
        specs = specs_of(shapes, mesh_of(1, 1, model))
        block = "Transformer/encoderblock_0"
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for name in ("query", "key", "value"):
            assert specs[f"{attention}/{name}/kernel"] == (None, "model", None)
            assert specs[f"{attention}/{name}/bias"] == ("model", None)
        assert specs[f"{attention}/out/kernel"] == ("model", None, None)
        assert specs[f"{attention}/out/bias"] == (None,)
        assert specs[f"{block}/MlpBlock_3/Dense_0/kernel"] == (None, "model")
        assert specs[f"{block}/MlpBlock_3/Dense_1/kernel"] == ("model", None)
        assert specs["head/kernel"] == (None, None)


@pytest.mark.parametrize(
    "options",
    [
        {"pool": "gap"},
        {"pool": "map"},
        {"pool": "gap", "class_token": True, "fc_norm": True},
        {"distillation": True},
        {"representation_layer": True},
        {"posemb": "none"},
        {"posemb": "learned2d", "posemb_placement": "every"},
        {"posemb": "sincos2d"},
        {"posemb": "relative", "posemb_placement": "every"},
        {"posemb": "relative", "posemb_placement": "shared"},
        {"scan": True},
        {"variant": "R50+B/16", "pool": "map"},
        {"activation": "swiglu", "layer_scale_init": 0.1, "num_register_tokens": 4},
    ],
)
def test_the_default_splits_every_head_and_position_embedding(options):
    shapes = fast_shapes(**{"variant": "S/16"} | options)
    mesh = mesh_of(1, 8, 2)
    whole, part = sizes(shapes, place(shapes, mesh))
    assert part < 1.05 * whole / 8
    specs = specs_of(shapes, mesh)
    if options.get("pool") == "map":
        assert specs["MAPHead_0/MlpBlock_0/Dense_1/kernel"] == ("model", "fsdp")
        query = specs["MAPHead_0/MultiHeadDotProductAttention_0/query/kernel"]
        assert query == ("fsdp", "model", None)
    if options.get("activation") == "swiglu":
        for name in ("gate", "Dense_0"):
            found = specs[f"Transformer/encoderblock_0/MlpBlock_3/{name}/kernel"]
            assert found == ("fsdp", "model")
    if options.get("posemb") == "relative":
        relative = [spec for path, spec in specs.items() if "relative" in path]
        assert relative
        assert {spec[0] for spec in relative} == {"model"}


def test_the_depth_of_stacked_blocks_is_never_split():
    shapes = shapes_of("S/16", depth=8, mlp_dim=1500)  # 8 would fit 8 devices best.
    flat = specs_of(shapes, mesh_of(1, 4, 2))
    stacked = specs_of(stacking.stack(shapes), mesh_of(1, 4, 2))
    for path, spec in stacked.items():
        one = path.replace("/encoderblock/", "/encoderblock_0/")
        assert spec == ((None,) if one != path else ()) + flat[one]
    with pytest.raises(UserError, match=r"mesh.fsdp=5 divides no .*key/kernel 384x6"):
        place(stacking.stack(shapes), mesh_of(1, 5))


def test_small_parameters_stay_whole_and_large_ones_lose_their_largest_axis():
    specs = specs_of(shapes_of("S/16"), mesh_of(2, 4))
    block = "Transformer/encoderblock_0"
    assert specs[f"{block}/MlpBlock_3/Dense_0/kernel"] == (None, "fsdp")
    assert specs[f"{block}/MlpBlock_3/Dense_1/kernel"] == ("fsdp", None)
    assert specs["head/kernel"] == ("fsdp", None)  # 4 does not divide 21,843.
    assert specs["head/bias"] == (None,)
    assert specs[f"{block}/LayerNorm_0/scale"] == (None,)
    assert specs["embedding/kernel"] == (None, None, None, "fsdp")


def test_a_rule_of_the_user_goes_ahead():
    rules = ("Dense_0/kernel$ -> fsdp+data", r"(query|key)/kernel -> -, -, model")
    specs = specs_of(shapes_of("S/16"), mesh_of(2, 2, 2), *rules)
    block = "Transformer/encoderblock_2"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    assert specs[f"{block}/MlpBlock_3/Dense_0/kernel"] == (("fsdp", "data"),)
    assert specs[f"{block}/MlpBlock_3/Dense_1/kernel"] == ("model", "fsdp")
    assert specs[f"{attention}/key/kernel"] == (None, None, "model")
    assert specs[f"{attention}/value/kernel"] == ("fsdp", "model", None)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("haed/kernel -> fsdp", r"'haed/kernel -> fsdp' matches none of the 56 param"),
        ("encoderblock_99/ -> fsdp", "matches none of the 56 parameters, such as"),
        ("head/kernel -> -, fsdp", "2 devices do not divide 21843 of head/kernel 384x"),
        ("head/bias -> -, fsdp", "has 2 axes, but head/bias 21843 has 1"),
        ("head/kernel", "is not 'REGEX -> AXIS, AXIS' with axes from data, fsdp, mo"),
        ("head/kernel -> fsdb", "'fsdb' is not an axis"),
        ("head/kernel -> fsdp, fsdp", "names an axis of the mesh twice"),
        ("head/(kernel -> fsdp", r"'head/\(kernel' is not a regular expression"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(rule, message):
    with pytest.raises(UserError, match=f"sharding.rules: .*{message}"):
        place(shapes_of("S/16"), mesh_of(1, 2, 2), rule)


def test_a_rule_for_some_of_the_stacked_layers_is_refused():
    shapes = stacking.stack(shapes_of("Ti/16"))
    rule = "encoderblock_[12]/.*Dense_0/kernel -> fsdp"
    with pytest.raises(UserError, match=r"only 2 of the 3 layers .* model.scan=False"):
        place(shapes, mesh_of(1, 2), rule)


@pytest.mark.parametrize(
    ("variant", "mesh", "message"),
    [
        ("R50x1", mesh_of(1, 1, 2), "mesh.model=2 splits attention heads and MLPs, wh"),
        ("Ti/16", mesh_of(1, 7), "mesh.fsdp=7 divides no axis of .* set mesh.fsdp to"),
    ],
)
def test_a_mesh_that_does_not_fit_the_network_is_refused(variant, mesh, message):
    with pytest.raises(UserError, match=message):
        place(fast_shapes(variant), mesh)


def test_a_mesh_that_splits_nothing_is_refused():
    shapes = shapes_of("Ti/16", width=12, num_heads=3, mlp_dim=20, num_classes=5)
    with pytest.raises(UserError, match="mesh.fsdp=2 splits param.*min_size=32768 el"):
        place(shapes, mesh_of(4, 2))


@pytest.mark.parametrize("scan", [False, True])
def test_what_belongs_to_a_parameter_lies_as_it_does(scan):
    shapes = shapes_of("Ti/16", scan=scan)
    params = place(shapes, mesh_of(2, 4))
    tx = optax.chain(optax.scale_by_adam(), optax.trace(0.9))
    moments = jax.eval_shape(tx.init, shapes)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = {"key": key, "step": jnp.zeros([]), "opt": moments}
    placed = sharding.like(state, (shapes, params))
    adam, momentum = placed["opt"]
    assert adam.mu == adam.nu == momentum.trace == params
    for whole in (placed["key"], placed["step"], adam.count):
        assert whole.spec == jax.sharding.PartitionSpec()

    # Several past gradients lie as the parameter does; its means over rows do not.
    of_each = jax.tree.map(
        lambda s: (np.zeros((5, *s.shape)), np.zeros(s.shape[:-1])), shapes
    )
    past, means = jax.tree.transpose(
        jax.tree.structure(shapes),
        jax.tree.structure((0, 0)),
        sharding.like(of_each, (shapes, params)),
    )
    for one, kept, mean in zip(
        *map(jax.tree.leaves, (params, past, means)), strict=True
    ):
        assert kept.spec == jax.sharding.PartitionSpec(None, *one.spec)
        assert mean.spec == jax.sharding.PartitionSpec()
