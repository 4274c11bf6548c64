"""Losses of a student and a teacher whose outputs have other means and deviations.

Networks and heads are left out: what they would answer is given, another value in each
crop, token and output, so that no swapped tree, axis, temperature or centre passes.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from vit_jax import models
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.models import resizing
from vit_jax.tasks import dino, dinov2
from vit_jax.tasks.distillation import DistillationConfig
from vit_jax.tasks.task import divide_ratios

B, G, S, K = 3, 2, 3, 5  # Images, large and small crops of each, outputs.
V, C = G + S, B * G
N, M, L, D = 4, 7, 6, 8  # Patches, masked ones at most, outputs for them, width.
STEP, STEPS = 3, 10
CROPS = f"multi_crop(small_size=4, num_small={S})"
KEY = jax.random.key(0)
FIXED = ("teacher", "anchor")  # No gradient may reach them.


def drawn(seed, *shape, mean, deviation):
    """Returns numbers whose mean and deviation differ from output to output."""
    rng = np.random.default_rng(seed)
    of_each = 1 + np.arange(shape[-1]) / shape[-1]
    noise = rng.normal(size=shape) * deviation * of_each
    return (noise + mean * of_each[::-1]).astype(np.float32)


def build(config):
    """Returns a task of crops, whose answers a test gives."""
    sizes = {"width": D, "depth": 1, "num_heads": 2, "mlp_dim": 4}
    model = models.create("Ti/4", num_classes=0, image_size=(8, 8), **sizes)
    data = DataConfig(image_size=(8, 8), num_classes=0, train_transform=CROPS)
    return config.build(model, data, RunLength(STEPS, 2.0))


def differentiate(task, params, extra, batch):
    """Returns the loss, metrics, statistics, and gradients of student and state."""
    lose = jax.value_and_grad(task.loss, (0, 1), has_aux=True, allow_int=True)
    (loss, aux), grads = jax.jit(lose)(params, extra, batch, KEY)
    metrics, stats = divide_ratios(aux)
    student, state = grads
    still = jax.device_get([state[name] for name in state if name in FIXED])
    assert not any(np.any(x) for x in jax.tree.leaves(still))
    return jax.device_get((loss, metrics, stats, student))


def pairs_loss(student, targets, small_weight=1.0):
    """Returns the mean cross-entropy over all pairs of different crops, pair by pair."""
    terms = []
    for large in range(G):
        for crop in range(V):
            if crop != large:
                term = -(targets[:, large] * student[:, crop]).sum(-1)
                terms.append(term * (1.0 if crop < G else small_weight))
    return np.mean(terms)


BATCH = {
    "image": jnp.zeros((B, G, 8, 8, 3)),
    "small_crops": jnp.zeros((B, S, 4, 4, 3)),
}
STUDENT = drawn(0, B, V, K, mean=0.3, deviation=0.2)
TEACHER = drawn(1, B, V, K, mean=-0.6, deviation=0.1)


@pytest.fixture(scope="module")
def dino_task():
    config = dino.DinoConfig(
        num_outputs=K,
        student_temperature=0.2,
        teacher_temperature=0.05,
        teacher_temperature_start=0.05,
        teacher_momentum=0.9,
        center_momentum=0.8,
    )
    task = build(config)

    def answers(params, batch, *, train=False, key=None):
        assert train == (key is not None) == ("small_crops" in batch)
        return params["outputs"] if train else params["outputs"][:, :G]

    task.answers = answers
    return task


def test_dinos_student_predicts_its_teacher_and_only_the_student_is_trained(dino_task):
    center = drawn(2, K, mean=-0.4, deviation=0.1)
    params = {"outputs": STUDENT}
    extra = {"teacher": {"outputs": TEACHER}, "center": center, "step": STEP}
    loss, metrics, stats, grads = differentiate(dino_task, params, extra, BATCH)
    targets = softmax((TEACHER[:, :G] - center) / 0.05, -1)
    assert loss == pytest.approx(
        pairs_loss(log_softmax(STUDENT / 0.2, -1), targets), rel=1e-5
    )
    assert np.abs(grads["outputs"]).min() > 0
    entropy = -(targets * np.log(targets)).sum(-1).mean()
    assert metrics["teacher_entropy"] == pytest.approx(entropy, rel=1e-5)
    mean = TEACHER[:, :G].mean((0, 1))
    np.testing.assert_allclose(stats["center"], mean, rtol=1e-5)


def test_teacher_and_centre_move_by_their_own_momenta(dino_task):
    center = drawn(2, K, mean=-0.4, deviation=0.1)
    mean = drawn(3, K, mean=0.9, deviation=0.1)
    params = {"outputs": STUDENT}
    extra = {"teacher": {"outputs": TEACHER}, "center": center, "step": STEP}
    # The momentum of the step that is finished, not of the next one.
    momentum = 1 - 0.1 * 0.5 * (1 + np.cos(np.pi * STEP / STEPS))
    new = dino_task.update(extra, params, {"center": mean}, jnp.asarray(STEP + 1))
    np.testing.assert_allclose(new["center"], 0.8 * center + 0.2 * mean, rtol=1e-5)
    expected = momentum * TEACHER + (1 - momentum) * STUDENT
    np.testing.assert_allclose(new["teacher"]["outputs"], expected, rtol=1e-5)
    assert new["step"] == STEP + 1
    # What is evaluated and exported is the teacher's.
    networks = {"network": {"a": 1}}, {"teacher": {"network": {"a": 2}}}
    assert dino_task.backbone(*networks) == {"a": 2}


@pytest.mark.parametrize("centering", ["center", "sinkhorn"])
def test_held_out_images_are_compared_by_two_fixed_crops(centering):
    kinds = {"sinkhorn": dinov2.Dinov2Config, "center": dino.DinoConfig}
    config = kinds[centering](
        num_outputs=K,
        student_temperature=0.2,
        teacher_temperature=0.05,
        teacher_temperature_start=0.01,  # Of no effect: no step is warmed up.
    )
    task, seen = build(config), []

    def outputs(params, crops):
        seen.append(crops)
        return jnp.asarray(params["outputs"][:, :G])

    task.class_outputs = outputs
    center = drawn(2, K, mean=-0.4, deviation=0.1)
    extra = {"teacher": {"outputs": TEACHER}, "step": STEP}
    extra["center"] = jnp.asarray(center)
    if centering == "sinkhorn":
        extra, center = {k: extra[k] for k in ("teacher", "step")}, 0.0
    images = jnp.asarray(drawn(9, B, 8, 8, 3, mean=0.1, deviation=0.4))
    found = task.held_out_metrics({"outputs": STUDENT}, extra, {"image": images}, KEY)
    targets = softmax((TEACHER[:, :G] - center) / 0.05, -1)
    student = log_softmax(STUDENT[:, :G] / 0.2, -1)
    terms = [-(targets[:, i] * student[:, 1 - i]).sum(-1) for i in range(G)]
    np.testing.assert_allclose(found["loss"], np.mean(terms, 0), rtol=1e-5)
    entropy = -(targets * np.log(targets)).sum(-1).mean(1)
    np.testing.assert_allclose(found["teacher_entropy"], entropy, rtol=1e-5)
    for crops in seen:
        assert crops.shape == (B, G, 8, 8, 3)
        for crop, part in zip((0, 1), (images[:, :6, :6], images[:, 2:, 2:])):
            for image in range(B):
                expected = resizing.resize_grid(part[image], (8, 8), "bicubic")
                np.testing.assert_allclose(crops[image, crop], expected, atol=1e-5)


@pytest.mark.parametrize("kind", [dino.DinoConfig, dinov2.Dinov2Config])
def test_outputs_of_held_out_crops_are_those_of_a_teacher(kind):
    task = build(kind(num_outputs=K, hidden_dim=7, bottleneck_dim=3))
    shapes = jax.eval_shape(task.init, KEY)[0]
    params = jax.tree.map(
        lambda x: jnp.asarray(drawn(x.size, *x.shape, mean=0.1, deviation=0.3)), shapes
    )
    crops = jnp.asarray(drawn(3, B, G, 8, 8, 3, mean=0.1, deviation=0.4))
    more = ()
    if kind is dinov2.Dinov2Config:
        more = (MASKED._replace(index=jnp.zeros((1, M), int)),)
    whole = task.answers(params, {"image": crops}, *more)
    expected = getattr(whole, "outputs", whole)
    np.testing.assert_allclose(task.class_outputs(params, crops), expected, rtol=1e-5)


# Masked patches of each crop; the last places of `index` fill up.
HIDDEN = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]] * 2, bool)
WEIGHTS = np.array([1 / 2, 1 / 2, 1 / 3, 0, 1 / 3, 1 / 3, 0], np.float32) / C
MASKED = dinov2.Masked(*map(jnp.asarray, (HIDDEN, np.zeros((1, M), int), WEIGHTS)))


def balanced(outputs, temperature):
    """Returns Sinkhorn-Knopp's probabilities after three rounds, as they are published."""
    shares = np.exp(outputs.astype(np.float64) / temperature)
    rows, columns = shares.shape
    for _ in range(3):
        shares /= columns * shares.sum(0, keepdims=True)
        shares /= rows * shares.sum(1, keepdims=True)
    return shares * rows


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def koleo(features):
    """Returns the sum over the large crops of KoLeo, image by image."""
    total = 0.0
    for crop in range(G):
        x = unit(features[:, crop].astype(np.float64))
        distances = np.linalg.norm(x[:, None] - x, axis=-1) + 9 * np.eye(B)
        total -= np.log(distances.min(1)).mean()
    return total


