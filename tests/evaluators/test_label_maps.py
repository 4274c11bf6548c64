"""Masks of images by a checkpoint: the command, its files, and what it refuses."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import mask_folder
import numpy as np
import pytest
from helpers import ROOT, TINY, full_disk, random_weights, run_command
from PIL import Image

import vit_jax
from vit_jax import models
from vit_jax.analysis import representations
from vit_jax.data.transforms import naflex
from vit_jax.errors import UserError
from vit_jax.evaluators import label_maps, segmentation
from vit_jax.models import segmenter
from vit_jax.models.patches import PatchSequences
from vit_jax.weights import Preprocess, export, open_pretrained
from vit_jax.weights.segmenter import segmenter_of

NAMES = ("sky", "sea", "land")
SIZES = {"b": (29, 41), "a": (16, 24), "deeper/a": (70, 30)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Returns a folder with a model, images of several sizes, and a damaged one."""
    folder = tmp_path_factory.mktemp("masks")
    model = models.create("Ti/8", num_classes=0, image_size=(16, 24), **TINY)
    built = segmenter.build(model, "linear", (-1,), 0, num_classes=3)
    params, means = jax.device_get(jax.jit(built.init)(jax.random.key(3)))
    network = random_weights(model, "tiny")
    # So that images have several classes.
    noise = np.random.default_rng(1).normal(size=(4, 16, 24, 3)).astype(np.float32)
    logits = jax.jit(built.logits)(network.params, params, means, noise)
    params["head"]["bias"] = -np.asarray(logits).mean((0, 1, 2))
    task = {"name": "segmentation", "head": "linear", "layers": (-1,), "width": 1}
    preprocess = Preprocess((16, 24), (0.4,), (0.2,))
    pretrained = dataclasses.replace(
        network,
        preprocess=preprocess,
        class_names=NAMES,
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


def opened(place, **given):
    quiet = {"tell": lambda line: None}
    return vit_jax.load_model(place / "model.safetensors", **given, **quiet)


def test_an_image_of_the_networks_shape_has_the_same_classes_as_a_window(place):
    rng = np.random.default_rng(1)
    sizes = [(16, 24), (32, 48), (24, 36)]  # All become 2x3 patches.
    colors = rng.integers(0, 256, (2, 3, 3), np.uint8)
    colors = colors.astype(np.float32)
    images = [representations.enlarge(colors, size).astype(np.uint8) for size in sizes]
    windows = opened(place).segment(images)
    whole = opened(place, max_tokens=6).segment(images, batch_size=2)
    for one, other in zip(whole, windows, strict=True):
        assert len(np.unique(one)) > 1
        assert (one == other).mean() > 0.999  # Their sums are rounded differently.


@pytest.mark.slow
def test_images_of_any_size_are_classified_whole(place, predict, tmp_path, capsys):
    files = sorted((place / "images").rglob("?.png"))
    files = [file for file in files if file.name != "c.png"]
    model, fixed = opened(place, max_tokens=40), opened(place)
    found = model.segment(files, batch_size=2)
    pretrained = open_pretrained(place / "model.safetensors", with_task=True)
    masks = {}
    for file, label_map in zip(files, found, strict=True):
        pixels = np.asarray(Image.open(file))
        sides = [8 * n for n in naflex.fitting_grid(*pixels.shape[:2], 40)]
        resized = Image.fromarray(pixels).resize(sides[::-1], Image.Resampling.BILINEAR)
        own = fixed.model.at_size(sides)
        params = own.resize(fixed.params, fixed.model)
        images = (np.asarray(resized)[None] / 255 - 0.4) / 0.2
        logits = segmenter_of(pretrained, own)(params, jnp.asarray(images, jnp.float32))
        expected = segmenter.resize(logits, pixels.shape[:2]).argmax(-1)[0]
        assert label_map.shape == pixels.shape[:2]
        assert (label_map == expected).mean() > 0.999
        masks[file] = label_map
    # The command says the same, the damaged file in its place.
    code, out, error = predict("--max_tokens=40", "--json", "--batch_size=2")
    assert code == 1 and "c.png" in error
    for line in map(json.loads, out.splitlines()):
        (label_map,) = (m for file, m in masks.items() if str(file) == line["file"])
        parts = np.bincount(label_map.ravel(), minlength=3) / label_map.size
        for name, part in zip(NAMES, parts, strict=True):
            assert line["parts"].get(name, 0) == pytest.approx(part)


def test_an_evaluation_of_any_size_counts_the_pixels_of_its_masks(place, capsys):
    mask_folder.write(place / "set", 5, "images/val", "masks/val")
    model = opened(place, max_tokens=40)
    counts = 0
    for file in (place / "set" / "images" / "val").iterdir():
        mask = place / "set" / "masks" / "val" / file.name
        true = np.array(Image.open(mask), np.int16)
        true[true == 255] = -1
        counts = counts + segmentation.confusion(true, model.segment(file), 3)
    recipe = f"configs/eval/segmentation.py:data={place / 'set'},masks=masks,split=val"
    words = [f"--config={ROOT / recipe}", f"--model={place / 'model.safetensors'}"]
    words += ["--max_tokens=40", "--json", "--config.data.reduce_zero_label=False"]
    assert not run_command("evaluate", words)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = segmentation.score(counts, 5).metrics["miou"]
    assert report["test"]["miou"] == pytest.approx(expected, abs=1e-3)


def test_windows_of_images_of_any_size_are_refused(place, predict):
    with pytest.raises(UserError, match=r"resize='none'.*max_tokens=40"):
        predict("--max_tokens=40", "--resize=none")
    with pytest.raises(UserError, match=r"overlap=0.5.*max_tokens=40"):
        opened(place, max_tokens=40).segment(np.zeros((9, 9, 3), np.uint8), overlap=0.5)
    words = [f"--model={place / 'model.safetensors'}", "--max_tokens=40"]
    with pytest.raises(UserError, match=r"max_tokens=40.*--max_tokens=0"):
        run_command("convert", [*words, "--to=stablehlo", f"--out={place / 'out'}"])


def test_a_pyramid_refuses_images_of_any_size():
    model = models.create("Ti/8", num_classes=0, image_size=(16, 24), **TINY)
    built = segmenter.build(model, "pyramid", (-1,), 8, num_classes=3)
    shapes = model.shapes, *jax.eval_shape(built.init, jax.random.key(3))
    given = PatchSequences(jnp.zeros((1, 48, 8, 3)), jnp.array([[[3, 2]]]))
    with pytest.raises(UserError, match=r"task.head='pyramid'.*max_tokens to 0"):
        jax.eval_shape(lambda *trees: built.logits(*trees, given), *shapes)


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


def test_images_of_any_names_have_masks_of_their_own(tmp_path):
    writer = label_maps.Writer(tmp_path, 2)
    blank = np.zeros((5, 7, 3), np.uint8)
    paths = "x/a.png", "y/a.png", "z/a_2.png", "z/A.png"
    found = [writer.write(path, blank, np.zeros((5, 7), np.int16)) for path in paths]
    written = {path.lower() for files in found for path in files.values()}
    assert len(written) == 2 * len(paths) == len([*tmp_path.iterdir()])


@pytest.mark.parametrize("most", [100, 2_000])
def test_a_full_disk_is_an_error_and_leaves_no_cut_picture(tmp_path, most):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (40, 70, 3), np.uint8)
    label_map = rng.integers(0, 3, (40, 70)).astype(np.int16)
    writer = label_maps.Writer(tmp_path, 3)
    message = rf"--out={tmp_path}.*File too large"
    with full_disk(most), pytest.raises(UserError, match=message):
        writer.write("a.png", image, label_map)
    left = [path.name for path in tmp_path.iterdir()]
    assert left == ([] if most == 100 else ["a_mask.png"])
    for name in left:
        Image.open(tmp_path / name).load()


def test_an_overlay_leaves_what_has_no_class_or_a_black_one():
    image = np.full((4, 6, 3), 100, np.uint8)
    label_map = np.full((4, 6), -1, np.int16)
    label_map[:, 2:4], label_map[:, 4:] = 0, 1
    colors = np.array([(0, 0, 0), (255, 0, 0)], np.uint8)
    shown = label_maps.overlay(image, label_map, colors)
    np.testing.assert_array_equal(shown[:, :4], image[:, :4])
    assert shown[0, 4, 0] > 100 > shown[0, 4, 1]
