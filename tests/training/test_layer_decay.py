import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import slow_but, tiny_config

from vit_jax import models
from vit_jax.config.lengths import RunLength
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.models.varied import VariedConfig
from vit_jax.training import optim

DECAY, DEPTH = 0.6, 2


def create(variant="Ti/16", image_size=(64, 96), **options):
    small = {"width": 24, "depth": DEPTH, "num_heads": 3, "mlp_dim": 20}
    small = small if "/" in variant and "Swin" not in variant else {}
    size = {"num_classes": 5, "image_size": image_size}
    return models.create(variant, **size | small | options)


def shapes_of(model):
    return jax.eval_shape(model.init, jax.random.key(0))


def factors(model):
    """Returns the factor of each parameter by its path."""
    return flat(optim.layer_factors(shapes_of(model), DECAY, model.config))


def flat(tree):
    return flatten_dict(tree, sep="/")


def test_a_layer_moves_by_the_decay_of_the_one_above_it():
    found = factors(create(representation_layer=True))
    for path, factor in found.items():
        # As MAE counts them: 0 the input, block i is i + 1, the rest is on top.
        layer = DEPTH + 1
        if path.startswith(("cls", "embedding/", "Transformer/posembed")):
            layer = 0
        elif "encoderblock_" in path:
            layer = int(path.split("encoderblock_")[1].split("/")[0]) + 1
        assert factor == pytest.approx(DECAY ** (DEPTH + 1 - layer)), path
    assert len({round(f, 9) for f in found.values()}) == DEPTH + 2


def test_stacked_blocks_move_as_those_one_by_one():
    plain = factors(create())
    model = create(scan=True)
    stacked = shapes_of(model)
    each = optim.layer_factors(stacked, DECAY, model.config)
    whole = jax.tree.map(lambda x, f: np.broadcast_to(f, x.shape), stacked, each)
    assert any(stacking.is_stacked(path) for path in flat(whole))
    for path, values in flat(stacking.unstack(whole)).items():
        np.testing.assert_allclose(values, plain[path], rtol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    "variant", [pytest.param("R50+B/16", marks=pytest.mark.slow), "R+Ti/16"]
)
def test_the_resnet_of_a_hybrid_is_its_input(variant):
    found = factors(create(variant))
    stem = [f for path, f in found.items() if path.startswith(("block", "conv_root"))]
    assert stem
    assert set(stem) == {found["embedding/kernel"]} == {DECAY ** (DEPTH + 1)}


# Of what an option needs beside it, and numbers that add parameters.
WITH = {
    "class_token": {"pool": "gap"},
    "posemb_placement": {"posemb": "relative"},
    "posemb": {"posemb_placement": "every"},
    "num_register_tokens": {"num_register_tokens": 2},
    "layer_scale_init": {"layer_scale_init": 0.1},
}


def every_option():
    """Yields options of a Vision Transformer: of each key all values but the default."""
    for field in dataclasses.fields(VariedConfig):
        # No key, or without parameters and of some devices only.
        if "config" not in field.metadata or field.name == "attention_impl":
            continue
        values = field.metadata["config"].choices
        for value in (True,) if field.type is bool else values:
            if value == field.default:
                continue
            more = {} if value == "stem" else WITH.get(field.name, {})
            if field.name == "posemb" and value != "relative":
                more = {}
            yield {**more, field.name: value}
    yield from (WITH["num_register_tokens"], WITH["layer_scale_init"])
    yield {"posemb": "learned2d", "posemb_placement": "every", "pool": "map"}
    yield {"distillation": True, "fc_norm": True, "representation_layer": True}


BEFORE_ALL_BLOCKS = {"register_tokens", "Transformer/pre_norm/scale"}
BEFORE_ALL_BLOCKS.add("Transformer/relative_bias")


# These add no parameter and take none away; of the others one of each key is fast.
COMPUTED = {"dtype", "posemb_resize", "init", "remat_policy", "drop_path_schedule"}
COMPUTED.add("patch_resize")
FAST = {tuple(options): options for options in every_option()}
FAST = [options for keys, options in FAST.items() if not COMPUTED & {*keys}]


@pytest.mark.parametrize("options", slow_but(FAST, every_option()), ids=str)
def test_every_parameter_of_every_kind_of_model_has_a_layer(options):
    model = create(**options)
    given, found = shapes_of(model), factors(model)
    for name, factor in found.items():
        # Below the factors of all layers together, or of one.
        assert ((0 < np.asarray(factor)) & (np.asarray(factor) <= 1)).all(), name
        np.broadcast_to(factor, flat(given)[name].shape)
        if name.startswith(("head", "fc_norm", "pre_logits", "MAPHead_0")):
            assert factor == 1, name
        elif name in BEFORE_ALL_BLOCKS:
            assert factor == found["cls"] == DECAY ** (DEPTH + 1)
        elif number := re.search(r"(?:block|bias|embedding|posembed)_(\d+)(/|$)", name):
            layer = int(number[1])
            layer = -1 if name.startswith("Transformer/posembed_0") else layer
            assert factor == pytest.approx(DECAY ** (DEPTH - layer)), name


