"""Runs of the tasks without labels, through the commands that all runs have."""

import shutil

import jax
import numpy as np
import pytest
from helpers import tiny_config
from PIL import Image

from vit_jax import cli, visualize, weights
from vit_jax.data import pipeline
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError
from vit_jax.training import loop, train_step

MAE = {"name": "mae", "decoder_width": 8, "decoder_depth": 1, "decoder_num_heads": 2}
CROPS = "multi_crop(small_size=(4, 8), num_small=2)"
DINO = {"name": "dino", "num_outputs": 24, "hidden_dim": 16, "bottleneck_dim": 8}
DINO |= {"large_transforms": ("flip", "flip | color_jitter(0.4)")}
TASKS = {
    "masked_patch": {"name": "masked_patch"},
    "mae": MAE,
    "simmim": {"name": "simmim", "mask_unit": 4},
    "dino": DINO,
}
# What a workdir holds beside the network.
TASK_PARAMS = {
    "masked_patch": {"mask_token", "decoder"},
    "mae": {"decoder"},
    "simmim": {"mask_token", "decoder"},
    "dino": {"head", "network"},  # The student; the network is the teacher.
}
KNN = {"kind": "knn", "train": "train", "test": "val", "k": 3}


def config_of(name, **sections):
    data = {"num_classes": 0} | sections.pop("data", {})
    if name == "dino":
        data = {"train_transform": CROPS} | data
    evals = {"knn": KNN} | ({} if name == "dino" else {"held_out": {"kind": "task"}})
    sections = {"evals": evals, "ema": {"decay": 0}} | sections
    task = TASKS[name] | sections.pop("task", {})
    return tiny_config(data=data, task=task, **sections)


@pytest.fixture(scope="module", params=TASKS)
def run(request, tmp_path_factory):
    """Trains a task: its name, its workdir and the report."""
    workdir = tmp_path_factory.mktemp("runs") / request.param
    return request.param, workdir, loop.train(config_of(request.param), workdir)


def test_it_is_evaluated_in_training(run):
    name, _, report = run
    assert 0 <= report["final"]["knn"]["params"]["top1"] <= 1
    if name == "dino":
        return
    found = report["final"]["held_out"]["params"]
    assert np.isfinite(list(found.values())).all()
    assert "loss" in found
    if name == "masked_patch":
        names = {"color_accuracy", "commonest_accuracy", "neighbors_accuracy"}
        assert found.keys() == {"loss", *names}


def test_its_workdir_is_a_model(run):
    name, workdir, _ = run
    found = weights.open_pretrained(workdir, with_task=True)
    assert found.options["num_classes"] == 0
    assert "head" not in found.params and "Transformer" in found.params
    assert found.task_params.keys() == TASK_PARAMS[name]
    config = tiny_config(init={"checkpoint": str(workdir)}, total_steps=2)
    report = loop.train(config, workdir.parent / f"{name}_tuned")
    assert "top1" in report["final"]["val"]["params"]


def test_a_resumed_run_is_equal_to_the_bit(run, tmp_path):
    name, workdir, report = run
    shutil.copytree(workdir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6")
    (tmp_path / "run" / "report.json").unlink()
    again = loop.train(config_of(name), tmp_path / "run")
    assert again["params_sha256"] == report["params_sha256"]
    assert again["final"] == report["final"]


def losses_of(config, num_devices, steps=3):
    """Trains for some steps on a mesh of so many devices; returns loss and weights."""
    mesh = meshes.create(config.mesh, jax.devices()[:num_devices])
    source = open_source(config.data, "train")
    setup = train_step.build_train_setup(config, mesh, len(source))
    state, found = setup.initial_state(), []
    batches = pipeline.train_batches(
        source,
        config.data,
        batch_size=config.batch_size,
        seed=config.seed,
        start=0,
        stop=steps,
    )
    with batches:
        for batch in batches:
            batch = {name: batch[name] for name in setup.batch_shapes}
            state, metrics = setup.train_step(state, meshes.to_devices(batch, mesh))
            found.append(float(metrics["loss"]))
    state = jax.device_get(setup.to_disk(state))
    return found, setup.task.backbone(state.params, state.extra)


@pytest.fixture(scope="module", params=TASKS)
def alone(request):
    """Trains a task on one device: its name, losses and weights."""
    return request.param, *losses_of(config_of(request.param), 1)


FSDP = {"mesh": {"data": 2, "fsdp": 4}, "sharding": {"min_size": 1}}
MICROBATCHES = {"optim": {"learning_rate": 0.01, "grad_accum_steps": 4}}


@pytest.mark.parametrize(
    ("devices", "sections"),
    [
        pytest.param(8, {"mesh": {"data": 8}}, id="8 devices"),
        pytest.param(8, FSDP, id="fsdp", marks=pytest.mark.slow),
        pytest.param(1, MICROBATCHES, id="microbatches", marks=pytest.mark.slow),
        pytest.param(1, {"model": {"scan": True}}, id="scan", marks=pytest.mark.slow),
    ],
)
def test_it_is_the_same_on_any_mesh(alone, devices, sections):
    name, losses, network = alone
    found, other = losses_of(config_of(name, **sections), devices)
    np.testing.assert_allclose(found, losses, rtol=2e-5)
    assert jax.tree.structure(other) == jax.tree.structure(network)
    # Adam's first steps have the length of the rate, whatever rounding left of a
    # gradient that is 0 in exact numbers, as those of the keys' biases.
    differ = jax.tree.map(lambda a, b: np.abs(a - b).max(), network, other)
    far = [
        jax.tree_util.keystr(k)
        for k, v in jax.tree.leaves_with_path(differ)
        if v > 1e-4
    ]
    assert all("'key']['bias']" in path for path in far)


@pytest.mark.slow
def test_bfloat16_trains(run, tmp_path):
    name, _, report = run
    config = config_of(name, model={"dtype": "bfloat16"}, total_steps=2)
    found = loop.train(config, tmp_path / "run")
    assert set(found["final"]) == set(report["final"])


def test_classes_are_refused():
    for name in TASKS:
        with pytest.raises(
            UserError, match="reads no labels: set data.num_classes to 0"
        ):
            train_step.build_train_setup(
                config_of(name, data={"num_classes": 5}),
                meshes.create(MeshConfig()),
                20,
            )


def test_the_task_is_evaluated_in_training_alone(tmp_path):
    evals = {"held_out": {"kind": "task"}}
    with pytest.raises(
        UserError, match="evals.held_out is an evaluation of the task, w"
    ):
        loop.train(config_of("dino", evals=evals), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_reconstruction_is_drawn(run, tmp_path, capsys):
    name, workdir, _ = run
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    for number in range(2):
        Image.fromarray(pixels + number).save(tmp_path / f"{number}.png")
    words = [f"--model={workdir}", "--figure=reconstruction", f"--out={tmp_path}/out"]
    words += ["--images", str(tmp_path / "0.png"), str(tmp_path / "1.png")]
    flags = cli.parse(visualize.parser(), words)
    if name == "dino":
        with pytest.raises(UserError, match="no task that predicts images travels"):
            visualize.main(flags)
        return
    assert not visualize.main(flags)
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
