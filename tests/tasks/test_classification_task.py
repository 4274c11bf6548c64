import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.tasks import classification as losses

LOGITS = jnp.array([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]])
LABELS = jnp.array([2, 1])


def test_softmax_is_minus_the_log_probability():
    expected = np.log(np.exp(LOGITS).sum(1)) - np.array([0.5, 3.0])
    actual = losses.softmax(LOGITS, losses.one_hot(LABELS, 3))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_sigmoid_sums_the_binary_losses_of_all_classes():
    p = 1 / (1 + np.exp(-np.asarray(LOGITS)))
    y = np.eye(3)[np.asarray(LABELS)]
    expected = -(y * np.log(p) + (1 - y) * np.log(1 - p)).sum(1)
    actual = losses.sigmoid(LOGITS, losses.one_hot(LABELS, 3))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_sigmoid_with_a_bias_of_minus_ten_starts_near_ten():
    """Why the head bias: 21,843 classes at logit 0 would start at 15,140."""
    labels = losses.one_hot(jnp.array([5]), 21_843)
    loss = losses.sigmoid(jnp.full((1, 21_843), -10.0), labels)
    assert loss[0] == pytest.approx(10 + 21_843 * np.exp(-10.0), rel=1e-3)


def test_smoothing_spreads_the_given_share():
    smooth = losses.smooth(losses.one_hot(LABELS, 3), 0.3)
    np.testing.assert_allclose(smooth[0], [0.1, 0.1, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(
        losses.smooth(losses.one_hot(LABELS, 3), 0.0), losses.one_hot(LABELS, 3)
    )
