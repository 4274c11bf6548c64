import dataclasses
import pathlib

import jax
import pytest

from vit_jax import models
from vit_jax.config import fields
from vit_jax.config.lengths import RunLength
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.evaluators.classification import ClassificationConfig
from vit_jax.models import variants
from vit_jax.tools.sweeps import fine_tuning, recipes
from vit_jax.training import config as configuration
from vit_jax.training import optim
from vit_jax.weights.pretrained import Pretrained

ROOT = pathlib.Path(__file__).parents[3]


def published(variant="B/16", **options):
    """Returns a checkpoint without its parameters, as of Google's ViTs."""
    options = {"variant": variant, "num_classes": 21_843, "channels": 3} | options
    options = {"image_size": (224, 224)} | options
    return Pretrained({}, options, "google", "paper:B/16-i21k")


def task(pretrained, dataset="cifar100", **options):
    return fine_tuning.task(pretrained, recipes.find(dataset), **options)


def test_runs_have_what_the_recipe_by_hand_has():
    google = published(pool="token", representation_layer=True)
    how = Preprocess((224, 224), interpolation="bilinear_plain", squash=True)
    found = task(dataclasses.replace(google, preprocess=how))
    arg = "model=B/16,dataset=cifar100,rate=0.01"
    for ours, extra in (
        (found.trial(0.01), ",dev"),
        (found.final(0.01, 0), ""),
    ):
        path = f"{ROOT}/configs/transfer.py:{arg}{extra}"
        theirs = configuration.load(path, {"init": "paper:B/16-i21k"})
        lines = fields.differences(theirs, ours)
        keys = {line.split(":")[0] for line in lines}
        # How often is told and saved, where it is computed, and how it is written.
        free = {"name", "model.dtype", "model.matmul_dtype", "checkpoint.max_to_keep"}
        free |= {"evals.dev", "evals.held_out"}
        assert {k for k in keys if "_every_" not in k} <= free, lines
    assert found.trial(0.01).evals == {
        "held_out": ClassificationConfig(split="train[98%:]")
    }
    assert found.final(0.01, 7).evals == {"test": ClassificationConfig(split="test")}
    assert found.final(0.01, 7).seed == 7


def test_the_checkpoint_says_what_its_network_is():
    kept = {
        "pool": "gap",
        "class_token": True,
        "activation": "gelu",
        "layer_norm_eps": 1e-12,
        "posemb": "none",
        "width": 36,
        "num_heads": 3,
    }
    more = {"dropout": 0.1, "scan": True, "platform": "tpu", "drop_path_rate": 0.2}
    more |= {"posemb_placement": "stem", "representation_layer": True}
    more |= {"patch_dropout": 0.5}
    model = task(published("S/16", **kept, **more)).config.model
    assert {key: getattr(model, key) for key in kept} == kept
    # Neither what was drawn in its training nor where that was, nor its head.
    assert (model.dropout, model.drop_path_rate, model.scan) == (0, 0, False)
    assert not model.representation_layer and not model.patch_dropout
    # Nobody reads it without position embeddings.
    assert "posemb_placement" not in fields.to_dict(model)
    resnet = task(published("R50x1", stage_depths=(1, 1, 1, 1), zero_pool=True)).config
    assert (resnet.model.stage_depths, resnet.model.zero_pool) == ((1, 1, 1, 1), True)
    hybrid = task(published("R50+B/16", stem_width=32, stage_depths=(1, 1, 2))).config
    assert hybrid.model.stem_width == 32


@pytest.mark.parametrize(
    ("variant", "side"),
    [("B/16", 384), ("L/32", 384), ("H/14", 518), ("R50+B/16", 384), ("R50x1", 384)],
)
def test_the_usual_resolution_is_that_of_the_paper(variant, side):
    assert fine_tuning.usual_size(published(variant)) == (side, side)


@pytest.mark.slow
def test_grey_checkpoints_take_grey_images_and_both_their_normalisation(pretrained):
    grey = published(channels=1, image_size=(32, 32))
    assert task(grey, "digits", resolution=(16, 16)).config.data.channels == 1
    preprocess = dataclasses.replace(pretrained.preprocess, mean=(0.1, 0.2, 0.3))
    other = dataclasses.replace(pretrained, preprocess=preprocess)
    found = task(other, "digits", resolution=(16, 16)).config
    assert found.data.mean == (0.1, 0.2, 0.3)
    assert found.data.num_classes == 10
    assert found.total_steps == 500


