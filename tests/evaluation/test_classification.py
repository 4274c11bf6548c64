import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import config as configuration
from vit_jax import models
from vit_jax.data import pipeline, sources
from vit_jax.errors import UserError
from vit_jax.evaluation import classification
from vit_jax.parallel import mesh as meshes
from vit_jax.parallel import sharding

EXAMPLES = 37  # Not a multiple of the batch, nor of the devices.


@pytest.fixture(scope="module")
def setting():
    config = configuration.complete(
        {
            "batch_size": 8,
            "optim": {"rate": 1.0},
            "data": {
                "name": "made",
                "classes": 5,
                "examples": EXAMPLES,
                "image_size": (8, 12),
            },
            "model": {
                "variant": "Ti/4",
                "width": 12,
                "depth": 1,
                "heads": 3,
                "mlp_dim": 24,
            },
        }
    )
    model = models.create(**config.model, classes=5, image_size=(8, 12))
    params = model.init(jax.random.key(0))
    params["head"]["kernel"] = jax.random.normal(jax.random.key(1), (12, 5))
    return config, model, params, sources.open_source(config.data, "val")


def evaluate(setting, params=None, **sizes):
    config, model, own, source = setting
    mesh = meshes.create(sizes, jax.devices()[: math.prod(sizes.values())])
    shardings = sharding.parameters(own, mesh, smallest=60)
    params = params or {"raw": own}
    with pipeline.eval_batches(source, config.data, batch_size=8) as batches:
        return classification.evaluate(
            classification.build(model, config, mesh, shardings),
            {
                name: jax.device_put(values, shardings)
                for name, values in params.items()
            },
            batches,
            mesh,
        )


@pytest.mark.parametrize(
    "sizes", [{"data": 1}, {"data": 8}, {"data": 2, "fsdp": 4}, {"data": 2, "model": 3}]
)
def test_each_example_counts_once_on_any_mesh(setting, sizes):
    _, model, params, source = setting
    images = source.images.astype(np.float32) / 127.5 - 1
    logits = np.asarray(model.apply(params, jnp.asarray(images))["logits"], np.float64)
    chosen = logits[np.arange(EXAMPLES), source.labels]
    expected_loss = (np.log(np.exp(logits).sum(1)) - chosen).mean()
    expected_top1 = (logits.argmax(1) == source.labels).mean()

    scores = evaluate(setting, **sizes)["raw"]
    assert scores["examples"] == EXAMPLES
    assert scores["top1"] == pytest.approx(expected_top1, abs=1e-7)
    assert scores["loss"] == pytest.approx(expected_loss, rel=1e-5)


def test_sets_of_parameters_are_scored_side_by_side(setting):
    _, _, params, _ = setting
    zeros = jax.tree.map(jnp.zeros_like, params)
    scores = evaluate(setting, {"raw": params, "ema": zeros}, data=1)
    assert scores["ema"]["loss"] == pytest.approx(np.log(5), rel=1e-6)
    assert scores["raw"]["loss"] != scores["ema"]["loss"]


def test_an_evaluation_can_be_abandoned(setting):
    config, model, params, source = setting
    mesh = meshes.create({"data": 1}, jax.devices()[:1])
    asked = iter([False, False, True])
    with pipeline.eval_batches(source, config.data, batch_size=8) as batches:
        scores = classification.evaluate(
            classification.build(model, config, mesh),
            {"raw": params},
            batches,
            mesh,
            stop=lambda: next(asked),
        )
    assert scores is None


def test_an_empty_evaluation_is_refused(setting):
    config, model, params, _ = setting
    mesh = meshes.create({"data": 1}, jax.devices()[:1])
    step = classification.build(model, config, mesh)
    with pytest.raises(UserError, match="no example"):
        classification.evaluate(step, {"raw": params}, [], mesh)
