"""Rank and spread of features, which need no labels."""

import jax
import numpy as np
import pytest
from helpers import tiny_config
from PIL import Image
from test_suite import config_of, params_of, suite_of

from vit_jax import models
from vit_jax.config import fields
from vit_jax.data.config import DataConfig
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError
from vit_jax.evaluators import feature_rank, splits
from vit_jax.evaluators.feature_rank import RankConfig
from vit_jax.evaluators.suite import Suite
from vit_jax.training import run_report

RANK = {"kind": "rank", "split": "val"}


def direct(features):
    """The metrics by a singular value decomposition and a loop over all pairs."""
    wide = features.astype(np.float64)
    singular = np.linalg.svd(wide, compute_uv=False)
    parts = singular / singular.sum() + 1e-7
    unit = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    pairs = [
        unit[i] @ unit[j] for i in range(len(unit)) for j in range(len(unit)) if i != j
    ]
    variances = np.linalg.svd(wide - wide.mean(0), compute_uv=False) ** 2
    return {
        "rankme": np.exp(-(parts * np.log(parts)).sum()),
        "mean_cosine": np.mean(pairs),
        "first_component": variances[0] / variances.sum(),
    }


@pytest.mark.parametrize("shape", [(41, 7), (7, 41), (13, 13)])
def test_metrics_are_those_of_a_direct_computation(shape, monkeypatch):
    rng = np.random.default_rng(0)
    scale = np.geomspace(1, 1e-3, shape[1])
    features = ((rng.normal(size=shape) + 0.7) * scale).astype(np.float32)
    expected = direct(features)
    whole = feature_rank.measure(features)
    assert whole == pytest.approx(expected, rel=1e-6)
    assert 1 < whole["rankme"] < min(shape)
    monkeypatch.setattr(feature_rank, "_BLOCK", 3 * max(shape))  # Three rows at once.
    assert feature_rank.measure(features) == pytest.approx(whole, rel=1e-9)
    asked = iter([False, True])
    assert feature_rank.measure(features, lambda: next(asked)) is None


def test_the_ends_of_the_scales():
    rng = np.random.default_rng(0)
    one = rng.normal(size=(1, 11)).astype(np.float32)
    collapsed = feature_rank.measure(np.repeat(one, 30, axis=0))
    assert collapsed == pytest.approx(
        {"rankme": 1.0, "mean_cosine": 1.0, "first_component": 1.0}, abs=1e-4
    )
    orthogonal = feature_rank.measure(np.eye(11, dtype=np.float32))
    assert orthogonal["rankme"] == pytest.approx(11, rel=1e-4)
    assert orthogonal["mean_cosine"] == pytest.approx(0, abs=1e-12)
    line = feature_rank.measure(rng.normal(size=(30, 1)).astype(np.float32) * one)
    assert line["first_component"] == pytest.approx(1)
    zeros = feature_rank.measure(np.zeros((5, 3), np.float32))
    assert all(np.isfinite(list(zeros.values())))


def test_a_collapse_that_float32_could_not_tell_from_none():
    # A spread of a ten thousandth beside the mean: float32 squares would lose it.
    rng = np.random.default_rng(0)
    spread = rng.normal(size=(50, 9)) * [4, 1, 1, 1, 1, 1, 1, 1, 1]
    features = (100 + 1e-2 * spread).astype(np.float32)
    found = feature_rank.measure(features)
    assert found["first_component"] == pytest.approx(
        direct(features)["first_component"], rel=1e-6
    )
    assert 0.5 < found["first_component"] < 0.9
    assert found["mean_cosine"] > 0.9999


def test_no_label_is_read_and_every_image_counts_once(passed):
    config = config_of({"rank": RANK}, num_classes=0)
    suite, model = suite_of(config)
    assert not suite._evaluators["rank"].passes[0].split.data.has_labels
    scores = suite.run({"params": params_of(model)})["rank"]["params"]
    assert passed == [83]
    assert 1 < scores["rankme"] < 12
    assert -1 < scores["mean_cosine"] < 1
    assert 0 < scores["first_component"] < 1
    line = run_report.scores_line({"rank": {"params": scores}})
    assert line == f"rank/params/rankme {scores['rankme']:.6g}"


def test_a_labelled_pass_serves_it_too(passed):
    config = config_of({"val": "val", "rank": RANK})
    suite, model = suite_of(config)
    suite.run({"params": params_of(model)})
    assert passed == [83]


def test_a_split_without_labels_is_opened_for_a_classifier(tmp_path):
    for name in ("val/a.png", "val/b.png", "val/deep/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        image = np.random.default_rng(len(name)).integers(0, 256, (9, 9, 3), np.uint8)
        Image.fromarray(image).save(tmp_path / name)
    data = DataConfig(name="folder", data_dir=str(tmp_path), num_classes=10)
    opened = splits.EvalSplits(data)
    keys = {"model_classes": False, "labelled": False}
    first = opened.open("one", RankConfig(), "val", **keys)
    assert len(first.source) == 3
    assert not first.data.has_labels
    assert opened.open("two", RankConfig(), "val", **keys) is first


def test_one_image_has_no_rank():
    with pytest.raises(
        UserError, match=r"evals\.rank: synthetic val\[:1\] has 1 image"
    ):
        suite_of(config_of({"rank": RANK | {"split": "val[:1]"}}, num_classes=0))


def test_metrics_are_equal_on_any_mesh():
    found = []
    for count in (1, 4):
        config = tiny_config(
            evals={"rank": RANK}, batch_size=12, data={"num_classes": 0}
        )
        mesh = meshes.create(MeshConfig(data=count), jax.devices()[:count])
        model = models.create(
            **fields.to_dict(config.model), num_classes=5, image_size=(8, 12)
        )
        suite = Suite(model, config.evals, config.data, config.batch_size, mesh)
        scores = suite.run({"params": params_of(model)})
        found.append(scores["rank"]["params"])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
