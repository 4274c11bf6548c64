"""ResNets against plain formulas; published weights: tests/weights/test_parity.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models
from vit_jax.models.resnet import StdConv


@pytest.mark.parametrize("of_deviation", [False, True])
def test_kernel_is_standardised_over_each_output_channel(of_deviation):
    conv = StdConv(5, 3, stride=2, padding=1, epsilon=0.25, of_deviation=of_deviation)
    x = jax.random.normal(jax.random.key(0), (2, 7, 9, 4))
    params = conv.init(jax.random.key(1), x)
    kernel = np.asarray(params["params"]["kernel"], np.float64)
    centred = kernel - kernel.mean((0, 1, 2))
    std = kernel.std((0, 1, 2))
    kernel = centred / (std + 0.25 if of_deviation else np.sqrt(std**2 + 0.25))

    padded = np.pad(np.asarray(x, np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    expected = np.zeros((2, 4, 5, 5))
    for i in range(4):
        for j in range(5):
            window = padded[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
            expected[:, i, j] = np.einsum("byxc,yxcd->bd", window, kernel)
    np.testing.assert_allclose(conv.apply(params, x), expected, atol=1e-5)
    # Arrays of the caller, which cannot be written, stay as they are.
    found = conv.apply(jax.device_get(params), x)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_resnet_takes_any_size_and_starts_at_its_head_bias():
    model = models.create(
        "R50x1",
        num_classes=7,
        image_size=(40, 70),
        stage_depths=(1, 1, 1),
        stem_width=32,
        head_bias_init=-10.0,
    )
    images = jnp.ones((2, 40, 70, 3))
    out = jax.jit(lambda key: model.apply(model.init(key), images))(jax.random.key(0))
    np.testing.assert_array_equal(out["logits"], np.full((2, 7), -10.0))
    assert out["pre_logits"].shape == (2, 512)
    assert model.grid == (3, 5)  # 16 pixels each, the last ones in part.


@pytest.mark.slow
def test_units_of_a_hybrids_stem_start_as_the_identity():
    model = models.create(
        "R50+B/16",
        num_classes=0,
        image_size=(32, 48),
        stage_depths=(1, 1, 2),
        stem_width=32,
        width=12,
        depth=1,
        num_heads=3,
        mlp_dim=20,
    )
    params = jax.jit(model.init)(jax.random.key(0))
    apply = jax.jit(model.apply)
    for block, unit in (("block1", "unit1"), ("block3", "unit2")):
        np.testing.assert_array_equal(params[block][unit]["gn3"]["scale"], 0)
    images = jax.random.normal(jax.random.key(1), (2, 32, 48, 3))
    before = apply(params, images)["pre_logits"]
    for name, kernel in params["block3"]["unit2"].items():
        if name.startswith("conv"):
            kernel["kernel"] = kernel["kernel"] * -3 + 1
    np.testing.assert_array_equal(before, apply(params, images)["pre_logits"])
    assert model.grid == (2, 3)
