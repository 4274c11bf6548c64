"""Rotary embeddings and biases by offset: what they depend on, and every way to run them."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recorded_draws
from helpers import draw_params, slow_but

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import attention, intermediates, stacking
from vit_jax.models.patches import Places
from vit_jax.models.positions import mixed_rotary, relative_bias, rotary

TINY = {"width": 24, "depth": 2, "num_heads": 2, "mlp_dim": 32, "num_classes": 3}
KINDS = {
    "axial": {"rope": "axial", "posemb": "none", "rope_temperature": 1e4},
    "centered": {"rope": "centered", "posemb": "none", "num_register_tokens": 2},
    "mixed": {"rope": "mixed", "rope_temperature": 10.0},
    "biases": {"relative_bias": "every", "posemb": "none"},
    "shared biases": {"relative_bias": "shared"},
    "norms": {
        "pre_norm": True,
        "qk_norm": True,
        "attention_out_norm": True,
        "mlp_norm": True,
        "activation": "swiglu",
    },
    "post-norm": {"post_norm": True, "layer_scale_init": 0.1},
    "two final norms": {"cls_norm": True, "num_register_tokens": 2},
    "no final norm": {"final_norm": False, "activation": "quick_gelu"},
}


def build(size=(16, 24), **options):
    return models.create("Ti/8", image_size=size, **TINY | options)


@pytest.mark.parametrize("kind", ["axial", "centered"])
def test_products_of_turned_vectors_depend_on_the_offset(kind):
    angles = jnp.asarray(rotary.angles(kind, (3, 4), 8, 100.0))
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    q, k = (jnp.broadcast_to(x, (1, 1, 12, 8)) for x in (q, k))
    q, k = (attention.rotate(x, angles)[0, 0] for x in (q, k))
    products = np.asarray(q @ k.T)
    for offset in (1, 4, 5):  # To the right, down, and both.
        same = [(i, i + offset) for i in (0, 1, 4, 5) if i % 4 < 3]
        values = [products[i, j] for i, j in same]
        np.testing.assert_allclose(values, values[0], atol=1e-5)
    assert abs(products[0, 1] - products[0, 4]) > 1e-3


@pytest.mark.slow
def test_mixed_angles_are_rows_and_columns_by_frequencies_of_each_head_and_layer():
    rng = np.random.default_rng(0)
    # Down and across, heads, half the width.
    frequencies = jnp.asarray(rng.normal(size=(2, 3, 5)), jnp.float32)
    found = np.asarray(mixed_rotary.mixed_angles(frequencies, (2, 4)))
    assert found.shape == (3, 8, 5)
    for row in range(2):
        for column in range(4):
            expected = row * frequencies[0] + column * frequencies[1]
            place = found[:, 4 * row + column]
            np.testing.assert_allclose(place, expected, atol=1e-5)
    model = build(rope="mixed", num_register_tokens=1)
    params = draw_params(model)
    images = jax.random.normal(jax.random.key(1), (2, 16, 24, 3))
    logits = jax.jit(model.apply)(params, images)["logits"]
    own = params["Transformer"]["rope_frequencies"]
    assert own.shape[:3] == (2, 2, 2)
    for layer in range(2):  # Each layer has its own frequencies, down and across.
        for axis in range(2):
            other = own.at[layer, axis].mul(2.0)
            changed = {**params["Transformer"], "rope_frequencies": other}
            found = jax.jit(model.apply)(params | {"Transformer": changed}, images)
            assert np.abs(found["logits"] - logits).max() > 1e-4
    # Of images of any size: places in any order, others in each image.
    place = rng.integers(0, 5, (2, 6, 2))
    one_each = jnp.zeros((2, 6), jnp.int32)
    places = Places(one_each, jnp.asarray(place), jnp.full((2, 6, 2), 5), 1)
    at = np.asarray(mixed_rotary.mixed_angles(frequencies, (2, 4), places))
    down, across = place[:, None, :, :1], place[:, None, :, 1:]
    of_rows, of_columns = np.asarray(frequencies)[:, :, None]
    expected = down * of_rows + across * of_columns
    np.testing.assert_allclose(at, expected, rtol=1e-5, atol=1e-5)


def test_a_reference_stretches_the_grid():
    wide = rotary.angles("axial", (8, 8), 8, 1e4, 4)
    narrow = rotary.angles("axial", (4, 4), 8, 1e4, 4)
    np.testing.assert_allclose(wide[0, ::2][:4], narrow[0, :4], atol=1e-6)


def test_jittered_positions_are_those_moved_and_stretched():
    plain = rotary.angles("centered", (2, 4), 8, 100.0)
    draw = lambda seed, *how: np.asarray(
        rotary.jittered_angles(jax.random.key(seed), plain, 100.0, *how)
    )
    np.testing.assert_allclose(draw(0, 0.0, 1.0, 1.0), plain, rtol=1e-6)
    for seed in range(8):
        factor = draw(seed, 0.0, 1.0, 2.0) / plain
        assert 0.5 <= factor.min() and factor.max() <= 2
        np.testing.assert_allclose(factor, factor[0, 0, 0], rtol=1e-5)
        sides = draw(seed, 0.0, 1.5, 1.0) / plain
        rows, columns = sides[0, 0, :2], sides[0, 0, 2:]
        assert np.ptp(rows) < 1e-4 < abs(rows[0] - columns[0])
        moved = draw(seed, 0.2, 1.0, 1.0) - plain
        np.testing.assert_allclose(moved, moved[:, :1].repeat(8, 1), atol=1e-5)
        assert (abs(moved[0, 0, [0, 2]]) <= 0.2 * 2 * np.pi + 1e-6).all()


@pytest.mark.slow
def test_positions_are_jittered_in_training_alone():
    model = build(rope="centered", posemb="none", rope_rescale=2.0)
    params = draw_params(model)
    images = jax.random.normal(jax.random.key(0), (2, 16, 24, 3))
    still = build(rope="centered", posemb="none").apply(params, images)["logits"]
    found = [
        model.apply(params, images, train=True, key=jax.random.key(i))["logits"]
        for i in range(2)
    ]
    assert not np.allclose(found[0], found[1])
    assert not np.allclose(found[0], still)
    np.testing.assert_array_equal(model.apply(params, images)["logits"], still)


def test_each_block_and_kind_of_jitter_draws_by_itself(monkeypatch):
    jitter = {"rope_shift": 0.1, "rope_jitter": 1.5, "rope_rescale": 2.0}
    config = build(rope="centered", posemb="none", **jitter).config
    keys = jax.random.split(jax.random.key(0), config.depth)
    drawn = recorded_draws.record(monkeypatch)
    first, second = rotary.Rotary(config, (2, 4), 1).by_block(None, keys=keys)
    jax.effects_barrier()
    assert len(set(drawn)) == len(drawn) == 3 * config.depth
    assert not np.allclose(first["angles"], second["angles"])
    # Sides are rescaled together and jittered apart.
    plain = rotary.angles("centered", (2, 4), 8, 100.0)
    how = keys[0], plain, 100.0, 0.0
    together, apart = (
        rotary.jittered_angles(*how, *factors) / plain
        for factors in ((1.0, 2.0), (2.0, 1.0))
    )
    np.testing.assert_allclose(together, together[0, 0, 0], rtol=1e-5)
    rows, columns = apart[..., :2], apart[..., 2:]
    np.testing.assert_allclose(rows, rows[0, 0, 0], rtol=1e-5)
    np.testing.assert_allclose(columns, columns[0, 0, 0], rtol=1e-5)
    assert abs(rows[0, 0, 0] - columns[0, 0, 0]) > 0.01


def test_layers_and_heads_begin_with_directions_of_their_own():
    begun = []

    def param(name, init, shape):
        begun.append(init(jax.random.key(0), shape))
        return begun[0]

    module = types.SimpleNamespace(param=param)
    config = build(rope="mixed").config
    mixed_rotary.MixedRotary(config, (2, 3), 0).by_block(module)
    # Of the two directions of a head.
    (down, across), K = np.moveaxis(np.asarray(begun[0]), 1, 0), 24 // 2
    turns = np.arctan2(across, down)[..., [0, K // 4]].reshape(-1, 2)
    assert len(np.unique(turns[:, 0].round(4))) == config.depth * config.num_heads
    between = np.cos(turns[:, 0] - turns[:, 1])
    np.testing.assert_allclose(between, 0, atol=1e-5)


def test_biases_are_by_offset_and_prefix_tokens_have_their_own():
    table = jnp.arange(3 * 5 + 3, dtype=jnp.float32)[:, None]
    bias = np.asarray(relative_bias.bias_of_grid(table, (2, 3), 1))[0]
    assert bias[0, 0] == 17 and set(bias[0, 1:]) == {15} and set(bias[1:, 0]) == {16}
    patches = bias[1:, 1:]
    assert set(np.diag(patches)) == {7}  # No offset.
    assert patches[1, 0] == patches[5, 4] == 8  # From the right neighbour.
    assert patches[3, 0] == 12 and patches[0, 3] == 2


@pytest.mark.parametrize("kind", slow_but(["axial"], KINDS))
def test_a_scan_and_block_by_block_are_the_same_network(kind):
    model, scanned = (build(**KINDS[kind], scan=scan) for scan in (False, True))
    params = draw_params(model)
    images = jax.random.normal(jax.random.key(1), (2, *model.image_shape))
    expected = jax.jit(model.apply)(params, images)["logits"]
    assert np.abs(expected).max() > 0.01
    found = jax.jit(scanned.apply)(stacking.stack(params), images)["logits"]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    layers = list(intermediates.layers(model, params, images))
    found = intermediates.classify_tokens(model, params, layers[-1].tokens)["logits"]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(layers[0].attention.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("kind", ["axial", "mixed"])
def test_visible_patches_keep_their_places(kind):
    model = build(**KINDS[kind])
    params = draw_params(model)
    images = jax.random.normal(jax.random.key(1), (2, *model.image_shape))
    every = jnp.tile(jnp.arange(6), (2, 1))
    encode = jax.jit(model.encode)
    tokens = encode(params, images)
    shuffled = jax.random.permutation(jax.random.key(2), every, 1, independent=True)
    found = encode(params, images, visible=shuffled)
    back = jnp.argsort(shuffled, 1)[..., None]
    patches = jnp.take_along_axis(found[:, 1:], back, axis=1)
    np.testing.assert_allclose(patches, tokens[:, 1:], atol=1e-5)


def test_biases_and_frequencies_fit_another_size_of_image():
    for kind in ("biases", "mixed"):
        small = build((16, 24), **KINDS[kind])
        large = small.at_size((32, 24))
        params = large.resize(draw_params(small), small)
        shapes = jax.eval_shape(large.init, jax.random.key(0))
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    table = draw_params(build((16, 24), **KINDS["biases"]))["Transformer"][
        "relative_bias_0"
    ]
    resized = relative_bias.resize_bias(np.asarray(table), (2, 3), (4, 3))
    old, new = table[:-3].reshape(3, 5, 2), resized[:-3].reshape(7, 5, 2)
    # Near offsets stay; the outermost are stretched.
    np.testing.assert_allclose(new[3, 1:-1], old[1, 1:-1], atol=1e-6)
    np.testing.assert_array_equal(resized[-3:], table[-3:])


def test_impossible_networks_are_refused():
    with pytest.raises(UserError, match="heads have 6 features, not a multiple of 4"):
        build(num_heads=4, rope="axial")
    with pytest.raises(UserError, match="rope='spiral' is not one of none, axial"):
        build(rope="spiral")
    with pytest.raises(UserError, match="fc_norm=True .* model.final_norm=False"):
        build(pool="gap", fc_norm=True, final_norm=False)
    with pytest.raises(UserError, match="model.cls_norm=True .* model.pool='token'"):
        build(pool="gap", cls_norm=True)
    with pytest.raises(UserError, match="does not support model.relative_bias='every'"):
        build(relative_bias="every", attention_impl="splash", platform="tpu")
