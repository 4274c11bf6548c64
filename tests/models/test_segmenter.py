"""Heads for masks: shapes for every kind of network, the linear one as PyTorch's."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TINY, draw_params, slow_but

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import segmenter, stacking

SMALL = TINY | {"depth": 2}
# Of images of 16x32 pixels.
NETWORKS = {
    "ViT": ("Ti/4", SMALL),
    "scan": ("Ti/4", SMALL | {"scan": True}),
    "registers": ("Ti/4", SMALL | {"num_register_tokens": 2}),
    "Mixer": (
        "Mixer-S/4",
        {"width": 12, "depth": 2, "tokens_mlp_dim": 4, "channels_mlp_dim": 8},
    ),
    "Swin": (
        "Swin-T",
        {"patch_size": 2, "width": 8, "stage_depths": (1, 1), "num_heads": (2, 4)}
        | {"window_size": 4},
    ),
    "ResNet": ("R50x1", {"stage_depths": (1, 1), "stem_width": 32}),
}


@pytest.mark.parametrize(
    ("network", "head"),
    slow_but(
        [("scan", "linear"), ("Mixer", "pyramid")],
        itertools.product(NETWORKS, ("linear", "pyramid")),
    ),
)
def test_every_network_with_patches_takes_every_head(network, head):
    variant, keys = NETWORKS[network]
    model = models.create(variant, num_classes=0, image_size=(16, 32), **keys)
    params = draw_params(model)
    layers = (-2, -1)
    built = segmenter.build(model, head, layers, 12, num_classes=5)
    images = np.random.default_rng(1).normal(size=(2, 16, 32, 3)).astype("f")
    head_params, means = built.init(jax.random.key(0))
    logits = jax.jit(built.logits)(params, head_params, means, images)
    features = lambda *args: model.layer_features(*args, layers)
    rows, columns = jax.eval_shape(features, params, images)[0].shape[1:3]
    one_grid = network not in ("Swin", "ResNet")
    times = 4 if head == "pyramid" and one_grid else 1
    assert logits.shape == (2, rows * times, columns * times, 5)
    assert logits.dtype == jnp.float32
    assert bool(means) == (head == "linear")


def test_the_linear_head_is_that_of_dinov2_in_pytorch():
    model = models.create("Ti/4", num_classes=0, image_size=(8, 12), **TINY)
    built = segmenter.build(model, "linear", (-1,), 0, num_classes=5)
    params, means = built.init(jax.random.key(0))
    rng, x = np.random.default_rng(0), []
    for _ in range(3):
        x.append(rng.normal(2, 3, (4, 2, 3, TINY["width"])).astype(np.float32))
    mean, variance = np.zeros(TINY["width"]), np.ones(TINY["width"])
    scale = rng.normal(1, 0.1, TINY["width"])
    params["BatchNorm_0"]["scale"] = jnp.asarray(scale, jnp.float32)
    kernel = np.asarray(params["head"]["kernel"], np.float64)
    # torch.nn.BatchNorm2d in training, eps=1e-5, then a 1x1 convolution.
    for maps in x:
        variables = {"params": params, "batch_stats": means}
        found, changed = built.head.apply(
            variables, [jnp.asarray(maps)], train=True, mutable=["batch_stats"]
        )
        means = changed["batch_stats"]
        rows = maps.reshape(-1, TINY["width"]).astype(np.float64)
        normal = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5) * scale
        expected = (normal @ kernel).reshape(*maps.shape[:3], 5)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        mean = 0.9 * mean + 0.1 * rows.mean(0)
        variance = 0.9 * variance + 0.1 * rows.var(0)
    np.testing.assert_allclose(means["BatchNorm_0"]["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(means["BatchNorm_0"]["var"], variance, rtol=1e-4)
    variables = {"params": params, "batch_stats": means}
    rows = (x[0].reshape(-1, TINY["width"]) - mean) / np.sqrt(variance + 1e-5) * scale
    expected = (rows @ kernel).reshape(4, 2, 3, 5)
    found = built.head.apply(variables, [jnp.asarray(x[0])])
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_network_without_such_a_layer_is_refused():
    model = models.create("Ti/4", num_classes=0, image_size=(8, 12), **TINY)
    with pytest.raises(UserError, match="layers=7"):
        segmenter.build(model, "linear", (7,), 0, num_classes=5)


@pytest.mark.slow
def test_layers_of_a_scan_are_those_of_blocks_one_by_one():
    options = dict(
        num_classes=0, image_size=(8, 12), dropout=0.0, **TINY | {"depth": 3}
    )
    plain, scan = (models.create("Ti/4", scan=s, **options) for s in (False, True))
    images = np.random.default_rng(1).normal(size=(2, 8, 12, 3)).astype("f")
    params = draw_params(plain)
    plain, scan = (segmenter.build(m, "linear", (0, -1), 0, 5) for m in (plain, scan))
    rest = (*jax.jit(plain.init)(jax.random.key(0)), images, None)
    found = [
        jax.jit(built.logits_and_means)(params, *rest)[0]
        for built, params in ((plain, params), (scan, stacking.stack(params)))
    ]
    np.testing.assert_allclose(*found, atol=1e-5)


def test_a_map_is_made_finer_as_by_a_transposed_convolution():
    x = jax.random.normal(jax.random.key(0), (2, 3, 5, 7))
    kernel = jax.random.normal(jax.random.key(1), (2, 2, 7, 11))
    across = kernel.transpose(2, 0, 1, 3).reshape(7, 4 * 11)
    expected = jax.lax.conv_transpose(
        x,
        kernel[::-1, ::-1],
        (2, 2),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    found = segmenter.depth_to_space(x @ across)
    np.testing.assert_allclose(found, expected, atol=1e-5)
