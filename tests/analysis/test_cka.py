"""CKA, against its definition by pairs and quadruples of images."""

import itertools

import numpy as np
import pytest

from vit_jax.analysis import cka
from vit_jax.errors import UserError


def features(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_linear_is_the_alignment_of_centred_gram_matrices():
    x, y = features(7, 4), features(7, 3, seed=2) + 5
    y[:, 0] += 2 * x[:, 1]
    middle = np.eye(7) - 1 / 7
    k, l = (middle @ v @ v.T @ middle for v in (x, y))
    wanted = np.trace(k @ l) / np.sqrt(np.trace(k @ k) * np.trace(l @ l))
    assert cka.linear(x, y) == pytest.approx(wanted, rel=1e-5)


def test_rotation_scale_and_shift_change_nothing():
    x = features(9, 5)
    turn, _ = np.linalg.qr(features(5, 5, seed=2))
    assert cka.linear(x, 3 * x @ turn + 2) == pytest.approx(1, rel=1e-5)
    assert cka.linear(x, np.ones((9, 2), np.float32)) == 0


def test_hsic_without_bias_is_the_mean_over_quadruples_of_images():
    x, y = features(6, 4), features(6, 3, seed=2)
    k, l = cka.gram(x), cka.gram(y)
    # Song et al., equation 4: all quadruples of different images.
    terms = [
        k[i, j] * (l[i, j] + l[q, r] - 2 * l[i, q])
        for i, j, q, r in itertools.permutations(range(6), 4)
    ]
    assert cka.unbiased_hsic(k, l) == pytest.approx(np.mean(terms), rel=1e-5)


def test_pairs_of_layers_of_one_and_of_two_networks():
    x, y, z = features(20, 3, 4), features(20, 5, seed=2), features(20, 2, 2, seed=3)
    one, other = [cka.gram(x), cka.gram(y)], [cka.gram(z), cka.gram(x), cka.gram(y)]
    found = cka.Alignment()
    found.add(one, one)
    assert found.images == 20
    table = found.result()
    np.testing.assert_allclose(np.diag(table), 1, rtol=1e-6)
    np.testing.assert_allclose(table, table.T, rtol=1e-6)
    assert abs(table[0, 1]) < 0.3  # They know nothing of each other.
    across = cka.Alignment()
    across.add(one, other)
    assert across.result().shape == (2, 3)
    np.testing.assert_allclose(across.result()[:, 1:], table, atol=1e-6)


def test_batches_come_near_to_what_all_images_give_whatever_their_size():
    x = features(400, 6)
    y = x[:, :3] + 0.5 * features(400, 3, seed=2)
    wanted = cka.linear(x, y)
    for size in (8, 50, 130):
        found = cka.Alignment()
        for start in range(0, 400 - size + 1, size):
            part = slice(start, start + size)
            grams = [cka.gram(x[part]), cka.gram(y[part])]
            found.add(grams, grams)
        assert found.result()[0, 1] == pytest.approx(wanted, abs=0.04)


def test_a_layer_that_is_the_same_for_all_images_is_like_no_other():
    grams = [cka.gram(features(8, 3)), cka.gram(np.full((8, 3), 1e4, np.float32))]
    found = cka.Alignment()
    found.add(grams, grams)
    np.testing.assert_allclose(found.result(), [[1, 0], [0, 0]], atol=1e-6)


def test_too_few_images_are_refused():
    few = [cka.gram(features(3, 2))]
    with pytest.raises(UserError, match="3 images are too few .* give 4 or more"):
        cka.Alignment().add(few, few)
    with pytest.raises(UserError, match="there are no images to compare layers by"):
        cka.Alignment().result()
