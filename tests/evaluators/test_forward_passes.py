import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import draw_params, tiny_config

from vit_jax import models
from vit_jax.config import fields
from vit_jax.data import pipeline
from vit_jax.data.sources.base import Source
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError
from vit_jax.evaluators import classification, forward_passes
from vit_jax.evaluators.forward_passes import Wanted
from vit_jax.models.layers import MODEL_AXES

EXAMPLES = 37  # Not a multiple of the batch, nor of the devices.
ALLOWED = (1, 2, 4, 6)
ALL = Wanted(features=True, predictions=True, losses=True, restricted=ALLOWED)


@pytest.fixture(scope="module")
def setting():
    data = {"num_classes": 7, "num_examples": EXAMPLES}
    config = tiny_config(data=data, model={"mlp_dim": 24})
    model = models.create(
        **fields.to_dict(config.model), num_classes=7, image_size=(8, 12)
    )
    params = draw_params(model)
    params["head"]["kernel"] = jax.random.normal(jax.random.key(1), (12, 7))
    return config, model, params, open_source(config.data, "val")


def collect(setting, params=None, wanted=ALL, source=None, **sizes):
    config, model, own, default = setting
    mesh = meshes.create(
        MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())]
    )
    shardings = sharding.parameters(own, mesh, MODEL_AXES, min_size=60)
    params = params or {"params": own}
    step = forward_passes.make_eval_step(model, config.data, mesh, wanted, shardings)
    with pipeline.eval_batches(source or default, config.data, batch_size=8) as batches:
        placed = {name: jax.device_put(x, shardings) for name, x in params.items()}
        return forward_passes.collect_outputs(step, placed, batches, mesh)


def direct(setting):
    """Returns features and logits of all images, of one plain call."""
    _, model, params, source = setting
    images = jnp.asarray(source.images.astype(np.float32) / 127.5 - 1)
    outputs = jax.jit(model.apply)(params, images)
    return np.asarray(outputs["pre_logits"]), np.asarray(outputs["logits"], np.float64)


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "model": 3},
        pytest.param({"data": 2, "fsdp": 4}, marks=pytest.mark.slow),
    ],
)
def test_each_example_counts_once_on_any_mesh(setting, sizes):
    features, logits = direct(setting)
    labels = setting[-1].labels
    found = collect(setting, **sizes)["params"]
    assert {type(value) for value in jax.tree.leaves(found)} == {np.ndarray}
    np.testing.assert_array_equal(found.records, np.arange(EXAMPLES))
    np.testing.assert_array_equal(found.labels, labels)
    assert found.features.dtype == np.float32
    np.testing.assert_allclose(found.features, features, atol=1e-5)
    order = np.argsort(-logits, axis=1)
    np.testing.assert_array_equal(found.predictions.tops, order[:, :5])
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(found.predictions.confidence, chances.max(1), rtol=1e-5)
    loss = -np.log(chances[np.arange(EXAMPLES), labels])
    np.testing.assert_allclose(found.predictions.losses, loss, rtol=1e-5)
    # The same with the other logits left out.
    best = np.array(ALLOWED)[np.argsort(-logits[:, ALLOWED], axis=1)]
    np.testing.assert_array_equal(found.restricted.tops, best)
    part = chances[:, ALLOWED] / chances[:, ALLOWED].sum(1, keepdims=True)
    np.testing.assert_allclose(found.restricted.confidence, part.max(1), rtol=1e-5)
    rows = np.flatnonzero(np.isin(labels, ALLOWED))
    missed = -np.log(part[rows, np.searchsorted(ALLOWED, labels[rows])])
    np.testing.assert_allclose(found.restricted.losses[rows], missed, rtol=1e-4)

    scores = classification.score(found, 7).metrics
    assert scores["examples"] == EXAMPLES
    assert scores["top1"] == pytest.approx((order[:, 0] == labels).mean(), abs=1e-9)
    top5 = (order[:, :5] == labels[:, None]).any(1).mean()
    assert scores["top5"] == pytest.approx(top5, abs=1e-9)
    assert scores["loss"] == pytest.approx(loss.mean(), rel=1e-5)


def test_sets_of_parameters_are_taken_side_by_side(setting):
    _, _, params, _ = setting
    zeros = jax.tree.map(jnp.zeros_like, params)
    found = collect(setting, {"params": params, "ema": zeros}, data=1)
    np.testing.assert_allclose(found["ema"].predictions.losses, np.log(7), rtol=1e-6)
    losses = [found[name].predictions.losses for name in ("params", "ema")]
    assert (losses[0] != losses[1]).all()
    assert not found["ema"].features.any()


def test_only_what_is_wanted_is_computed(setting):
    found = collect(setting, wanted=Wanted(features=True), data=1)["params"]
    assert found.features is not None
    assert found.predictions is found.logits is found.restricted is None
    found = collect(setting, wanted=Wanted(predictions=True), data=1)["params"]
    assert found.predictions is not None
    assert found.features is found.predictions.losses is None


def test_a_model_without_a_head_gives_features(setting):
    config, _, params, source = setting
    model = models.create(
        **fields.to_dict(config.model), num_classes=0, image_size=(8, 12)
    )
    bare = {name: value for name, value in params.items() if name != "head"}
    found = collect((config, model, bare, source), wanted=Wanted(features=True), data=1)
    expected = collect(setting, wanted=Wanted(features=True), data=1)
    np.testing.assert_array_equal(found["params"].features, expected["params"].features)


def test_a_damaged_image_is_left_out(setting):
    config, *rest, source = setting

    class Torn(Source):
        class_names, images, labels = (), None, None

        def __len__(self):
            return EXAMPLES

        def __getitem__(self, i):
            image = b"torn" if i in (0, 30) else source.images[i]
            return {"image": image, "label": int(source.labels[i])}

        def describe(self, i):
            return f"record {i}"

        record_id = describe

    skipping = fields.replace(config, {"data.on_error": "skip"})
    found = collect((skipping, *rest, source), source=Torn(), data=1)["params"]
    whole = collect(setting, data=1)["params"]
    kept = np.delete(np.arange(EXAMPLES), (0, 30))
    np.testing.assert_array_equal(found.records, kept)
    jax.tree.map(
        lambda some, all: np.testing.assert_array_equal(some, all[kept]), found, whole
    )


def test_a_pass_can_be_abandoned_and_is_not_empty(setting):
    config, model, params, source = setting
    mesh = meshes.create(MeshConfig(data=1), jax.devices()[:1])
    asked = iter([False, False, True])
    step = forward_passes.make_eval_step(model, config.data, mesh, ALL)
    arguments = step, {"params": params}
    with pipeline.eval_batches(source, config.data, batch_size=8) as batches:
        found = forward_passes.collect_outputs(
            *arguments, batches, mesh, stop=lambda: next(asked)
        )
    assert found is None
    with pytest.raises(UserError, match="no example"):
        forward_passes.collect_outputs(*arguments, [], mesh)
