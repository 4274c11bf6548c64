"""Runs of the task segmentation: what is learnt, on which devices, and what reads it."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TINY, begin, kill_after, tiny_config, train
from PIL import Image

import vit_jax
from vit_jax import models, weights
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.data.transforms import geometric, parse
from vit_jax.data.transforms.photometric_distortion import PhotometricDistortion
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.evaluators import sliding_window
from vit_jax.evaluators.sliding_window import Sliding
from vit_jax.models import cost
from vit_jax.tasks import segmentation
from vit_jax.tasks.segmentation import SegmentationConfig
from vit_jax.training import config as configuration
from vit_jax.training import loop, train_setup
from vit_jax.weights import checkpoint_folders

CLASSES = 3


def config(**sections):
    task = {"name": "segmentation"} | sections.pop("task", {})
    data = {"num_classes": CLASSES, "mask_key": "mask", "image_size": (8, 16)}
    data |= sections.pop("data", {})
    evals = {"val": {"kind": "segmentation"}}
    return tiny_config(data=data, task=task, **{"evals": evals} | sections)


def long():
    return config(
        total_steps=60,
        log_every_steps=20,
        checkpoint_every_steps=45,
        data={"train_transform": "scale_crop | flip | color_jitter"},
        task={"layers": (0, -1), "dice": 0.5},
        model={"variant": "Ti/2", "depth": 2},
        ema={"decay": 0.9},
        optim={"name": "adam", "learning_rate": 0.01, "layer_decay": 0.7},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the workdir and the result of a short run on one device."""
    workdir = tmp_path_factory.mktemp("segmentation") / "run"
    return workdir, train(long(), workdir)


def test_a_run_that_was_killed_ends_with_the_same_bits(trained, tmp_path):
    workdir, whole = trained
    killed = shutil.copytree(workdir, tmp_path / "killed")
    kill_after(45, killed)
    again = train(long(), killed)
    assert again["params_sha256"] == whole["params_sha256"]
    assert again["final"] == whole["final"]


def test_it_learns_and_its_metrics_are_those_of_its_masks(trained):
    workdir, done = trained
    scores = done["final"]["val"]["ema"]
    assert scores["miou"] > 0.45 and scores["examples"] == 20
    assert set(scores) >= {"pixel_accuracy", "mean_accuracy", "iou/class 0"}
    lines = [
        json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()
    ]
    logged = [line for line in lines if "train/dice_loss" in line]
    assert logged[-1]["train/pixel_accuracy"] > logged[0]["train/pixel_accuracy"]


def test_what_is_trained_segments_from_its_checkpoint(trained, tmp_path):
    workdir, _ = trained
    model = vit_jax.load_model(workdir, tell=lambda line: None)
    rng = np.random.default_rng(0)
    images = [
        rng.integers(0, 256, (*size, 3), np.uint8) for size in ((8, 12), (30, 21))
    ]
    maps = model.segment(images)
    assert [one.shape for one in maps] == [(8, 12), (30, 21)]
    assert {one.dtype for one in maps} == {np.dtype(np.int16)}
    np.testing.assert_array_equal(model.segment(images[1]), maps[1])
    Image.fromarray(images[1]).save(tmp_path / "a.png")
    np.testing.assert_array_equal(model.segment([tmp_path / "a.png"])[0], maps[1])
    assert model.segmenter.class_names == ("class 0", "class 1", "class 2")
    # A file of ours keeps the head; one of another library has no place for it.
    pretrained = weights.open_pretrained(str(workdir), with_task=True)
    from vit_jax.weights import export

    file = tmp_path / "model.safetensors"
    export.export(pretrained, "safetensors", file)
    again = vit_jax.load_model(file, tell=lambda line: None)
    np.testing.assert_array_equal(again.segment(images[1]), maps[1])
    assert again.segmenter.class_names == model.segmenter.class_names


def test_evaluating_a_checkpoint_gives_the_scores_of_the_run(trained):
    from vit_jax.evaluators import checkpoint

    workdir, done = trained
    pretrained = weights.open_pretrained(str(workdir), with_task=True)
    how = weights.preprocessing_of(pretrained)
    raw = {"batch_size": 8, "evals": {"val": {"kind": "segmentation", "split": "val"}}}
    raw["data"] = {"name": "synthetic", "num_examples": 20, "mask_key": "mask"}
    evaluation = configuration.loading.complete(configuration.EvaluationConfig, raw)
    found = checkpoint.evaluate(pretrained, how, evaluation)
    best = checkpoint_folders.best(workdir)
    scores = found.scores["val"]["weights"]
    expected = done["final"]["val"]["ema"]
    assert not best and scores.keys() == expected.keys()
    for name, value in expected.items():
        assert scores[name] == pytest.approx(value, abs=1e-6), name
    counts = found.confusions["val"].counts
    assert counts.sum() == 20 * 8 * 16


