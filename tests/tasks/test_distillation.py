"""Distillation: DeiT's losses to the digit, and a teacher that stays as it is."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import begin, draw_params, kill_after, tiny_config, write_workdir

from vit_jax import models, weights
from vit_jax.config import fields
from vit_jax.config.lengths import RunLength
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.arrays import ArraySource
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import sharding
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.tasks.classification import Classification, ClassificationConfig
from vit_jax.tasks.distillation import Distillation, DistillationConfig
from vit_jax.training import loop, train_setup
from vit_jax.weights.formats import native

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
    base = task.base_loss(jnp.asarray(logits), {"label": jnp.asarray(labels)})
    part = task.teacher_loss(
        jnp.asarray(logits_kd), jnp.asarray(GOLDEN["loss/teacher"])
    )
    return (1 - config.alpha) * base + config.alpha * part


DATA = tiny_config(data={"num_classes": 10}).data


@pytest.mark.parametrize(("kind", "heat"), [("soft", 1), ("soft", 3), ("hard", 1)])
@pytest.mark.parametrize("base", BASES)
def test_the_loss_is_deits(base, kind, heat):
    labels, smoothing = BASES[base]
    labels = GOLDEN[f"loss/{labels}"]
    labels = labels if labels.ndim == 2 else np.eye(10, dtype=np.float32)[labels]
    logits = GOLDEN["loss/logits"], GOLDEN["loss/logits_kd"]
    for alpha in (0.5, 0.1):
        config = DistillationConfig(
            teacher="x",
            kind=kind,
            alpha=alpha,
            temperature=float(heat),
            label_smoothing=smoothing,
            mean_over_classes=True,
        )
        found = losses(config, *logits, labels)
        name = f"loss/{base}/{kind}_tau{heat}_alpha{alpha}"
        assert float(found) == pytest.approx(float(GOLDEN[name]), abs=1e-6)
        if base == "soft_target":
            grad = jax.grad(lambda a, b: losses(config, a, b, labels), (0, 1))  # noqa: B023
            for found, key in zip(grad(*logits), ("", "_kd"), strict=True):
                wanted = GOLDEN[f"{name}/grad_logits{key}"]
                np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_the_paper_does_not_divide_by_the_classes():
    config = DistillationConfig(teacher="x", kind="soft", alpha=1.0)
    labels = np.eye(10, dtype=np.float32)[GOLDEN["loss/label"]]
    of_paper = losses(config, GOLDEN["loss/logits"], GOLDEN["loss/logits_kd"], labels)
    config = fields.replace(config, {"mean_over_classes": True})
    of_code = losses(config, GOLDEN["loss/logits"], GOLDEN["loss/logits_kd"], labels)
    assert float(of_paper) == pytest.approx(10 * float(of_code))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Returns the workdir of a teacher."""
    workdir = tmp_path_factory.mktemp("teacher") / "run"
    write_workdir(tiny_config(total_steps=1, evals={}), workdir)
    return workdir


def config_of(teacher, **sections):
    keys = {"total_steps": 2, "checkpoint_every_steps": 1, "log_every_steps": 1}
    keys["task"] = {"name": "distillation", "teacher": str(teacher)}
    return tiny_config(**keys | {"model": {"distillation": True}} | sections)


def build(config):
    return config.task.build(config.build_model(), config.data, RunLength(2, 1.0))


def exported(teacher, path, **changes):
    """Exports the teacher with other metadata and returns the file."""
    found = weights.open_pretrained(teacher)
    native.write(dataclasses.replace(found, **changes), path)
    return path


