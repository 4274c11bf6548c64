"""Runs on images of any size as sequences of patches."""

import shutil

import jax
import numpy as np
import pytest
from helpers import kill_after, tiny_config, train
from PIL import Image

import vit_jax
from vit_jax.data.pipeline import eval_batches, train_batches
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError

SIZES = [(8, 24), (30, 10), (16, 16), (5, 40), (12, 18)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Photographs of many shapes, of two classes: dark and bright."""
    root, rng = tmp_path_factory.mktemp("shapes"), np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        for number in range(count):
            for label, level in (("dark", 60), ("bright", 200)):
                size = SIZES[(number + len(label)) % len(SIZES)]
                pixels = rng.normal(level, 20, (*size, 3)).clip(0, 255)
                path = root / split / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(path)
    return root


@pytest.fixture
def config(folder):
    """Makes a config with the given training transform."""

    def make(transform, **sections):
        data = {"name": "folder", "data_dir": str(folder), "num_classes": 2}
        data |= {
            "image_size": (16, 16),
            "num_examples": 0,
            "train_transform": transform,
        }
        data |= {"eval_transform": "naflex(8, patch=4)"}
        model = {"pool": "gap", "posemb_resize": "bilinear"}
        sections = {"data": data, "model": model} | sections
        return tiny_config(**sections)

    return make


def stream(config, **more):
    how = {"batch_size": 8, "seed": 3, "start": 0, "stop": 6} | more
    source = open_source(config.data, "train")
    with train_batches(source, config.data, **how) as batches:
        return list(batches)


def test_batches_hold_patches_and_grids(config):
    made = config("naflex(8, patch=4, area=(0.5, 1.0), flip=True)")
    for batch in stream(made):
        assert (
            batch["image"].shape == (8, 32, 4, 3) and batch["image"].dtype == np.uint8
        )
        assert batch["grids"].shape == (8, 1, 2) and batch["grids"].dtype == np.int32
        counts = batch["grids"].prod(-1)[:, 0]
        assert (counts >= 1).all() and (counts <= 8).all()
        for strip, count in zip(batch["image"], counts, strict=True):
            assert not strip[4 * count :].any()
    with eval_batches(
        open_source(made.data, "val"), made.data, batch_size=4
    ) as batches:
        found = list(batches)
    grids = np.concatenate([batch["grids"] for batch in found])
    assert len(np.unique(grids.reshape(-1, 2), axis=0)) > 3
    assert not grids[~np.concatenate([batch["mask"] for batch in found])].any()


@pytest.mark.parametrize(
    "transform",
    [
        "naflex((4, 8, 15), patch=4, area=(0.5, 1.0), flip=True)",
        "naflex(24, patch=4, pack=2)",
        "naflex(side=16, patch=(3, 8), area=(0.5, 1.0))",
    ],
)
def test_a_resumed_stream_has_the_same_batches(config, transform):
    made = config(transform)
    whole, again = stream(made, stop=12), stream(made, start=7, stop=12)
    for a, b in zip(whole[7:], again, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            np.testing.assert_array_equal(value, b[name])


def test_each_batch_draws_one_of_several_lengths(config):
    made = config("naflex((4, 8, 15), patch=4)")
    lengths = [batch["image"].shape[1] // 4 for batch in stream(made, stop=20)]
    assert {*lengths} == {4, 8, 15}


def test_each_batch_draws_one_of_several_patches(config):
    made = config("naflex(side=16, patch=(2, 4, 5))")
    shapes = {batch["image"].shape[1:3] for batch in stream(made, stop=20)}
    assert shapes == {(64 * 2, 2), (16 * 4, 4), (10 * 5, 5)}


def test_packed_images_share_a_sequence(config):
    made = config("naflex(24, patch=4, pack=4)")
    for batch in stream(made):
        assert batch["image"].shape == (2, 96, 4, 3)
        assert batch["grids"].shape == (2, 4, 2)
        assert batch["label"].shape == (8,)
        counts = batch["grids"].prod(-1)
        assert (counts > 0).all() and (counts.sum(1) <= 24).all()
        for strip, grids, labels in zip(
            batch["image"], counts, batch["label"].reshape(2, 4), strict=True
        ):
            parts = np.split(strip, 4 * np.cumsum(grids))
            bright = [part.mean() > 128 for part in parts[:4]]
            # Classes in the order of their names: bright, dark.
            assert bright == [label == 0 for label in labels]
            assert not parts[4].any()
    used = np.mean([batch["grids"].prod(-1).sum(1) for batch in stream(made)])
    assert used > 0.8 * 24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transform", "optim"),
    [
        ("naflex((4, 12), patch=4, area=(0.5, 1.0), flip=True)", {}),
        pytest.param(
            *(
                "naflex(side=16, patch=(3, 8), area=(0.5, 1.0))",
                {"grad_accum_steps": 2},
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_killed_run_resumes_bit_identical(config, transform, optim, tmp_path):
    made = config(transform, optim={"learning_rate": 0.01} | optim)
    report = train(made, tmp_path / "whole")
    copy = shutil.copytree(tmp_path / "whole", tmp_path / "copy")
    kill_after(3, copy)
    assert train(made, copy)["params_sha256"] == report["params_sha256"]


@pytest.mark.slow
def test_a_run_learns_and_uses_all_devices(config, tmp_path):
    made = config(
        "naflex(8, patch=4)",
        total_steps=20,
        batch_size=16,
        mesh={"data": 8},
        checkpoint_every_steps=20,
        optim={"learning_rate": 0.02},
    )
    report = train(made, tmp_path)
    assert report["devices"] == 8 == jax.device_count()
    assert report["final"]["val"]["params"]["top1"] == 1


def test_packed_images_are_split_over_devices(config, tmp_path):
    keys = {"mesh": {"data": 8}, "total_steps": 2}
    made = config("naflex(16, patch=4, pack=2)", batch_size=16, **keys)
    assert train(made, tmp_path / "even")["devices"] == 8
    with pytest.raises(UserError, match=r"batch_size=8.*8 devices"):
        train(config("naflex(16, patch=4, pack=2)", **keys), tmp_path / "odd")


def test_evaluations_of_any_size_need_a_network_that_takes_them(config, tmp_path):
    made = config("random_resized_crop", model={"variant": "C+Ti/4"})
    with pytest.raises(UserError, match=r"evals\.val: data\.eval_transform.*C\+Ti/4"):
        train(made, tmp_path)


def test_the_cost_is_that_of_the_patches(config, tmp_path):
    one, packed = (
        vit_jax.train_setup(config(line, batch_size=16), 24).training_flops
        for line in ("naflex(8, patch=4)", "naflex(16, patch=4, pack=2)")
    )
    both = vit_jax.train_setup(config("naflex((8, 16), patch=4)"), 24).training_flops
    assert one < packed < 1.2 * one < both < 1.8 * one


@pytest.mark.parametrize(
    ("transform", "sections", "key"),
    [
        ("naflex(8, patch=4) | flip", {}, "data.train_transform"),
        ("naflex(8, patch=4, pack=3)", {}, "batch_size"),
        (
            "naflex(8, patch=4)",
            {"task": {"name": "distillation", "teacher": "none"}},
            "data.train_transform",
        ),
        (
            "naflex(8, patch=4, pack=2)",
            {"optim": {"learning_rate": 0.1, "grad_accum_steps": 2}},
            "optim.grad_accum_steps",
        ),
        ("naflex(8, patch=4, pack=2)", {"model": {"pool": "token"}}, "model.pool"),
    ],
)
def test_what_does_not_fit_is_refused(config, transform, sections, key, tmp_path):
    with pytest.raises(UserError, match=key):
        train(config(transform, **sections), tmp_path)