@pytest.mark.slow
def test_eight_devices_with_split_parameters_train_and_count_as_one(tmp_path):
    found = []
    keys = {"total_steps": 3, "checkpoint_every_steps": 3}
    keys |= {"optim": {"name": "sgd", "learning_rate": 0.1}}
    found.append(loop.train(config(**keys), tmp_path / "one"))
    split = config(mesh={"data": 2, "fsdp": 4}, sharding={"min_size": 100}, **keys)
    found.append(loop.train(split, tmp_path / "eight"))
    one, eight = (run["final"]["val"]["params"] for run in found)
    for name in one:
        assert one[name] == pytest.approx(eight[name], abs=0.02), name
    (before, after) = (
        weights.open_pretrained(str(tmp_path / name), with_task=True)
        for name in ("one", "eight")
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4),
        before.task_params,
        after.task_params,
    )


def test_a_frozen_network_is_left_as_it_was_and_needs_less(tmp_path):
    short = {"total_steps": 1, "evals": {}}
    loop.train(config(task={"frozen": True}, **short), tmp_path / "run")
    stored = weights.open_pretrained(str(tmp_path / "run"), with_task=True)
    assert stored.task_params.keys() == {"segmenter", "segmenter_means"}
    task = config(task={"frozen": True})
    first = jax.eval_shape(task.build_model().init, jax.random.key(0))
    assert jax.tree.structure(first) == jax.tree.structure(stored.params)
    frozen, free = (build(frozen=frozen).training_flops() for frozen in (True, False))
    assert frozen < free


def build(size=(8, 12), **keys):
    data = DataConfig(image_size=size, num_classes=CLASSES, mask_key="mask")
    model = models.create("Ti/4", num_classes=0, image_size=size, **TINY)
    return SegmentationConfig(**keys).build(model, data, RunLength(4, 1.0))


def test_losses_are_those_of_their_formulas():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 3, 4, CLASSES)).astype(np.float32)
    labels = rng.integers(-1, CLASSES, (2, 3, 4))
    weights_of = lambda labels: segmentation.pixel_weights(jnp.asarray(labels))
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    counted = labels >= 0
    truth = np.eye(CLASSES)[labels] * counted[..., None]
    expected = -np.log((shares * truth).sum(-1)[counted]).mean()
    cross_entropy, dice = map(jax.jit, (segmentation.cross_entropy, segmentation.dice))
    found = cross_entropy(logits, labels, weights_of(labels))
    assert found == pytest.approx(expected, abs=1e-5)
    shares = shares * counted[..., None]
    both, each = (shares * truth).sum((0, 1, 2)), (shares + truth).sum((0, 1, 2))
    found = dice(logits, labels)
    assert found == pytest.approx(1 - (2 * both / each).mean(), abs=1e-5)
    # Nothing to learn from, and a class that does not occur.
    nothing = np.full_like(labels, -1)
    assert cross_entropy(logits, nothing, weights_of(nothing)) == 0
    assert np.isfinite(dice(logits, nothing))
    only = np.zeros_like(labels)
    both, each = (shares := np.exp(logits))[..., 0] / shares.sum(-1), 24
    expected = 1 - 2 * both.sum() / (both.sum() + each)
    assert dice(logits, only) == pytest.approx(expected, abs=1e-5)


def test_the_dice_loss_of_images_is_mmsegmentations():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 3, 5, CLASSES)).astype(np.float32)
    labels = rng.integers(-1, CLASSES, (4, 3, 5))
    labels[2] = 1  # The other classes do not occur.
    labels[3] = -1
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    terms = []
    for p, image in zip(shares, labels, strict=True):
        target = np.where(image == -1, 255, image)  # Its number of no class.
        one_hot = np.eye(CLASSES)[np.clip(target, 0, CLASSES - 1)]
        valid = target != 255
        for k in range(CLASSES):
            num = (p[..., k] * one_hot[..., k] * valid).sum() * 2 + 1
            den = (p[..., k] ** 2 + one_hot[..., k] ** 2).sum() + 1
            terms.append(1 - num / den)
    of_images = jax.jit(segmentation.dice_of_images)
    found = float(of_images(logits, labels))
    assert found == pytest.approx(np.mean(terms), abs=1e-6)
    # A mean over the images, so that microbatches have the gradients of the batch.
    parts = [of_images(logits[i : i + 2], labels[i : i + 2]) for i in (0, 2)]
    assert np.mean(parts) == pytest.approx(found, abs=1e-6)


