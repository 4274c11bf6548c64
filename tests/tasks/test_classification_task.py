import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
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
    actual = losses.sigmoid(LOGITS, losses.one_hot(LABELS, 3)).sum(1)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_sigmoid_with_a_bias_of_minus_ten_starts_near_ten():
    """Why the head bias: 21,843 classes at logit 0 would start at 15,140."""
    labels = losses.one_hot(jnp.array([5]), 21_843)
    loss = losses.sigmoid(jnp.full((1, 21_843), -10.0), labels)
    assert loss[0].sum() == pytest.approx(10 + 21_843 * np.exp(-10.0), rel=1e-3)


def focal(p, y):
    """Equation 5 of arXiv:1708.02002, with gamma of 2 and alpha of 0.25."""
    p, alpha = np.where(y == 1, p, 1 - p), np.where(y == 1, 0.25, 0.75)
    return -alpha * (1 - p) ** 2 * np.log(p)


def asymmetric(p, y):
    """arXiv:2009.14119 with exponents of 0 and 4, and a margin of 0.05."""
    shifted = np.maximum(p - 0.05, 0)
    return np.where(y == 1, -np.log(p), -(shifted**4) * np.log(1 - shifted))


@pytest.mark.parametrize("loss", [focal, asymmetric])
def test_losses_of_easy_classes_are_those_of_the_papers(loss):
    logits = jnp.linspace(-9, 9, 30).reshape(6, 5)
    y = np.arange(30).reshape(6, 5) % 3 % 2
    expected = loss(1 / (1 + np.exp(-np.asarray(logits, np.float64))), y)
    labels = jnp.asarray(y, jnp.float32)
    model = models.create("Ti/4", num_classes=5, image_size=(8, 8), depth=1, width=12)
    config = losses.ClassificationConfig(loss=loss.__name__)
    data = DataConfig(num_classes=5, multi_label=True)
    task = config.build(model, data, RunLength(1, 1.0))
    of = lambda logits: task.base_loss(logits, {"label": labels})
    assert float(of(logits)) == pytest.approx(expected.sum(1).mean(), rel=1e-4)
    assert np.isfinite(jax.grad(of)(10 * logits)).all()
    # Without exponents and margin it is the sum of binary cross-entropies.
    plain = {
        "asymmetric": {"gamma_neg": 0.0, "clip": 0.0},
        "focal": {"focal_gamma": 0.0},
    }
    config = losses.ClassificationConfig(loss=loss.__name__, **plain[loss.__name__])
    terms = losses.SIGMOID_LOSSES[loss.__name__](logits, labels, config)
    weights = np.where(y == 1, 0.25, 0.75) if loss is focal else 1.0
    np.testing.assert_allclose(
        terms, weights * np.asarray(losses.sigmoid(logits, labels)), rtol=1e-5
    )


def test_smoothing_spreads_the_given_share():
    smooth = losses.smooth(losses.one_hot(LABELS, 3), 0.3)
    np.testing.assert_allclose(smooth[0], [0.1, 0.1, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(
        losses.smooth(losses.one_hot(LABELS, 3), 0.0), losses.one_hot(LABELS, 3)
    )


def test_f1_counts_probabilities_and_labels_above_one_half():
    logits = jnp.array([[0.2, -0.2], [0.4, -3.0]])
    labels = jnp.array([[0.6, 0.4], [0.0, 1.0]])
    # Two are predicted, two are there, one is both.
    assert float(losses.f1(logits, labels).value) == pytest.approx(2 * 1 / (2 + 2))


def test_mixed_images_have_two_classes_above_a_threshold():
    model = models.create("Ti/4", num_classes=3, image_size=(8, 8), depth=1, width=12)
    labels, data = jnp.array([[0.7, 0.3, 0.0]]), DataConfig(num_classes=3)

    def loss(**keys):
        config = losses.ClassificationConfig(loss="sigmoid", **keys)
        task = config.build(model, data, RunLength(1, 1.0))
        return float(task.base_loss(LOGITS[:1], {"label": labels}))

    for threshold, target in ((0.0, [1, 1, 0]), (0.5, [1, 0, 0])):
        expected = losses.sigmoid(LOGITS[:1], jnp.array([target], float)).sum()
        assert loss(target_threshold=threshold) == pytest.approx(float(expected))
    assert loss() == pytest.approx(float(losses.sigmoid(LOGITS[:1], labels).sum()))


def test_loss_smoothing_weights_and_threshold_act_together():
    """Each product of the four keys against the definition in float64."""
    model = models.create("Ti/4", num_classes=3, image_size=(8, 8), depth=1, width=12)
    labels = np.array([[0.7, 0.3, 0.0], [0.0, 0.45, 0.55]])
    x, data = np.asarray(LOGITS, np.float64), DataConfig(num_classes=3)
    p, rest = 1 / (1 + np.exp(-x)), 1 / (1 + np.exp(x))
    log_softmax = x - np.log(np.exp(x).sum(1, keepdims=True))
    seen = set()
    for loss, smoothing, weights, threshold in itertools.product(
        ("softmax", "sigmoid"), (0.0, 0.3), ((1.0,), (0.5, 4.0, 2.0)), (None, 0.0, 0.5)
    ):
        y = labels
        if loss == "sigmoid" and threshold is not None:
            y = (labels > threshold) * 1.0
        y = (1 - smoothing) * y + smoothing / 3
        w = np.ones(3) if weights == (1.0,) else np.array(weights)
        if loss == "sigmoid":
            expected = (-(y * np.log(p) + (1 - y) * np.log(rest)) * w).sum(1).mean()
        else:  # A weighted mean of images, by their labels before smoothing.
            of_image = labels @ w
            expected = (-(y * log_softmax).sum(1) * of_image).sum() / of_image.sum()
        config = losses.ClassificationConfig(
            loss=loss,
            label_smoothing=smoothing,
            class_weights=weights,
            target_threshold=threshold,
        )
        task = config.build(model, data, RunLength(1, 1.0))
        batch = {"label": jnp.asarray(labels, jnp.float32)}
        if loss == "softmax" and len(weights) > 1:
            batch["weight"] = task.image_weights(batch["label"])
        found = float(task.base_loss(LOGITS, batch))
        assert found == pytest.approx(expected, rel=1e-5), config
        seen.add(round(expected, 6))
    assert len(seen) == 4 + 3 * 4  # Softmax knows no threshold.


def test_mixup_takes_the_image_before_the_copies():
    model = models.create("Ti/4", num_classes=6, image_size=(4, 4), depth=1, width=12)
    data = DataConfig(
        image_size=(4, 4), num_classes=6, train_transform="mixup(1.0)", repeats=3
    )
    task = losses.ClassificationConfig().build(model, data, RunLength(1, 1.0))
    batch = {
        "image": jnp.zeros((6, 4, 4, 3), jnp.uint8),
        "label": jnp.repeat(jnp.array([1, 4]), 3),
        "index": jnp.arange(6, dtype=jnp.uint32),
    }
    label = jax.jit(task.prepare)(batch, jax.random.key(0))["label"]
    assert ((label[:, 1] > 0) & (label[:, 1] < 1)).all()
    np.testing.assert_allclose(label[:, 1] + label[:, 4], 1, atol=1e-6)
