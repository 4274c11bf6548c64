"""Features after each layer of every kind of network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import draw_params, slow_but

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import intermediates, stacking

SMALL = {"width": 12, "depth": 3, "num_heads": 2, "mlp_dim": 16}
SWIN = {"patch_size": 2, "width": 8, "stage_depths": (1, 2), "num_heads": (2, 4)}
SIZE = (16, 24)
# Variant, its keys, and the shapes of the layers.
NETWORKS = {
    "registers": ("Ti/8", SMALL | {"num_register_tokens": 2}, [(2, 3, 12)] * 3),
    "both": ("Ti/8", SMALL | {"pool": "token_gap"}, [(2, 3, 12)] * 3),
    "distilled": ("Ti/8", SMALL | {"distillation": True}, [(2, 3, 12)] * 3),
    "fc_norm": ("Ti/8", SMALL | {"pool": "gap", "fc_norm": True}, [(2, 3, 12)] * 3),
    "positions": ("Ti/8", SMALL | {"posemb_placement": "every"}, [(2, 3, 12)] * 3),
    "Swin": ("Swin-T", SWIN | {"window_size": 4}, [(8, 12, 8), (4, 6, 16)]),
    "ResNet": (
        "R50x1",
        {"stage_depths": (1, 1), "stem_width": 32},
        [(8, 12, 32), (4, 6, 128), (2, 3, 256)],
    ),
    "Mixer": (
        "Mixer-S/8",
        {"width": 12, "depth": 2, "tokens_mlp_dim": 4, "channels_mlp_dim": 8},
        [(2, 3, 12)] * 2,
    ),
    "Axial": ("Axial-B/8", SMALL | {"depth": 2}, [(2, 3, 12)] * 2),
}


def made(name, **options):
    variant, keys, shapes = NETWORKS[name]
    model = models.create(variant, num_classes=0, image_size=SIZE, **keys | options)
    images = jax.random.normal(jax.random.key(1), (2, *model.image_shape))
    return model, draw_params(model), images, shapes


@pytest.mark.parametrize("name", slow_but(("fc_norm", "Axial"), NETWORKS))
def test_layers_have_their_shapes_and_the_last_is_what_the_classifier_pools(name):
    model, params, images, shapes = made(name)
    numbers = range(model.num_layers)

    def run(params, images):
        every = [
            model.layer_features(params, images, numbers, norm=norm, tokens="pooled")
            for norm in (True, False)
        ]
        patches = model.layer_features(params, images, numbers)
        flat = model.layer_features(params, images, [-1, 0], reshape=False)
        last = model.patch_features(params, images)
        return *every, patches, flat, last, model.apply(params, images)["pre_logits"]

    normed, raw, patches, flat, last, expected = jax.jit(run)(params, images)
    assert [x.shape[1:] for x in patches] == shapes
    assert all(x.dtype == jnp.float32 for x in patches)
    np.testing.assert_allclose(normed[-1], expected, atol=1e-5)
    np.testing.assert_allclose(patches[-1], last, atol=1e-5)
    np.testing.assert_allclose(flat[0], last.reshape(flat[0].shape), atol=1e-5)
    np.testing.assert_array_equal(flat[1], patches[0].reshape(flat[1].shape))
    assert abs(normed[-1] - raw[-1]).max() > 0.1
    norm_of_last_alone = name in ("Swin", "ResNet")
    if name != "fc_norm":
        differs = abs(normed[0] - raw[0]).max() > 0.1
        assert differs != norm_of_last_alone


def test_blocks_give_the_tokens_that_attention_figures_see():
    model, params, images, _ = made("registers")
    run = jax.jit(
        lambda *args: model.layer_features(*args, range(3), norm=False, tokens="all")
    )
    found = run(params, images)
    for tokens, layer in zip(
        found, intermediates.layers(model, params, images), strict=True
    ):
        np.testing.assert_allclose(tokens, layer.tokens, atol=1e-5)
    prefix = jax.jit(lambda *args: model.layer_features(*args, [1], tokens="prefix"))
    assert prefix(params, images)[0].shape == (2, 3, 12)


@pytest.mark.parametrize(
    "layers", [pytest.param((-1,), marks=pytest.mark.slow), (0, -1)]
)
def test_a_scan_has_the_same_features(layers):
    model, params, images, _ = made("positions", scan=False)
    scanned = model.replace(scan=True)
    stacked = stacking.stack(params)
    found = jax.jit(lambda *args: scanned.layer_features(*args, layers))(
        stacked, images
    )
    expected = jax.jit(lambda *args: model.layer_features(*args, layers))(
        params, images
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_layers_behind_the_last_chosen_one_are_not_computed():
    model, params, images, _ = made("registers")

    def operations(layer):
        run = jax.jit(lambda *args: model.layer_features(*args, [layer]))
        return run.lower(params, images).compile().cost_analysis()["flops"]

    first, second = operations(0), operations(1)
    assert first < second < 0.8 * operations(2)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("registers", {"layers": [3]}, "layers=3: .* 3 layers: choose from 0 to 2"),
        ("registers", {"layers": [0, -4]}, "layers=-4"),
        ("Swin", {"layers": [2]}, "layers=2: .* 2 layers"),
        ("Mixer", {"tokens": "prefix"}, "tokens='prefix': .*'Mixer-S/8'"),
    ],
)
def test_what_is_not_there_is_named(name, arguments, message):
    model, params, images, _ = made(name)
    with pytest.raises(UserError, match=message):
        model.layer_features(params, images, **arguments)
