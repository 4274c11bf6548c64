"""Test-time augmentation: which views are asked about, and what becomes of the answers."""

import jax
import numpy as np
import pytest
from helpers import draw_params, slow_but
from PIL import Image

from vit_jax import models
from vit_jax.data.preprocess import Preprocess
from vit_jax.evaluators import checkpoint, prediction
from vit_jax.evaluators.augmented import VIEWS, augment
from vit_jax.training import config as configuration
from vit_jax.weights.pretrained import Pretrained

SIZES = {"width": 24, "depth": 1, "num_heads": 2, "mlp_dim": 48}
HOW = Preprocess(image_size=(16, 24), crop_fraction=0.8)


def made(loss="softmax"):
    model = models.create(
        variant="Ti/8", num_classes=3, image_size=(16, 24), channels=3, **SIZES
    )
    params = jax.device_get(draw_params(model))
    names = ("a", "b", "c")
    return model, Pretrained(params, model.options, "vit_jax", "m", HOW, names, loss)


@pytest.mark.parametrize(
    ("views", "loss"),
    slow_but(
        [("flip", "softmax"), ("five_crops", "sigmoid")],
        zip(VIEWS, ("softmax", "sigmoid", "softmax"), strict=True),
    ),
)
def test_probabilities_are_the_mean_over_the_views(views, loss):
    model, found = made(loss)
    wide, how = augment(model, HOW, views, sigmoid=loss == "sigmoid")
    expected_size = (16, 24) if views == "flip" else (20, 30)
    assert how.image_size == expected_size == wide.image_shape[:2]
    images = jax.random.normal(jax.random.key(1), (2, *expected_size, 3))
    if views == "flip":
        cut = [images]
    else:
        corners = ((2, 3), (0, 0), (0, 6), (4, 0), (4, 6))
        cut = [images[:, t : t + 16, w : w + 24] for t, w in corners]
    if views != "five_crops":
        cut += [view[:, :, ::-1] for view in cut]
    act = jax.nn.sigmoid if loss == "sigmoid" else jax.nn.softmax
    apply = jax.jit(model.apply)
    one_by_one = [apply(found.params, view) for view in cut]
    mean = np.mean([act(each["logits"]) for each in one_by_one], axis=0)
    outputs = jax.jit(wide.apply)(found.params, images)
    np.testing.assert_allclose(act(outputs["logits"]), mean, atol=1e-6)
    features = np.mean([each["pre_logits"] for each in one_by_one], axis=0)
    np.testing.assert_allclose(outputs["pre_logits"], features, atol=1e-6)


def test_half_a_pixel_of_the_centre_is_rounded_down():
    model, pretrained = made()
    model, _ = augment(model, pretrained.preprocess, "five_crops", sigmoid=False)
    rows, columns = 16 + 3, 24 + 5
    pixels = jax.numpy.arange(rows * columns).reshape(1, rows, columns, 1)
    corners = [divmod(int(view[0, 0, 0, 0]), columns) for view in model._cut(pixels)]
    assert corners == [(1, 2), (0, 0), (0, 5), (3, 0), (3, 5)]


@pytest.mark.slow
def test_predictions_and_evaluations_take_views(tmp_path):
    _, found = made()
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (6, 30, 40, 3), np.uint8)
    for i, image in enumerate(pixels):
        path = tmp_path / "val" / "abc"[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    raw = {"batch_size": 4, "data": {"name": "folder", "data_dir": str(tmp_path)}}
    config = configuration.loading.complete(
        configuration.EvaluationConfig, raw | {"evals": {"val": "val"}}
    )
    for views in ("", "ten_crops"):
        classifier = prediction.Classifier(found, views=views)
        # A prediction does not change if the image is mirrored, where both are asked.
        batch = np.stack([classifier.prepare(image) for image in pixels])
        mirrored = np.stack([classifier.prepare(image[:, ::-1]) for image in pixels])
        logits, others = map(np.asarray, map(classifier.logits, (batch, mirrored)))
        assert np.allclose(logits, others, atol=1e-5) == bool(views)
        scores = checkpoint.evaluate(found, HOW, config, views=views).scores
        right = (logits.argmax(1) == np.arange(6) % 3).mean()
        assert scores["val"]["weights"]["top1"] == pytest.approx(right)
    assert augment(made()[0], HOW, "", sigmoid=False)[1] is HOW
