"""Distillation of features: losses to the digit, teachers of other kinds, whole runs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    TINY,
    assert_same_training,
    draw_params,
    kill_after,
    slow_but,
    tiny_config,
    train,
    trained_on,
    write_weights,
)

from vit_jax import models, weights
from vit_jax.config.lengths import RunLength
from vit_jax.data.preprocess import Preprocess
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed.mesh import MeshConfig
from vit_jax.errors import UserError
from vit_jax.models import cost, vector_and_patches
from vit_jax.tasks.feature_distillation import FeatureDistillation
from vit_jax.training import train_setup
from vit_jax.weights.formats import native

B = 5
MEAN, STD = (0.1, 0.3, 0.45), (0.5, 0.2, 0.35)  # Of the student, by channel.
# Teachers of another patch size, image size, normalisation and width than the student.
HOW = Preprocess((9, 15), mean=(0.6, 0.2, 0.4), std=(0.3, 0.7, 0.15), squash=True)
FIRST = {"variant": "Ti/3", "image_size": (9, 15), "width": 15, "mlp_dim": 7}
FIRST |= {"num_classes": 0, "num_register_tokens": 2}
SECOND = {"variant": "Ti/4", "image_size": (8, 12), "num_classes": 3, "pool": "gap"}
WEIGHTS = {
    "cosine": 0.7,
    "smooth_l1": 1.3,
    "relational": 2.1,
    "patch_cosine": 0.4,
    "patch_smooth_l1": 1.7,
    "patch_relational": 3.1,
}
ALL = {f"{name}_weight": value for name, value in WEIGHTS.items()}
OF_VECTORS = {"patch_cosine_weight": 0.0, "patch_smooth_l1_weight": 0.0}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Returns a teacher with a bicubic preprocessing of its own."""
    path = tmp_path_factory.mktemp("teachers") / "first.safetensors"
    how = dataclasses.replace(HOW, interpolation="bicubic")
    write_weights(path, preprocess=how, **FIRST)
    return str(path)


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """Returns a teacher with a classifier, whose normalisation is unknown."""
    path = tmp_path_factory.mktemp("teachers") / "second.safetensors"
    write_weights(path, **SECOND)
    return str(path)


def config_of(*teachers, **sections):
    data = {"num_classes": 0, "mean": MEAN, "std": STD} | sections.pop("data", {})
    task = {"name": "feature_distillation", "teachers": teachers, "projector": "linear"}
    task |= sections.pop("task", {})
    keys = {"total_steps": 4, "checkpoint_every_steps": 2, "log_every_steps": 1}
    keys |= {"ema": {"decay": 0.5}, "evals": {"held_out": {"kind": "task"}}}
    return tiny_config(data=data, task=task, **keys | sections)


def build(config, saved=None):
    run = RunLength(4, 1.0)
    return config.task.build(config.build_model(), config.data, run, saved)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def project(layers, x):
    layer = jax.device_get(layers["out"])
    return x @ layer["kernel"] + layer["bias"]


def losses_of(student, teacher, projectors):
    """Computes all losses of the images in NumPy, by the names of their weights."""
    found = {}
    for prefix, place in (("", "vector"), ("patch_", "patches")):
        s, t = (
            np.asarray(x[place], np.float64).reshape(B, -1, x[place].shape[-1])
            for x in (student, teacher)
        )
        p = project(projectors[place], s)
        apart = np.abs(p - t)
        smooth = np.where(apart < 1, apart**2 / 2, apart - 0.5)
        cosines = (unit(p) * unit(t)).sum(-1)
        # The similarities of vectors are those of the images of the batch.
        s, t = (unit(x if prefix else x.swapaxes(0, 1)) for x in (s, t))
        errors = np.square(s @ s.swapaxes(1, 2) - t @ t.swapaxes(1, 2)).mean(-1)
        found |= {
            f"{prefix}cosine": (1 - cosines).mean(1),
            f"{prefix}smooth_l1": smooth.mean((1, 2)),
            f"{prefix}relational": errors.mean(1) if prefix else errors[0],
        }
    return found


def drawn_state(task, seed=0):
    params, extra = draw_params(task, seed)
    return params, {**extra, **task.load()}


