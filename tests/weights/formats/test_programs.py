"""Programs of other runtimes, each run by its own runtime and compared with the network."""

import dataclasses
import functools
import itertools
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import draw_params, run_command, slow_but

import vit_jax
from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.evaluators import label_maps, prediction
from vit_jax.models import segmenter
from vit_jax.weights import Preprocess, Pretrained, export
from vit_jax.weights.formats import native, programs
from vit_jax.weights.network_images import prepare_image

PREPROCESS = Preprocess((64, 64), (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), "bicubic", 0.75)
# One of each kind of network.
SMALL = {"depth": 1, "width": 48, "num_heads": 3, "mlp_dim": 68}
NETWORKS = {
    "Ti/16": SMALL,
    "R26+S/32": SMALL | {"stage_depths": (1,), "stem_width": 32},
    "R50x1": {"stage_depths": (1,), "stem_width": 32},
    "Swin-T": {"stage_depths": (1, 2), "width": 24, "num_heads": (1, 2)},
    "Mixer-S/16": {
        "depth": 1,
        "width": 48,
        "tokens_mlp_dim": 20,
        "channels_mlp_dim": 68,
    },
    "Axial-S/16": SMALL,
}


def made(variant="Ti/16", classes=7, **options):
    model = models.create(
        variant=variant,
        num_classes=classes,
        image_size=(64, 64),
        channels=3,
        **NETWORKS[variant] | options,
    )
    params = jax.device_get(draw_params(model, seed=1))
    names = tuple(f"class {i}" for i in range(classes))
    return Pretrained(params, model.options, "vit_jax", "test", PREPROCESS, names)


def images(count, size=64):
    rng = np.random.default_rng(count)
    return rng.integers(0, 256, (count, size, size, 3), np.uint8)


def in_jax(folder):
    data = (folder / "model.stablehlo").read_bytes()
    loaded = jax.export.deserialize(bytearray(data))
    return lambda *batch: jax.device_get(loaded.call(*batch))


