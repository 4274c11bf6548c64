"""Masks of images by a checkpoint: the command, its files, and what it refuses."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from helpers import TINY, random_weights, run_command
from PIL import Image

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.evaluators import label_maps
from vit_jax.models import segmenter
from vit_jax.weights import Preprocess, export

NAMES = ("sky", "sea", "land")
SIZES = {"b": (29, 41), "a": (16, 24), "deeper/a": (70, 30)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Returns a folder with a model, images of several sizes, and a damaged one."""
    folder = tmp_path_factory.mktemp("masks")
    model = models.create("Ti/8", num_classes=0, image_size=(16, 24), **TINY)
    built = segmenter.build(model, "linear", (-1,), 0, num_classes=3)
    params, means = jax.device_get(built.init(jax.random.key(3)))
    params["head"]["bias"] = np.array([0, 0.05, 0], np.float32)
    task = {"name": "segmentation", "head": "linear", "layers": (-1,), "width": 1}
    preprocess = Preprocess((16, 24), (0.4,), (0.2,))
    pretrained = dataclasses.replace(
        random_weights(model, "tiny", preprocess=preprocess, class_names=NAMES),
        options=model.options,
        task=task,
        task_params={segmenter.PARAMS: params, segmenter.MEANS: means},
    )
    export.export(pretrained, "safetensors", folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for name, size in SIZES.items():
        path = folder / "images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(path)
    (folder / "images" / "c.png").write_bytes(b"no image")
    return folder


@pytest.fixture
def predict(place, capsys):
    """Runs the command on the images; returns its exit code, output and errors."""

    def run(*words):
        model = f"--model={place / 'model.safetensors'}"
        code = run_command("predict", [model, place / "images", *words])
        return code, *capsys.readouterr()

    return run


def test_masks_and_overlays_are_written_and_their_parts_printed(predict, tmp_path):
    code, out, error = predict("--json", f"--out={tmp_path / 'out'}")
    assert code == 1 and "c.png" in error
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["file"].split("images/")[1] for line in lines] == [
        "a.png",
        "b.png",
        "deeper/a.png",
    ]
    written = set()
    for line, size in zip(
        lines, (SIZES["a"], SIZES["b"], SIZES["deeper/a"]), strict=True
    ):
        with Image.open(line["files"]["mask"]) as mask:
            assert mask.mode == "P" and mask.size == size[::-1]
            counts = np.bincount(np.array(mask).ravel(), minlength=3) / np.prod(size)
        for name, count in zip(NAMES, counts, strict=True):
            assert line["parts"].get(name, 0) == pytest.approx(count)
        with Image.open(line["files"]["overlay"]) as picture:
            assert picture.size == size[::-1]
        written |= {*line["files"].values()}
    assert len(written) == 6  # Two images are called a.png.


def test_the_table_has_the_largest_parts(predict):
    code, out, _ = predict("--topk=1", "--resize=none")
    head, *rows = out.splitlines()
    assert code == 1 and head.split() == ["file", "part", "class"]
    assert len(rows) == 3 and all(row.split()[-1] in NAMES for row in rows)


def test_names_have_to_be_as_many_as_classes(predict, tmp_path):
    (tmp_path / "names.txt").write_text("one\ntwo\n")
    with pytest.raises(UserError, match="2 class names"):
        predict(f"--labels={tmp_path / 'names.txt'}")


def test_a_picture_of_more_than_256_classes_has_16_bits(tmp_path):
    label_map = np.arange(300, dtype=np.int16).reshape(15, 20)
    path = tmp_path / "mask.png"
    label_maps.picture(label_map, np.zeros((300, 3), np.uint8)).save(path)
    with Image.open(path) as picture:
        np.testing.assert_array_equal(np.array(picture), label_map)


def test_an_overlay_leaves_what_counts_for_no_class():
    image = np.full((4, 6, 3), 100, np.uint8)
    label_map = np.full((4, 6), -1, np.int16)
    label_map[:, 3:] = 1
    colors = np.array([(0, 0, 0), (255, 0, 0)], np.uint8)
    shown = label_maps.overlay(image, label_map, colors)
    np.testing.assert_array_equal(shown[:, :3], image[:, :3])
    assert shown[0, 4, 0] > 100 > shown[0, 4, 1]
