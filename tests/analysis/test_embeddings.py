"""Filters against the eigenvectors of their covariance, positions against loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from helpers import draw_params, slow_but

from vit_jax import models
from vit_jax.analysis import embeddings
from vit_jax.errors import UserError
from vit_jax.models.positions import EMBEDDINGS
from vit_jax.models.positions.added import Table

Y, X, D = 2, 3, 12


@pytest.fixture
def kernel():
    rng = np.random.default_rng(1)
    mixing = np.diag(np.geomspace(9, 0.1, 24)) @ rng.standard_normal((24, 40))
    return (mixing + 3).reshape(2, 4, 3, 40).astype(np.float32)


def test_components_are_eigenvectors_of_the_covariance(kernel):
    found, share = embeddings.principal_components(kernel, 5)
    assert found.shape == (5, 2, 4, 3)
    values, vectors = np.linalg.eigh(np.cov(kernel.reshape(24, 40)))
    for component, part, value, vector in zip(
        found, share, values[::-1], vectors.T[::-1], strict=False
    ):
        assert abs(component.ravel() @ vector) == pytest.approx(1, abs=1e-4)
        assert part == pytest.approx(value / values.sum(), rel=1e-4)
        assert component.ravel()[abs(component).argmax()] > 0


def test_filters_of_two_patterns_have_those_two():
    one, other = np.eye(24)[[3, 17]]
    weights = np.array([[3, -3, 0, 0], [0, 0, 1, -1.0]])
    kernel = (one[:, None] * weights[0] + other[:, None] * weights[1]) + 7
    found, share = embeddings.principal_components(
        kernel.reshape(2, 4, 3, 4).astype(np.float32)
    )
    assert len(found) == 4
    np.testing.assert_allclose(found[0].ravel(), one, atol=1e-6)
    np.testing.assert_allclose(found[1].ravel(), other, atol=1e-6)
    np.testing.assert_allclose(share, [0.9, 0.1, 0, 0], atol=1e-6)


def test_equal_filters_have_no_variance_to_explain():
    _, share = embeddings.principal_components(np.full((2, 2, 1, 5), 0.1, np.float32))
    assert not share.any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_filters_that_diverged_are_refused(kernel, value):
    kernel[1, 2, 0, 7] = value
    with pytest.raises(UserError, match="the first kernel is not finite: the checkpoi"):
        embeddings.principal_components(kernel)


def test_zero_is_mid_grey():
    pattern = np.array([[[[0.0], [0.2]], [[-0.4], [0.1]]], np.zeros((2, 2, 1))])
    tiles = embeddings.components_to_intensities(pattern.astype(np.float32))
    np.testing.assert_allclose(tiles[0].ravel(), [0.5, 0.75, 0, 0.625], atol=1e-6)
    np.testing.assert_array_equal(tiles[1], 0.5)


@pytest.mark.parametrize("name", ["embedding", "conv_root", "root_block/conv_root"])
def test_the_first_kernel_is_the_one_applied_to_pixels(name, kernel):
    params = {f"{name}/kernel": kernel}
    if name == "conv_root":  # Of a hybrid, whose embedding comes later.
        params["embedding/kernel"] = np.zeros((1, 1, 64, 5))
    found = embeddings.first_kernel(unflatten_dict(params, sep="/"))
    np.testing.assert_array_equal(found, kernel)


def random_model(**options):
    options = {"width": D, "depth": 2, "num_heads": 3, "mlp_dim": 5} | options
    model = models.create("B/4", num_classes=5, image_size=(4 * Y, 4 * X), **options)
    return model, jax.tree.map(np.array, draw_params(model))


def cosine(a, b):
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize(
    ("place", "kind"),
    slow_but(
        [("stem", "learned"), ("every", "sincos2d"), ("shared", "learned2d")],
        itertools.product(
            ("stem", "every", "shared"),
            ("learned", "learned2d", "sincos2d", "sincos2d_mae"),
        ),
    ),
)
def test_position_similarity_is_the_cosine_of_what_is_added_to_patches(kind, place):
    model, params = random_model(posemb=kind, posemb_placement=place)
    for layer in (0, 1):
        name = f"posembed_{layer if place == 'every' else 'input'}"
        own = params["Transformer"].get(name, {})
        added = Table(EMBEDDINGS[kind](model.config, (Y, X), 1))
        added = added.apply({"params": jax.tree.map(jnp.asarray, own)})
        table = np.asarray(added)[0, 1:].reshape(Y, X, D)
        found = embeddings.position_similarity(model, params, layer)
        for y, x, v, u in np.ndindex(Y, X, Y, X):
            wanted = cosine(table[y, x], table[v, u])
            assert found[y, x, v, u] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("place", ["every", "shared"])
def test_relative_position_similarity_is_the_cosine_to_offset_zero(place):
    model, params = random_model(posemb="relative", posemb_placement=place)
    for layer in (0, 1):
        name = "relative_embedding" + (f"_{layer}" if place == "every" else "")
        keys = params["Transformer"][name]
        found = embeddings.position_similarity(model, params, layer)
        for y, x, v, u in np.ndindex(Y, X, Y, X):
            # Entry n - m + N - 1 of the keys, N = 7 with the class token.
            at = (y * X + x) - (v * X + u) + 6
            wanted = np.mean([cosine(keys[h, at], keys[h, 6]) for h in range(3)])
            assert found[y, x, v, u] == pytest.approx(wanted, abs=1e-5)


def test_orthogonal_embeddings_are_similar_to_themselves_only():
    model, params = random_model()
    table = np.concatenate([np.ones((1, D)), 3 * np.eye(Y * X, D)])[None]
    table[0, 3] = 0  # Nothing is like it.
    params["Transformer"]["posembed_input"]["pos_embedding"] = table
    found = embeddings.position_similarity(model, params).reshape(Y * X, Y * X)
    wanted = np.eye(Y * X)
    wanted[2, 2] = 0
    np.testing.assert_allclose(found, wanted, atol=1e-7)


def test_prefix_tokens_are_left_out():
    model, params = random_model(distillation=True)
    params["Transformer"]["posembed_input"]["pos_embedding"][0, :2] = np.nan
    assert np.isfinite(embeddings.position_similarity(model, params)).all()


@pytest.mark.parametrize("kind", ["learned", "relative"])
def test_embeddings_that_diverged_are_refused(kind):
    model, params = random_model(posemb=kind, posemb_placement="shared")
    encoder = params["Transformer"]
    if kind == "learned":
        encoder["posembed_input"]["pos_embedding"][0, 3, 2] = np.nan
    else:
        encoder["relative_embedding"][1, 2, 0] = np.inf
    with pytest.raises(UserError, match="the position embedding is not finite: the ch"):
        embeddings.position_similarity(model, params)


def test_models_without_position_embeddings_or_such_a_layer_are_refused():
    model, params = random_model(posemb="none")
    with pytest.raises(UserError, match="posemb=none: B/4 has no position embeddings"):
        embeddings.position_similarity(model, params)
    resnet = models.create("R50x1", num_classes=5, image_size=(32, 32))
    with pytest.raises(UserError, match="R50x1 has no position embeddings"):
        embeddings.position_similarity(resnet, {})
    with pytest.raises(
        UserError, match="layer=2: out of range; choose a number from 0 to 1"
    ):
        embeddings.position_similarity(*random_model(), 2)
