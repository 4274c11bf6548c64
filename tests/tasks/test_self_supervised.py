"""Runs of the tasks without labels, through the commands that all runs have."""

import functools
import shutil

import jax
import numpy as np
import pytest
from helpers import (
    assert_same_training,
    begin,
    kill_after,
    run_command,
    slow_but,
    tiny_config,
    train,
    trained_on,
)
from PIL import Image

import vit_jax
from vit_jax import weights
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.training import loop, train_setup

MAE = {"name": "mae", "decoder_width": 8, "decoder_depth": 1, "decoder_num_heads": 2}
CROPS = "multi_crop(small_size=(4, 8), num_small=2)"
DINO = {"name": "dino", "num_outputs": 24, "hidden_dim": 16, "bottleneck_dim": 8}
DINO |= {"large_transforms": ("flip", "flip | color_jitter(0.4)")}
DINOV2 = DINO | {"name": "dinov2", "mask_group": 4, "koleo_group": 4}
TEACHERS = ("dino", "dinov2")
TASKS = {
    "masked_patch": {"name": "masked_patch"},
    "mae": MAE,
    "simmim": {"name": "simmim", "mask_unit": 4},
    "dino": DINO,
    "dinov2": DINOV2,
}
# What a workdir holds beside the network.
TASK_PARAMS = {
    "masked_patch": {"mask_token", "decoder", "color_counts"},
    "mae": {"decoder"},
    "simmim": {"mask_token", "decoder"},
    # The student, and what the teacher has more than the network.
    "dino": {"head", "network", "teacher", "center"},
    "dinov2": {"head", "patch_head", "mask_token", "network", "teacher"},
}
KNN = {"kind": "knn", "train": "train", "test": "val", "k": 3}


def config_of(name, **sections):
    data = {"num_classes": 0} | sections.pop("data", {})
    if name in TEACHERS:
        data = {"train_transform": CROPS} | data
    evals = {"held_out": {"kind": "task"}}
    if name in TEACHERS:
        evals["knn"] = KNN
    keys = {"total_steps": 4, "checkpoint_every_steps": 2, "log_every_steps": 1}
    sections = {"evals": evals, "ema": {"decay": 0}, **keys} | sections
    task = TASKS[name] | sections.pop("task", {})
    return tiny_config(data=data, task=task, **sections)


@pytest.fixture(scope="module", params=slow_but(TASKS.keys() - {"simmim"}, TASKS))
def run(request, tmp_path_factory):
    """Trains a task: its name, its workdir and the report."""
    workdir = tmp_path_factory.mktemp("runs") / request.param
    return request.param, workdir, train(config_of(request.param), workdir)


def test_it_is_evaluated_in_training(run):
    name, _, report = run
    if name in TEACHERS:
        assert 0 <= report["final"]["knn"]["params"]["top1"] <= 1
    found = report["final"]["held_out"]["params"]
    assert np.isfinite(list(found.values())).all()
    assert "loss" in found
    if name == "masked_patch":
        names = {"color_accuracy", "commonest_accuracy", "neighbors_accuracy"}
        assert found.keys() == {"loss", *names}
    if name in TEACHERS:
        assert found.keys() == {"loss", "teacher_entropy"}


def test_its_workdir_is_a_model(run):
    name, workdir, _ = run
    found = weights.open_pretrained(workdir, with_task=True)
    assert found.options["num_classes"] == 0
    assert "head" not in found.params and "Transformer" in found.params
    assert found.task_params.keys() == TASK_PARAMS[name]
    model = tiny_config().build_model()
    loaded = weights.load(workdir, model, head="new").params["Transformer"]
    jax.tree.map(np.testing.assert_array_equal, loaded, found.params["Transformer"])


# State beside the parameters (counts, a teacher and its center), and masks.
@pytest.mark.parametrize(
    "run", ["masked_patch", "dino", "dinov2", "mae"], indirect=True
)
def test_a_resumed_run_is_equal_to_the_bit(run, tmp_path):
    name, workdir, report = run
    shutil.copytree(workdir, tmp_path / "run")
    kill_after(2, tmp_path / "run")
    again = train(config_of(name), tmp_path / "run")
    assert again["params_sha256"] == report["params_sha256"]
    assert again["final"] == report["final"]


@functools.cache
def alone(name):
    """Trains a task on one device; returns losses and weights."""
    return trained_on(config_of(name), 1)


