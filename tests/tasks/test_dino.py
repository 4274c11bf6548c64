"""DINO against facebookresearch/dino, step by step."""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recorded_draws
from flax.traverse_util import flatten_dict, unflatten_dict
from helpers import tiny_config
from safetensors.numpy import load_file

from vit_jax import models
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.tasks import dino, dino_losses
from vit_jax.training import optim
from vit_jax.weights.formats import timm
from vit_jax.weights.formats.files import Tensors

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
TRAIN = np.load(GOLDEN / "dino_train.npz")
CROPS = "multi_crop(small_size=16, num_small=4)"
DATA = DataConfig(image_size=(32, 32), num_classes=0, train_transform=CROPS)
RUN = RunLength(6, 2.0)
CONFIG = dino.DinoConfig(
    num_outputs=48,
    hidden_dim=32,
    bottleneck_dim=16,
    teacher_temperature=0.07,
    teacher_temperature_start=0.04,
    teacher_temperature_epochs=2,
    teacher_momentum=0.9,
)


def model_of(**options):
    sizes = {"width": 24, "depth": 2, "num_heads": 3, "mlp_dim": 48}
    return models.create(
        "Ti/4",
        num_classes=0,
        image_size=(32, 32),
        activation="gelu",
        posemb_resize="bicubic_dino",
        **sizes | options,
    )


def head_of(flat):
    head = {
        f"Dense_{i}": {
            "kernel": flat[f"mlp.{2 * i}.weight"].T,
            "bias": flat[f"mlp.{2 * i}.bias"],
        }
        for i in range(3)
    }
    return head | {"last_layer": flat["last_layer.weight_v"].T}


def part(flat, prefix):
    return {k.removeprefix(prefix): v for k, v in flat.items() if k.startswith(prefix)}


def params_of(flat):
    """Returns a student or teacher of facebookresearch under the names here."""
    backbone = part(flat, "backbone.")
    network = timm.read(Tensors(backbone, {}, {}, "student"), num_heads=3).params
    found = {"network": network, "head": head_of(part(flat, "head."))}
    return jax.tree.map(jnp.asarray, found)


@pytest.fixture(scope="module")
def task():
    return dino.Dino(CONFIG, model_of(), DATA, RUN)


def batch_of(step):
    crops = [
        jnp.asarray(TRAIN[f"train/{step}/crop_{i}"].transpose(0, 2, 3, 1))
        for i in range(6)
    ]
    return {"image": jnp.stack(crops[:2], 1), "small_crops": jnp.stack(crops[2:], 1)}


def crops_first(outputs):
    """Returns outputs (B, V, K) in their order, crop by crop."""
    return np.asarray(outputs).swapaxes(0, 1).reshape(-1, outputs.shape[-1])


def test_six_steps_equal_theirs(task):
    params = params_of(load_file(GOLDEN / "dino_student.safetensors"))
    teacher = params_of(part(TRAIN, "teacher_start/"))
    extra = {
        "teacher": teacher,
        "center": jnp.zeros(48),
        "step": jnp.zeros((), "int32"),
    }
    assert jax.tree.map(jnp.shape, (params, extra)) == jax.tree.map(
        lambda s: s.shape, jax.eval_shape(task.init, jax.random.key(0))
    )
    differentiate = jax.jit(jax.grad(task.loss, has_aux=True))
    answers, update = jax.jit(task.answers), jax.jit(task.update)
    clip = optim.clip_by_parameter_norm(0.3)
    clipped = jax.jit(clip.update)
    counts, moments = {}, {}
    for step in range(6):
        batch = batch_of(step)
        found = answers(params, batch)
        expected = TRAIN[f"train/{step}/student_out"]
        np.testing.assert_allclose(crops_first(found), expected, atol=1e-5)
        found = answers(extra["teacher"], {"image": batch["image"]})
        expected = TRAIN[f"train/{step}/teacher_out"]
        np.testing.assert_allclose(crops_first(found), expected, atol=1e-5)
        grads, (metrics, stats) = differentiate(params, extra, batch, jax.random.key(0))
        assert float(metrics["loss"]) == pytest.approx(
            float(TRAIN[f"train/{step}/loss"]), abs=1e-5
        )
        momentum = float(TRAIN["train/momentum"][step])
        assert float(metrics["teacher_momentum"]) == pytest.approx(momentum, abs=1e-6)
        temperature = float(TRAIN["train/teacher_temp"][step // 2])
        assert float(metrics["teacher_temperature"]) == pytest.approx(temperature)
        grads, _ = clipped(grads, clip.init(params))
        params = jax.tree.map(
            jnp.asarray, adamw(*jax.device_get((params, grads)), counts, moments, step)
        )
        extra = update(extra, params, stats, jnp.asarray(step + 1, jnp.int32))
        expected = TRAIN[f"train/{step}/center_after"][0]
        np.testing.assert_allclose(extra["center"], expected, atol=1e-6)
    for who, found in (("student", params), ("teacher", extra["teacher"])):
        expected = params_of(part(TRAIN, f"{who}_end/"))
        for name, value in flatten_dict(found, sep="/").items():
            if "/key/bias" in name:  # Its gradient is rounding, which Adam magnifies.
                continue
            wanted = flatten_dict(expected, sep="/")[name]
            np.testing.assert_allclose(value, wanted, atol=1e-4, err_msg=name)


def adamw(params, grads, counts, moments, step):
    """Takes PyTorch's step of AdamW, which skips parameters without a gradient."""
    rate, decay = (float(TRAIN[f"train/{name}"][step]) for name in ("lr", "wd"))
    moved = flatten_dict(params, sep="/")
    for name, grad in flatten_dict(grads, sep="/").items():
        if name == "head/last_layer" and step < 2:
            continue
        counts[name] = count = counts.get(name, 0) + 1
        mean, square = moments.get(name, (0, 0))
        mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad**2
        moments[name] = mean, square
        value = moved[name]
        if name.endswith(("/kernel", "cls", "pos_embedding", "last_layer")):
            value = value * (1 - rate * decay)
        root = np.sqrt(square / (1 - 0.999**count)) + 1e-8
        moved[name] = value - rate * mean / (1 - 0.9**count) / root
    return unflatten_dict(moved, sep="/")


def test_heads_equal_theirs():
    weights = part(TRAIN, "head_free_gain/")
    params = head_of(weights) | {"gain": weights["last_layer.weight_g"][:, 0]}
    head = dino_losses.Head(32, 16, 48, free_gain=True)
    found = head.apply({"params": params}, jnp.asarray(TRAIN["head/in"]))
    np.testing.assert_allclose(found, weights["out"], atol=1e-5)


def test_cross_entropies_are_those_of_all_pairs():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, 5, 7)), jnp.float32)
    targets = jax.nn.softmax(jnp.asarray(rng.normal(size=(3, 2, 7)), jnp.float32))
    pairs = [
        -(targets[:, g] * jax.nn.log_softmax(logits[:, v])).sum(-1)
        for g in range(2)
        for v in range(5)
        if g != v
    ]
    expected = np.mean(pairs, axis=0)
    found = dino_losses.cross_entropies(logits, targets)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_drop_path_is_the_students_alone():
    """The teacher answers the same whatever is drawn; the student does not."""
    task = dino.Dino(CONFIG, model_of(drop_path_rate=0.5), DATA, RUN)
    params, extra = jax.jit(task.init)(jax.random.key(0))
    lose = jax.jit(task.loss)
    losses, centers = [], []
    for seed in range(4):
        loss, (_, stats) = lose(params, extra, batch_of(0), jax.random.key(seed))
        losses.append(float(loss))
        centers.append(np.asarray(stats["center"]))
    assert len(set(losses)) > 1
    assert all((center == centers[0]).all() for center in centers)


