"""Attention maps and distances, against loops over pairs of patches."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import plain_vit
import pytest

from vit_jax import models
from vit_jax.analysis import attention, rollout
from vit_jax.errors import UserError
from vit_jax.models import parts

GRID, PATCH = (3, 5), 4


@pytest.fixture(scope="module")
def network():
    """A model of a grid that is not square, its parameters, and two images."""
    model = models.create(
        "B/4", classes=5, image_size=(12, 20), width=8, depth=3, heads=2, mlp_dim=9
    )
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(3)
    leaves = [jnp.array(rng.standard_normal(leaf.shape, np.float32)) for leaf in leaves]
    images = jnp.array(rng.standard_normal((2, 12, 20, 3), np.float32))
    return model, jax.tree.unflatten(tree, leaves), images


def drawn(*shape):
    """Returns attention like numbers: above 0, rows of sum 1."""
    weights = np.random.default_rng(1).random(shape).astype(np.float32)
    return jnp.array(weights / weights.sum(-1, keepdims=True))


def by_loops(weights, extra):
    """Works one head's distance out, pair by pair."""
    reach = []
    for n in range(15):
        total = far = 0.0
        for m in range(15):
            rows, columns = n // 5 - m // 5, n % 5 - m % 5
            share = float(weights[extra + n, extra + m])
            total += share
            far += share * PATCH * (rows**2 + columns**2) ** 0.5
        reach.append(far / total)
    return np.mean(reach)


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_distances_are_those_of_loops_over_pairs(extra):
    maps = [drawn(2, 3, 15 + extra, 15 + extra) ** p for p in (1, 2)]
    found = attention.distances(iter(maps), GRID, PATCH, extra)
    wanted = [
        [[by_loops(h, extra) for h in maps[i][b]] for i in (0, 1)] for b in (0, 1)
    ]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    mean = attention.distance(maps, GRID, PATCH, extra)
    np.testing.assert_allclose(mean, np.mean(wanted, 0), rtol=1e-5)


def test_uniform_attention_reaches_the_mean_distance_of_all_pairs():
    maps = [jnp.full((2, 3, 16, 16), 1 / 16)]
    between = attention.between_patches(GRID, PATCH)
    assert between.max() == pytest.approx(PATCH * (4 + 16) ** 0.5)
    np.testing.assert_allclose(
        attention.distance(maps, GRID, PATCH, 1), np.full((1, 3), between.mean()), 1e-5
    )


def test_who_looks_at_itself_or_one_aside_looks_that_far():
    itself = jnp.eye(16)[None, None]
    assert attention.distance([itself], GRID, PATCH, 1) == 0
    aside = np.zeros((15, 15), np.float32)
    for n in range(15):
        aside[n, n + 1 if n % 5 < 4 else n - 1] = 1
    assert attention.distance([jnp.array(aside)[None, None]], GRID, PATCH, 0) == PATCH


def test_patches_that_look_at_no_patch_have_no_distance():
    weights = np.zeros((1, 1, 16, 16), np.float32)
    weights[..., 0] = 1  # All look at the class token
    assert attention.distance([jnp.array(weights)], GRID, PATCH, 1) == 0
    weights[0, 0, 1, [0, 2]] = 0.5  # but one, which sees its neighbour too.
    assert attention.distance([jnp.array(weights)], GRID, PATCH, 1) == PATCH


def test_batches_average_to_all_images(network):
    model, params, images = network

    def distances(images):
        maps = attention.maps(model, params, images)
        return attention.distances(maps, model.grid, model.patch, model.extra)

    whole = distances(images)
    parts = np.concatenate([distances(images[:1]), distances(images[1:])])
    assert whole.shape == (2, 3, 2)
    np.testing.assert_allclose(parts, whole, rtol=1e-4)
    mean = attention.distance(attention.maps(model, params, images), GRID, PATCH, 1)
    np.testing.assert_allclose(mean, whole.mean(0), rtol=1e-5)


@pytest.mark.parametrize(
    "follow",
    [
        rollout.rollout,
        lambda maps: attention.distance(maps, GRID, PATCH, 1),
    ],
    ids=["rollout", "distance"],
)
def test_no_layer_is_alive_while_the_next_is_computed(network, follow, monkeypatch):
    model, params, images = network
    alive, run = [], parts.run

    def watched(*args):
        shapes = [array.shape for array in jax.live_arrays()]
        alive.append(shapes.count((2, 2, 16, 16)))
        return run(*args)

    monkeypatch.setattr(parts, "run", watched)
    gc.collect()  # Of earlier tests.
    follow(attention.maps(model, params, images))
    assert alive == [0] * 3


def test_any_layer_head_and_query_can_be_asked_for(network):
    model, params, images = network
    _, weights, _ = plain_vit.forward(params, images[1], patch=4, heads=2)
    for layer, query, head in ((0, 0, 1), (1, 9, 0), (2, 15, None), (-1, 15, None)):
        found = attention.of_query(
            model, params, images, layer=layer, query=query, head=head
        )
        wanted = jnp.stack(weights[layer])[:, query]
        wanted = wanted.mean(0) if head is None else wanted[head]
        np.testing.assert_allclose(found[1], wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layer": 3}, "layer=3 is not one of the 3 of the model: .* from -3 to 2"),
        ({"layer": -4}, "layer=-4 is not one of the 3"),
        ({"layer": 0, "query": 16}, "query=16 is not one of the 16"),
        ({"layer": 0, "head": 2}, "head=2 is not one of the 2 .* from 0 to 1"),
    ],
)
def test_what_is_not_there_is_refused(network, choice, message):
    with pytest.raises(UserError, match=message):
        attention.of_query(*network, **choice)


def test_a_resnet_has_no_attention():
    resnet = models.create("R50x1", classes=5, image_size=(32, 32))
    images = jnp.zeros((1, 32, 32, 3))
    with pytest.raises(UserError, match="a ResNet has no attention"):
        attention.maps(resnet, {}, images)
    with pytest.raises(UserError, match="a ResNet has no attention"):
        attention.of_query(resnet, {}, images, layer=0)