@pytest.mark.parametrize(
    ("keys", "coupled"),
    [
        ({"dice": 0.5}, ("BatchNorm", "the Dice loss")),
        ({"dice": 0.5, "dice_of": "image"}, ("BatchNorm",)),
        ({"dice": 0.5, "dice_of": "image", "head": "pyramid"}, ()),
        ({"dice_of": "batch", "head": "pyramid"}, ()),
    ],
)
def test_only_what_compares_images_is_coupled(keys, coupled):
    assert build(**keys).coupled == coupled


@pytest.mark.parametrize(
    ("data", "size", "sides", "steps"),
    [
        # Of an image of 1,024x2,048 pixels: cityscapes.py resizes it to that size.
        ("cityscapes", (512, 1024), (512, 2048), ([0, 256, 512], [0, 512, 1024])),
        ("ade20k", (512, 512), (256, 1024), ([0], [0, 256, 512])),
        ("voc", (512, 512), (256, 1024), ([0], [0, 256, 512])),
        ("ade20k,head=linear", (512, 512), (256, 1024), ([0], [0, 341, 512])),
    ],
)
def test_the_recipe_has_mmsegmentations_scales(data, size, sides, steps):
    path = f"{pathlib.Path(__file__).parents[2]}/configs/segmentation.py:data={data}"
    c = configuration.load(path)
    assert c.data.image_size == size
    crop, distortion, pad, flip = sum(
        parse.parse_train(c.data.train_transform, size), ()
    )
    assert tuple(side * min(crop.size) for side in crop.scale) == sides
    assert crop.most_of_one == 0.75 and not crop.pad
    assert distortion == PhotometricDistortion()
    np.testing.assert_allclose(pad.fill, 255 * np.array(c.data.mean), atol=0.5)
    assert type(flip) is geometric.Flip
    how = Sliding(size, c.evals["val"].resize, c.evals["val"].overlap)
    fitted = how.fitted((1024, 2048))
    for length, window, starts in zip(fitted, size, steps, strict=True):
        assert sliding_window._starts(length, window, how.overlap) == starts


def test_a_run_without_masks_is_refused():
    with pytest.raises(UserError, match="data.mask_key"):
        model = models.create("Ti/4", num_classes=0, image_size=(8, 12), **TINY)
        data = DataConfig(image_size=(8, 12), num_classes=3)
        SegmentationConfig().build(model, data, RunLength(4, 1.0))


def test_a_head_of_other_classes_is_refused_where_it_is_to_be_kept(trained, tmp_path):
    workdir, _ = trained
    keys = {
        "task": {"layers": (0, -1)},
        "model": {"variant": "Ti/2", "depth": 2},
    }
    start = {"checkpoint": str(workdir), "head": "keep"}
    with pytest.raises(UserError, match="init.head"):
        begin(config(init=start, data={"num_classes": 2}, **keys), tmp_path / "a")
    stored = weights.open_pretrained(str(workdir), with_task=True)
    _, state, _ = begin(config(init=start, **keys), tmp_path / "b")
    found = {"network": stored.params} | stored.task_params
    assert found.keys() == state.params.keys() | state.extra.keys()
    jax.tree.map(np.testing.assert_array_equal, state.params | state.extra, found)
    start = {"checkpoint": str(workdir)}
    _, state, _ = begin(
        config(init=start, data={"num_classes": 2}, **keys), tmp_path / "c"
    )
    assert state.params["segmenter"]["head"]["kernel"].shape[-1] == 2


def test_operations_are_those_of_network_and_head():
    size, width, classes = (8, 12), TINY["width"], CLASSES
    head = 2 * 2 * 3 * width * classes  # Of a grid of 2x3 patches.
    model = models.create("Ti/4", num_classes=0, image_size=size, **TINY)
    network = cost.forward_flops(model)
    assert build(size).training_flops() == 3 * (network + head)
    assert build(size, frozen=True).training_flops() == network + 3 * head


def test_layers_of_a_network_that_is_not_trained_have_no_rates():
    frozen = config(task={"frozen": True}, optim={"layer_decay": 0.7})
    with pytest.raises(UserError, match=r"optim\.layer_decay=0\.7"):
        train_setup.build(frozen, meshes.create(frozen.mesh), 20)
