"""Images of any size as sequences of patches."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import draw_params, slow_but

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models.patches import PatchSequences, draw
from vit_jax.models.resizing import RESIZE_METHODS

SIDE = 4
TINY = {"width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 32}


def create(grid=(3, 3), variant=f"Ti/{SIDE}", **options):
    size = tuple(SIDE * n for n in grid)
    options = TINY | options
    return models.create(variant, num_classes=3, image_size=size, **options)


def draw_images(*grids):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(y * SIDE, x * SIDE, 3)).astype("f") for y, x in grids]


def strip(image):
    y, x = (n // SIDE for n in image.shape[:2])
    cells = image.reshape(y, SIDE, x, SIDE, 3).swapaxes(1, 2)
    return cells.reshape(y * x * SIDE, SIDE, 3)


def sequences(rows, length, fill=7.0):
    """Returns sequences, each of some images, that are padded to so many patches."""
    most = max(map(len, rows))
    pixels = np.full((len(rows), length * SIDE, SIDE, 3), fill, np.float32)
    grids = np.zeros((len(rows), most, 2), np.int32)
    for i, images in enumerate(rows):
        whole = np.concatenate([strip(image) for image in images])
        pixels[i, : len(whole)] = whole
        for k, image in enumerate(images):
            grids[i, k] = np.array(image.shape[:2]) // SIDE
    return PatchSequences(jnp.asarray(pixels), jnp.asarray(grids))


# One block, but where blocks differ.
TWO = {"depth": 2}
KINDS = [
    {},
    {"pool": "gap", "posemb": "learned2d"},
    {"pool": "gap", "posemb": "factorized", "posemb_resize": "bilinear_plain"},
    {"pool": "map", "posemb": "sincos2d", "scan": True} | TWO,
    {"pool": "gap", "posemb": "sincos2d_mae", "num_register_tokens": 2},
    {"pool": "gap", "posemb": "none", "rope": "axial", "rope_reference": 5},
    {"pool": "token_gap", "posemb": "none", "rope": "centered", "scan": True} | TWO,
    {"pool": "gap", "rope": "mixed"} | TWO,
    {"distillation": True, "num_register_tokens": 1, "fc_norm": True},
]


@pytest.fixture(scope="module", params=slow_but([KINDS[0], KINDS[4]], KINDS))
def network(request):
    """A network, parameters, and its program, that both tests of a kind take."""
    model = create(**{"depth": 1} | request.param)
    return model, jax.device_get(draw_params(model)), jax.jit(model.apply)


def test_square_images_give_the_same_as_ordinary_ones(network):
    _, params, apply = network
    images = draw_images((3, 3), (3, 3), (3, 3))
    expected = apply(params, np.stack(images))
    for length in (9, 12):
        found = apply(params, sequences([[image] for image in images], length))
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, atol=5e-6)


def test_other_images_give_the_same_as_a_network_of_their_size(network):
    model, params, apply = network
    images = draw_images((2, 5), (4, 1), (1, 1))
    found = apply(params, sequences([[image] for image in images], 12))["logits"]
    for row, image in zip(found, images, strict=True):
        own = model.at_size(image.shape[:2])
        resized = own.resize(params, model)
        (expected,) = jax.jit(own.apply)(resized, image[None])["logits"]
        np.testing.assert_allclose(row, expected, atol=5e-6)


@functools.cache
def program_at(*size):
    """Returns the program of a network of one size, where no positions are resized."""
    return jax.jit(create((4, 3), pool="gap", depth=1).at_size(size).apply)


@pytest.mark.parametrize(
    "method", slow_but(("bilinear", "bicubic_plain_square"), RESIZE_METHODS)
)
def test_positions_are_resized_by_the_method_of_the_network(method):
    model = create((4, 3), pool="gap", depth=1, posemb_resize=method)
    params = jax.device_get(draw_params(model))
    images = draw_images((2, 6), (4, 3), (9, 1), (8, 8))
    given = sequences([[image] for image in images], 70)
    found = jax.jit(model.apply)(params, given)["logits"]
    for row, image in zip(found, images, strict=True):
        size = image.shape[:2]
        resized = model.at_size(size).resize(params, model)
        (expected,) = program_at(*size)(resized, image[None])["logits"]
        np.testing.assert_allclose(row, expected, atol=5e-6)


@pytest.mark.parametrize(
    ("rope", "pool"),
    slow_but(
        [("none", "map"), ("mixed", "gap")],
        itertools.product(("none", "mixed"), ("gap", "map")),
    ),
)
def test_packed_images_give_the_same_as_separate_ones(pool, rope):
    model = create(pool=pool, rope=rope)
    params = draw_params(model)
    first, second, third = draw_images((2, 2), (1, 3), (3, 2))
    given = sequences([[first, second], [third]], 8)
    packed = jax.jit(model.apply)(params, given)["logits"]
    assert packed.shape == (4, 3)
    alone = [[image] for image in (first, second, third)]
    alone = jax.jit(model.apply)(params, sequences(alone, 8))["logits"]
    np.testing.assert_allclose(packed[:3], alone, atol=5e-6)
    assert np.isfinite(packed[3]).all()  # Where there is no image.


@pytest.mark.parametrize("pool", slow_but(["gap"], ["token", "gap", "map"]))
def test_padding_changes_neither_outputs_nor_gradients(pool):
    model = create(pool=pool)
    params = draw_params(model)
    images = [[image] for image in draw_images((2, 2), (1, 3))]

    @jax.jit
    @jax.grad
    def slope(params, given):
        return (model.apply(params, given)["logits"] ** 2).sum()

    first = slope(params, sequences(images, 5, 0.0))
    for fill, length in ((100.0, 5), (-3.0, 9)):
        other = slope(params, sequences(images, length, fill))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), first, other
        )


@pytest.mark.parametrize(("length", "kernel"), [(64, False), (1024, True)])
def test_attention_is_chosen_by_the_length_of_sequences(length, kernel):
    sizes = {"width": 128, "depth": 1, "num_heads": 1}
    model = create((8, 8), pool="gap", dtype="bfloat16", platform="tpu", **sizes)
    given = PatchSequences(
        jax.ShapeDtypeStruct((2, length * SIDE, SIDE, 3), jnp.bfloat16),
        jax.ShapeDtypeStruct((2, 4, 2), jnp.int32),
    )
    apply = jax.jit(model.apply).trace(model.shapes, given)
    text = apply.lower(lowering_platforms=("tpu",)).as_text()
    assert ("splash_mha_fwd" in text) == kernel


def test_places_are_rows_and_columns_of_each_image():
    grids = np.array([[[2, 3], [1, 2], [0, 0]]])
    pixels = np.zeros((1, 10 * SIDE, SIDE, 3))

    @jax.jit
    def parts():
        places = PatchSequences(pixels, jnp.asarray(grids)).places()
        return places.image, places.place, places.valid

    (image,), (place,), (valid,) = jax.device_get(parts())
    whole = [(0, y, x) for y, x in itertools.product(range(2), range(3))]
    whole += [(1, 0, 0), (1, 0, 1)]
    found = np.concatenate([image[:, None], place], axis=1)
    np.testing.assert_array_equal(found[:8], whole)
    assert valid.tolist() == [True] * 8 + [False] * 2


def test_patch_dropout_keeps_a_part_of_each_image():
    grids = np.array([[[4, 4], [0, 0]], [[1, 6], [1, 1]], [[1, 1], [3, 5]]])
    pixels = np.zeros((3, 16 * SIDE, SIDE, 3))

    @jax.jit
    def drawn(key):
        places = PatchSequences(pixels, jnp.asarray(grids)).places()
        visible, kept = draw(places, 0.5, key)
        return visible, kept, places.take(visible, kept).image

    seen = np.zeros((3, 16))
    for seed in range(40):
        visible, kept, left = jax.device_get(drawn(jax.random.key(seed)))
        assert visible.shape == (3, 9)
        counts = [np.bincount(row, minlength=3)[:2].tolist() for row in left]
        assert counts == [[8, 0], [3, 1], [1, 8]]
        for row in range(3):
            seen[row, visible[row, : kept[row]]] += 1
    assert (seen[0] > 5).all() and (seen[1, :6] > 5).all()
    assert seen[1, 6] == seen[2, 0] == 40 and not seen[1, 7:].any()


@pytest.mark.parametrize("pool", ["gap", "map"])
def test_patch_dropout_is_of_training_and_ignores_padding(pool):
    model = create(pool=pool, depth=1, patch_dropout=0.5, posemb="none")
    params = draw_params(model)
    flat = np.full((2 * SIDE, 3 * SIDE, 3), 0.5, np.float32)  # All patches are equal.
    given = sequences([[flat]], 12)
    whole = jax.jit(model.apply)(params, given)["logits"]
    train = jax.jit(functools.partial(model.apply, train=True))
    part = train(params, given, key=jax.random.key(0))["logits"]
    np.testing.assert_allclose(part, whole, atol=1e-5)


def test_groups_of_stochastic_depth_take_their_own_masks():
    options = {"drop_path_rate": 0.5, "drop_path_group": 2, "pool": "gap", "depth": 1}
    model = create(drop_path_schedule="constant", **options)
    params = draw_params(model)
    images = [[image] for image in draw_images((1, 2), (3, 3), (2, 1), (1, 1))]
    train = jax.jit(functools.partial(model.apply, train=True))
    first, other = (
        train(params, sequences(images, 9, fill), key=jax.random.key(0))["logits"]
        for fill in (0.0, 50.0)
    )
    np.testing.assert_allclose(first, other, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"posemb": "relative", "posemb_placement": "every"}, "model.posemb"),
        ({"relative_bias": "every"}, "model.relative_bias"),
        ({"variant": "C+Ti/4"}, "model.variant"),
    ],
)
def test_networks_that_cannot_read_sequences_are_refused(options, key):
    model = create(**options)
    with pytest.raises(UserError, match=key):
        model.apply(draw_params(model), sequences([draw_images((1, 2))], 4))


def test_one_class_token_cannot_be_of_several_images():
    model = create()
    pair = sequences([draw_images((1, 2), (1, 1))], 4)
    with pytest.raises(UserError, match=r"class token.*model\.pool"):
        model.apply(draw_params(model), pair)
