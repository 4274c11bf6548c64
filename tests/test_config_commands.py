"""The commands at the heads of configs: each is run for its result, or says why not."""

import json
import pathlib
import re

import numpy as np
import pytest
from helpers import ROOT, TINY, commands_of, run_command, write_weights
from PIL import Image

from vit_jax.__main__ import load
from vit_jax.command_line import cli
from vit_jax.config import loading
from vit_jax.data.sources.open import open_source
from vit_jax.training import config as configuration

FILES = sorted((ROOT / "configs").rglob("*.py"))
COMMANDS = [(path, words) for path in FILES for words in commands_of(path)]
# Of each command, as a pattern: the test of its result on its data or on a stand-in, or why
# there is none. The first pattern that matches counts.
TESTS = {
    r"train .*configs/(digits|digits_finetune)\.py": (
        "tests/test_digits.py::"
        "test_digits_reach_their_accuracy_and_so_does_the_fine_tuning"
    ),
    r"(train|predict) .*(digits_)?names": (
        "tests/test_config_commands.py::test_digits_are_told_apart_by_their_figures"
    ),
    r"train .*(flowers\.py|flowers_finetune|data=flowers)": (
        "tests/test_config_commands.py::test_photographs_of_a_folder_are_learnt"
    ),
    r"train .*configs/(dinov2|dinov3|mae)\.py": (
        "tests/test_docs_pretraining.py::"
        "test_the_commands_and_programs_of_pretraining_run"
    ),
    r"train .*configs/dinov3_7b\.py": (
        "tests/training/test_lowering.py::test_the_step_of_a_recipe"
    ),
    # What their quick versions replace.
    r"train .*((b16_\w+|jft)\.py:model=L/16|:data=(cifar10|imagenet2012))": (
        "tests/test_configs.py::test_recipe_builds_with_every_argument"
    ),
    r"train ": "tests/test_smoke.py::test_recipes_take_three_steps_on_made_data",
    r"transfer .*vtab": (
        "tests/tools/sweeps/test_vtab_study.py::"
        "test_tasks_that_are_there_run_and_the_others_say_how"
    ),
    r"transfer ": (
        "tests/test_transfer.py::"
        "test_a_study_of_digits_that_is_killed_ends_as_the_undisturbed_one"
    ),
    r"datasets": "tests/test_datasets.py::test_the_table_says_what_is_prepared",
    r"eval/classification": (
        "tests/test_evaluate.py::test_classification_writes_numbers_and_a_picture"
    ),
    r"eval/(fewshot|knn)": (
        "tests/test_evaluate.py::test_few_shot_and_neighbours_end_with_a_line_of_json"
    ),
    r"eval/imagenet": (
        "tests/evaluators/test_label_sets.py::"
        "test_labels_share_a_pass_over_the_same_images"
    ),
    r"eval/corruptions": (
        "tests/evaluators/test_corruptions.py::test_all_sets_are_read_by_one_program"
    ),
    r"eval/layers": (
        "tests/test_evaluate.py::test_evaluations_of_features_are_repeated_by_layer"
    ),
    r"eval/probe": "tests/test_evaluate.py::test_a_probe_and_flags_for_the_images",
    r"eval/(retrieval|zero_shot)": (
        "tests/evaluators/test_image_text.py::"
        "test_recipes_of_evaluations_give_the_scores_of_the_run"
    ),
    r"eval/(regression|ridge)": (
        "tests/test_finetune_numbers.py::test_recipes_of_evaluations_score_numbers"
    ),
    r"eval/segmentation": (
        "tests/evaluators/test_label_maps.py::"
        "test_an_evaluation_of_any_size_counts_the_pixels_of_its_masks"
    ),
    r"(study|report) .*cost": (
        "takes the compiler of TPUs minutes; tests/tools/sweeps/test_study.py measures "
        "the cost of a network once"
    ),
    r"(study|report) .*positions": (
        "tests/test_docs.py::test_the_commands_and_programs_of_the_site_run"
    ),
    r"(study|report) ": (
        "tests/test_config_commands.py::test_a_point_of_a_study_is_run_and_reported"
    ),
}


def pattern_of(words):
    line = " ".join(words).removeprefix("vit_jax.")
    return next((pattern for pattern in TESTS if re.search(pattern, line)), None)


def test_every_command_of_a_config_is_run_by_a_test_or_says_why_not():
    assert {pattern_of(words) for _, words in COMMANDS} == {*TESTS}
    for path in FILES:
        headed = "\nRun:" in path.read_text()
        assert headed == any(each == path for each, _ in COMMANDS), path
    for place in TESTS.values():
        if "::" in place:
            file, name = place.split("::")
            assert f"\ndef {name}(" in (ROOT / file).read_text(), place


