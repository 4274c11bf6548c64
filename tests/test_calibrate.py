"""A calibrated model: from tags to thresholds, sets, and exported files."""

import csv
import functools
import json

import numpy as np
import pytest
from helpers import run_command, write_weights
from PIL import Image
from scipy import special

import vit_jax
from vit_jax.data.config import DataConfig
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.tools import calibrating

COLORS = ("blue", "green", "red")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on 90 noisy images of a colour, half of them striped, in 30 groups."""
    root, rng = tmp_path_factory.mktemp("calibrate"), np.random.default_rng(0)
    lines = [("image", "tags", "animal")]
    for i in range(90):
        color, striped = rng.integers(3), rng.integers(2)
        pixels = rng.normal(90, 60, (16, 16, 3))
        pixels[..., 2 - color] += 60
        pixels[::2] += 60 * striped
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / f"{i}.png")
        tags = [COLORS[color]] + ["striped"] * int(striped)
        lines.append((f"{i}.png", ", ".join(tags), i // 3))
    with (root / "photos.csv").open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    how = Preprocess(image_size=(16, 16), crop_fraction=1.0)
    sizes = {"variant": "Ti/8", "num_classes": 5, "image_size": (16, 16)}
    write_weights(root / "weights.safetensors", "abcde", how, **sizes)
    finetune(root, "animal")
    return root / "run"


def finetune(root, group):
    return vit_jax.finetune(
        root / "photos.csv",
        root / "run",
        group=group,
        calibrate=True,
        model=root / "weights.safetensors",
        minutes=0,
        tell=str,
        total_steps=30,
        **{"task.loss": "focal"},
    )


@pytest.mark.slow
def test_tags_get_thresholds_and_sets_that_predict_and_export_apply(run, capsys):
    decisions = json.loads((run / "calibration.json").read_text())
    assert len(decisions["thresholds"]) == 4 and decisions["sigmoid"]
    images = decisions["fitted"]["images"]
    assert decisions["fitted"]["split"] == "val" and images == 18
    assert decisions["measured"]["split"] == "val, in 5 parts"
    with pytest.raises(UserError, match="another command.*group_key"):
        finetune(run.parent, r"(\d)")
    model = vit_jax.load_model(run, tell=lambda line: None)
    photo = str(run.parent / "0.png")
    logits = model(photo)[0]
    p = special.expit(logits / decisions["temperature"] + decisions["bias"])
    expected = {
        name: chance
        for name, chance, least in zip(
            model.class_names, p, decisions["thresholds"], strict=True
        )
        if chance >= least
    }
    best = model.predict(photo)
    assert {one.name: one.probability for one in best} == pytest.approx(expected)
    # A file of this project keeps the decisions.
    path = run.parent / "out.safetensors"
    words = [f"--model={run}", "--to=safetensors", f"--out={path}"]
    assert not run_command("convert", words)
    assert "a threshold per class, sets for --coverage" in capsys.readouterr().out
    kept = vit_jax.load_model(path, tell=lambda line: None)
    assert kept.predict(photo) == best
    # The command says the same.
    capsys.readouterr()
    for model_of in (run, path):
        words = [f"--model={model_of}", "--json", "--coverage=0.9", photo]
        assert run_command("predict", words) == 0
        found = json.loads(capsys.readouterr().out)["predictions"]
        least = 1 - decisions["scores"][int(np.ceil(19 * 0.9)) - 1]
        assert sorted(one["probability"] for one in found) == pytest.approx(
            sorted(p[(p >= least) | (p == p.max())])
        )
    words = [f"--model={run}", "--coverage=0.9", photo]
    for more, problem in (
        ("--threshold=0.5", "--coverage=0.9 with --threshold=0.5"),
        ("--tta=flip", "coverage=0.9: sets are calibrated for .*one view"),
        ("--no_ema", "coverage=0.9: the model has no calibrated sets"),
    ):
        with pytest.raises(UserError, match=problem):
            run_command("predict", [*words, more])


@pytest.mark.slow
def test_programs_have_calibrated_logits(run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    decisions = json.loads((run / "calibration.json").read_text())
    words = [f"--model={run}", "--to=onnx", f"--out={tmp_path / 'onnx'}"]
    assert not run_command("convert", words)
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    pixels = np.asarray(Image.open(run.parent / "0.png"))[None]
    (logits,) = session.run(["logits"], {"images": pixels})
    model = vit_jax.load_model(run, tell=lambda line: None)
    scaled = model(pixels) / decisions["temperature"] + decisions["bias"]
    np.testing.assert_allclose(logits, scaled, atol=2e-2)
    about = json.loads((tmp_path / "onnx" / "preprocess.json").read_text())
    about = about["calibration"]
    assert about["thresholds"] == decisions["thresholds"]
    least = 1 - decisions["scores"][int(np.ceil(19 * 0.9)) - 1]
    assert about["smallest_probability_by_coverage"]["0.9"] == pytest.approx(least)


@pytest.mark.slow
def test_a_run_is_calibrated_later_on_images_that_it_was_not_trained_on(run, capsys):
    before = (run / "calibration.json").read_text()
    assert not run_command("evaluate", [f"--model={run}", "--calibrate"])
    assert "calibration: temperature" in capsys.readouterr().out
    assert json.loads((run / "calibration.json").read_text()) == json.loads(before)
    words = [f"--model={run}", "--calibrate=val[:50%]", "--json"]
    assert not run_command("evaluate", words)
    printed = json.loads(capsys.readouterr().out)
    assert (printed["fitted"]["images"], printed["fitted"]["chose_checkpoint"]) == (
        9,
        False,
    )
    (run / "calibration.json").write_text(before)
    for words, problem in (
        (
            [f"--model={run}", "--calibrate=train"],
            "72 of its images were trained on",
        ),
        (
            [f"--model={run}", "--calibrate", "--tta=flip"],
            "--tta=flip with --calibrate",
        ),
        (["--model=weights.safetensors", "--calibrate"], "is not the workdir of a run"),
        (["--model=weights.safetensors"], "--config is missing"),
    ):
        with pytest.raises(UserError, match=problem):
            run_command("evaluate", words)


def test_images_that_two_splits_share_are_not_scored_twice():
    data = DataConfig(name="digits", num_classes=10)
    shared = functools.partial(calibrating.common_images, data)
    assert shared("test[:50%]", "test") > 100
    assert shared("train[:90%]", "train[90%:]") == shared("train", "test") == 0
