"""Attention maps, distance, rollout and relevance, against loops and whole matrices."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import plain_vit
import pytest

from vit_jax import models
from vit_jax.analysis import attention
from vit_jax.errors import UserError
from vit_jax.models import intermediates

GRID, PATCH_SIZE = (3, 5), 4
L, B, H, N = 4, 2, 3, 7  # Of rollout.
DEPTH = 2  # Of relevance.
TINY = {"width": 8, "depth": DEPTH, "num_heads": 2, "mlp_dim": 9}


@pytest.fixture(scope="module")
def network():
    """A model of 2x3 patches, its parameters, and two images."""
    return plain_vit.drawn(scale=1.0, **TINY | {"depth": 3})


def random_attention(*shape):
    """Returns positive numbers whose rows sum to 1."""
    weights = np.random.default_rng(1).random(shape).astype(np.float32)
    return jnp.array(weights / weights.sum(-1, keepdims=True))


def distance_by_loops(weights, num_prefix_tokens):
    """Returns one head's mean attention distance, pair by pair."""
    distances = []
    for n in range(15):
        total = weighted = 0.0
        for m in range(15):
            rows, columns = n // 5 - m // 5, n % 5 - m % 5
            weight = float(weights[num_prefix_tokens + n, num_prefix_tokens + m])
            total += weight
            weighted += weight * PATCH_SIZE * (rows**2 + columns**2) ** 0.5
        distances.append(weighted / total)
    return np.mean(distances)


@pytest.mark.parametrize("num_prefix_tokens", [0, 1, 2])
def test_distances_are_those_of_loops_over_pairs(num_prefix_tokens):
    N = 15 + num_prefix_tokens
    maps = [random_attention(2, 3, N, N) ** p for p in (1, 2)]
    found = distance(iter(maps), num_prefix_tokens)
    wanted = [
        [[distance_by_loops(h, num_prefix_tokens) for h in maps[i][b]] for i in (0, 1)]
        for b in (0, 1)
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def distance(maps, num_prefix_tokens):
    return attention.mean_attention_distance(maps, GRID, PATCH_SIZE, num_prefix_tokens)


def test_distances_of_attention_that_is_plain():
    even = [jnp.full((2, 3, 16, 16), 1 / 16)]
    distances = attention.patch_distances(GRID, PATCH_SIZE)
    assert distances.max() == pytest.approx(PATCH_SIZE * (4 + 16) ** 0.5)
    np.testing.assert_allclose(distance(even, 1), distances.mean(), 1e-5)
    assert distance([jnp.eye(16)[None, None]], 1) == 0
    neighbour = np.zeros((15, 15), np.float32)
    for n in range(15):
        neighbour[n, n + 1 if n % 5 < 4 else n - 1] = 1
    assert distance([jnp.array(neighbour)[None, None]], 0) == PATCH_SIZE
    weights = np.zeros((1, 1, 16, 16), np.float32)
    weights[..., 0] = 1  # All attend to the class token
    assert distance([jnp.array(weights)], 1) == 0
    weights[0, 0, 1, [0, 2]] = 0.5  # but one, which attends to its neighbour too.
    assert distance([jnp.array(weights)], 1) == PATCH_SIZE


@pytest.fixture
def alive(monkeypatch):
    """Notes how many arrays of attention are there when a block is run or differentiated."""
    found = []

    def watch(name):
        run = getattr(intermediates, name)

        def watched(*args):
            shapes = [array.shape for array in jax.live_arrays()]
            found.append(shapes.count((2, 2, 7, 7)))
            return run(*args)

        monkeypatch.setattr(intermediates, name, watched)

    gc.collect()  # Of earlier tests.
    for name in ("run_block", "block_vjp"):
        watch(name)
    return found


@pytest.mark.slow
def test_no_layer_is_alive_while_the_next_is_computed(network, alive):
    model, params, images = network
    for consume in (
        attention.rollout,
        lambda maps: attention.mean_attention_distance(maps, (2, 3), 4, 1),
    ):
        consume(attention.attention_maps(model, params, images))
    assert alive == [0] * 6
    attention.relevance(model, params, images, jnp.array([1, 3]))
    assert len(alive) >= 9 and not any(alive)


def test_any_layer_head_and_query_can_be_asked_for(network):
    model, params, images = network
    forward = functools.partial(plain_vit.forward, patch=4, num_heads=2)
    _, weights, _ = jax.jit(forward)(params, images[1])
    for layer, query, head in ((0, 0, 1), (1, 4, 0), (2, 6, None), (-1, 6, None)):
        found = attention.query_attention(
            model, params, images, layer=layer, query=query, head=head
        )
        wanted = jnp.stack(weights[layer])[:, query]
        wanted = wanted.mean(0) if head is None else wanted[head]
        np.testing.assert_allclose(found[1], wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layer": 3}, "layer=3: out of range; choose a number from -3 to 2"),
        ({"layer": -4}, "layer=-4: out of range"),
        ({"layer": 0, "query": 7}, "query=7: out of range; .* from 0 to 6"),
        ({"layer": 0, "head": 2}, "head=2: out of range; .* from 0 to 1"),
    ],
)
def test_an_index_out_of_range_is_refused(network, choice, message):
    with pytest.raises(UserError, match=message):
        attention.query_attention(*network, **choice)