FSDP = {"mesh": {"data": 2, "fsdp": 4}, "sharding": {"min_size": 1}}
MICROBATCHES = {"optim": {"learning_rate": 0.01, "grad_accum_steps": 4}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "sections"),
    [
        ("dino", 8, FSDP),
        ("dinov2", 8, FSDP),
        ("mae", 8, {"mesh": {"data": 8}}),
        ("masked_patch", 8, {"mesh": {"data": 8}}),
        ("dino", 1, MICROBATCHES),
        ("masked_patch", 1, MICROBATCHES),
        ("mae", 1, MICROBATCHES),
        ("mae", 1, {"model": {"scan": True}}),
    ],
    ids=str,
)
def test_it_is_the_same_on_any_mesh(name, devices, sections):
    found = trained_on(config_of(name, **sections), devices)
    assert_same_training(found, alone(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", TEACHERS)
def test_scores_at_the_start_and_the_end_are_the_same_on_any_mesh(name, tmp_path):
    evals, found = {"held_out": {"kind": "task"}, "rank": {"kind": "rank"}}, []
    for number, sections in enumerate(({}, FSDP)):
        config = config_of(
            name, evals=evals, total_steps=2, eval_at_start=True, **sections
        )
        scores = {}

        class Scores(vit_jax.Callback):
            def evaluate(self, step, values, scores=scores):
                scores[step] = values

        train(config, tmp_path / str(number), callbacks=[Scores()])
        found.append(scores)
    one, several = found
    assert [*one] == [*several] == [0, 2]
    assert one[0] == pytest.approx(several[0], rel=2e-5)
    assert one[2] == pytest.approx(several[2], rel=1e-3)
    assert one[0] != one[2]


def test_classes_are_refused():
    for name in TASKS:
        with pytest.raises(
            UserError, match="reads no labels: set data.num_classes to 0"
        ):
            train_setup.build(
                config_of(name, data={"num_classes": 5}),
                meshes.create(MeshConfig()),
                20,
            )


def test_a_task_without_metrics_of_images_is_not_evaluated(tmp_path):
    config = tiny_config(evals={"held_out": {"kind": "task"}})
    with pytest.raises(
        UserError, match="evals.held_out is an evaluation of the task, w"
    ):
        loop.train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("run", slow_but(["dinov2"], TEACHERS), indirect=True)
def test_another_run_starts_with_student_and_teacher(run, tmp_path):
    name, workdir, _ = run
    keys = {"init": {"checkpoint": str(workdir)}, "evals": {}}
    before = weights.open_pretrained(workdir, with_task=True).task_params
    _, state, _ = begin(config_of(name, **keys), tmp_path / "same")
    for part in set(before) - {"center", "teacher"}:
        assert_equal(state.params[part], before[part])
    assert_equal(state.extra["teacher"], before["teacher"])
    student, teacher = before, before["teacher"]
    assert (student["head"]["last_layer"] != teacher["head"]["last_layer"]).any()
    # With larger images, student and teacher are its teacher.
    data = {"image_size": (16, 24), "train_transform": "multi_crop(small_size=8)"}
    _, state, notes = begin(config_of(name, data=data, **keys), tmp_path / "large")
    for part in ("head", "network"):
        why = "the student begins as the teacher (network/"
        assert any(f"{part} of the task: left out, as {why}" in line for line in notes)
        assert_equal(state.params[part], state.extra["teacher"][part])
    assert_equal(state.params["head"], teacher["head"])
    # So they are if the run says so.
    chosen = config_of(name, task={"start_from_teacher": True}, **keys)
    _, state, notes = begin(chosen, tmp_path / "teacher")
    assert any("head of the task: left out, as the student begins" in n for n in notes)
    for part in state.params:
        assert_equal(state.params[part], before["teacher"][part])
    with pytest.raises(UserError, match="config.init has another head than this run"):
        begin(config_of(name, task={"num_outputs": 9}, **keys), tmp_path / "other")


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def begun(workdir, place, name, **sections):
    """Returns the first state of a run from another, and the notes on the task's parts."""
    keys = {"evals": {}, "init": {"checkpoint": str(workdir)}, "seed": 1}
    _, state, notes = begin(config_of(name, **keys, **sections), place)
    found = state.params | (state.extra or {})
    return found, [line for line in notes if " of the task: " in line]


@pytest.mark.parametrize(
    "run", slow_but(["masked_patch"], sorted({*TASKS} - {*TEACHERS})), indirect=True
)
def test_another_run_starts_with_what_predicts(run, tmp_path):
    name, workdir, _ = run
    scan = {"scan": name != "simmim"}
    params, lines = begun(workdir, tmp_path / "same", name, model=scan)
    before = weights.open_pretrained(workdir, with_task=True).task_params
    assert set(lines) == {f"{part} of the task: loaded" for part in before}
    for part, expected in before.items():
        assert_equal(stacking.separate(params[part]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["mae"], indirect=True)
def test_a_decoder_of_another_depth_begins_anew(run, tmp_path):
    _, workdir, _ = run
    deeper = {"task": {"decoder_depth": 2}}
    params, lines = begun(workdir, tmp_path / "deeper", "mae", **deeper)
    assert len(lines) == 1
    assert lines[0].startswith("decoder of the task: left out, as Transformer/")
    assert lines[0].endswith(" is missing")
    before = weights.open_pretrained(workdir, with_task=True).task_params
    kernel = before["decoder"]["embedding"]["kernel"]
    assert (params["decoder"]["embedding"]["kernel"] != kernel).any()


def test_the_reconstruction_is_drawn(run, tmp_path):
    name, workdir, _ = run
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    for number in range(2):
        Image.fromarray(pixels + number).save(tmp_path / f"{number}.png")
    words = [f"--model={workdir}", "--figure=reconstruction", f"--out={tmp_path}/out"]
    words += ["--images", str(tmp_path / "0.png"), str(tmp_path / "1.png")]
    if name in TEACHERS:
        with pytest.raises(UserError, match="include no task that predicts images"):
            run_command("visualize", words)
        return
    assert not run_command("visualize", words)
    found = np.load(tmp_path / "out" / "reconstruction.npz")
    original = found["original"]
    np.testing.assert_array_equal(original[0], pixels)
    names = set(found) - {"images", "original"}
    assert len(names) == 3
    for shown in names:
        assert found[shown].shape == original.shape
        assert (found[shown] != original).any()
    with Image.open(tmp_path / "out" / "reconstruction.png") as sheet:
        assert min(sheet.size) > 100