@pytest.mark.parametrize(
    ("mode", "moves"),
    [("full", (5, 5)), ("head", (2, 2)), ("head_then_all", (2, 5))],
)
def test_modes_move_what_they_say(pretrained, mode, moves):
    found = task(
        *(pretrained, "digits"),
        resolution=(8, 8),
        mode=mode,
        overrides={"total_steps": 10},
    )
    params = {
        "head": {"kernel": jax.numpy.ones(3), "bias": jax.numpy.ones(2)},
        "head_extra": {"k": jax.numpy.ones(3)},
        "MAPHead_0": {"k": jax.numpy.ones(3)},
        "embedding": {"head": jax.numpy.ones(4)},
    }
    config = found.final(0.1, 0)
    length = RunLength(10, 1.0)
    tx = optim.optimizer(config.optim, params, lambda step: 0.1, length, config.model)
    state = tx.init(params)
    for expected, numbers in zip(moves, ((0, 1), (2,)), strict=True):
        for step in numbers:
            updates, state = tx.update(params, state, params, step=step)
        moved = sum(bool(u.any()) for u in jax.tree.leaves(updates))
        assert moved == expected


def test_layer_decay_and_other_keys_reach_every_run():
    overrides = {
        "batch_size": 64,
        "eval_every_steps": 5,
        "model.scan": True,
        "optim.grad_clip_norm": 0.0,
        "optim.schedule.name": "linear",
    }
    found = task(published(), layer_decay=0.75, rates=(0.1, 0.02), overrides=overrides)
    assert found.rates == (0.02, 0.1)
    trial, final = found.trial(0.02), found.final(0.02, 1)
    for config in (trial, final):
        assert (config.batch_size, config.optim.grad_clip_norm) == (64, 0.0)
        assert config.model.scan
        assert config.optim.schedule.name == "linear"
        assert (config.optim.layer_decay, config.optim.learning_rate) == (0.75, 0.02)
    # The test split is scored once, at the end.
    assert (trial.eval_every_steps, final.eval_every_steps) == (5, 0)


def test_a_run_may_be_stated_in_epochs_and_by_another_optimiser():
    overrides = {"epochs": 3, "optim.name": "adam", "optim.b2": 0.99}
    config = task(published(), overrides=overrides).config
    assert (config.epochs, config.total_steps) == (3.0, 0)
    assert (config.optim.name, config.optim.b2) == ("adam", 0.99)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optim.learning_rate": 0.1}, "learning_rate: --learning_rates sets it"),
        ({"init": "x"}, "--config.init: --model sets it here"),
        ({"seed": 3}, "--config.seed: --seeds sets it here"),
        ({"data.split": "test"}, "--config.data.split: the recipe sets"),
        ({"evals.peek": "test"}, "--config.evals.peek: the recipe sets"),
        ({"evals": {}}, "--config.evals: the recipe sets"),
        ({"data": 5}, "--config.data: it is a section; set a key of it"),
        ({"optim.momentun": 1}, "unknown config key optim.momentun; the nearest"),
        ({"total_steps": "abc"}, "total_steps='abc'"),
        ({"optim.name": 3}, "optim.name=3 is not one of"),
        ({"data.num_classes": "x"}, "data.num_classes='x'"),
    ],
)
def test_what_is_not_free_is_refused_in_one_line(overrides, message):
    with pytest.raises(UserError, match=message):
        task(published(), overrides=overrides)


def test_keys_of_the_data_are_checked_before_it_is_opened(pretrained):
    with pytest.raises(UserError, match="data.channels='x'"):
        task(pretrained, "digits", resolution=(8, 8), overrides={"data.channels": "x"})


@pytest.mark.parametrize("test", ["train[90%:]", "test+train[:1]"])
def test_a_test_split_out_of_train_is_refused(test):
    with pytest.raises(UserError, match=r"must not share a split with it"):
        fine_tuning.task(published(), recipes.find("cifar10", test=test))


def test_a_resolution_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match="385 is not a multiple of the patch size 16"):
        task(published(), resolution=(385, 384))


def test_weights_that_do_not_tell_their_normalisation_are_named():
    assert any("assumed" in note for note in task(published()).notes)
    stated = {"data.mean": (0.5,), "data.std": (0.5, 0.4, 0.3)}
    assert not any("assumed" in n for n in task(published(), overrides=stated).notes)


@pytest.mark.parametrize(
    ("overrides", "every"),
    [
        ({"total_steps": 20}, 50),
        ({"total_steps": 7000}, 700),
        ({"checkpoint_every_steps": 3}, 3),
    ],
)
def test_long_runs_save_ten_times_and_short_ones_seldom(overrides, every):
    config = task(published(), overrides=overrides).config
    assert config.checkpoint_every_steps == every


@pytest.mark.slow
def test_the_network_of_every_variant_is_built_again():
    size = {"image_size": (224, 448)}
    for variant in variants.NAMES:
        model = models.create(variant, num_classes=7, **size)
        found = task(published(**model.options), resolution=size["image_size"])
        again = models.create(
            **fields.to_dict(found.config.model), num_classes=7, channels=3, **size
        )
        ignored = {"dtype", "matmul_dtype", "platform", "num_classes"}
        for key in model.options.keys() - ignored:
            assert again.options[key] == model.options[key], key