def test_a_resnet_has_no_attention():
    resnet = models.create("R50x1", num_classes=5, image_size=(32, 32))
    images = jnp.zeros((1, 32, 32, 3))
    with pytest.raises(UserError, match="a ResNet has no attention"):
        attention.attention_maps(resnet, {}, images)
    with pytest.raises(UserError, match="a ResNet has no attention"):
        attention.query_attention(resnet, {}, images, layer=0)


def rollout_maps():
    weights = np.random.default_rng(1).random((L, B, H, N, N)).astype(np.float32)
    return weights / weights.sum(-1, keepdims=True)


def rollout_by_loops(maps, head_fusion, num_discarded):
    """Multiplies the layers, one image and one row at a time."""
    results = []
    for b in range(B):
        product = np.eye(N)
        for layer in maps:
            mixed = np.zeros((N, N))
            for n in range(N):
                row = [[layer[b, h, n, m] for h in range(H)] for m in range(N)]
                row = [sum(r) / H if head_fusion == "mean" else max(r) for r in row]
                for m in sorted(range(N), key=row.__getitem__)[:num_discarded]:
                    row[m] = 0
                row[n] += 1
                mixed[n] = np.array(row) / sum(row)
            product = mixed @ product
        results.append(product)
    return results


@pytest.mark.parametrize("head_fusion", ["mean", "max"])
@pytest.mark.parametrize(("discard_ratio", "num_discarded"), [(0.0, 0), (0.3, 2)])
def test_rollout_is_that_of_loops(head_fusion, discard_ratio, num_discarded):
    maps = rollout_maps()
    found = attention.rollout(map(jnp.array, maps), head_fusion, discard_ratio)
    np.testing.assert_allclose(
        found, rollout_by_loops(maps, head_fusion, num_discarded), atol=1e-6
    )
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("head_fusion", ["mean", "max", "min"])
def test_rollout_with_the_weakest_of_the_matrix_dropped_is_that_of_vit_explain(
    head_fusion,
):
    maps, expected = rollout_maps(), []
    for b in range(B):
        product = np.eye(N)
        for layer in maps:
            flat = getattr(layer[b], head_fusion)(0).reshape(-1)
            weakest = np.argsort(flat)[: int(0.7 * N * N)]
            flat[weakest[weakest != 0]] = 0
            mixed = (flat.reshape(N, N) + np.eye(N)) / 2
            # They divide by the sums of rows along the last axis: columns.
            product = mixed / mixed.sum(-1) @ product
        expected.append(product)
    found = attention.rollout(map(jnp.array, maps), head_fusion, 0.7, "matrix")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_rollout_of_uniform_attention_halves_the_own_share_per_layer():
    uniform = jnp.full((B, H, N, N), 1 / N)
    own = 2.0**-L
    wanted = own * np.eye(N) + (1 - own) / N
    np.testing.assert_allclose(attention.rollout([uniform] * L)[0], wanted, rtol=1e-5)


