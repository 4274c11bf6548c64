"""The linear probe: BatchNorm and classifier as PyTorch's; its runs: test_lora.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.tasks.linear_probe import LinearProbeConfig

SIZE = {"width": 12, "depth": 1, "num_heads": 3, "mlp_dim": 20}
RUN = RunLength(4, 1.0)


def build(num_classes=5, **options):
    data = DataConfig(image_size=(8, 12), num_classes=num_classes)
    model = models.create(
        "Ti/4", num_classes=num_classes, image_size=(8, 12), **SIZE | options
    )
    return LinearProbeConfig().build(model, data, RUN)


def batches(steps, count=9):
    """Yields features whose mean and scale differ, and labels."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        features = 3 * rng.normal(size=(count, 12)) * np.arange(1, 13) + 2
        labels = np.eye(5)[rng.integers(0, 5, count)]
        yield features.astype(np.float32), labels.astype(np.float32)


def by_hand(kernel, bias, steps, rate):
    """Trains BatchNorm1d(affine=False, eps=1e-6) and a linear map in float64."""
    mean, variance, losses = np.zeros(12), np.ones(12), []
    for features, labels in batches(steps):
        x = features.astype(np.float64)
        normal = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-6)
        logits = normal @ kernel + bias
        share = np.exp(logits - logits.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        losses.append(-(labels * np.log(share)).sum(1).mean())
        slope = (share - labels) / len(x)
        kernel, bias = kernel - rate * normal.T @ slope, bias - rate * slope.sum(0)
        mean = 0.9 * mean + 0.1 * x.mean(0)
        variance = 0.9 * variance + 0.1 * x.var(0, ddof=1)
    return kernel, bias, mean, variance, losses


def test_it_trains_as_batch_norm_and_a_linear_map():
    task, rate = build(), 0.5
    params, extra = jax.jit(task.init)(jax.random.key(0))
    head = jax.device_get(params["head"])
    assert 0.005 < head["kernel"].std() < 0.02 and not head["bias"].any()
    grad = jax.jit(jax.value_and_grad(task.probe_loss, has_aux=True))
    *expected, losses = by_hand(head["kernel"], head["bias"], 5, rate)
    found = []
    for step, batch in enumerate(batches(5), 1):
        features, labels = map(jnp.asarray, batch)
        (loss, (metrics, stats)), grads = grad(params, features, {"label": labels})
        assert metrics["loss"] == loss
        params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
        extra = task.update(extra, params, stats, step)
        found.append(float(loss))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    trained = params["head"]["kernel"], params["head"]["bias"]
    state = *trained, extra["mean"], extra["variance"]
    for one, other in zip(state, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_its_classifier_is_both_in_evaluation():
    """As BatchNorm with its running statistics, then the linear map."""
    task = build()
    params, extra = jax.jit(task.init)(jax.random.key(0))
    head = {"kernel": jnp.ones((12, 5)) * jnp.arange(5)[None], "bias": jnp.arange(5.0)}
    stats = {"mean": jnp.arange(12.0), "variance": jnp.arange(1.0, 13.0)}
    extra = task.update(extra, {"head": head}, stats, 1)
    images = jax.random.normal(jax.random.key(1), (3, 8, 12, 3))
    outputs = jax.jit(task.model.apply)(task.backbone(params, extra), images)
    x = outputs["pre_logits"] - 0.1 * jnp.arange(12.0)[None]
    x /= jnp.sqrt(0.9 + 0.1 * jnp.arange(1.0, 13.0) + 1e-6)[None]
    expected = x @ head["kernel"] + head["bias"][None]
    np.testing.assert_allclose(outputs["logits"], expected, rtol=1e-5, atol=1e-5)


def test_flops_are_of_a_forward_pass_and_the_classifier():
    task = build()
    assert task.training_flops() == cost.forward_flops(task.model) + 4 * 12 * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 0}, "data.num_classes=0 with task.name='linear_probe', which"),
        ({"distillation": True}, "model.distillation=True with task.name='linear"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(UserError, match=message) as error:
        build(**options)
    assert "\n" not in str(error.value)