@pytest.mark.parametrize("scan", [False, True])
def test_frequencies_of_all_blocks_move_as_their_blocks(scan):
    model = create(rope="mixed", scan=scan)
    given, found = shapes_of(model), factors(model)["Transformer/rope_frequencies"]
    np.testing.assert_allclose(found.ravel(), [DECAY**2, DECAY], rtol=1e-6)
    assert len(flat(given)["Transformer/rope_frequencies"].shape) == found.ndim


def test_blocks_of_all_stages_count_as_layers():
    sizes = {"patch_size": 4, "width": 8, "num_heads": (2, 2), "stage_depths": (2, 1)}
    swin = models.create("Swin-T", num_classes=5, image_size=(32, 32), **sizes)
    found = factors(swin)
    layers = {
        "embedding/kernel": 4,
        "embedding_norm/scale": 4,
        "stage_0/block_0/attn/bias_table": 3,
        "stage_0/block_1/mlp/Dense_0/kernel": 2,
        "stage_0/merge/kernel": 2,  # Of the stage before, as SimMIM has it.
        "stage_0/merge_norm/scale": 2,
        "stage_1/block_0/norm1/scale": 1,
        "norm/scale": 0,
        "head/kernel": 0,
    }
    for name, below in layers.items():
        assert found[name] == pytest.approx(DECAY**below), name
    assert len({round(factor, 6) for factor in found.values()}) == 5


# One of each family: others differ in numbers of blocks and widths. A ResNet is refused.
@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("Ti/14", {"depth": 2}),
        ("R26+S/32", {"depth": 2}),
        ("Axial-B/16", {"depth": 2}),
        ("Mixer-S/16", {"depth": 2}),
        ("Swin-T", {"stage_depths": (1, 2, 1, 1)}),
        ("SwinV2-T/w8", {"stage_depths": (1, 2, 1, 1)}),
    ],
)
def test_every_parameter_of_every_family_has_a_layer(variant, sizes):
    size = (256, 256) if variant == "SwinV2-T/w8" else (224, 224)
    model = models.create(variant, num_classes=5, image_size=size, **sizes)
    found = factors(model)
    for name, factor in found.items():
        assert ((0 < np.asarray(factor)) & (np.asarray(factor) <= 1)).all(), name
    if variant.startswith(("Mixer", "Axial")):
        assert found["embedding/kernel"] == pytest.approx(DECAY**3)
        assert found["head/kernel"] == 1
        last = [f for name, f in found.items() if re.search("[Bb]lock_1/", name)]
        assert last and set(last) == {DECAY}


def test_a_parameter_of_no_known_layer_is_an_error():
    params = {"Transformer": {"encoderblock_0": {"k": np.zeros(2)}}, "odd": np.ones(3)}
    with pytest.raises(ValueError, match="no layer of .* contains odd"):
        optim.layer_factors(params, DECAY, VariedConfig(depth=1))


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UserError, match=r"optim.layer_decay=0.6: model.variant"):
        factors(create("R50x1"))


@pytest.mark.parametrize("scan", [False, True])
def test_the_optimiser_scales_steps_and_weight_decay_but_not_the_clipping(scan):
    blocks = {f"encoderblock_{i}": {"k": jnp.full(5, 2.0)} for i in range(DEPTH)}
    params = {"embedding": {"k": jnp.full(5, 2.0)}, "Transformer": blocks}
    params = stacking.stack(params) if scan else params
    grads = jax.tree.map(jnp.ones_like, params)
    options = {"name": "sgd", "momentum": 0.0, "grad_clip_norm": 1.0}
    options |= {"weight_decay": 0.1, "weight_decay_mask": ("k$",)}
    run, network = RunLength(100, 7.0), VariedConfig(depth=DEPTH)

    def update(**more):
        config = tiny_config(optim=options | more).optim
        tx = optim.optimizer(config, params, lambda step: 0.5, run, network)
        return tx.update(grads, tx.init(params), params)[0]

    plain, scaled = update(), update(layer_decay=DECAY)
    by_layer = optim.layer_factors(params, DECAY, network)
    expected = jax.tree.map(lambda u, f: np.asarray(u) * f, plain, by_layer)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), scaled, expected
    )


def test_values_out_of_bounds_are_refused():
    for value, bound in ((1.5, "most 1"), (-0.1, "least 0")):
        message = f"optim.layer_decay={value} must be at {bound}"
        with pytest.raises(UserError, match=message):
            tiny_config(optim={"layer_decay": value})
