import re

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from trees import SIZE, assert_same, counted_by_kind, encoder, random_flat, save

import vit_jax
from vit_jax import models
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.models import variants
from vit_jax.weights import open_pretrained
from vit_jax.weights.formats import google, linen
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.open import load


@pytest.mark.parametrize("rename", [lambda name: name, counted_by_kind])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pool": "gap"},
        {"representation_layer": True},
        {"num_classes": 0},
        {"channels": 1},
    ],
    ids=str,
)
def test_both_ways_of_counting_give_our_tree_and_options(tmp_path, rename, options):
    model = encoder(**options)
    flat = random_flat(model)
    found = open_pretrained(save(tmp_path / "a.npz", flat, rename))
    assert found.format == "google"
    assert_same(found.params, flat)
    assert models.create(**found.options).options == model.options
    assert found.preprocess == Preprocess(
        (12, 12), interpolation="bilinear_plain", squash=True
    )
    assert found.notes == ()


@pytest.mark.parametrize(
    ("variant", "options", "side"),
    [
        ("R50+Ti/16", {"stage_depths": (1, 1, 2), "stem_width": 32, **SIZE}, 48),
        pytest.param("R26+Ti/32", SIZE, 96, marks=pytest.mark.slow),
        ("R+Ti/16", SIZE, 64),  # Tokens of 32 pixels, whatever its name says.
    ],
)
def test_hybrids_are_named_by_their_stem(tmp_path, variant, options, side):
    model = models.create(variant, num_classes=5, image_size=(side, side), **options)
    shapes = {
        # As the published files have GroupNorm's.
        k: v.reshape(1, 1, 1, -1) if re.search(r"(gn\d|gn_\w+)/", k) else v
        for k, v in zeros(model).items()
    }
    found = open_pretrained(save(tmp_path / "a.npz", shapes))
    assert models.create(**found.options).options == model.options
    assert_same(found.params, zeros(model))


def zeros(model):
    return {k: np.zeros_like(v) for k, v in random_flat(model).items()}


@pytest.mark.parametrize("size", variants.SIZES)
def test_published_sizes_are_named_without_differing_numbers(size):
    known = variants.SIZES[size]
    D, F, H, N = known.width, known.mlp_dim, known.num_heads, 16 * 16 + 1
    block = "Transformer/encoderblock_0"
    query = f"{block}/MultiHeadDotProductAttention_1/query/kernel"
    flat = {
        "embedding/kernel": (14, 14, 3, D),
        f"{block}/MlpBlock_3/Dense_0/kernel": (D, F),
        query: (D, H, D // H),
        "Transformer/posembed_input/pos_embedding": (1, N, D),
        "cls": (1, 1, D),
    } | {f"Transformer/encoderblock_{i}/x": (1,) for i in range(known.depth)}
    # One number in memory, however large the array is.
    flat = {name: np.broadcast_to(np.float32(0), shape) for name, shape in flat.items()}
    assert linen.transformer_options(flat) == {
        "variant": f"{size}/14",
        "image_size": (224, 224),
        "channels": 3,
    }


def test_parameters_of_an_optimiser_are_found_and_its_state_is_left(tmp_path):
    flat = random_flat(encoder())
    state = {"opt/state/step": np.array(3), "opt/state/cls/mu": np.ones(12)}
    whole = {f"opt/target/{name}": value for name, value in flat.items()} | state
    found = open_pretrained(save(tmp_path / "a.npz", whole))
    assert_same(found.params, flat)
    assert found.notes == ("ignored 2 arrays outside the network: opt/state",)


def test_names_counted_in_both_ways_are_refused(tmp_path):
    flat = random_flat(encoder())
    name = "Transformer/encoderblock_0/LayerNorm_2/scale"
    flat[counted_by_kind(name)] = flat[name]
    with pytest.raises(
        UserError, match=r"LayerNorm_\d/scale is in the checkpoint twice"
    ):
        open_pretrained(save(tmp_path / "a.npz", flat))


def test_grid_that_cannot_be_guessed_is_refused(tmp_path):
    flat = random_flat(encoder(image_size=(12, 16)))
    with pytest.raises(UserError, match="12 patches are not a square grid"):
        open_pretrained(save(tmp_path / "a.npz", flat))


@pytest.mark.parametrize("pool", [pytest.param("token", marks=pytest.mark.slow), "gap"])
def test_a_grid_that_is_no_square_is_told_by_the_size_of_images(tmp_path, pool):
    model = encoder(image_size=(12, 16), pool=pool)
    flat = random_flat(model)
    path = save(tmp_path / "a.npz", flat)
    found = open_pretrained(path, image_size=(12, 16))
    assert found.options["image_size"] == (12, 16)
    assert_same(found.params, flat)
    with pytest.raises(UserError, match="give the height and width"):
        open_pretrained(path, image_size=(16, 16))
    loaded = vit_jax.load_model(path, image_size=(12, 16), tell=lambda _: None)
    image = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    images = loaded.preprocess(image)
    wanted = model.apply(unflatten_dict(flat, sep="/"), images)["pre_logits"]
    np.testing.assert_allclose(loaded.features(image), wanted, atol=1e-5)
    # A run at that size starts from it without resizing.
    rows = load(path, model, head="keep").rows
    assert not any("resized" in row.action for row in rows)


def test_a_mixer_is_not_taken_for_a_transformer(tmp_path):
    flat = {"stem/kernel": np.ones(3), "MixerBlock_0/LayerNorm_0/bias": np.ones(3)}
    message = "in none of the known formats .*google.* such as MixerBlock_0/LayerNorm_0"
    with pytest.raises(UserError, match=message):
        open_pretrained(save(tmp_path / "a.npz", flat))


def test_shapes_of_another_network_are_refused():
    flat = random_flat(encoder())
    flat["embedding/kernel"] = flat["embedding/kernel"].reshape(-1, SIZE["width"])
    assert google.recognises(Tensors(flat, {}, {}, "x"))
    with pytest.raises(UserError, match=r"shape \(48, 12\) does not fit a Vision Tr"):
        linen.transformer_options(flat)