@pytest.mark.slow
def test_a_student_trains_and_resumes_without_the_file_of_its_teacher(
    teacher, tmp_path
):
    # Images of the teacher have another mean, which the run must know without the file.
    preprocess = Preprocess((8, 12), mean=(0.1, 0.2, 0.3), std=(0.5,) * 3, squash=True)
    file = exported(teacher, tmp_path / "a.safetensors", preprocess=preprocess)
    config = config_of(file)
    whole = loop.train(config, tmp_path / "run")
    assert set(whole["final"]["val"]) == {"params", "ema"}
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    logged = json.loads(lines[0])
    for name in ("class_loss", "distillation_loss", "teacher_top1"):
        assert np.isfinite(logged[f"train/{name}"])
    kill_after(1, tmp_path / "run")
    file.unlink()
    begin(config, tmp_path / "run")
    # Another file in its place changes nothing either.
    exported(teacher, file)
    resumed = loop.train(config, tmp_path / "run")
    assert resumed["params_sha256"] == whole["params_sha256"]
    message = r"another config \(task.teacher: .*a.safetensors -> .*other"
    with pytest.raises(UserError, match=message):
        loop.train(config_of(tmp_path / "other"), tmp_path / "run")


def test_classes_in_another_order_are_matched_by_name_or_refused(teacher, tmp_path):
    names, order = tuple("abcde"), np.array([3, 0, 4, 1, 2])
    pixels = np.zeros((1, 8, 12, 3), np.uint8)
    found = weights.open_pretrained(teacher)
    draw = np.random.default_rng(0).standard_normal
    head = {"kernel": draw((12, 5), np.float32), "bias": draw(5, np.float32)}
    losses, images = [], jnp.asarray(draw((3, 8, 12, 3), np.float32))
    rng = jax.random.key(2)
    for i, of_teacher in enumerate((np.arange(5), order)):
        params = found.params | {
            "head": {k: v[..., of_teacher] for k, v in head.items()}
        }
        # The first names its classes in the order of the data.
        known = tuple(names[k] for k in of_teacher)
        file = exported(
            teacher, tmp_path / f"{i}.safetensors", params=params, class_names=known
        )
        config = config_of(file, task={"name": "distillation", "teacher": str(file)})
        source = ArraySource("made", pixels, None, names)
        task = config.task.of_records(config.data, source)
        built = task.build(config.build_model(), config.data, RunLength(2, 1.0))
        # As in a resumed run.
        saved = json.loads(json.dumps(built.metadata()))
        model, run = config.build_model(), RunLength(2, 1.0)
        resumed = config.task.build(model, config.data, run, saved)
        state = draw_params(built)
        extra = {**(state[1] or {}), **built.load()}
        batch = {"image": images, "label": jnp.eye(3, 5)}
        for each in (built, resumed)[: 1 + i]:
            of_params = jax.jit(lambda params: each.loss(params, extra, batch, rng))  # noqa: B023
            loss, (metrics, _) = of_params(state[0])
            losses.append([float(loss), float(metrics["teacher_top1"])])
        assert any("matched by names" in note for note in built.notes) == bool(i)
    assert losses[0] == pytest.approx(losses[1]) and losses[1] == losses[2]
    other = ArraySource("made", pixels, None, ("f", *names[1:]))
    task = config.task.of_records(config.data, other)
    with pytest.raises(
        UserError, match="lack 1 of 5: 'f'.*task.match_classes=position"
    ):
        task.build(config.build_model(), config.data, RunLength(2, 1.0))
    task = dataclasses.replace(task, match_classes="position")
    assert "classes" not in task.build(model, config.data, run).metadata()["teacher"]


def test_images_are_normalised_as_the_teacher_knows_them(teacher, tmp_path):
    images = jnp.ones((1, 8, 12, 3))
    other = Preprocess((8, 12), mean=(0.1, 0.2, 0.3), std=(0.5,) * 3, squash=True)
    file = exported(teacher, tmp_path / "a.safetensors", preprocess=other)
    found = build(config_of(file))._teacher.images(images)[0, 0, 0]
    np.testing.assert_allclose(found, (1 - np.array([0.1, 0.2, 0.3])) / 0.5, rtol=1e-6)
    exported(teacher, file, preprocess=None)
    task = build(config_of(file, data={"mean": (0.5, 0.25, 0.125)}))
    assert task._teacher.images(images) is images
    (line,) = task.notes
    assert str(file) in line and line.endswith(
        "does not record its normalisation: "
        "data.mean=(0.5, 0.25, 0.125) and data.std=(0.5,) are used"
    )


