"""A network with BatchNorm: the ConvMixer of the docs, trained, resumed, evaluated, exported."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import kill_after, tiny_config, train

from vit_jax import models, weights
from vit_jax.config import fields
from vit_jax.data.transforms import device as device_transforms
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.models import STATE
from vit_jax.training import config as configuration
from vit_jax.training import train_setup
from vit_jax.weights import export

EXAMPLES = pathlib.Path(__file__).parents[2] / "docs/examples"
VARIANT = "conv_mixer:ConvMixerConfig"
MOMENTUM = 0.75
MIXER = {"variant": VARIANT, "width": 6, "depth": 1, "momentum": MOMENTUM}


@pytest.fixture(scope="module", autouse=True)
def _found():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield


def conv_mixer(**sections):
    raw = fields.to_dict(tiny_config(**sections))
    return configuration.complete(raw | {"model": MIXER})


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mixer"
    train(conv_mixer(ema={"decay": 0.5}), folder)
    return folder


def images_of(count=16, classes=5):
    rng = np.random.default_rng(0)
    arrays = {
        "image": rng.integers(0, 256, (count, 8, 12, 3), np.uint8),
        "label": rng.integers(0, classes, count, np.int32),
        "index": np.arange(count, dtype=np.uint32),
    }
    return jax.tree.map(jnp.asarray, arrays)


def near(a, b, atol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), a, b)


def stepped(config, num_devices):
    """Returns the state at the start and after a step."""
    mesh = meshes.create(config.mesh, jax.devices()[:num_devices])
    setup = train_setup.build(config, mesh, num_examples=20)
    state = setup.initial_state()
    before = jax.device_get(state.replace(key=None))
    batch = {
        name: jax.device_put(value, setup.layout.batch[name].sharding)
        for name, value in images_of(config.batch_size).items()
    }
    after, _ = setup.train_step(state, batch)
    return setup, before, jax.device_get(after.replace(key=None))


def test_a_step_moves_the_means_to_those_of_the_whole_batch():
    config = conv_mixer(batch_size=16)
    setup, before, after = stepped(config, 8)
    mean, variance = (before.extra[STATE]["norm"][k] for k in ("mean", "var"))
    assert not mean.any()
    assert (variance == 1).all()
    # What BatchNorm sees: all 16 images, though each device has two.
    batch = setup.task.prepare(images_of(), jax.random.key(0))
    layer = before.params["embedding"]
    x = jax.lax.conv_general_dilated(
        batch["image"], layer["kernel"], (4, 4), "VALID", dimension_numbers=_NHWC
    )
    x = np.asarray(jax.nn.gelu(x + layer["bias"][None, None, None]))
    moved = after.extra[STATE]["norm"]
    expected = (1 - MOMENTUM) * x.mean((0, 1, 2))
    np.testing.assert_allclose(moved["mean"], expected, atol=1e-6)
    expected = MOMENTUM + (1 - MOMENTUM) * x.var((0, 1, 2))
    np.testing.assert_allclose(moved["var"], expected, atol=1e-6)
    _, _, alone = stepped(config, 1)
    near(after, alone, atol=1e-5)


_NHWC = ("NHWC", "HWIO", "NHWC")


def test_a_run_says_that_frozen_layers_have_moving_means_and_what_microbatches_change():
    mesh = meshes.create(conv_mixer().mesh, jax.devices()[:1])
    notes = lambda **optim: (
        train_setup.build(conv_mixer(optim=optim), mesh, num_examples=20).notes
    )
    assert notes() == ()
    (line,) = notes(freeze=("^norm/",))
    assert "optim.freeze=('^norm/',)" in line and "running means" in line
    (line,) = notes(grad_accum_steps=4)
    assert line.startswith("optim.grad_accum_steps=4: BatchNorm") and "2 images" in line


@pytest.mark.slow
def test_of_parts_of_a_batch_the_means_are_averaged():
    config = conv_mixer(optim={"grad_accum_steps": 2})
    setup, before, after = stepped(config, 1)
    batch = setup.task.prepare(images_of(8), jax.random.key(0))
    found = []
    for part in (slice(0, 8, 2), slice(1, 8, 2)):
        rows = {name: value[part] for name, value in batch.items()}
        given = before.params, before.extra, rows, jax.random.key(0)
        found.append(setup.task.outputs(*given)[1][STATE])
    average = jax.tree.map(lambda a, b: (a + b) / 2, *found)
    near(average, after.extra[STATE], atol=1e-6)


def test_a_run_is_resumed_to_the_bit(workdir, tmp_path):
    copy = shutil.copytree(workdir, tmp_path / "run")
    whole = json.loads((copy / "report.json").read_text())
    kill_after(3, copy)
    resumed = train(conv_mixer(ema={"decay": 0.5}), copy)
    assert resumed["params_sha256"] == whole["params_sha256"]
    assert resumed["final"] == whole["final"]
    means = [weights.open_pretrained(at).params[STATE] for at in (workdir, copy)]
    jax.tree.map(np.testing.assert_array_equal, *means)


def test_an_evaluation_uses_the_running_means(workdir):
    found = weights.open_pretrained(workdir)
    model = models.create(**found.options)
    assert model.stateful
    images = jnp.asarray(images_of(4)["image"] / 127.5 - 1, jnp.float32)
    logits = model.apply(found.params, images)["logits"]
    # An image's answer is its own, not that of the batch it came in.
    alone = model.apply(found.params, images[:1])["logits"]
    np.testing.assert_allclose(logits[:1], alone, atol=1e-6)
    shifted = jax.tree.map(lambda x: x + 0.5, found.params[STATE])
    other = model.apply({**found.params, STATE: shifted}, images)["logits"]
    assert np.abs(other - logits).max() > 1e-3


@pytest.mark.slow
def test_it_begins_from_a_run(workdir, tmp_path):
    found = weights.open_pretrained(workdir)
    stated = {"init": str(workdir), "data": {"num_classes": 3}, "evals": {}}
    train(conv_mixer(total_steps=1, optim={"learning_rate": 1e-9}, **stated), tmp_path)
    begun = weights.open_pretrained(tmp_path).params[STATE]["norm"]["mean"]
    start = found.params[STATE]["norm"]["mean"]
    assert np.abs(begun - MOMENTUM * start).max() > 0
    drawn = np.zeros_like(start)
    # A quarter of the way to the mean of a batch: nearer to the run's than to the start's.
    assert np.abs(begun - start).max() < np.abs(begun - drawn).max()


def test_its_program_answers_as_it_does(workdir, tmp_path):
    found = weights.open_pretrained(workdir)
    export.export(found, "stablehlo", tmp_path / "program")
    data = (tmp_path / "program" / "model.stablehlo").read_bytes()
    images = images_of(3)["image"]
    program = jax.export.deserialize(bytearray(data)).call
    model = models.create(**found.options)
    how = found.preprocess
    normal = device_transforms.normalize(images, how.mean, how.std)
    logits = model.apply(found.params, normal)["logits"]
    np.testing.assert_allclose(program(images)["logits"], logits, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "moves"),
    [
        ({"name": "distillation"}, True),
        ({"name": "lora", "rank": 1, "projections": ("channels_0",)}, True),
        ({"name": "linear_probe"}, False),
    ],
    ids=lambda task: str(task),
)
def test_tasks_move_the_means_or_leave_them_as_they_are(workdir, tmp_path, task, moves):
    begins = {"init": str(workdir)}
    if task["name"] == "distillation":
        task, begins = task | {"teacher": str(workdir)}, {}
    train(conv_mixer(task=task, total_steps=3, evals={}, **begins), tmp_path)
    before, after = (
        weights.open_pretrained(at).params[STATE]["norm"]["mean"]
        for at in (workdir, tmp_path)
    )
    assert (before != after).all() == moves
    assert (before == after).all() != moves


def test_a_task_that_does_not_carry_the_means_is_refused():
    config = conv_mixer(task={"name": "center_loss:CenterLossConfig"})
    mesh = meshes.create(config.mesh, jax.devices()[:1])
    with pytest.raises(UserError, match=r"center_loss:CenterLossConfig.*batch_stats"):
        train_setup.build(config, mesh, num_examples=20)
