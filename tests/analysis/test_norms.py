"""Lengths of tokens, against sorted ones."""

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.analysis import norms
from vit_jax.errors import UserError


def test_lengths_are_euclidean():
    tokens = jnp.array([[[3.0, 4.0], [0, -2]], [[0, 0], [1, 1]]])
    np.testing.assert_allclose(norms.lengths(tokens), [[5, 2], [0, 2**0.5]])


def test_quantiles_of_batches_are_those_of_all_lengths():
    rng = np.random.default_rng(1)
    lengths = rng.lognormal(2, 1, (3, 5, 40, 7))  # Batches, layers, images, patches.
    found = norms.Distribution()
    for batch in lengths:
        found.add(list(batch))
    wanted = np.quantile(np.moveaxis(lengths, 1, 0).reshape(5, -1), norms.QUANTILES, 1)
    np.testing.assert_allclose(found.quantiles(), wanted.T, rtol=0.1)
    np.testing.assert_allclose(found.quantiles((0.5,))[:, 0], wanted[2], rtol=0.025)
    np.testing.assert_allclose(found.longest(), lengths.max((0, 2, 3)))


def test_few_long_tokens_among_equal_ones_are_seen():
    of_layer = np.full((4, 50), 10.0)
    of_layer[:, 3] = 200
    found = norms.Distribution()
    found.add([of_layer, np.full((4, 50), 10.0)])
    np.testing.assert_allclose(found.beyond(), [0.02, 0])
    low, high = found.quantiles((0.5, 0.999))[0]
    assert low == pytest.approx(10, rel=0.03)
    assert high == pytest.approx(200, rel=0.03)
    np.testing.assert_array_equal(found.longest(), [200, 10])


def test_zeros_and_giants_have_their_place():
    found = norms.Distribution()
    found.add([np.array([[0.0, 0.0, 1e30]])])
    low, high = found.quantiles((0.5, 1.0))[0]
    assert low < 1e-5 and high > 1e6
    assert found.longest()[0] == 1e30


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_lengths_that_diverged_are_refused(value):
    found = norms.Distribution()
    with pytest.raises(UserError, match="a token after layer 2 is not finite"):
        found.add([np.ones((1, 3)), np.array([[1.0, value, 2.0]])])


def test_without_images_there_is_nothing_to_tell():
    with pytest.raises(UserError, match="there are no images whose tokens"):
        norms.Distribution().quantiles()
