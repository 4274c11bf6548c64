"""SimMIM: features, reconstruction, loss and gradients of microsoft/SimMIM."""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from vit_jax import models, weights
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.tasks import masking
from vit_jax.tasks.mae import MaeConfig
from vit_jax.tasks.simmim import SimMimConfig
from vit_jax.weights.formats import timm
from vit_jax.weights.formats.files import Tensors

# Of microsoft/SimMIM d3e29bc; tests/golden/README.md.
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
IO = np.load(GOLDEN / "simmim.io.npz")
CASES = ("vit_absolute", "vit_shared_bias")
RUN = RunLength(4, 1.0)
SIDE = 8  # Of a patch; 3 channels.


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def batch(case):
    """The images and the mask of the case."""
    mask = jnp.asarray(IO[f"{case}/mask"].reshape(2, -1), jnp.float32)
    return {"image": jnp.asarray(IO["image"].transpose(0, 2, 3, 1)), "mask": mask}


@pytest.fixture(scope="module")
def original(case):
    """The golden network and what is beside it, under our names."""
    flat = load_file(GOLDEN / f"simmim_{case}.safetensors")
    encoder = {k.removeprefix("encoder."): v for k, v in flat.items()}
    decoder = {
        leaf: encoder.pop(f"decoder.0.{name}")
        for leaf, name in (("kernel", "weight"), ("bias", "bias"))
    }
    token = encoder.pop("mask_token")
    for i in range(2):  # Their attention has no bias of the keys.
        query, value = (encoder.pop(f"blocks.{i}.attn.{n}_bias") for n in "qv")
        biases = [query, np.zeros_like(query), value]
        encoder[f"blocks.{i}.attn.qkv.bias"] = np.concatenate(biases)
        for j in (1, 2):  # Under the names that only plain networks of timm have.
            encoder[f"blocks.{i}.ls{j}.gamma"] = encoder.pop(f"blocks.{i}.gamma_{j}")
    # Without a config.json, positions that are not there are as good as zeros.
    encoder.setdefault("pos_embed", np.zeros((1, 17, 24), np.float32))
    encoder.pop("rel_pos_bias.relative_position_index", None)
    # It pools the patches: its last norm is after that, and none is in the encoder.
    found = timm.read(Tensors(encoder, {}, {}, "case"), 3)
    # The channels of PixelShuffle stand before the pixels of a patch.
    kernel = decoder["kernel"].reshape(3, SIDE * SIDE, 24).transpose(2, 1, 0)
    bias = decoder["bias"].reshape(3, SIDE * SIDE).T
    params = {
        "network": found.params,
        "mask_token": token,
        "decoder": {"kernel": kernel.reshape(24, -1), "bias": bias.reshape(-1)},
    }
    return models.create(**found.options), params


def build(original, **keys):
    keys = {"mask_unit": SIDE, "mask_ratio": 0.6} | keys
    data = DataConfig(image_size=(32, 32), num_classes=0)
    return SimMimConfig(**keys).build(original[0], data, RUN)


def test_features_reconstruction_loss_and_gradients_are_the_originals(
    original, case, batch
):
    task, (model, params) = build(original), original
    assert task.num_patches == 16

    def hide(patches):
        return jnp.where(batch["mask"][..., None] > 0, params["mask_token"], patches)

    @jax.jit
    def compute(params):
        tokens = model.encode(params["network"], batch["image"], edit_patches=hide)
        lose = jax.value_and_grad(
            lambda p: task.loss(p, None, batch, jax.random.key(0)), has_aux=True
        )
        return tokens, task.predict(params, batch)[0], lose(params)

    tokens, predicted, ((loss, (metrics, _)), grads) = compute(params)
    expected = IO[f"{case}/features"].reshape(2, 24, -1).transpose(0, 2, 1)
    np.testing.assert_allclose(tokens[:, 1:], expected, rtol=0, atol=1e-5)
    images = masking.unpatchify(predicted, (4, 4), SIDE)
    expected = IO[f"{case}/reconstruction"].transpose(0, 2, 3, 1)
    np.testing.assert_allclose(images, expected, rtol=0, atol=1e-5)
    assert float(loss) == pytest.approx(float(IO[f"{case}/loss"]), abs=1e-5)
    assert metrics["loss"] == loss
    expected = IO[f"{case}/grad/encoder.mask_token"]
    np.testing.assert_allclose(grads["mask_token"], expected, rtol=0, atol=1e-5)
    bias = grads["decoder"]["bias"].reshape(SIDE * SIDE, 3).T.reshape(-1)
    expected = IO[f"{case}/grad/decoder.0.bias"]
    np.testing.assert_allclose(bias, expected, rtol=0, atol=1e-5)


