"""Distillation: DeiT's losses to the digit, and a teacher that stays as it is."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import tiny_config

from vit_jax import models
from vit_jax.config import fields
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError
from vit_jax.tasks.classification import Classification, ClassificationConfig
from vit_jax.tasks.distillation import Distillation, DistillationConfig
from vit_jax.training import loop, train_step

# Of facebookresearch/deit 7e160fe; tests/golden/README.md.
GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "deit_losses.npz")
BASES = {
    "soft_target": ("mixed", 0.0),
    "smooth_0.1": ("label", 0.1),
    "ce": ("label", 0.0),
}


def losses(config, logits, logits_kd, labels):
    """Returns the whole loss, as the task puts it together."""
    task = Distillation.__new__(Distillation)
    Classification.__init__(task, config, models.create("Ti/4", num_classes=10), DATA)
    base = task.base_loss(jnp.asarray(logits), jnp.asarray(labels))
    part = task.teacher_loss(
        jnp.asarray(logits_kd), jnp.asarray(GOLDEN["loss/teacher"])
    )
    return (1 - config.alpha) * base + config.alpha * part


DATA = tiny_config(data={"num_classes": 10}).data


@pytest.mark.parametrize("alpha", [0.5, 0.1])
@pytest.mark.parametrize(("kind", "heat"), [("soft", 1), ("soft", 3), ("hard", 1)])
@pytest.mark.parametrize("base", BASES)
def test_the_loss_is_deits(base, kind, heat, alpha):
    labels, smoothing = BASES[base]
    labels = GOLDEN[f"loss/{labels}"]
    labels = labels if labels.ndim == 2 else np.eye(10, dtype=np.float32)[labels]
    config = DistillationConfig(
        teacher="x",
        kind=kind,
        alpha=alpha,
        temperature=float(heat),
        label_smoothing=smoothing,
        mean_over_classes=True,
    )
    logits = GOLDEN["loss/logits"], GOLDEN["loss/logits_kd"]
    found = losses(config, *logits, labels)
    name = f"loss/{base}/{kind}_tau{heat}_alpha{alpha}"
    assert float(found) == pytest.approx(float(GOLDEN[name]), abs=1e-6)
    if base == "soft_target":
        grads = jax.grad(lambda a, b: losses(config, a, b, labels), (0, 1))(*logits)
        for found, key in zip(grads, ("grad_logits", "grad_logits_kd"), strict=True):
            np.testing.assert_allclose(found, GOLDEN[f"{name}/{key}"], atol=1e-6)


def test_the_paper_does_not_divide_by_the_classes():
    config = DistillationConfig(teacher="x", kind="soft", alpha=1.0)
    labels = np.eye(10, dtype=np.float32)[GOLDEN["loss/label"]]
    of_paper = losses(config, GOLDEN["loss/logits"], GOLDEN["loss/logits_kd"], labels)
    config = fields.replace(config, {"mean_over_classes": True})
    of_code = losses(config, GOLDEN["loss/logits"], GOLDEN["loss/logits_kd"], labels)
    assert float(of_paper) == pytest.approx(10 * float(of_code))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Trains a teacher for a few steps and returns its workdir."""
    workdir = tmp_path_factory.mktemp("teacher") / "run"
    loop.train(tiny_config(total_steps=3), workdir)
    return workdir


def config_of(teacher, **sections):
    task = {"name": "distillation", "teacher": str(teacher)}
    return tiny_config(
        **{
            "task": task,
            "model": {"distillation": True},
            "total_steps": 4,
            "log_every_steps": 2,
            "checkpoint_every_steps": 2,
        }
        | sections
    )


def test_a_student_trains_resumes_and_keeps_its_teacher(teacher, tmp_path):
    config = config_of(teacher)
    report = loop.train(config, tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    logged = json.loads(lines[0])
    for name in ("class_loss", "distillation_loss", "teacher_top1"):
        assert np.isfinite(logged[f"train/{name}"])
    assert set(report["final"]["val"]) == {"raw", "ema"}
    # As if it had been killed after step 2: it goes on from there to the same end.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    (tmp_path / "run" / "report.json").unlink()
    again = loop.train(config, tmp_path / "run")
    assert again["params_sha256"] == report["params_sha256"]


def test_the_teacher_is_in_the_state_and_does_not_move(teacher):
    mesh = meshes.create(MeshConfig(data=1), jax.devices()[:1])
    built = train_step.build_train_setup(config_of(teacher), mesh, 20)
    state = built.initial_state()
    before = jax.device_get(state.extra)
    assert before["teacher"]["head"]["kernel"].any()
    batch = {
        name: jnp.zeros(form.shape, form.dtype)
        for name, form in built.batch_shapes.items()
    }
    state, metrics = built.train_step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.extra), before)
    assert np.isfinite(float(metrics["distillation_loss"]))


def test_one_classifier_learns_from_both(teacher):
    mesh = meshes.create(MeshConfig(data=1), jax.devices()[:1])
    built = train_step.build_train_setup(
        config_of(teacher, model={"distillation": False}), mesh, 20
    )
    assert "head_dist" not in built.shapes.params


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"num_classes": 4}}, r"has num_classes=5, but data.num_classes=4"),
        ({"data": {"image_size": (8, 16)}}, r"is for images of \(8, 12\), but"),
        ({"task": {"name": "distillation"}}, "task.teacher is empty: name a workdir"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(teacher, sections, message):
    config = config_of(teacher, **sections)
    with pytest.raises(UserError, match=message):
        config.task.build(
            models.create("Ti/4", num_classes=5, image_size=(8, 12)), config.data
        )


def test_keys_of_another_task_are_refused():
    with pytest.raises(
        UserError, match="task.teacher is read only with task.name=dist"
    ):
        tiny_config(task={"teacher": "x"})
    assert type(tiny_config().task) is ClassificationConfig
