"""MLP-Mixers against google-research/vision_transformer, and as any other network."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from helpers import draw_params, slow_but, tiny_config
from jax.sharding import PartitionSpec
from trees import specs

from vit_jax import models, weights
from vit_jax.config import fields
from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.models.mixer import SIZES
from vit_jax.training import config as configuration
from vit_jax.training import loop
from vit_jax.weights import export

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = {"width": 16, "depth": 2, "tokens_mlp_dim": 8, "channels_mlp_dim": 24}


@pytest.fixture(scope="module")
def original():
    """The model, its parameters and what the original code gave."""
    found = weights.open_pretrained(GOLDEN / "mixer.npz")
    with np.load(GOLDEN / "mixer.io.npz") as io:
        arrays = {name: jnp.asarray(value) for name, value in io.items()}
    return models.create(**found.options), found.params, arrays


def test_logits_and_gradients_are_the_originals(original):
    model, params, io = original

    def loss(params):
        logits = model.apply(params, io["image"])["logits"]
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(
            logits, io["label"]
        )
        return losses.mean(), logits

    (value, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(logits, io["logits"], atol=1e-5)
    np.testing.assert_allclose(value, io["loss"], rtol=1e-6)
    found = flatten_dict(grads, sep="/")
    compared = 0
    for name, wanted in io.items():
        if name.startswith("grad/"):
            ours = name.removeprefix("grad/").replace("stem/", "embedding/")
            np.testing.assert_allclose(found[ours], wanted, atol=1e-6)
            compared += 1
    assert compared == 5


def test_timms_activation_is_an_option(original):
    model, params, io = original
    exact = models.create(**model.options | {"activation": "gelu"})
    found = jax.jit(exact.apply)(params, io["image"])["logits"]
    np.testing.assert_allclose(found, io["timm_logits_erf"], atol=1e-5)
    assert np.abs(found - io["logits"]).max() > 1e-4


@pytest.mark.parametrize(
    "name",
    slow_but(["Mixer-B/16"], [n for n in models.names() if n.startswith("Mixer")]),
)
def test_published_sizes_have_their_parameters(name):
    letter, patch = name.removeprefix("Mixer-").split("/")
    size, patch = SIZES[letter], int(patch)
    model = models.create(name, num_classes=1_000)
    N, D = (224 // patch) ** 2, size.width
    mlps = 2 * N * size.tokens_mlp_dim + N + size.tokens_mlp_dim
    mlps += 2 * D * size.channels_mlp_dim + D + size.channels_mlp_dim
    ends = 3 * patch**2 * D + D + 2 * D + 1_000 * (D + 1)
    assert cost.parameters(model) == size.depth * (mlps + 4 * D) + ends
    # Products of the embedding, the MLPs and the classifier.
    macs = 3 * patch**2 * D * N + 1_000 * D
    macs += size.depth * 2 * N * D * (size.tokens_mlp_dim + size.channels_mlp_dim)
    assert cost.macs_per_image(model) == pytest.approx(macs, rel=0.01)


def test_stochastic_depth_skips_the_branches_of_whole_images():
    model = models.create(
        "Mixer-S/8", num_classes=0, image_size=(16, 16), drop_path_rate=0.9, **TINY
    )
    params, images = draw_params(model), jnp.ones((64, 16, 16, 3))
    apply = jax.jit(functools.partial(model.apply, train=True))
    found = apply(params, images, key=jax.random.key(1))
    # The first block is never skipped; of the last, each of two branches may be.
    assert len(np.unique(np.round(found["pre_logits"], 4), axis=0)) == 4
    still = jax.jit(model.apply)(params, images)["pre_logits"]
    assert len(np.unique(np.round(still, 4), axis=0)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": "Mixer-X/16"}, "'Mixer-X/16' is not Mixer-SIZE/PATCH"),
        ({"variant": "Mixer-B"}, "'Mixer-B' is not Mixer-SIZE/PATCH"),
        ({"image_size": (20, 16)}, "height 20 is not a multiple of the patch size 8"),
        ({"activation": "relu"}, "model.activation='relu' is not one of gelu_tanh, ge"),
        ({"depth": 5_000}, "model.depth=5000 must be below 1000"),
    ],
)
def test_what_is_no_mixer_is_refused(changes, message):
    stated = {"variant": "Mixer-S/8", "num_classes": 3, "image_size": (16, 16)}
    with pytest.raises(UserError, match=message):
        models.create(**stated | changes)


@pytest.mark.slow
def test_a_run_is_a_model_that_is_written(tmp_path):
    config = fields.to_dict(tiny_config(total_steps=1, data={"image_size": (16, 16)}))
    config |= {"model": {"variant": "Mixer-S/4", **TINY, "depth": 1}}
    report = loop.train(configuration.complete(config), tmp_path / "run")
    assert 0 <= report["final"]["val"]["params"]["top1"] <= 1
    found = weights.open_pretrained(tmp_path / "run")
    out = tmp_path / "mixer.npz"
    _, notes = export.export(found, "google", out)
    assert any("preprocessing" in note for note in notes)
    again = weights.open_pretrained(out)
    jax.tree.map(np.testing.assert_array_equal, again.params, found.params)
    images = jax.random.normal(jax.random.key(0), (2, 16, 16, 3))
    one, other = (
        jax.jit(models.create(**f.options).apply)(f.params, images)
        for f in (found, again)
    )
    np.testing.assert_array_equal(one["logits"], other["logits"])


def test_hidden_units_of_both_mlps_are_split_over_the_axis_model():
    model = models.create("Mixer-S/4", num_classes=4, image_size=(16, 16), **TINY)
    found = specs(model)
    for mixing in ("token", "channel"):
        mlp = f"MixerBlock_1/{mixing}_mixing"
        assert found[f"{mlp}/Dense_0/kernel"] == PartitionSpec(None, "model")
        assert found[f"{mlp}/Dense_0/bias"] == PartitionSpec("model")
        assert found[f"{mlp}/Dense_1/kernel"] == PartitionSpec("model", None)


def test_an_image_of_parts_has_the_mean_of_their_features():
    old, factor = (8, 12), 3
    model = models.create("Mixer-S/4", num_classes=5, image_size=old, **TINY)
    params = jax.device_get(draw_params(model))
    size = tuple(factor * side for side in old)
    hidden = TINY["tokens_mlp_dim"] * factor**2
    keys = TINY | {"tokens_mlp_dim": hidden}
    large = models.create("Mixer-S/4", num_classes=5, image_size=size, **keys)
    resized = large.resize(params, model)
    images = jax.random.normal(jax.random.key(2), (2, *size, 3))
    (Y, X), K = old, factor
    parts = images.reshape(2, K, Y, K, X, 3).swapaxes(2, 3).reshape(-1, Y, X, 3)
    wanted = jax.jit(model.apply)(params, parts)["logits"]
    wanted = wanted.reshape(2, K * K, 5).mean(1)
    found = jax.jit(large.apply)(resized, images)["logits"]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_parameters_of_another_size_of_image_are_refused():
    model = models.create("Mixer-S/4", num_classes=0, image_size=(16, 16), **TINY)
    params = draw_params(model)
    assert model.at_size((16, 16)).resize(params, model) is params
    hidden = 4 * TINY["tokens_mlp_dim"]
    for size, message in (
        ((8, 8), "4x4 patches .* 2x2: change data.image_size"),
        ((32, 16), "not to 8x4"),
        ((32, 32), f"4 times as many: .* to {hidden}"),
    ):
        with pytest.raises(UserError, match=message):
            model.at_size(size).resize(params, model)
