"""Token merging against the algorithm of the paper, written out in NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TINY, draw_params, slow_but

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models import cost, intermediates, merging

B, N, H, K, D = 3, 14, 2, 5, 7


def build(image_size=(12, 20), **options):
    options = TINY | {"depth": 3} | options
    return models.create("B/4", num_classes=5, image_size=image_size, **options)


def merge(x, sizes, keys, count, protected):
    """Merges the tokens of one image, (N, D), one pair after another."""
    metric = keys.mean(0)
    metric = metric / np.linalg.norm(metric, axis=-1, keepdims=True)
    first = [i for i in range(protected, len(x)) if i % 2 == 0]
    second = [i for i in range(protected, len(x)) if i % 2 == 1]
    edges = []
    for i in first:
        similar = [metric[i] @ metric[j] for j in second]
        edges.append((max(similar), i, second[int(np.argmax(similar))]))
    edges.sort(key=lambda edge: -edge[0])
    edges = edges[: min(count, (len(x) - protected) // 2)]
    gone = {i for _, i, _ in edges}
    rows = [(x[i], sizes[i]) for i in range(protected)]
    rows += [(x[i], sizes[i]) for i in first if i not in gone]
    for j in second:
        group = [j, *(i for _, i, into in edges if into == j)]
        size = sum(sizes[i] for i in group)
        rows.append((sum(x[i] * sizes[i] for i in group) / size, size))
    return np.stack([row for row, _ in rows]), np.array([size for _, size in rows])


@pytest.mark.parametrize(
    ("count", "protected"),
    slow_but([(1, 0), (3, 1), (99, 3)], itertools.product((1, 3, 99), (0, 1, 2, 3))),
)
def test_pairs_sums_and_order_are_those_of_the_paper(count, protected):
    rng = np.random.default_rng(count)
    x, keys = rng.normal(size=(B, N, D)), rng.normal(size=(B, H, N, K))
    sizes = rng.integers(1, 5, (B, N)).astype(np.float32)
    found = merging.merge(*map(jnp.asarray, (x, sizes, keys)), count, protected)
    expected = [merge(*image, count, protected) for image in zip(x, sizes, keys)]
    for one, other in zip(found, zip(*expected)):
        np.testing.assert_allclose(one, np.stack(other), rtol=1e-5, atol=1e-5)


def norm(x, params):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * params["scale"] + params["bias"]


def block(x, sizes, params, count):
    """Applies a block to the tokens of one image."""
    at = params["MultiHeadDotProductAttention_1"]
    y = norm(x, params["LayerNorm_0"])
    q, k, v = (
        np.einsum("nd,dhk->hnk", y, at[name]["kernel"]) + at[name]["bias"][:, None]
        for name in ("query", "key", "value")
    )
    logits = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]) + np.log(sizes)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hnk,hkd->nd", weights @ v, at["out"]["kernel"])
    x, sizes = merge(x + mixed + at["out"]["bias"], sizes, k, count, 1)
    mlp = params["MlpBlock_3"]
    y = norm(x, params["LayerNorm_2"]) @ mlp["Dense_0"]["kernel"]
    y += mlp["Dense_0"]["bias"]
    y *= 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return x + y @ mlp["Dense_1"]["kernel"] + mlp["Dense_1"]["bias"], sizes


@pytest.mark.parametrize(
    "pool", [pytest.param("token", marks=pytest.mark.slow), "token_gap"]
)
def test_the_network_is_that_of_numpy(pool):
    model = build(pool=pool)
    params = draw_params(model)
    images = jax.random.normal(jax.random.key(1), (2, *model.image_shape))
    found = jax.jit(model.replace(token_merging=2).apply)(params, images)["pre_logits"]
    params = jax.device_get(params)
    encoder, kernel = params["Transformer"], params["embedding"]["kernel"]
    for image, expected in zip(np.asarray(images), found):
        patches = image.reshape(3, 4, 5, 4, 3)
        x = np.einsum("yixjc,ijcd->yxd", patches, kernel).reshape(15, 12)
        x = np.concatenate([params["cls"][0], x + params["embedding"]["bias"]])
        x, sizes = x + encoder["posembed_input"]["pos_embedding"][0], np.ones(16)
        for i in range(3):
            x, sizes = block(x, sizes, encoder[f"encoderblock_{i}"], 2)
        x = norm(x, encoder["encoder_norm"])
        mean = np.average(x[1:], axis=0, weights=sizes[1:])
        pooled = x[0] if pool == "token" else np.concatenate([x[0], mean])
        np.testing.assert_allclose(pooled, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pool", slow_but(["gap"], ["token", "gap", "map"]))
def test_merging_equal_patches_changes_nothing(pool):
    model = build(pool=pool, posemb="none", num_register_tokens=2)
    params = draw_params(model)
    kinds = jax.random.normal(jax.random.key(1), (2, 4, 4, 3))
    places = np.array([[0, 1, 1, 0, 0], [1, 1, 0, 0, 1], [1, 0, 1, 1, 0]])
    images = kinds[places].transpose(0, 2, 1, 3, 4).reshape(1, 12, 20, 3)
    expected = jax.jit(model.apply)(params, images)["logits"]
    for count in (1, 2):
        merging_some = model.replace(token_merging=count)
        found = jax.jit(merging_some.apply)(params, images)["logits"]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_none_is_the_same_program_and_training_merges_nothing():
    model = build(dropout=0.1)
    params = draw_params(model)
    images = jax.random.normal(jax.random.key(1), (2, *model.image_shape))

    def lowered(model, train):
        def call(params, images):
            key = jax.random.key(2) if train else None
            return model.apply(params, images, train=train, key=key)

        return jax.jit(call).lower(params, images).as_text()

    assert lowered(model.replace(token_merging=0), False) == lowered(model, False)
    assert lowered(model.replace(token_merging=3), True) == lowered(model, True)
    assert lowered(model.replace(token_merging=3), False) != lowered(model, False)


def test_fewer_products_and_the_same_parameters():
    model = build(scan=True)
    merged = model.replace(token_merging=4)
    assert not merged.config.stacked and merged.shapes == build().shapes
    assert cost.macs_per_image(merged) < 0.8 * cost.macs_per_image(model)


@pytest.mark.parametrize(
    "options",
    [
        {"posemb": "relative", "posemb_placement": "every"},
        {"posemb_placement": "shared"},
        {"relative_bias": "shared"},
        {"rope": "axial"},
    ],
)
def test_positions_within_blocks_are_refused(options):
    with pytest.raises(UserError, match="token_merging=8 with model.(posemb|rel|rope)"):
        build(**options).replace(token_merging=8)


def test_features_of_patches_and_attention_are_refused():
    model = build().replace(token_merging=8)
    params = draw_params(model)
    images = jnp.zeros((1, *model.image_shape))
    inside = functools.partial(intermediates.layers, model)
    calls = (model.encode, model.layer_features, inside)
    for call in calls:
        with pytest.raises(UserError, match="token_merging=8"):
            call(params, images)
