"""Vision Transformers with a convolutional stem."""

import jax
import numpy as np
import pytest
from helpers import draw_params
from sklearn.datasets import load_sample_image

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import STATE
from vit_jax.models.conv_stem import whitening

TINY = {"width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 32, "pool": "gap"}


def create(variant="C+Ti/4", image_size=(8, 12), **options):
    options = TINY | options
    return models.create(variant, num_classes=3, image_size=image_size, **options)


@pytest.mark.parametrize(
    ("variant", "widths", "patch_side"),
    [
        ("C+Ti/16", (24, 48, 96, 192), 1),  # As the paper's with 1 GFLOP.
        ("C+S/16", (48, 96, 192, 384), 1),  # 4 GFLOP.
        ("C+B/14", (768,), 7),
    ],
)
def test_convolutions_halve_a_patch_and_double_up_to_the_width(
    variant, widths, patch_side
):
    model = models.create(variant, num_classes=3, image_size=(112, 112))
    config = model.config
    assert (config.stem_widths, config.patch_side) == (widths, patch_side)
    assert model.shapes["embedding"]["kernel"].shape[:3] == (
        patch_side,
        patch_side,
        widths[-1],
    )
    assert model.grid == (112 // config.patch_size,) * 2


def test_the_stem_is_convolutions_norms_and_relus():
    strides = 2, 1, 2
    model = create(stem_widths=(8, 6, 6), stem_strides=strides)
    params = draw_params(model)
    images = jax.random.normal(jax.random.key(1), (2, 8, 12, 3))
    x = np.asarray(images)
    for i, stride in enumerate(strides):
        kernel = np.asarray(params[f"stem_conv_{i}"]["kernel"])
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        rows, columns = x.shape[1:3]
        x = sum(
            padded[:, j : j + rows : stride, k : k + columns : stride] @ kernel[j, k]
            for j in range(3)
            for k in range(3)
        )
        x -= x.mean(-1, keepdims=True)
        x /= np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        norm = jax.tree.map(np.asarray, params[f"stem_norm_{i}"])
        x = np.maximum(x * norm["scale"] + norm["bias"], 0)
    plain = models.create("Ti/1", num_classes=3, image_size=(2, 3), channels=6, **TINY)
    rest = {name: p for name, p in params.items() if not name.startswith("stem_")}
    expected = jax.jit(plain.apply)(rest, x)["logits"]
    found = jax.jit(model.apply)(params, images)["logits"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_batch_norm_follows_the_images_in_training_and_the_means_after_it():
    model = create(stem_widths=(8,), stem_strides=(4,), stem_norm="batch")
    params = model.init(jax.random.key(0))
    images = 3 + jax.random.normal(jax.random.key(1), (4, 8, 12, 3))
    step = jax.jit(model.apply_and_update)
    outputs, state = step(params, images, jax.random.key(2))
    # Neither scale nor offset of the images matters to norms over the batch.
    again, _ = step(params, 5 * images, jax.random.key(2))
    np.testing.assert_allclose(outputs["pre_logits"], again["pre_logits"], atol=1e-4)
    features = jax.lax.conv_general_dilated(
        images,
        params["stem_conv_0"]["kernel"],
        (4, 4),
        ((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    means = state["stem_norm_0"]
    np.testing.assert_allclose(means["mean"], 0.1 * features.mean((0, 1, 2)), atol=1e-5)
    expected = 0.9 + 0.1 * features.var((0, 1, 2))
    np.testing.assert_allclose(means["var"], expected, atol=1e-4)
    apply = jax.jit(model.apply)
    first, one = (apply(params, images[:count])["pre_logits"][0] for count in (4, 1))
    np.testing.assert_allclose(first, one, atol=1e-5)
    moved = apply({**params, STATE: state}, images)["pre_logits"]
    assert np.abs(moved[0] - first).max() > 1e-3


@pytest.mark.parametrize("side", [2, 3])
def test_windows_of_a_photograph_are_whitened(side):
    photo = load_sample_image("china.jpg")[:, :, :3] / 127.5 - 1
    windows = np.lib.stride_tricks.sliding_window_view(photo, (side, side), (0, 1))
    windows = windows[::7, ::7].transpose(0, 1, 3, 4, 2).reshape(-1, side * side * 3)
    kernel = whitening(side, 3)
    outputs = windows @ kernel.reshape(-1, kernel.shape[-1])
    related = lambda x: np.abs(np.corrcoef(x.T)[np.triu_indices(x.shape[1], 1)])
    assert related(windows).mean() > 0.8
    assert related(outputs).mean() < 0.1
    assert 0.05 < outputs.std(0).min() and outputs.std(0).max() < 3


def test_whitened_windows_and_their_negatives_enter_the_stem():
    options = {"stem_widths": (8,), "stem_strides": (4,)}
    model = create(stem_whitening=2, **options)
    inner = create(channels=24, **options)
    params = draw_params(model)
    assert model.shapes == inner.shapes
    images = np.asarray(jax.random.normal(jax.random.key(1), (2, 8, 12, 3)))
    kernel = whitening(2, 3).reshape(12, 12)
    padded = np.pad(images, ((0, 0), (0, 1), (0, 1), (0, 0)))
    x = np.lib.stride_tricks.sliding_window_view(padded, (2, 2), (1, 2))
    x = x.transpose(0, 1, 2, 4, 5, 3).reshape(2, 8, 12, 12) @ kernel
    x = np.maximum(np.concatenate([x, -x], -1), 0)
    expected = jax.jit(inner.apply)(params, x)["logits"]
    found = jax.jit(model.apply)(params, images)["logits"]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_stem_is_the_layer_before_the_blocks():
    config = create().config
    assert config.layer_of("stem_conv_0/kernel") == 0
    assert config.layer_of("stem_norm_1/scale") == 0
    assert config.layer_of("encoderblock_0/LayerNorm_0/scale") == 1


@pytest.mark.parametrize("widths", [(8, 8, 8), (8, 0)])
def test_other_numbers_of_convolutions_are_refused(widths):
    with pytest.raises(UserError, match="model.stem_"):
        create(stem_widths=widths)


@pytest.mark.parametrize("strides", [(2,), (2, 3), (2, -1)])
def test_strides_that_do_not_fit_are_refused(strides):
    with pytest.raises(UserError, match="model.stem_strides"):
        create(stem_widths=(8, 8), stem_strides=strides)


def test_a_stem_of_another_name_is_unknown():
    with pytest.raises(UserError, match="model.variant='C\\+R50\\+B/16'"):
        create("C+R50+B/16")