def test_losses_are_those_of_two_teachers_with_weights(first, second):
    task = {"teacher_weights": (0.6, 1.9), **ALL}
    built = build(config_of(first, second, task=task))
    params, extra = drawn_state(built)
    pixels = np.random.default_rng(0).uniform(size=(B, 8, 12, 3)).astype(np.float32)
    images = jnp.asarray((pixels - np.array(MEAN)) / np.array(STD), jnp.float32)
    batch, key = {"image": images}, jax.random.key(1)
    loss, (metrics, _) = jax.jit(built.loss)(params, extra, batch, key)

    def features(model, params, images):
        compute = jax.jit(lambda f, *args: f(*args), static_argnums=0)
        return {
            "vector": compute(model.apply, params, images)["pre_logits"],
            "patches": compute(model.patch_features, params, images),
        }

    student = features(built.model, params["network"], images)
    resized = np.asarray(jax.image.resize(pixels, (B, 9, 15, 3), "cubic"))
    inputs = (resized - np.array(HOW.mean)) / np.array(HOW.std), images
    totals = dict.fromkeys(WEIGHTS, 0.0)
    for i, (file, scale) in enumerate(((first, 0.6), (second, 1.9))):
        found = weights.open_pretrained(file)
        model = models.create(**found.options)
        teacher = features(model, found.params, jnp.asarray(inputs[i], jnp.float32))
        # Patches on the student's grid of 2x3.
        size = B, 2, 3, teacher["patches"].shape[-1]
        teacher["patches"] = jax.image.resize(teacher["patches"], size, "linear")
        expected = losses_of(student, teacher, params["projectors"][str(i)])
        whole = sum(WEIGHTS[name] * value for name, value in expected.items())
        assert metrics[f"teacher_{i}_loss"] == pytest.approx(whole.mean(), rel=1e-4)
        for name, value in expected.items():
            totals[name] = totals[name] + scale * value
    for name, value in totals.items():
        assert metrics[f"{name}_loss"] == pytest.approx(value.mean(), rel=1e-4), name
    whole = sum(WEIGHTS[name] * value for name, value in totals.items())
    assert loss == pytest.approx(whole.mean(), rel=1e-4)
    # Of each image, without the loss of several images.
    held_out = jax.jit(built.held_out_metrics)(params, extra, batch, key)
    assert held_out.keys() == {"loss", *(f"{k}_loss" for k in WEIGHTS)} - {
        "relational_loss"
    }
    np.testing.assert_allclose(
        held_out["patch_cosine_loss"], totals["patch_cosine"], rtol=1e-4
    )
    alone = whole - WEIGHTS["relational"] * totals["relational"]
    np.testing.assert_allclose(held_out["loss"], alone, rtol=1e-4)
    # One teacher's normalisation is unknown.
    (note,) = built.notes
    assert second in note and f"data.mean={MEAN}" in note


def test_standardised_targets_have_mean_0_and_deviation_1(first):
    config = config_of(first, task={"standardize": True, "smooth_l1_weight": 1.0})
    built = build(config)
    images = jax.random.normal(jax.random.key(0), (B, 8, 12, 3))
    compute = jax.jit(lambda *args: built._targets(built.teachers[0], *args))
    teacher = compute(built.load()["teacher_0"], images)
    for value in teacher.values():
        np.testing.assert_allclose(value.mean(-1), 0, atol=1e-5)
        np.testing.assert_allclose(value.std(-1), 1, atol=1e-3)


def test_the_projector_is_as_wide_as_told_and_gets_the_gradient(first):
    task = {"projector": "mlp", "projector_dim": 11, **OF_VECTORS}
    built = build(config_of(first, task=task))
    params, extra = drawn_state(built)
    ((name, projector),) = params["projectors"]["0"].items()
    assert name == "vector" and projector["Dense_0"]["kernel"].shape == (12, 11)
    assert projector["out"]["kernel"].shape == (11, 15)
    batch = {"image": jax.random.normal(jax.random.key(0), (B, 8, 12, 3))}
    of = lambda params, extra: built.loss(params, extra, batch, jax.random.key(1))[0]
    grads, still = jax.jit(jax.grad(of, (0, 1)))(params, extra)
    assert not any(np.any(x) for x in jax.tree.leaves(still))
    assert all(np.any(x) for x in jax.tree.leaves(grads["projectors"]))
    products = 12 * 11 + 11 * 15
    student, teacher = built.model, built.teachers[0].network
    macs = 3 * (cost.macs_per_image(student) + products) + cost.macs_per_image(teacher)
    assert built.training_flops() == 2 * macs