def gram(student, anchor):
    similar = [unit(x) @ unit(x).swapaxes(1, 2) for x in (student, anchor)]
    return np.square(similar[0] - similar[1]).mean()


# Parameters that are the answers: of a student and of its teacher.
OF_STUDENT = {
    "features": drawn(4, B, G, D, mean=0.2, deviation=1.0),
    "patches": drawn(5, C, N, D, mean=-0.3, deviation=0.7),
    "outputs": STUDENT,
    "patch_outputs": drawn(6, M, L, mean=0.5, deviation=0.2),
}
OF_TEACHER = {
    "features": drawn(7, B, G, D, mean=-0.8, deviation=0.4),
    "patches": drawn(8, C, N, D, mean=0.6, deviation=0.2),
    "outputs": TEACHER,
    "patch_outputs": drawn(9, M, L, mean=-0.2, deviation=0.1),
}
# With the class token, which has no part in Gram anchoring.
TOKENS = [drawn(10 + i, C, 1 + N, D, mean=i - 0.5, deviation=0.5) for i in range(2)]


@pytest.mark.parametrize("centering", ["sinkhorn", "center"])
def test_each_loss_of_dinov2_reads_its_part_of_student_and_teacher(centering):
    config = dinov2.Dinov2Config(
        num_outputs=K,
        patch_num_outputs=L,
        centering=centering,
        student_temperature=0.2,
        teacher_temperature=0.05,
        teacher_temperature_start=0.05,
        dino_weight=0.7,
        patch_weight=1.3,
        koleo_weight=0.4,
        gram_weight=2.0,
        small_weight=0.6,
        small_weight_end=0.6,
    )
    task = build(config)

    def answers(params, batch, masked, *, train=False, key=None):
        assert train == (key is not None) == ("small_crops" in batch)
        made = dict(params["answers"])
        made["outputs"] = made["outputs"][:, : V if train else G]
        return dinov2.Answers(**made)

    task.masked = lambda batch: MASKED
    task.answers = answers
    task._tokens = lambda params, crops: params["network"]["tokens"]
    params = {"answers": OF_STUDENT}
    extra = {
        "teacher": {"answers": OF_TEACHER, "network": {"tokens": TOKENS[0]}},
        "anchor": {"tokens": TOKENS[1]},
        "step": STEP,
    }
    centers = {
        "center": drawn(2, K, mean=-0.4, deviation=0.1),
        "patch_center": drawn(3, L, mean=-0.1, deviation=0.1),
    }
    extra |= centers if centering == "center" else {}
    batch = BATCH | {"anchor": BATCH["image"]}
    loss, metrics, stats, grads = differentiate(task, params, extra, batch)

    outputs, patches = TEACHER[:, :G], OF_TEACHER["patch_outputs"]
    counted = WEIGHTS > 0
    if centering == "center":
        targets = softmax((outputs - centers["center"]) / 0.05, -1)
        hidden = softmax((patches - centers["patch_center"]) / 0.05, -1)[counted]
        np.testing.assert_allclose(stats["center"], outputs.mean((0, 1)), rtol=1e-5)
        mean = patches[counted].mean(0)
        np.testing.assert_allclose(stats["patch_center"], mean, rtol=1e-5)
    else:
        targets = balanced(outputs.reshape(C, K), 0.05).reshape(B, G, K)
        hidden = balanced(patches[counted], 0.05)
        assert stats == {}
    logs = log_softmax(OF_STUDENT["patch_outputs"] / 0.2, -1)[counted]
    expected = {
        "dino": pairs_loss(log_softmax(STUDENT / 0.2, -1), targets, 0.6),
        "patch": -((hidden * logs).sum(-1) * WEIGHTS[counted]).sum(),
        "koleo": koleo(OF_STUDENT["features"]),
        "gram": gram(OF_STUDENT["patches"], TOKENS[1][:, 1:]),
    }
    for name, value in expected.items():
        assert metrics[f"{name}_loss"] == pytest.approx(value, rel=1e-4), name
    whole = np.dot([*expected.values()], (0.7, 1.3, 0.4, 2.0))
    assert loss == pytest.approx(whole, rel=1e-4)
    entropy = -(hidden * np.log(hidden)).sum(-1).mean()
    assert metrics["patch_entropy"] == pytest.approx(entropy, rel=1e-4)
    assert metrics["masked"] == pytest.approx(HIDDEN.mean())
    given = grads["answers"]
    assert all(np.abs(given[name]).min() > 0 for name in ("features", "patches"))
    assert (np.abs(given["patch_outputs"]).max(1) > 0).tolist() == counted.tolist()