def test_a_teacher_of_sigmoid_loss_is_for_hard_answers(teacher, tmp_path):
    file = exported(teacher, tmp_path / "a.safetensors", loss="sigmoid")
    build(config_of(file))
    task = {"name": "distillation", "teacher": str(file), "kind": "soft"}
    message = (
        "was trained with sigmoid loss, .*task.kind='soft' .*: set task.kind='hard'"
    )
    with pytest.raises(UserError, match=message):
        build(config_of(file, task=task))


@pytest.mark.parametrize("options", [{"num_classes": 0}, {"pool": "none"}])
def test_a_teacher_without_a_classifier_is_refused(teacher, tmp_path, options):
    found = weights.open_pretrained(teacher)
    params = found.params
    if "num_classes" in options:
        params = {k: v for k, v in params.items() if k != "head"}
    file = exported(
        teacher,
        tmp_path / "a.safetensors",
        options=found.options | options,
        params=params,
    )
    with pytest.raises(UserError, match="has no classifier: fine-tune it on these cl"):
        build(config_of(file))


def test_the_teachers_forward_pass_is_counted(teacher):
    task, frozen = build(config_of(teacher)), tiny_config().build_model()
    macs = 3 * cost.macs_per_image(task.model) + cost.macs_per_image(frozen)
    assert task.training_flops() == 2 * macs


def test_the_memory_check_counts_the_teacher(teacher, monkeypatch):
    mesh = meshes.create(MeshConfig(data=1), jax.devices()[:1])
    config = config_of(teacher)
    shapes = train_setup.build(config, mesh, 20).layout.shapes
    sizes = [
        sum(x.size * 4 for x in jax.tree.leaves(tree))
        for tree in (shapes.params, shapes.extra)
    ]
    assert all(sizes)
    have = lambda bytes: monkeypatch.setattr(
        sharding, "device_memory", lambda devices: bytes
    )
    have(sum(sizes))
    train_setup.build(config, mesh, 20)
    have(sum(sizes) - 1)
    with pytest.raises(UserError, match="the task keeps 0.0 GB beside them, and there"):
        train_setup.build(config, mesh, 20)


def test_the_teacher_is_in_the_state_and_does_not_move(teacher):
    mesh = meshes.create(MeshConfig(data=1), jax.devices()[:1])
    built = train_setup.build(config_of(teacher), mesh, 20)
    state = built.initial_state()
    before = jax.device_get(state.extra)
    assert before["teacher"]["head"]["kernel"].any()
    batch = {
        name: jnp.zeros(form.shape, form.dtype)
        for name, form in built.layout.batch.items()
    }
    state, metrics = built.train_step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.extra), before)
    assert np.isfinite(float(metrics["distillation_loss"]))


def test_one_classifier_learns_from_both(teacher):
    task = build(config_of(teacher, model={"distillation": False}))
    assert "head_dist" not in jax.eval_shape(task.init, jax.random.key(0))[0]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {"num_classes": 4}},
            r"has num_classes=5, but data.num_classes=4: fine-tune it on",
        ),
        ({"data": {"image_size": (8, 16)}}, r"is for images of \(8, 12\), but"),
        ({"task": {"name": "distillation"}}, "task.teacher='': give"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(teacher, sections, message):
    config = config_of(teacher, **sections)
    with pytest.raises(UserError, match=message):
        model = models.create("Ti/4", num_classes=5, image_size=(8, 12))
        config.task.build(model, config.data, RunLength(4, 1.0))


def test_keys_of_another_task_are_refused():
    with pytest.raises(
        UserError, match="task.teacher is read only with task.name=dist"
    ):
        tiny_config(task={"teacher": "x"})
    assert type(tiny_config().task) is ClassificationConfig
