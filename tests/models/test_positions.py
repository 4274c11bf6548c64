import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from vit_jax import models
from vit_jax.models import attention, positions
from vit_jax.models.encoder_config import EncoderConfig
from vit_jax.models.positions.added import Table
from vit_jax.models.positions.base import PLACEMENTS
from vit_jax.models.positions.sincos2d import sincos2d

Y, X, D = 3, 5, 12
TINY = {"width": D, "depth": 3, "num_heads": 3, "mlp_dim": 20}


def build(**options):
    return models.create(
        "B/4", num_classes=7, image_size=(4 * Y, 4 * X), **TINY, **options
    )


def random_like(params, key=3):
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(key), len(leaves))
    values = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, values)


def table(kind, num_prefix_tokens, num_register_tokens=0):
    config = EncoderConfig(width=D, posemb=kind)
    position = positions.EMBEDDINGS[kind]
    return Table(position(config, (Y, X), num_prefix_tokens, num_register_tokens))


def names(model):
    shapes = flatten_dict(model.shapes, sep="/")
    return {name: leaf.shape for name, leaf in shapes.items()}


def test_sincos2d_is_sines_and_cosines_of_column_then_row():
    table = np.asarray(sincos2d((Y, X), D)).reshape(Y, X, D)
    rates = [10_000 ** -(i / 2) for i in range(3)]
    y, x = 2, 4
    expected = [f(a * r) for a in (x, y) for f in (math.sin, math.cos) for r in rates]
    np.testing.assert_allclose(table[y, x], expected, atol=1e-6)


def test_learned2d_joins_a_vector_of_the_column_and_one_of_the_row():
    added = table("learned2d", 2)
    params = random_like(added.init(jax.random.key(0)))
    out = added.apply(params)[0]
    rows, columns = (params["params"][f"{n}_embedding"] for n in ("row", "column"))
    assert (rows.shape, columns.shape) == ((Y, D // 2), (X, D // 2))
    np.testing.assert_array_equal(out[:2], 0)
    np.testing.assert_array_equal(
        out[2:].reshape(Y, X, D)[1, 3], np.concatenate([columns[3], rows[1]])
    )


def test_factorized_adds_a_vector_of_the_column_and_one_of_the_row():
    added = table("factorized", 2)
    params = random_like(added.init(jax.random.key(0)))
    out = added.apply(params)[0]
    rows, columns = (params["params"][f"{n}_embedding"] for n in ("row", "column"))
    assert (rows.shape, columns.shape) == ((Y, D), (X, D))
    np.testing.assert_array_equal(out[:2], 0)
    np.testing.assert_allclose(out[2:].reshape(Y, X, D)[1, 3], columns[3] + rows[1])


@pytest.mark.parametrize("kind", ["learned", "learned2d", "sincos2d"])
def test_register_tokens_have_no_position(kind):
    added = table(kind, 3, 2)
    params = random_like(added.init(jax.random.key(0)))
    out = added.apply(params)[0]
    np.testing.assert_array_equal(out[1:3], 0)
    expected = table(kind, 1).apply(params)[0]
    np.testing.assert_array_equal(jnp.concatenate([out[:1], out[3:]]), expected)


@pytest.mark.parametrize("kind", ["learned", "learned2d", "factorized"])
def test_stem_and_shared_have_one_table_and_every_layer_its_own(kind):
    count = {
        at: sum(
            "posemb" in name for name in names(build(posemb=kind, posemb_placement=at))
        )
        for at in PLACEMENTS
    }
    tables = 1 if kind == "learned" else 2
    assert count == {"stem": tables, "shared": tables, "every": 3 * tables}


@pytest.mark.parametrize(
    "kind", [pytest.param("learned2d", marks=pytest.mark.slow), "sincos2d"]
)
def test_positions_act_before_the_layers_they_are_meant_for(kind):
    """With silent blocks the encoder's input to its last norm is a plain sum."""
    images = jax.random.normal(jax.random.key(1), (2, 4 * Y, 4 * X, 3))
    for at, times in (("stem", 1), ("shared", 3)):
        model = build(posemb=kind, posemb_placement=at, pool="none")
        params = random_like(jax.eval_shape(model.init, jax.random.key(0)))
        for i in range(TINY["depth"]):
            block = params["Transformer"][f"encoderblock_{i}"]
            for part, last in (
                ("MultiHeadDotProductAttention_1", "out"),
                ("MlpBlock_3", "Dense_1"),
            ):
                block[part][last] = jax.tree.map(jnp.zeros_like, block[part][last])
        norm = params["Transformer"]["encoder_norm"]
        norm["scale"], norm["bias"] = jnp.ones(D), jnp.zeros(D)
        embedding = params["embedding"]
        patches = jax.lax.conv_general_dilated(
            images,
            embedding["kernel"],
            (4, 4),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = patches.reshape(2, Y * X, D) + embedding["bias"][None, None]
        own = params["Transformer"].get("posembed_input", {})
        place = table(kind, 0).apply({"params": own})
        x = x + times * place
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
        out = jax.jit(model.apply)(params, images)["pre_logits"]
        np.testing.assert_allclose(out, x, atol=1e-4)


def test_relative_attention_adds_the_product_with_the_offsets_key():
    rng = np.random.default_rng(0)
    B, H, N, K = 2, 3, 5, 4
    q, k, v = (rng.normal(size=(B, H, N, K)).astype("f") for _ in range(3))
    keys = rng.normal(size=(H, 2 * N - 1, K)).astype("f")
    expected = np.zeros((B, H, N, K))
    for b in range(B):
        for h in range(H):
            for n in range(N):
                scores = [
                    q[b, h, n] @ (k[b, h, m] + keys[h, n - m + N - 1]) / np.sqrt(K)
                    for m in range(N)
                ]
                weights = np.exp(scores) / np.exp(scores).sum()
                expected[b, h, n] = weights @ v[b, h]
    ours = attention.attend(*map(jnp.asarray, (q, k, v, keys)))
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_relative_has_a_table_a_layer_or_one_for_all():
    every = names(build(posemb="relative", posemb_placement="every"))
    shared = names(build(posemb="relative", posemb_placement="shared"))
    tokens = 1 + Y * X
    of_every = {n: s for n, s in every.items() if "relative" in n}
    assert of_every == {
        f"Transformer/relative_embedding_{i}": (3, 2 * tokens - 1, 4) for i in range(3)
    }
    assert {n for n in shared if "relative" in n} == {"Transformer/relative_embedding"}
    assert not {n for n in every if "posembed" in n}


def test_without_positions_the_order_of_the_patches_is_not_seen():
    model = build(posemb="none")
    params = random_like(jax.eval_shape(model.init, jax.random.key(0)))
    images = jax.random.normal(jax.random.key(1), (1, 4 * Y, 4 * X, 3))
    a, b = (
        jax.jit(model.apply)(params, x)["logits"]
        for x in (images, jnp.roll(images, 4, 2))
    )
    np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-4)
    assert not {n for n in names(model) if "pos" in n.lower() or "relative" in n}