@pytest.mark.parametrize("task", [OF_VECTORS | {"cosine_weight": 0.0}, ALL])
def test_losses_within_the_batch_are_coupled(first, task):
    built = build(config_of(first, task=task | {"relational_weight": 1.0}))
    assert built.coupled == ("the relational loss",)
    assert build(config_of(first)).coupled == ()
    has_projectors = "projectors" in jax.eval_shape(built.init, jax.random.key(0))[0]
    assert has_projectors == bool(task["cosine_weight"])


MAP = ("Ti/4", {"pool": "map"})
KINDS = (
    MAP,
    ("Ti/4", {"scan": True, "representation_layer": True}),
    ("Ti/4", {"distillation": True}),
    ("R50x1", {"stage_depths": (1, 1), "stem_width": 32}),
    (
        "Mixer-S/4",
        {"depth": 1, "width": 12, "tokens_mlp_dim": 5, "channels_mlp_dim": 7},
    ),
)


@pytest.mark.parametrize(("variant", "options"), slow_but([MAP], KINDS), ids=str)
def test_one_pass_returns_vector_and_patches(variant, options):
    tiny = TINY if variant == "Ti/4" else {}
    model = models.create(variant, num_classes=0, image_size=(8, 12), **tiny | options)
    params = draw_params(model)
    images = jax.random.normal(jax.random.key(0), (2, 8, 12, 3))
    found = jax.jit(lambda *args: vector_and_patches.compute(model, *args))(
        params, images
    )
    vector = model.apply(params, images)["pre_logits"]
    np.testing.assert_allclose(found.vector, vector, atol=1e-5)
    patches = model.patch_features(params, images)
    np.testing.assert_allclose(found.patches, patches, atol=1e-5)


def test_a_teacher_gets_images_of_a_chosen_size(second):
    built = build(config_of(second, task={"image_sizes": (16,)}))
    assert built.teachers[0].network.grid == (4, 4)
    images = jax.random.normal(jax.random.key(0), (B, 8, 12, 3))
    assert built.teachers[0].images(images).shape == (B, 16, 16, 3)
    loaded = built.load()["teacher_0"]
    shapes = jax.eval_shape(built.init, jax.random.key(0))[1]["teacher_0"]
    jax.tree.map(
        lambda x, shape: np.testing.assert_equal(x.shape, shape.shape), loaded, shapes
    )
    with pytest.raises(UserError, match=r"second.*\(18, 18\).* patch size 4"):
        build(config_of(second, task={"image_sizes": (18,)}))


