"""Similarity of position embeddings, against loops over pairs of patches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models
from vit_jax.analysis import positions
from vit_jax.errors import UserError
from vit_jax.models.positions import AddPositions

Y, X, D = 2, 3, 12


def drawn(**options):
    options = {"width": D, "depth": 2, "heads": 3, "mlp_dim": 5} | options
    model = models.create("B/4", classes=5, image_size=(4 * Y, 4 * X), **options)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(3)
    leaves = [rng.standard_normal(leaf.shape, np.float32) for leaf in leaves]
    return model, jax.tree.unflatten(tree, leaves)


def cosine(a, b):
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize("kind", ["learned", "learned2d", "sincos2d"])
@pytest.mark.parametrize("place", ["stem", "every", "shared"])
def test_it_is_the_cosine_of_what_is_added_to_patches(kind, place):
    model, params = drawn(posemb=kind, posemb_at=place)
    for layer in (0, 1):
        name = f"posembed_{layer if place == 'every' else 'input'}"
        own = params["Transformer"].get(name, {})
        add = AddPositions(kind, (Y, X), 1)
        added = add.apply(
            {"params": jax.tree.map(jnp.asarray, own)}, jnp.zeros((1, 1 + Y * X, D))
        )
        table = np.asarray(added)[0, 1:].reshape(Y, X, D)
        found = positions.similarity(model, params, layer)
        for y, x, v, u in np.ndindex(Y, X, Y, X):
            wanted = cosine(table[y, x], table[v, u])
            assert found[y, x, v, u] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("place", ["every", "shared"])
def test_of_relative_positions_it_is_the_cosine_to_the_offset_of_itself(place):
    model, params = drawn(posemb="relative", posemb_at=place)
    for layer in (0, 1):
        name = "relative_embedding" + (f"_{layer}" if place == "every" else "")
        keys = params["Transformer"][name]
        found = positions.similarity(model, params, layer)
        for y, x, v, u in np.ndindex(Y, X, Y, X):
            # Entry n - m + N - 1 of the keys, N = 7 with the class token.
            at = (y * X + x) - (v * X + u) + 6
            wanted = np.mean([cosine(keys[h, at], keys[h, 6]) for h in range(3)])
            assert found[y, x, v, u] == pytest.approx(wanted, abs=1e-5)


def test_orthogonal_embeddings_are_alike_with_themselves_alone():
    model, params = drawn()
    table = np.concatenate([np.ones((1, D)), 3 * np.eye(Y * X, D)])[None]
    table[0, 3] = 0  # Nothing is like it.
    params["Transformer"]["posembed_input"]["pos_embedding"] = table
    found = positions.similarity(model, params).reshape(Y * X, Y * X)
    wanted = np.eye(Y * X)
    wanted[2, 2] = 0
    np.testing.assert_allclose(found, wanted, atol=1e-7)


def test_two_tokens_in_front_are_left_out():
    model, params = drawn(distillation=True)
    params["Transformer"]["posembed_input"]["pos_embedding"][0, :2] = np.nan
    assert np.isfinite(positions.similarity(model, params)).all()


@pytest.mark.parametrize("kind", ["learned", "relative"])
def test_embeddings_that_diverged_are_refused(kind):
    model, params = drawn(posemb=kind, posemb_at="shared")
    encoder = params["Transformer"]
    if kind == "learned":
        encoder["posembed_input"]["pos_embedding"][0, 3, 2] = np.nan
    else:
        encoder["relative_embedding"][1, 2, 0] = np.inf
    with pytest.raises(UserError, match="the position embedding is not finite: the ch"):
        positions.similarity(model, params)


def test_where_there_are_none_it_says_so():
    model, params = drawn(posemb="none")
    with pytest.raises(UserError, match=r"B/4 has no position embeddings"):
        positions.similarity(model, params)
    resnet = models.create("R50x1", classes=5, image_size=(32, 32))
    with pytest.raises(UserError, match="R50x1 has no position embeddings"):
        positions.similarity(resnet, {})
    with pytest.raises(UserError, match="layer=2 is not one of the 2"):
        positions.similarity(*drawn(), 2)