def test_bad_options_of_rollout_are_refused():
    maps = [jnp.full((B, H, N, N), 1 / N)]
    with pytest.raises(
        UserError, match=r"head_fusion='sum': unknown; choose mean or m"
    ):
        attention.rollout(maps, "sum")
    with pytest.raises(UserError, match=r"discard_from='all': unknown; choose rows or"):
        attention.rollout(maps, discard_from="all")
    for ratio in (1.0, -0.1, float("nan")):
        with pytest.raises(UserError, match=r"discard_ratio=.*: out of range; choose"):
            attention.rollout(maps, discard_ratio=ratio)
    with pytest.raises(UserError, match=r"maps=\[\]: rollout needs at least one layer"):
        attention.rollout([])


def relevance_model(**options):
    return plain_vit.drawn(scale=0.6, **{**TINY, **options})


@functools.partial(jax.jit, static_argnames="pool")
def slopes_and_weights(params, image, label, pool):
    N = 6 + ("cls" in params) + ("dist" in params)

    def logit(added):
        logits, weights, _ = plain_vit.forward(
            params, image, patch=4, num_heads=2, pool=pool, added=added
        )
        return logits[label], weights

    return jax.grad(logit, has_aux=True)([[jnp.zeros((N, N))] * 2] * DEPTH)


def relevance_by_matrices(params, image, label, pool="token"):
    """Returns the relevance by whole matrices, from the first layer up, as in the paper."""
    slopes, weights = slopes_and_weights(params, image, label, pool)
    whole = np.eye(len(weights[0][0]))
    for of_layer, slope in zip(weights, slopes, strict=True):
        whole = whole + positive_contribution(of_layer, slope) @ whole
    if pool == "map":
        return pooling_relevance(params, image, label) @ whole
    return whole[: 1 + ("dist" in params)].mean(0)


def pooling_relevance(params, image, label):
    """Returns the relevance of each token to a class in attention pooling."""
    _, _, tokens = plain_vit.forward(params, image, patch=4, num_heads=2, pool="map")
    x = plain_vit.norm(tokens[-1], params["Transformer"]["encoder_norm"], 1e-6)
    pool = params["MAPHead_0"]

    def logit(added):
        kernels = pool["MultiHeadDotProductAttention_0"]
        y, weights = plain_vit.attend(pool["probe"][0], x, kernels, added)
        z = plain_vit.norm(y, pool["LayerNorm_0"], 1e-6)
        y = y + plain_vit.mlp(z, pool["MlpBlock_0"])
        return (y @ params["head"]["kernel"])[0, label], weights

    slopes, weights = jax.grad(logit, has_aux=True)([jnp.zeros((1, 6))] * 2)
    return positive_contribution(weights, slopes)[0]


def positive_contribution(weights, slopes):
    pairs = zip(weights, slopes, strict=True)
    return np.mean([np.maximum(0, a * s) for a, s in pairs], axis=0)


@pytest.mark.parametrize(
    "options",
    [
        {"pool": "token"},
        pytest.param({"pool": "map"}, marks=pytest.mark.slow),
        pytest.param({"distillation": True}, marks=pytest.mark.slow),
    ],
    ids=lambda options: str(*options.values()),
)
def test_relevance_is_that_of_the_paper_s_matrices(options):
    model, params, images = relevance_model(**options)
    for classes in ((4, 2), (0, 2)):
        found = attention.relevance(model, params, images, jnp.array(classes))
        for row, image, label in zip(found, images, classes, strict=True):
            wanted = relevance_by_matrices(
                params, image, label, options.get("pool", "token")
            )
            np.testing.assert_allclose(row, wanted, rtol=1e-3, atol=1e-5)
    assert (found >= 0).all()


def test_a_token_without_influence_has_no_relevance():
    model, params, images = relevance_model(depth=1)
    block = params["Transformer"]["encoderblock_0"]
    block["MultiHeadDotProductAttention_1"]["out"]["kernel"] *= 0
    found = attention.relevance(model, params, images, jnp.array([1, 3]))
    np.testing.assert_array_equal(found, [[1, 0, 0, 0, 0, 0, 0]] * 2)


def test_relevance_to_an_unknown_class_is_refused():
    model, params, images = relevance_model()
    with pytest.raises(UserError, match="class 7 is not one of the 5"):
        attention.relevance(model, params, images, jnp.array([7, 0]))
