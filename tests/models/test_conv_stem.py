"""Vision Transformers with a convolutional stem."""

import jax
import numpy as np
import pytest
from helpers import draw_params

from vit_jax import models
from vit_jax.errors import UserError

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