def config_of(words):
    """Returns the config of a training command, with values for those left out."""
    words = [word for word in words[1:] if word != "..."]
    flags = cli.parse(load("train").parser(), words)
    stated = {"YOURS": "synthetic", ...: 7}
    overrides = {k: stated.get(v, v) for k, v in flags.overrides.items()}
    return configuration.load(flags.config, overrides)


def test_a_training_command_goes_on_from_a_run_of_its_network():
    variants, goes_on = {}, 0
    for path, words in COMMANDS:
        if words[0] != "vit_jax.train":
            continue
        config = config_of(words)
        workdir = next((w for w in words if w.startswith("--workdir=")), "")
        if before := variants.get((path, config.init.checkpoint)):
            goes_on += 1
            assert before == config.model.variant, words
        variants[path, workdir.partition("=")[2]] = config.model.variant
    assert goes_on == 6


@pytest.mark.slow
def test_digits_are_told_apart_by_their_figures(tmp_path, monkeypatch, capsys):
    config = configuration.load("configs/digits_names.py")
    digits = open_source(config.data, "test")
    (tmp_path / "IMAGE").mkdir()
    for i in range(len(digits)):
        path = tmp_path / "IMAGE" / f"{digits.labels[i]}_{i}.png"
        Image.fromarray(digits.images[i, ..., 0]).save(path)
    monkeypatch.chdir(tmp_path)
    (_, *train), (_, *predict) = commands_of(ROOT / "configs" / "digits_names.py")
    # Towers of one block compile in a third of the time.
    shorter = [
        "epochs=25",
        "optim.warmup_epochs=2",
        "model.depth=1",
        "task.text.depth=1",
    ]
    assert not run_command("train", [*train, *(f"--config.{key}" for key in shorter)])
    capsys.readouterr()
    assert not run_command("predict", [*predict, "--json"])
    right = []
    for line in capsys.readouterr().out.splitlines():
        row = json.loads(line)
        right.append(row["predictions"][0]["name"] == row["file"].split("/")[-1][0])
    assert len(right) == 355 and np.mean(right) > 0.7
    scores = json.loads(pathlib.Path("runs/names/report.json").read_text())["final"]
    assert np.mean(right) == pytest.approx(scores["test"]["ema"]["top1"], abs=0.03)


COLORS = {"daisy": (200, 190, 60), "roses": (190, 40, 70), "fern": (40, 160, 60)}
# What makes the runs short, by the start of their workdirs' names.
SHORTER = {
    "runs/flowers": "model.depth=2 optim.warmup_epochs=1 epochs=8",
    "runs/swin": "model.stage_depths=(1,1,1) optim.warmup_epochs=1 epochs=8",
    "runs/flowers_finetune": "init=weights.safetensors epochs=12",
}


@pytest.mark.slow
@pytest.mark.parametrize("workdir", SHORTER)
def test_photographs_of_a_folder_are_learnt(workdir, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("val", 7)):
        for name, color in COLORS.items():
            folder = tmp_path / "DIR" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 50, (37, 53, 3)) + color
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    network = {"variant": "Ti/16", "num_classes": 3, "activation": "gelu"}
    write_weights(tmp_path / "weights.safetensors", image_size=(32, 32), **network)
    keys = (
        f"{SHORTER[workdir]} batch_size=16 data.image_size=(32,32) data.num_classes=3"
    )
    more = [f"--config.{key}" for key in keys.split()]
    if "finetune" in workdir:
        more += [f"--config.model.{name}={size}" for name, size in TINY.items()]
    ((_, *words),) = (w for _, w in COMMANDS if f"--workdir={workdir}" in w)
    assert not run_command("train", [*words, *more])
    report = json.loads(pathlib.Path(workdir, "report.json").read_text())
    assert report["final"]["val"]["params"]["top1"] > 0.6


# Studies whose network's depth is not what they compare.
SHALLOWER = ("finetuning", "pooling", "regularization", "scaling", "self_supervision")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        path
        for path, words in COMMANDS
        if words[0] == "vit_jax.study" and path.stem not in ("cost", "positions")
    ],
    ids=lambda path: path.stem,
)
def test_a_point_of_a_study_is_run_and_reported(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (_, *study), (_, *report) = commands_of(path)
    axes = loading.read_study(str(path))["axes"]
    first = [f"--only={axis}={values[0]}" for axis, values in axes.items()]
    shorter = ["--seeds=1", "--config.total_steps=2"]
    shorter += ["--config.model.depth=1"] * (path.stem in SHALLOWER)
    assert not run_command("study", [*study, *first, *shorter])
    (workdir,) = tmp_path.glob("runs/*")
    (point,) = json.loads((workdir / "study.json").read_text())["points"]
    scores = point["scores"]
    assert scores and np.isfinite([one["mean"] for one in scores.values()]).all(), (
        scores
    )
    assert not run_command("report", report)
    assert point["name"] in (tmp_path / "report" / "report.md").read_text()
