"""Runs with `model.scan` end to end: on disk they are as any other."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_config, train

from vit_jax import models, weights
from vit_jax.config import fields
from vit_jax.evaluators import prediction
from vit_jax.training import loop
from vit_jax.weights import checkpoint_folders
from vit_jax.weights import workdir as workdirs

SGD = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}


def setting(**model):
    return tiny_config(
        model={"depth": 2, "dropout": 0.1, "drop_path_rate": 0.2} | model,
        optim=dict(SGD, grad_clip_norm=1.0),
        ema={"decay": 0.9},
        evals={},
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trains as asked, each model once; returns the workdir and the report."""

    @functools.cache
    def run(scan):
        workdir = tmp_path_factory.mktemp("scan" if scan else "unrolled") / "run"
        model = {"scan": True, "remat_policy": "full"} if scan else {}
        return workdir, loop.train(setting(**model), workdir)

    return run


def stored(workdir, **options):
    return workdirs.load(workdir, **options).params


def assert_near(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), a, b)


@pytest.mark.slow
def test_scan_and_rematerialisation_train_to_the_same_parameters(runs):
    unrolled, scanned = runs(False)[0], runs(True)[0]
    for average in (False, True):
        found, expected = (stored(w, use_ema=average) for w in (scanned, unrolled))
        assert "encoderblock_1" in found["Transformer"]
        assert_near(found, expected)


@pytest.mark.slow
def test_a_run_goes_on_with_scan_toggled(runs, tmp_path):
    workdir, _ = runs(False)
    shutil.copytree(workdir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / checkpoint_folders.FOLDER / "6")
    assert checkpoint_folders.steps(tmp_path / "run") == [3]
    train(setting(scan=True), tmp_path / "run")
    assert_near(stored(tmp_path / "run"), stored(workdir))


@pytest.mark.slow
def test_toggling_alone_changes_no_bit(runs, tmp_path):
    """A finished run only evaluates, so that parameters go in and out."""
    workdir, report = runs(False)
    shutil.copytree(workdir, tmp_path / "run")
    (tmp_path / "run" / "report.json").unlink()
    again = train(setting(scan=True), tmp_path / "run")
    assert again["params_sha256"] == report["params_sha256"]


@pytest.mark.slow
def test_a_scan_starts_from_unrolled_weights_and_is_read_back_unrolled(runs, tmp_path):
    workdir, _ = runs(True)
    found = weights.open_pretrained(workdir)
    assert not {"scan", "remat_policy", "attention_impl"} & found.options.keys()
    images = np.zeros((2, 8, 12, 3), np.uint8)
    images[1, 2:5] = 200
    logits = prediction.Classifier(found).logits(images)
    assert np.isfinite(logits).all() and np.abs(logits[0] - logits[1]).max() > 0

    config = setting(scan=True)
    changes = {"init.checkpoint": str(workdir), "init.head": "keep"}
    changes |= {"optim.freeze": (r"encoderblock_0/", "head")}
    config = fields.replace(config, changes)
    loop.train(config, tmp_path)
    before, after = (tree["Transformer"] for tree in (found.params, stored(tmp_path)))
    kernel = lambda tree, i: tree[f"encoderblock_{i}"]["MlpBlock_3"]["Dense_0"][
        "kernel"
    ]
    np.testing.assert_array_equal(kernel(after, 0), kernel(before, 0))
    assert np.abs(kernel(after, 1) - kernel(before, 1)).max() > 1e-6


@pytest.mark.slow
def test_weights_are_loaded_in_the_layout_of_the_model(runs):
    workdir, _ = runs(True)
    assert checkpoint_folders.read_metadata(workdir)["config"]["model"]["scan"] is True
    found = weights.open_pretrained(workdir)
    scanned = models.create(**found.options | {"scan": True})
    unrolled = models.create(**found.options)
    images = jnp.ones((1, 8, 12, 3))
    stacked = weights.load(workdir, scanned).params
    logits = jax.jit(scanned.apply)(stacked, images)["logits"]
    expected = jax.jit(unrolled.apply)(found.params, images)["logits"]
    np.testing.assert_allclose(logits, expected, atol=1e-5)