def in_onnxruntime(folder):
    onnxruntime = pytest.importorskip("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options)
    given, names = (
        [one.name for one in some]
        for some in (session.get_inputs(), session.get_outputs())
    )
    return lambda *batch: dict(
        zip(names, session.run(None, dict(zip(given, batch, strict=True))), strict=True)
    )


RUNTIMES = {"stablehlo": in_jax, "onnx": in_onnxruntime}


def written(pretrained, to, folder, **options):
    if to == "onnx":
        pytest.importorskip("jax2onnx")
    export.export(pretrained, to, folder, **options)
    return RUNTIMES[to](folder)


@pytest.fixture(scope="module")
def program_of(tmp_path_factory):
    """Writes the program of a network once; returns its folder and what runs it."""

    @functools.cache
    def write(to, variant="Ti/16"):
        folder = tmp_path_factory.mktemp(to) / "out"
        return folder, written(made(variant), to, folder)

    return write


@functools.cache
def logits_of(variant):
    """Returns the logits of three images by the network."""
    found = np.asarray(prediction.Classifier(made(variant)).logits(images(3)))
    assert np.abs(found).max() > 0.1
    return found


FAST = [("stablehlo", "Ti/16"), ("onnx", "Ti/16")]


@pytest.mark.parametrize(
    ("to", "variant"),
    slow_but(FAST, itertools.product(RUNTIMES, NETWORKS)),
)
def test_every_network_gives_the_same_logits_for_any_number_of_images(
    to, variant, program_of
):
    _, run = program_of(to, variant)
    for count in (1, 3):
        found, wanted = run(images(3)[:count]), logits_of(variant)[:count]
        np.testing.assert_allclose(found["logits"], wanted, atol=1e-4)
        assert found["pre_logits"].shape[0] == count


@pytest.mark.parametrize("to", RUNTIMES)
def test_what_a_user_needs_beside_it_is_there(to, program_of):
    folder, run = program_of(to)
    how = json.loads((folder / "preprocess.json").read_text())
    assert how["image_size"] == [64, 64]
    assert how["crop_fraction"] == 0.75
    assert how["outputs"] == ["logits", "pre_logits"] == list(run(images(1)))
    assert how["probabilities"] == "softmax"
    assert (folder / "labels.txt").read_text().splitlines()[6] == "class 6"


@pytest.mark.parametrize("to", RUNTIMES)
def test_a_backbone_gives_features_alone(to, tmp_path):
    run = written(made(classes=0), to, tmp_path)
    assert list(run(images(2))) == ["pre_logits"]
    assert run(images(2))["pre_logits"].shape == (2, 48)


def test_the_size_may_be_another(tmp_path):
    pretrained = made()
    native.WRITERS["safetensors"].write(pretrained, tmp_path / "a.safetensors")
    out = tmp_path / "out"
    words = [f"--model={tmp_path}/a.safetensors", "--to=stablehlo", f"--out={out}"]
    run_command("convert", [*words, "--resolution=96"])
    larger = dataclasses.replace(PREPROCESS, image_size=(96, 96))
    wanted = prediction.Classifier(pretrained, preprocess=larger).logits(images(2, 96))
    found = in_jax(out)(images(2, 96))["logits"]
    np.testing.assert_allclose(found, np.asarray(wanted), atol=1e-5)


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("stablehlo", {"posemb_resize": "bicubic"}),
        ("onnx", {"posemb_resize": "bicubic_square"}),
        pytest.param(
            *("onnx", {"posemb_resize": "bilinear", "pool": "map"}),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("onnx", {"posemb": "factorized", "pool": "gap", "rope": "axial"}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_program_reads_images_of_any_size(to, options, tmp_path):
    how = {"max_tokens": 12, "patch": 16}
    pretrained = dataclasses.replace(
        made(**options), preprocess=dataclasses.replace(PREPROCESS, **how)
    )
    run = written(pretrained, to, tmp_path / "out")
    native.write(pretrained, tmp_path / "weights.safetensors")
    model = vit_jax.load_model(
        tmp_path / "weights.safetensors", tell=lambda line: None, **how
    )
    rng = np.random.default_rng(0)
    sizes = [(30, 70), (64, 64), (90, 20)]
    images = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    wanted = model(images)
    for some in (images, images[:1]):
        prepared = [prepare_image(image, model.preprocessing) for image in some]
        pixels, grids = map(np.stack, zip(*prepared, strict=True))
        assert pixels.shape == (len(some), 12 * 16, 16, 3)
        found = run(pixels, grids)["logits"]
        np.testing.assert_allclose(found, wanted[: len(some)], atol=1e-4)
    said = json.loads((tmp_path / "out" / "preprocess.json").read_text())
    assert (said["max_tokens"], said["patch"]) == (12, 16) and "grids" in said["input"]


def test_one_program_replaces_another(tmp_path, program_of):
    folder = tmp_path / "out"
    shutil.copytree(program_of("stablehlo")[0], folder)
    (folder / "mine.txt").write_text("stays")
    with pytest.raises(UserError, match="add --overwrite"):
        written(made(), "stablehlo", folder)
    written(made(classes=3), "stablehlo", folder, overwrite=True)
    assert in_jax(folder)(images(1))["logits"].shape == (1, 3)
    assert (folder / "mine.txt").read_text() == "stays"


@pytest.mark.slow
def test_int8_weights_are_small_and_give_nearly_the_same_logits(
    tmp_path, program_of, capsys
):
    pytest.importorskip("jax2onnx")
    native.WRITERS["safetensors"].write(made(), tmp_path / "x.safetensors")
    words = f"--model={tmp_path}/x.safetensors", f"--out={tmp_path}/out", "--int8"
    run_command("convert", [*words, "--to=onnx"])
    assert "int8 per channel" in capsys.readouterr().out
    found = in_onnxruntime(tmp_path / "out")(images(3))["logits"]
    folder, run = program_of("onnx", "Ti/16")
    wanted = run(images(3))["logits"]
    difference = np.abs(found - wanted).max()
    assert 1e-6 < difference < 0.1 * np.abs(wanted).max()
    sizes = [(at / "model.onnx").stat().st_size for at in (tmp_path / "out", folder)]
    assert sizes[0] < 0.6 * sizes[1]  # A small network is mostly operations.
    assert [p.name for p in (tmp_path / "out").iterdir() if ".data" in p.name] == []
    with pytest.raises(UserError, match="--int8 is for --to=onnx, not --to=timm"):
        run_command("convert", [*words, "--to=timm", "--overwrite"])


@pytest.mark.slow
def test_the_command_prints_nothing_of_jax2onnx(tmp_path):
    pytest.importorskip("jax2onnx")
    export.export(made(), "safetensors", tmp_path / "x.safetensors")
    words = f"--model={tmp_path}/x.safetensors", "--to=onnx", f"--out={tmp_path}/out"
    # In a process of its own, because warnings come with its first import.
    done = subprocess.run(
        [sys.executable, "-m", "vit_jax.convert", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    for word in ("Traceback", "jax2onnx.", "WARNING:jax2onnx"):
        assert word not in done.stdout + done.stderr


def test_without_the_extra_the_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with pytest.raises(UserError, match=r"--to=onnx needs jax2onnx .*pip install -e"):
        export.export(made(), "onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_prepares_images_has_to_be_known():
    unknown = dataclasses.replace(made(), preprocess=None)
    with pytest.raises(UserError, match="give --mean, --std and --crop_pct"):
        programs.build(unknown)


@functools.cache
def with_head(head, variant):
    """Returns a network with a head for masks, and its label maps of three images."""
    backbone = made(variant, classes=0)
    model = models.create(**backbone.options)
    layers = (0, -1) if head == "pyramid" else (-1,)
    built = segmenter.build(model, head, layers, 12, num_classes=3)
    params, means = jax.device_get(jax.jit(built.init)(jax.random.key(0)))
    task = {"name": "segmentation", "head": head, "layers": layers, "width": 12}
    pretrained = dataclasses.replace(
        backbone,
        task=task,
        task_params={segmenter.PARAMS: params, segmenter.MEANS: means},
        class_names=("a", "b", "c"),
    )
    classifier = label_maps.PixelClassifier(pretrained, PREPROCESS)
    maps = classifier.label_maps(enumerate(images(3)), batch_size=3)
    return pretrained, np.stack([label_map for _, label_map in maps])


@pytest.mark.parametrize(
    ("head", "variant"),
    slow_but(
        [("linear", "Ti/16")],
        [("linear", "Ti/16"), ("pyramid", "Ti/16"), ("pyramid", "Swin-T")],
    ),
)
@pytest.mark.parametrize("to", RUNTIMES)
def test_a_head_for_masks_gives_the_logits_of_pixels(to, head, variant, tmp_path):
    pretrained, expected = with_head(head, variant)
    run = written(pretrained, to, tmp_path / "out")
    for count in (1, 3):
        outputs = run(images(3)[:count])
        assert outputs.keys() == {"logits"}
        assert outputs["logits"].shape == (count, 64, 64, 3)
        found = outputs["logits"].argmax(-1)
        # Rounding where two are equal.
        assert (found == expected[:count]).mean() > 0.999
    assert (tmp_path / "out" / "labels.txt").read_text() == "a\nb\nc\n"
