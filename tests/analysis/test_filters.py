"""Principal components of filters, against the covariance's eigenvectors."""

import numpy as np
import pytest

from vit_jax.analysis import filters
from vit_jax.errors import UserError


@pytest.fixture
def kernels():
    rng = np.random.default_rng(1)
    mixing = np.diag(np.geomspace(9, 0.1, 24)) @ rng.standard_normal((24, 40))
    return (mixing + 3).reshape(2, 4, 3, 40).astype(np.float32)


def test_they_are_eigenvectors_of_the_covariance(kernels):
    found, share = filters.components(kernels, 5)
    assert found.shape == (5, 2, 4, 3)
    values, vectors = np.linalg.eigh(np.cov(kernels.reshape(24, 40)))
    for component, part, value, vector in zip(
        found, share, values[::-1], vectors.T[::-1], strict=False
    ):
        assert abs(component.ravel() @ vector) == pytest.approx(1, abs=1e-4)
        assert part == pytest.approx(value / values.sum(), rel=1e-4)
        assert component.ravel()[abs(component).argmax()] > 0


def test_filters_of_two_patterns_have_those_two():
    one, other = np.eye(24)[[3, 17]]
    weights = np.array([[3, -3, 0, 0], [0, 0, 1, -1.0]])
    kernels = (one[:, None] * weights[0] + other[:, None] * weights[1]) + 7
    found, share = filters.components(kernels.reshape(2, 4, 3, 4).astype(np.float32))
    assert len(found) == 4
    np.testing.assert_allclose(found[0].ravel(), one, atol=1e-6)
    np.testing.assert_allclose(found[1].ravel(), other, atol=1e-6)
    np.testing.assert_allclose(share, [0.9, 0.1, 0, 0], atol=1e-6)


def test_equal_filters_have_nothing_to_explain():
    _, share = filters.components(np.full((2, 2, 1, 5), 0.1, np.float32))
    assert not share.any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_filters_that_diverged_are_refused(kernels, value):
    kernels[1, 2, 0, 7] = value
    with pytest.raises(UserError, match="the first kernel is not finite: the checkpoi"):
        filters.components(kernels)


def test_nothing_is_the_middle_grey_of_a_tile():
    pattern = np.array([[[[0.0], [0.2]], [[-0.4], [0.1]]], np.zeros((2, 2, 1))])
    tiles = filters.tiles(pattern.astype(np.float32))
    np.testing.assert_allclose(tiles[0].ravel(), [0.5, 0.75, 0, 0.625], atol=1e-6)
    np.testing.assert_array_equal(tiles[1], 0.5)


@pytest.mark.parametrize(
    "params",
    [
        lambda leaf, other: {"embedding": {"kernel": leaf}},
        lambda leaf, other: {
            "embedding": {"kernel": other},
            "conv_root": {"kernel": leaf},
        },
        lambda leaf, other: {"root_block": {"conv_root": {"kernel": leaf}}},
    ],
    ids=["vit", "hybrid", "resnet"],
)
def test_the_filters_are_those_that_see_pixels(params, kernels):
    found = filters.kernels(params(kernels, np.zeros((1, 1, 64, 5))))
    np.testing.assert_array_equal(found, kernels)