def test_each_crop_has_its_own_transforms():
    lines = {"large_transforms": ("flip", ""), "small_transform": ""}
    config = dino.DinoConfig(num_outputs=48, **lines)
    task = dino.Dino(config, model_of(), DATA, RUN)
    rng = np.random.default_rng(0)
    batch = {
        "image": jnp.asarray(rng.integers(0, 256, (16, 2, 32, 32, 3)), jnp.uint8),
        "small_crops": jnp.asarray(rng.integers(0, 256, (16, 4, 16, 16, 3)), jnp.uint8),
        "index": jnp.arange(16, dtype=jnp.uint32),
    }
    found = task.prepare(batch, jax.random.key(0))
    plain = {k: batch[k] / 127.5 - 1 for k in ("image", "small_crops")}
    np.testing.assert_allclose(found["small_crops"], plain["small_crops"], atol=1e-6)
    np.testing.assert_allclose(found["image"][:, 1], plain["image"][:, 1], atol=1e-6)
    flipped = [
        np.allclose(found["image"][i, 0], plain["image"][i, 0, :, ::-1], atol=1e-6)
        for i in range(16)
    ]
    assert 0 < sum(flipped) < 16


def test_each_crop_draws_by_itself(monkeypatch):
    flips = {"large_transforms": ("flip", "flip"), "small_transform": "flip"}
    task = dino.Dino(dino.DinoConfig(num_outputs=48, **flips), model_of(), DATA, RUN)
    drawn, size = recorded_draws.record(monkeypatch), 3
    batch = {
        "image": jnp.zeros((size, 2, 32, 32, 3), jnp.uint8),
        "small_crops": jnp.zeros((size, 4, 16, 16, 3), jnp.uint8),
        "index": jnp.arange(size, dtype=jnp.uint32),
    }
    task.prepare(batch, jax.random.key(0))
    jax.effects_barrier()
    assert len(set(drawn)) == len(drawn) == size * (2 + 4)


@pytest.mark.parametrize(
    ("entropy", "said"),
    [(0.0, "to one output"), (math.log(48), "to equal outputs"), (2.0, "")],
)
def test_a_collapse_is_told(task, entropy, said):
    metrics = {"teacher_entropy": entropy}
    found = [task.warning(metrics) for _ in range(6)]
    assert found[:4] == [""] * 4
    assert said in found[4]
    assert bool(found[5]) == bool(said)
    assert task.warning({"teacher_entropy": 1.0}) == ""


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"train_transform": "flip"}}, "must end with multi_crop"),
        (
            {"data": {"train_transform": "multi_crop(small_size=6)"}},
            r"crops of \(6, 6\) are not multiples of the patch size 4: change",
        ),
        ({"task": {"teacher_momentum": 1.5}}, "task.teacher_momentum=1.5 must be at "),
        (
            {"task": {"small_transform": "mixup(0.2)"}},
            "task.small_transform='mixup.0.2.': Mi",
        ),
        ({"task": {"large_transforms": ["flip"]}}, "must be 2 lines"),
        pytest.param(
            {"data": {"num_classes": 5}},
            "reads no labels: set data.num_classes to 0",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_input_is_told_in_one_line(sections, message):
    data = {"num_classes": 0, "train_transform": "multi_crop(small_size=4)"}
    with pytest.raises(UserError, match=message):
        config = tiny_config(
            data=data | sections.get("data", {}),
            task={"name": "dino"} | sections.get("task", {}),
        )
        config.task.build(config.build_model(), config.data, RUN)
