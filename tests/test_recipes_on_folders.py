"""Recipes of pretraining without labels on a folder of photographs."""

import json

import numpy as np
import pytest
from helpers import TINY, train
from PIL import Image

from configs.common import parse_arg
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError
from vit_jax.training import config

STEMS = ("mae", "simmim", "masked_patch", "dino", "dinov2", "dinov3")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder of 40 images, loose and in folders of any depth."""
    root = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(0)
    for i in range(40):
        path = root / ("", "holiday", "a/b/c")[i % 3] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 37, 3), np.uint8)).save(path)
    return root


@pytest.mark.parametrize("stem", STEMS)
def test_a_folder_replaces_the_data_set(photographs, stem):
    c = config.load(f"{stem}:data={photographs}")
    found = c.data.name, c.data.data_dir, c.data.num_classes, c.data.num_examples
    assert found == ("folder", str(photographs), 0, 0)
    train, held = (open_source(c.data, split) for split in ("all[5%:]", "all[:5%]"))
    assert c.data.split == "all[5%:]" and (len(train), len(held)) == (38, 2)
    assert not {*train.paths} & {*held.paths}
    assert {each.kind for each in c.evals.values()} <= {"task"}
    assert all(each.split == "all[:5%]" for each in c.evals.values())
    assert bool(c.evals) == (not stem.startswith("dino"))
    published = config.load(stem)
    assert (c.model, c.optim, c.epochs) == (
        published.model,
        published.optim,
        published.epochs,
    )


def test_stages_with_labels_take_folders_of_classes(photographs):
    c = config.load(f"mae:data={photographs},stage=finetune", {"init": "x"})
    assert (c.data.name, c.data.split, c.data.num_classes) == ("folder", "train", 1_000)
    assert [each.split for each in c.evals.values()] == [""]


def test_a_folder_that_does_not_exist_is_no_value(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="data='photos' is not one of .*FOLDER"):
        config.load("mae:data=photos")
    # The name of a value comes first.
    (tmp_path / "cifar10").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_arg("data=cifar10", data=("imagenet", "cifar10", "FOLDER")).data == (
        "cifar10"
    )


@pytest.mark.slow
def test_a_recipe_trains_on_a_folder(photographs, tmp_path):
    keys = {"total_steps": 2, "batch_size": 8, "mesh": {}, "log_every_steps": 1}
    keys |= {"data.image_size": (32, 32), "optim.warmup_epochs": 0, "model.scan": False}
    keys |= {"data.eval_transform": "resize_small(32) | central_crop"}
    keys |= {f"model.{key}": value for key, value in TINY.items()}
    keys |= {"task.decoder_width": 16, "task.decoder_depth": 1}
    keys |= {"task.decoder_num_heads": 2, "model.dtype": "float32"}
    train(config.load(f"mae:data={photographs}", keys), str(tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["examples"] == 38 and report["steps"] == 2
    assert np.isfinite(report["final"]["val"]["params"]["loss"])