CONFIGS = dino.DinoConfig(num_outputs=K), dinov2.Dinov2Config(num_outputs=K)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_large_and_small_crops_drop_branches_by_themselves(config):
    task, keys = build(config), []

    def features(params, crops, train, key):
        keys.append(tuple(jax.random.key_data(key).tolist()))
        return jnp.zeros((*crops.shape[:2], D))

    def tokens(params, crops, train, key, hide=None):
        x = features(params, crops, train, key).reshape(-1, 1, D)
        return x.repeat(1 + N, axis=1)

    task._features, task._tokens = features, tokens
    task.head = task.patch_head = types.SimpleNamespace(apply=lambda params, x: x)
    params = dict.fromkeys(("head", "patch_head", "mask_token"), jnp.zeros(()))
    given = params, BATCH, *([MASKED] if config.name == "dinov2" else [])
    task.answers(*given, train=True, key=KEY)
    assert len(keys) == len({*keys}) == 2


Y, X, CLASSES = 2, 3, 4
ORDER = [2, 0, 3, 1]  # The teacher's class of each class of the data.
MEANS = {"student": (0.1, 0.2, 0.35), "teacher": (0.4, 0.55, 0.6)}
STDS = {"student": (0.5, 0.25, 0.125), "teacher": (0.2, 0.3, 0.45)}


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_distilled_student_learns_from_labels_and_from_its_teachers_images(kind):
    options = {"width": D, "depth": 1, "num_heads": 2, "mlp_dim": 4}
    options |= {"num_classes": CLASSES, "image_size": (Y, X)}
    model = models.create("Ti/1", distillation=True, **options)
    data = DataConfig(
        image_size=(Y, X),
        num_classes=CLASSES,
        mean=MEANS["student"],
        std=STDS["student"],
    )
    saved = {
        "options": models.create("Ti/1", **options).options,
        "normalization": {"mean": MEANS["teacher"], "std": STDS["teacher"]},
        "loss": "softmax",
        "classes": ORDER,
    }
    config = DistillationConfig(teacher="x", kind=kind, alpha=0.3, temperature=2.0)
    if kind == "hard":
        config = DistillationConfig(teacher="x", kind=kind, alpha=0.3)
    task = config.build(model, data, RunLength(STEPS, 2.0), {"teacher": saved})

    def apply(params, images):  # A teacher has no argument `train`.
        return {"logits": images.mean((1, 2)) @ params["kernel"]}

    task._teacher.network = types.SimpleNamespace(apply=apply, image_shape=(Y, X, 3))
    task.outputs = lambda params, extra, batch, rng: (params, None)
    params = {
        "class_logits": drawn(0, B, CLASSES, mean=0.4, deviation=1.0),
        "distillation_logits": drawn(1, B, CLASSES, mean=-1.2, deviation=0.5),
    }
    both = params["class_logits"] + params["distillation_logits"]
    params["logits"] = both / 2
    kernel = drawn(2, 3, CLASSES, mean=0.5, deviation=3.0)
    pixels = np.random.default_rng(3).uniform(size=(B, Y, X, 3)).astype(np.float32)
    labels = np.eye(CLASSES, dtype=np.float32)[[0, 3, 1]]
    batch = {
        "image": (pixels - MEANS["student"]) / np.array(STDS["student"]),
        "label": labels,
    }
    batch["image"] = batch["image"].astype(np.float32)
    extra = {"teacher": {"kernel": kernel}, "step": STEP}
    loss, metrics, _, grads = differentiate(task, params, extra, batch)

    seen = (pixels - MEANS["teacher"]) / np.array(STDS["teacher"])
    logits = (seen.mean((1, 2)) @ kernel)[:, ORDER]
    if kind == "hard":
        chosen = np.eye(CLASSES)[logits.argmax(1)]
        terms = -chosen * log_softmax(params["distillation_logits"], 1)
    else:
        wanted = log_softmax(logits / 2, 1)
        predicted = log_softmax(params["distillation_logits"] / 2, 1)
        terms = 4 * np.exp(wanted) * (wanted - predicted)
    of_teacher = terms.sum(1).mean()
    of_labels = -(labels * log_softmax(params["class_logits"], 1)).sum(1).mean()
    assert metrics["class_loss"] == pytest.approx(of_labels, rel=1e-5)
    assert metrics["distillation_loss"] == pytest.approx(of_teacher, rel=1e-4)
    assert loss == pytest.approx(0.7 * of_labels + 0.3 * of_teacher, rel=1e-4)
    right = lambda of: (of.argmax(1) == labels.argmax(1)).mean()
    assert metrics["teacher_top1"] == pytest.approx(right(logits))
    assert right(logits) != right(params["distillation_logits"])
    assert metrics["top1"] == pytest.approx(right(params["logits"]))
    assert np.abs(grads["class_logits"]).min() > 0
