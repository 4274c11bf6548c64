"""CKA against its definition by quadruples of images, token norms against sorting."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.analysis import representations
from vit_jax.analysis.representations import MinibatchCKA, NormHistogram, gram_matrix
from vit_jax.errors import UserError


def features(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_linear_cka_is_the_alignment_of_centred_gram_matrices():
    x, y = features(7, 4), features(7, 3, seed=2) + 5
    y[:, 0] += 2 * x[:, 1]
    middle = np.eye(7) - 1 / 7
    k, l = (middle @ v @ v.T @ middle for v in (x, y))
    wanted = np.trace(k @ l) / np.sqrt(np.trace(k @ k) * np.trace(l @ l))
    assert representations.linear_cka(x, y) == pytest.approx(wanted, rel=1e-5)
    turn, _ = np.linalg.qr(features(4, 4, seed=2))
    assert representations.linear_cka(x, 3 * x @ turn + 2) == pytest.approx(1, rel=1e-5)
    assert representations.linear_cka(x, np.ones((7, 2), np.float32)) == 0


def test_hsic_without_bias_is_the_mean_over_quadruples_of_images():
    x, y = features(6, 4), features(6, 3, seed=2)
    k, l = gram_matrix(x), gram_matrix(y)
    # Song et al., equation 4: all quadruples of different images.
    terms = [
        k[i, j] * (l[i, j] + l[q, r] - 2 * l[i, q])
        for i, j, q, r in itertools.permutations(range(6), 4)
    ]
    assert representations.unbiased_hsic(k, l) == pytest.approx(
        np.mean(terms), rel=1e-5
    )


def test_pairs_of_layers_of_one_and_of_two_networks():
    x, y, z = features(20, 3, 4), features(20, 5, seed=2), features(20, 2, 2, seed=3)
    one, other = (
        [gram_matrix(x), gram_matrix(y)],
        [gram_matrix(z), gram_matrix(x), gram_matrix(y)],
    )
    found = MinibatchCKA()
    found.update(one, one)
    assert found.num_images == 20
    table = found.compute()
    np.testing.assert_allclose(np.diag(table), 1, rtol=1e-6)
    np.testing.assert_allclose(table, table.T, rtol=1e-6)
    assert abs(table[0, 1]) < 0.3  # They are independent.
    across = MinibatchCKA()
    across.update(one, other)
    assert across.compute().shape == (2, 3)
    np.testing.assert_allclose(across.compute()[:, 1:], table, atol=1e-6)


def test_batches_come_near_to_what_all_images_give_whatever_their_size():
    x = features(400, 6)
    y = x[:, :3] + 0.5 * features(400, 3, seed=2)
    wanted = representations.linear_cka(x, y)
    for size in (8, 50, 130):
        found = MinibatchCKA()
        for start in range(0, 400 - size + 1, size):
            part = slice(start, start + size)
            grams = [gram_matrix(x[part]), gram_matrix(y[part])]
            found.update(grams, grams)
        assert found.compute()[0, 1] == pytest.approx(wanted, abs=0.04)


def test_a_layer_that_is_the_same_for_all_images_is_like_no_other():
    grams = [gram_matrix(features(8, 3)), gram_matrix(np.full((8, 3), 1e4, np.float32))]
    found = MinibatchCKA()
    found.update(grams, grams)
    np.testing.assert_allclose(found.compute(), [[1, 0], [0, 0]], atol=1e-6)


def test_too_few_images_for_cka_are_refused():
    few = [gram_matrix(features(3, 2))]
    with pytest.raises(
        UserError, match="images=3: too few to compare layers .* give 4 or more"
    ):
        MinibatchCKA().update(few, few)
    with pytest.raises(UserError, match="images=0: too few to compare layers"):
        MinibatchCKA().compute()


def test_token_norms_are_euclidean():
    tokens = jnp.array([[[3.0, 4.0], [0, -2]], [[0, 0], [1, 1]]])
    np.testing.assert_allclose(
        representations.token_norms(tokens), [[5, 2], [0, 2**0.5]]
    )


def test_quantiles_of_batches_are_those_of_all_norms():
    rng = np.random.default_rng(1)
    norms = rng.lognormal(2, 1, (3, 5, 40, 7))  # Batches, layers, images, patches.
    found = NormHistogram()
    for batch in norms:
        found.update(list(batch))
    wanted = np.quantile(
        np.moveaxis(norms, 1, 0).reshape(5, -1), representations.QUANTILES, 1
    )
    np.testing.assert_allclose(found.quantiles(), wanted.T, rtol=0.1)
    np.testing.assert_allclose(found.quantiles((0.5,))[:, 0], wanted[2], rtol=0.025)
    np.testing.assert_allclose(found.max(), norms.max((0, 2, 3)))


def test_a_few_large_norms_among_equal_ones_are_outliers():
    of_layer = np.full((4, 50), 10.0)
    of_layer[:, 3] = 200
    found = NormHistogram()
    found.update([of_layer, np.full((4, 50), 10.0)])
    np.testing.assert_allclose(found.outlier_fraction(), [0.02, 0])
    low, high = found.quantiles((0.5, 0.999))[0]
    assert low == pytest.approx(10, rel=0.03)
    assert high == pytest.approx(200, rel=0.03)
    np.testing.assert_array_equal(found.max(), [200, 10])


def test_norms_beyond_the_bins_are_counted_at_the_ends():
    found = NormHistogram()
    found.update([np.array([[0.0, 0.0, 1e30]])])
    low, high = found.quantiles((0.5, 1.0))[0]
    assert low < 1e-5 and high > 1e6
    assert found.max()[0] == 1e30


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_norms_that_diverged_are_refused(value):
    found = NormHistogram()
    with pytest.raises(UserError, match="a token after layer 2 is not finite"):
        found.update([np.ones((1, 3)), np.array([[1.0, value, 2.0]])])