@pytest.mark.parametrize(
    ("teachers", "task", "message"),
    [
        ((), {}, r"task.teachers=\(\): give"),
        (("nowhere.npz",), {}, "task.teachers: .*nowhere.npz"),
        (
            ("x", "y"),
            {"teacher_weights": (1.0,)},
            r"task.teacher_weights=\(1.0,\) has 1",
        ),
        (("x",), {"image_sizes": (4, 4)}, r"task.image_sizes=\(4, 4\) has 2 numbers"),
        (("x",), OF_VECTORS | {"cosine_weight": 0.0}, "task.cosine_weight"),
        (("untrained",), {"projector_dim": 3}, "task.projector_dim"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(teachers, task, message):
    with pytest.raises(UserError, match=message) as error:
        build(config_of(*teachers, task=task))
    assert "\n" not in str(error.value)


def test_a_teacher_of_other_channels_or_classes_in_the_data_are_refused(
    first, tmp_path
):
    path = tmp_path / "grey.safetensors"
    write_weights(path, **SECOND | {"channels": 1})
    with pytest.raises(UserError, match=r"grey.*channels=1, but data.channels=3"):
        build(config_of(str(path)))
    with pytest.raises(UserError, match="data.num_classes=5 .*reads no labels"):
        build(config_of(first, data={"num_classes": 5}))


WITHOUT_PATCHES = """
import dataclasses

import flax.linen as nn

from vit_jax.models import NetworkConfig


class Pooled(nn.Module):
    @nn.compact
    def __call__(self, images, *, train=False):
        return {"pre_logits": nn.Dense(6)(images.mean((1, 2)))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(NetworkConfig):
    def build(self, num_classes, image_shape):
        return Pooled()
"""


def test_patches_of_a_network_without_any_are_refused(first, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "without_patches.py").write_text(WITHOUT_PATCHES)
    config = config_of(first)
    given = {"num_classes": 0, "image_size": (8, 12), "channels": 3}
    model = models.create("without_patches:Config", **given)
    with pytest.raises(
        UserError, match=r"the student returns no patches: set task.patch"
    ):
        FeatureDistillation(config.task, model, config.data)
    task = dataclasses.replace(config.task, **OF_VECTORS)
    built = FeatureDistillation(task, model, config.data)
    projectors = jax.eval_shape(built.init, jax.random.key(0))[0]["projectors"]
    assert projectors["0"]["vector"]["out"]["kernel"].shape == (6, 15)


def test_patch_dropout_goes_with_vectors_only(first):
    dropping = {"patch_dropout": 0.5}
    with pytest.raises(UserError, match=r"patch_dropout=0.5: .*needs all patches"):
        config_of(first, model=dropping).build_model()
    config_of(first, model=dropping, task=OF_VECTORS).build_model()


@pytest.fixture(scope="module")
def run(first, tmp_path_factory):
    """Trains: the config, the workdir and the report; the teacher's file is gone then."""
    folder = tmp_path_factory.mktemp("runs")
    file = folder / "teacher.safetensors"
    native.write(weights.open_pretrained(first), file)
    config = config_of(str(file), "untrained")
    report = train(config, folder / "run")
    file.unlink()
    return config, folder / "run", report


@pytest.mark.slow
def test_its_workdir_is_the_student(run):
    config, workdir, report = run
    scores = report["final"]["held_out"]
    assert scores.keys() == {"params", "ema"}
    names = {"loss", "cosine_loss", "patch_cosine_loss", "patch_smooth_l1_loss"}
    assert scores["ema"].keys() == names
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    losses = [row["train/loss"] for row in logged if "train/loss" in row]
    assert losses[-1] < losses[0]
    found = weights.open_pretrained(workdir, with_task=True)
    assert found.task_params.keys() == {"projectors"}
    shapes = jax.tree.map(np.shape, found.params)
    assert shapes == jax.tree.map(lambda x: x.shape, config.build_model().shapes)


@pytest.mark.slow
def test_a_resumed_run_is_equal_to_the_bit_without_the_file(run):
    config, workdir, report = run
    kill_after(2, workdir)
    again = train(config, workdir)
    assert again["params_sha256"] == report["params_sha256"]
    assert again["final"] == report["final"]


FSDP = {"mesh": {"data": 2, "fsdp": 4}, "sharding": {"min_size": 6}}


@pytest.mark.slow
@pytest.mark.parametrize("sections", [{"mesh": {"data": 8}}, FSDP], ids=str)
def test_eight_devices_learn_as_one(second, sections):
    found = trained_on(config_of(second, task=ALL, **sections), 8)
    assert_same_training(found, trained_on(config_of(second, task=ALL), 1))


def test_microbatches_change_the_relational_loss_only(first):
    built = build(config_of(first, task=ALL))
    params, extra = drawn_state(built)
    images = jax.random.normal(jax.random.key(0), (4, 8, 12, 3))
    compute = jax.jit(lambda images: built.losses(params, extra, images, None)[0])
    parts = compute(images[:2]), compute(images[2:])
    for name, whole in compute(images).items():
        same = np.allclose(jnp.concatenate([part[name] for part in parts]), whole)
        assert same == (name != "relational")
    few = {"optim": {"learning_rate": 0.01, "grad_accum_steps": 4}}
    mesh = meshes.create(MeshConfig(data=1), jax.devices()[:1])
    notes = train_setup.build(config_of(first, task=ALL, **few), mesh, 20).notes
    assert any("the relational loss use" in note for note in notes)
    notes = train_setup.build(config_of(first, **few), mesh, 20).notes
    assert not any("microbatch" in note for note in notes)


@pytest.mark.slow
def test_microbatches_learn_as_the_batch(first):
    few = {"optim": {"learning_rate": 0.01, "grad_accum_steps": 4}}
    whole = trained_on(config_of(first), 1)
    assert_same_training(trained_on(config_of(first, **few), 1), whole)
