"""A block, positions and a pooling from files outside the package."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from helpers import draw_params

from vit_jax import models
from vit_jax.models import stacking

EXAMPLES = pathlib.Path(__file__).parents[2] / "docs/examples"
SIZES = {"width": 12, "depth": 2, "num_heads": 3, "mlp_dim": 20}
Y, X = 2, 3


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def build(variant, **options):
    options = {"num_classes": 5, "image_size": (4 * Y, 4 * X), **SIZES, **options}
    return models.create(variant, **options)


def of(name, **options):
    return build(name, base="Ti/4", **options)


@pytest.fixture(scope="module")
def images():
    return jax.random.normal(jax.random.key(1), (2, 4 * Y, 4 * X, 3))


@pytest.mark.slow
def test_a_block_of_ones_own_has_another_attention(images):
    model, plain = of("own_block:TemperedConfig"), build("B/4")
    params = draw_params(model)
    flat = flatten_dict(params, sep="/")
    names = [name for name in flat if name.endswith("temperature")]
    assert len(names) == SIZES["depth"] and all(flat[n].shape == (3,) for n in names)
    blocks = [
        params["Transformer"][f"encoderblock_{i}"]["MultiHeadDotProductAttention_1"]
        for i in range(SIZES["depth"])
    ]
    # A factor of the logits is one of the queries, weights and bias.
    factors = [np.exp(block.pop("temperature"))[:, None] for block in blocks]
    expected = [
        {name: np.multiply(f, leaf) for name, leaf in block["query"].items()}
        for block, f in zip(blocks, factors, strict=True)
    ]
    tempered = model.apply(draw_params(model), images)["logits"]
    for block, query in zip(blocks, expected, strict=True):
        block["query"] = query
    np.testing.assert_allclose(
        plain.apply(params, images)["logits"], tempered, atol=2e-5
    )


def test_a_block_of_ones_own_is_scanned_recomputed_and_differentiated(images):
    params = draw_params(of("own_block:TemperedConfig"))

    def slope(**options):
        model = of("own_block:TemperedConfig", **options)
        own = stacking.stack(params) if model.config.stacked else params
        key = jax.random.key(2)
        loss = lambda p: model.apply(p, images, train=True, key=key)["logits"].sum()
        return stacking.unstack(jax.jit(jax.grad(loss))(own))

    plain, scanned = slope(), slope(scan=True, remat_policy="full")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), plain, scanned
    )
    first = plain["Transformer"]["encoderblock_0"]["MultiHeadDotProductAttention_1"]
    assert np.abs(first["temperature"]).min() > 0


def test_positions_of_ones_own_are_added_to_the_patches(images):
    model = of("own_positions:RingsConfig")
    params = draw_params(model)
    rings = params["Transformer"]["posembed_input"]["rings"]
    # Centres of the outer columns are 1.1 patches away, of the inner one 0.5.
    assert rings.shape == (2, SIZES["width"])
    plain = build("B/4")
    vectors = np.zeros((1, 1 + Y * X, SIZES["width"]), np.float32)
    vectors[0, 1:] = np.asarray(rings)[[1, 0, 1, 1, 0, 1]]
    own = {**params["Transformer"], "posembed_input": {"pos_embedding": vectors}}
    expected = plain.apply({**params, "Transformer": own}, images)["logits"]
    found = model.apply(params, images)["logits"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_pooling_of_ones_own_feeds_the_classifier(images):
    model = of("own_pooling:GeneralizedMeanConfig")
    params = draw_params(model)
    outputs, tokens = model.apply(params, images), model.encode(params, images)
    cubes = jnp.maximum(tokens, 1e-6) ** 3
    pooled = cubes.mean(1) ** (1 / 3)
    np.testing.assert_allclose(outputs["pre_logits"], pooled, rtol=1e-4)
    head = params["head"]
    expected = pooled @ head["kernel"] + head["bias"][None]
    np.testing.assert_allclose(outputs["logits"], expected, rtol=1e-4, atol=1e-5)