def test_units_are_hidden_whole_and_rounded_up(original):
    task = build(original, mask_unit=16, mask_ratio=0.6)
    index = jnp.arange(1_000, dtype=jnp.uint32)
    mask = np.asarray(task.draw(index, jax.random.key(1))["mask"])
    units = mask.reshape(-1, 2, 2, 2, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 4, 4)
    assert set(units.mean(-1).ravel()) == {0.0, 1.0}
    assert (units.mean(-1).sum(1) == math.ceil(0.6 * 4)).all()
    np.testing.assert_allclose(units.mean((0, 2)), 0.75, atol=0.05)
    # It depends on an image's position in the run alone.
    part = task.draw(index[jnp.array([7, 3])], jax.random.key(1))["mask"]
    np.testing.assert_array_equal(part, mask[[7, 3]])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mask_unit": 12}, r"task.mask_unit=12 must be a multiple of the patch \(8\)"),
        ({"mask_unit": 24}, r"task.mask_unit=24 must .* divide data.image_size=\(32, "),
        (
            {"mask_unit": 16, "mask_ratio": 0.9},
            "task.mask_ratio=0.9 hides all 4 units of 16 pixels: lower it",
        ),
    ],
)
def test_what_cannot_be_is_refused(original, keys, message):
    with pytest.raises(UserError, match=message) as error:
        build(original, **keys)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def swin():
    """The golden Swin Transformer, which makes one token of 2x2 patches of 2 pixels."""
    path = GOLDEN / "simmim_swin.safetensors"
    found = weights.open_pretrained(path)
    assert found.options["image_size"] == (16, 16)  # Nothing says of 32.
    flat, stride = load_file(path), 4
    kernel = flat["decoder.0.weight"].reshape(3, stride**2, 32).transpose(2, 1, 0)
    bias = flat["decoder.0.bias"].reshape(3, stride**2).T
    params = {
        "network": found.params,
        "mask_token": flat["encoder.mask_token"],
        "decoder": {"kernel": kernel.reshape(32, -1), "bias": bias.reshape(-1)},
    }
    model = models.create(**found.options | {"image_size": (32, 32)})
    batch = {
        "image": jnp.asarray(IO["image"].transpose(0, 2, 3, 1)),
        "mask": jnp.asarray(IO["swin/mask"].reshape(2, -1), jnp.float32),
    }
    return model, params, batch


@pytest.mark.slow
def test_a_swin_transformer_is_trained_as_in_the_original(swin):
    model, params, batch = swin
    task = build(swin, mask_unit=8)

    def loss(params):
        return task.loss(params, None, batch, jax.random.key(0))[0]

    @jax.jit
    def compute(params):
        predicted, _ = task.predict(params, batch)
        features = model.encode(params["network"], batch["image"])
        return predicted, features, jax.value_and_grad(loss)(params)

    predicted, features, (value, grads) = compute(params)
    assert features.shape == (2, 64, 32)
    images = masking.unpatchify(predicted, (8, 8), 4)
    expected = IO["swin/reconstruction"].transpose(0, 2, 3, 1)
    np.testing.assert_allclose(images, expected, rtol=0, atol=1e-5)

    assert float(value) == pytest.approx(float(IO["swin/loss"]), abs=1e-5)
    expected = IO["swin/grad/encoder.mask_token"]
    np.testing.assert_allclose(grads["mask_token"], expected, rtol=0, atol=1e-5)
    bias = grads["decoder"]["bias"].reshape(16, 3).T.reshape(-1)
    expected = IO["swin/grad/decoder.0.bias"]
    np.testing.assert_allclose(bias, expected, rtol=0, atol=1e-5)
    drawn = jax.eval_shape(task.init, jax.random.key(0))[0]
    assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, params)
    message = r"task.mask_unit=6 must be a multiple of .* \(4\)"
    with pytest.raises(UserError, match=message):
        build(swin, mask_unit=6)
    message = "model.variant='Swin-T' with task.name='mae'.*: choose a"
    with pytest.raises(UserError, match=message):
        data = DataConfig(image_size=(32, 32), num_classes=0)
        MaeConfig().build(model, data, RUN)
