"""DINOv2 against facebookresearch/dinov2: tokens, head, losses; and its masks and schedules."""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import draw_params, slow_but, tiny_config
from PIL import Image
from safetensors.numpy import load_file

from vit_jax import models, weights
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.models import cost
from vit_jax.tasks import block_masks, dino_losses, dinov2
from vit_jax.tasks.task import divide_ratios
from vit_jax.training import train_setup

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
LOSSES = np.load(GOLDEN / "dinov2_losses.npz")
TOKENS = np.load(GOLDEN / "dinov2.io.npz")
RUN = RunLength(100, 10.0)
HEADS = {"num_outputs": 24, "hidden_dim": 16, "bottleneck_dim": 8}


def task_of(
    crops="multi_crop(small_size=8, num_small=2)", variant="Ti/4", options=None, **keys
):
    sizes = {"width": 12, "depth": 1, "num_heads": 3, "mlp_dim": 20}
    model = models.create(
        variant, num_classes=0, image_size=(16, 24), **sizes | (options or {})
    )
    data = DataConfig(image_size=(16, 24), num_classes=0, train_transform=crops)
    config = dinov2.Dinov2Config(**HEADS | {"mask_ratio": (0.2, 0.5)} | keys)
    return config.build(model, data, RUN)


def state_of(task):
    """Returns made parameters and extra state: those of `init` cost a program."""
    params, extra = draw_params(task)
    began = {"step", "center", "patch_center"} & set(extra)
    return params, extra | {name: jnp.zeros_like(extra[name]) for name in began}


def batch_of(task, size=8, seed=0):
    rng = np.random.default_rng(seed)
    spec = task.batch_spec(size)
    batch = {
        name: rng.integers(0, 256, s.shape).astype(s.dtype) for name, s in spec.items()
    }
    batch["index"] = np.arange(size, dtype=np.uint32)
    return jax.jit(task.prepare)(batch, jax.random.key(seed))


# Tokens, head and losses of the original.


@pytest.mark.parametrize(
    "network", slow_but(["swiglu_reg4"], ["mlp_reg0", "mlp_reg4", "swiglu_reg4"])
)
def test_masked_tokens_equal_theirs(network):
    place = GOLDEN / f"dinov2_{network}" / "facebook.safetensors"
    found = weights.open_pretrained(place, num_heads=3)
    model = models.create(**found.options | {"image_size": (32, 32)})
    data = DataConfig(
        image_size=(32, 32), num_classes=0, train_transform="multi_crop(num_small=0)"
    )
    task = dinov2.Dinov2Config(**HEADS).build(model, data, RUN)
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    params = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), params)
    params["network"] = found.params
    params["mask_token"] = load_file(place)["mask_token"][None]
    images = TOKENS["32x32/image"].transpose(0, 2, 3, 1)[None]
    masked = dinov2.Masked(
        TOKENS["masks"], np.zeros((1, 1), np.int32), np.ones(1, np.float32)
    )

    @jax.jit
    def answer(*given):
        student = task.answers(*given, train=True, key=jax.random.key(0))
        return student, task.answers(*given)

    student, teacher = answer(params, {"image": images}, masked)
    for name in ("cls", "patches"):
        value = {"cls": student.features[0], "patches": student.patches}[name]
        expected = TOKENS[f"{network}/masked/{name}"]
        np.testing.assert_allclose(value, expected, atol=1e-5)
    # The teacher gets no mask.
    expected = TOKENS[f"{network}/32x32/patches"]
    np.testing.assert_allclose(teacher.patches, expected, atol=1e-5)


def test_heads_equal_theirs():
    flat = {k.removeprefix("head/weights/"): LOSSES[k] for k in LOSSES.files}
    params = {
        f"Dense_{i}": {
            "kernel": flat[f"mlp.{2 * i}.weight"].T,
            "bias": flat[f"mlp.{2 * i}.bias"],
        }
        for i in range(3)
    } | {"last_layer": flat["last_layer.weight_v"].T}
    given = LOSSES["head/in"]
    found = jax.jit(dino_losses.Head(20, 10, 12).apply)({"params": params}, given)
    np.testing.assert_allclose(found, LOSSES["head/out"], atol=1e-5)
    # With weights of norm 1 there is nothing to divide.
    last = params["last_layer"]
    params["last_layer"] = last / np.linalg.norm(last, axis=0)
    head = dino_losses.Head(20, 10, 12, weight_norm=False)
    found = jax.jit(head.apply)({"params": params}, given)
    np.testing.assert_allclose(found, LOSSES["head/out"], atol=1e-5)


def test_losses_equal_theirs():
    given = {
        k.removeprefix("loss/"): jnp.asarray(LOSSES[k])
        for k in LOSSES.files
        if k[:5] == "loss/"
    }
    mask = given["patch_mask"]
    per_image = mask / mask.sum(1, keepdims=True).clip(1) / len(mask)
    teacher, student, weight = (
        x.reshape(-1, *x.shape[2:])
        for x in (given["patch_teacher"], given["patch_student"] / 0.1, per_image)
    )
    valid = mask.reshape(-1)

    @jax.jit
    def compute():
        outputs = jnp.concatenate([given["teacher_0"], given["teacher_1"]])
        targets = dino_losses.centered(teacher, jnp.zeros(12), 0.05)
        chosen = dino_losses.sinkhorn_knopp(teacher, 0.05, valid)
        return {
            "sinkhorn": dino_losses.sinkhorn_knopp(outputs, 0.05),
            "ibot": dino_losses.patch_loss(student, targets, weight),
            "patch_sinkhorn": chosen,
            "ibot_with_sinkhorn": dino_losses.patch_loss(student, chosen, weight),
            "koleo": jax.value_and_grad(dino_losses.koleo)(given["koleo_in"]),
        }

    found = jax.device_get(compute())
    np.testing.assert_allclose(found["sinkhorn"], given["sinkhorn"], atol=1e-5)
    np.testing.assert_allclose(found["sinkhorn"].sum(1), 1, atol=1e-5)
    # Rows that do not count change nothing.
    targets = found["patch_sinkhorn"]
    np.testing.assert_allclose(targets[valid], given["patch_sinkhorn"], atol=1e-5)
    assert not targets[~valid].any()
    for name in ("ibot", "ibot_with_sinkhorn"):
        assert float(found[name]) == pytest.approx(float(given[name]), abs=1e-5)
    loss, slope = found["koleo"]
    assert float(loss) == pytest.approx(float(given["koleo"]), abs=1e-5)
    np.testing.assert_allclose(slope, given["koleo_grad"], atol=1e-5)


def test_koleo_of_groups_is_the_mean_of_theirs():
    x = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
    koleo = jax.jit(dino_losses.koleo, static_argnums=1)
    found = koleo(x, 4)
    alone = jax.jit(dino_losses.koleo)
    expected = np.mean([alone(part) for part in np.split(x, 3)])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(koleo(x, 8), found)  # Common divisor.


def test_sinkhorn_knopp_of_large_outputs_is_finite():
    outputs = np.array([[500, 0, 0], [0, 500, 0], [499, 0, 0]], np.float32)
    balance = jax.jit(dino_losses.sinkhorn_knopp)
    assert np.isfinite(balance(outputs, 0.05)).all()
    assert not balance(outputs, 0.05, np.zeros(3, bool)).any()


def test_gram_is_the_mean_square_of_differences_of_cosines():
    student, anchor = np.random.default_rng(0).normal(size=(2, 3, 4, 5))
    cosines = lambda x: (
        (x @ x.swapaxes(1, 2) / np.linalg.norm(x, axis=-1)[..., None])
        / np.linalg.norm(x, axis=-1)[:, None]
    )
    expected = np.mean((cosines(student) - cosines(anchor)) ** 2)
    found = jax.jit(dino_losses.gram)(student, anchor)
    assert float(found) == pytest.approx(expected, rel=1e-5)


# Masks.


def masks_of(task, batch):
    masked = jax.jit(task.masked)(batch)
    return np.asarray(masked.mask), masked


def test_half_of_the_crops_are_masked_in_equal_steps_of_the_ratio():
    task = task_of(mask_group=4, mask_ratio=(0.1, 0.5), mask_exact=True)
    mask, _ = masks_of(task, batch_of(task, 12))
    counts = mask.reshape(3, 8, 24).sum(-1)
    expected = [0] * 4 + [math.floor(24 * r) for r in (0.2, 0.3, 0.4, 0.5)]
    assert (np.sort(counts, axis=1) == expected).all()
    assert len({tuple(row) for row in counts}) > 1
    # DINOv2: any number within the step, in blocks alone.
    task = task_of(mask_group=4, mask_ratio=(0.1, 0.5))
    mask, masked = masks_of(task, batch_of(task, 12))
    counts = np.sort(mask.reshape(3, 8, 24).sum(-1), axis=1)
    assert not counts[:, :4].any()
    assert (counts[:, 4:] <= expected[4:]).all() and (counts[:, 4:] >= 1).all()
    # Each masked patch has its weight, and what fills up none.
    weights, index = (np.asarray(x).reshape(3, -1) for x in masked[2:0:-1])
    assert index.shape == (3, sum(expected))
    places = mask.reshape(3, -1)
    for group in range(3):
        taken = index[group][weights[group] > 0]
        np.testing.assert_array_equal(np.sort(taken), np.flatnonzero(places[group]))
    np.testing.assert_allclose(weights.sum(), 12 / 24, rtol=1e-5)


def test_masks_are_blocks_of_the_originals_sizes():
    """A mask of a given count is built of rectangles, and rarely falls short of it."""
    noise = jax.random.uniform(jax.random.key(0), (200, block_masks.TRIES, 4))
    noise = np.asarray(noise)
    counts = np.array([100] * 100 + [30] * 100)
    draw = jax.jit(block_masks.draw_masks, static_argnums=2)
    masks = np.asarray(draw(noise, counts, (16, 16)))
    masks = masks.reshape(-1, 16, 16)
    found = masks.sum((1, 2))
    assert (found <= counts).all() and (found == counts).mean() > 0.85
    assert (found >= np.asarray(counts) - 4).all()
    # Most neighbours of a masked patch are masked; single patches at random: 100 / 256.
    beside = masks[:100, :, 1:] & masks[:100, :, :-1]
    assert beside.sum() / masks[:100].sum() > 0.7
    first = draw(noise[:, :1], np.full(200, 100), (16, 16))
    first = np.asarray(first).reshape(-1, 16, 16)
    for mask in first[first.any((1, 2))]:
        rows, columns = mask.any(1).sum(), mask.any(0).sum()
        assert rows * columns == mask.sum() <= 128
        assert 0.2 < rows / columns < 5 and max(rows, columns) < 16
    found = np.asarray(draw(noise[:, :1], counts, (16, 16)))
    assert (found.sum(1) > 0).mean() > 0.5


def test_masks_depend_on_the_place_of_an_image_in_the_run_alone():
    task = task_of(mask_group=4)
    batch = batch_of(task, 8)
    whole, _ = masks_of(task, batch)
    half, _ = masks_of(task, {name: x[4:] for name, x in batch.items()})
    np.testing.assert_array_equal(whole[8:], half)
    # Each crop of each image has numbers of its own.
    noise = np.asarray(batch["mask_noise"])
    rows = noise.reshape(-1, noise.shape[-1])
    assert len(np.unique(rows, axis=0)) == len(rows) == 8 * 2


# Schedules.


def test_schedules_have_their_own_start_end_and_length():
    task = task_of(
        teacher_temperature_start=0.04,
        teacher_temperature=0.07,
        teacher_temperature_steps=11,
        teacher_momentum=0.9,
        teacher_momentum_end=0.98,
        teacher_momentum_steps=40,
    )
    at = lambda of, steps: [float(of(jnp.asarray(step))) for step in steps]
    found = at(task.teacher_temperature, (0, 5, 10, 60))
    np.testing.assert_allclose(found, [0.04, 0.055, 0.07, 0.07], rtol=1e-6)
    found = at(task.teacher_momentum, (0, 20, 40, 90))
    np.testing.assert_allclose(found, [0.9, 0.94, 0.98, 0.98], rtol=1e-6)
    constant = task_of(teacher_momentum=0.99, teacher_momentum_end=0.99)
    np.testing.assert_allclose(at(constant.teacher_momentum, (0, 50)), 0.99)
    rising = task_of(teacher_momentum=0.9)
    np.testing.assert_allclose(at(rising.teacher_momentum, (0, 100)), [0.9, 1.0])


# The task.


@pytest.mark.parametrize(
    "keys",
    [
        {"patch_num_outputs": 20},  # Other than of class tokens.
        pytest.param(
            {"separate_heads": False, "centering": "center"}, marks=pytest.mark.slow
        ),
    ],
)
def test_the_loss_is_the_weighted_sum_of_its_parts(keys):
    task = task_of(koleo_group=2, dino_weight=0.7, patch_weight=0.5, **keys)
    params, extra = state_of(task)
    centered = "centering" in keys
    assert ("patch_head" not in params) == ("center" in extra) == centered

    @jax.jit
    def step(params, extra, batch):
        grads, (metrics, stats) = jax.grad(task.loss, has_aux=True)(
            params, extra, batch, jax.random.key(1)
        )
        metrics, stats = divide_ratios((metrics, stats))
        new = task.update(extra, params, stats, jnp.asarray(1))
        masked = task.masked(batch)
        teacher = task.answers(extra["teacher"], {"image": batch["image"]}, masked)
        hidden = teacher.patch_outputs, masked.weights > 0
        return grads, metrics, stats, new, hidden

    grads, metrics, stats, new, hidden = jax.device_get(
        step(params, extra, batch_of(task))
    )
    parts = [float(metrics[f"{name}_loss"]) for name in ("dino", "patch", "koleo")]
    np.testing.assert_allclose(
        metrics["loss"], np.dot(parts, (0.7, 0.5, 0.1)), rtol=1e-5
    )
    assert all(
        np.isfinite(x).all() and x.any()
        for k, x in jax.tree.leaves_with_path(grads)
        if "key" not in str(k)
    )
    assert stats.keys() == ({"center", "patch_center"} if centered else set())
    if centered:
        outputs, counted = hidden
        expected = 0.1 * outputs[counted].mean(0)
        np.testing.assert_allclose(new["patch_center"], expected, atol=1e-6)


@pytest.mark.slow
def test_crops_may_pass_through_a_stem_of_convolutions():
    task = task_of(variant="C+Ti/4", options={"stem_widths": (8, 12)})
    state = jax.eval_shape(task.init, jax.random.key(0))
    batch = jax.eval_shape(task.prepare, task.batch_spec(4), jax.random.key(0))
    lose = jax.grad(task.loss, has_aux=True)
    grads, _ = jax.eval_shape(lose, *state, batch, jax.random.key(0))
    assert "stem_conv_0" in grads["network"]


# Gram anchoring.


def test_anchors_get_the_same_crops_at_another_size():
    crops = "multi_crop((32, 48), small_size=8, num_small=2)"
    keys = {"gram_weight": 2.0, "gram_scale": 2.0}
    lines = {"large_transforms": ("", "color_jitter(0.4)"), "small_transform": "flip"}
    task = task_of(crops, **keys, **lines)
    rng = np.random.default_rng(0)
    smooth = rng.uniform(0, 255, (2, 2, 5, 7, 3))
    smooth = smooth.repeat(10, 2).repeat(10, 3)[:, :, :32, :48].astype(np.uint8)
    batch = {
        "image": smooth,
        "small_crops": np.zeros((2, 2, 8, 8, 3), np.uint8),
        "index": np.arange(2, dtype=np.uint32),
    }
    found = jax.jit(task.prepare)(batch, jax.random.key(0))
    assert found["image"].shape == (2, 2, 16, 24, 3)
    np.testing.assert_allclose(found["anchor"], smooth / 127.5 - 1, atol=1e-6)
    for image in range(2):
        pixels = Image.fromarray(smooth[image, 0])
        small = pixels.resize((24, 16), Image.Resampling.BICUBIC)
        levels = (np.asarray(found["image"])[image, 0] + 1) * 127.5
        # Pillow rounds and clips between the two sides.
        assert abs(levels - np.asarray(small)).max() < 2.5
    distorted = np.asarray(found["image"])[:, 1]
    plain = task_of(crops, **keys, small_transform="")
    plain = jax.jit(plain.prepare)(batch, jax.random.key(0))
    assert not np.allclose(distorted, np.asarray(plain["image"])[:, 1])
    np.testing.assert_array_equal(found["anchor"], plain["anchor"])


@pytest.mark.parametrize("scale", [1, 2])
def test_gram_begins_at_its_step_and_has_no_effect_before(scale):
    crops = f"multi_crop(({16 * scale}, {24 * scale}), small_size=8, num_small=2)"
    keys = {"gram_weight": 2.0, "gram_scale": float(scale), "gram_start_steps": 3}
    task = task_of(crops, **keys)
    params, extra = state_of(task)
    assert jax.tree.structure(extra["anchor"]) == jax.tree.structure(params["network"])
    batch = batch_of(task)
    lose = jax.jit(task.loss)
    found = []
    for step in (2, 3):
        state = extra | {"step": jnp.asarray(step)}
        found.append(lose(params, state, batch, jax.random.key(1)))
    (_, (early, _)), (_, (late, _)) = jax.device_get(found)
    assert early["gram_loss"] == 0 < late["gram_loss"]
    np.testing.assert_allclose(
        late["loss"] - early["loss"], 2.0 * late["gram_loss"], atol=2e-3
    )
    # The anchor's parameters count.
    moved = jax.tree.map(lambda x: 1.5 * np.asarray(x), extra["anchor"])
    state = extra | {"step": jnp.asarray(3), "anchor": moved}
    _, (other, _) = lose(params, state, batch, jax.random.key(1))
    assert other["gram_loss"] != late["gram_loss"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, []),
        ({"gram_start_steps": 4}, [4]),
        ({"gram_every_steps": 3}, [3, 6, 9, 12]),
        ({"gram_every_steps": 3, "gram_updates": 2}, [3, 6]),
        (
            {"gram_start_steps": 4, "gram_every_steps": 3, "gram_updates": 3},
            [4, 7, 10],
        ),
    ],
)
def test_the_teacher_becomes_the_anchor(keys, expected):
    task = task_of("multi_crop(num_small=0)", gram_weight=1.0, **keys)
    # One parameter: the rule is the same for all.
    network = {"scale": np.float32(0)}
    extra = {"teacher": {"network": network}, "anchor": network, "step": 0}
    update, changes = jax.jit(task.update), []
    for step in range(1, 13):
        before = extra["anchor"]
        params = {"network": {"scale": np.float32(step)}}
        extra = update(extra, params, {}, np.int32(step))
        if before != extra["anchor"]:
            changes.append(step)
            assert extra["anchor"] == extra["teacher"]["network"]
    assert changes == expected


@pytest.mark.slow
def test_flops_are_those_of_student_and_teacher():
    options = {"drop_path_rate": 0.5, "drop_path_schedule": "constant"}
    depth = {"depth": 2}
    task = task_of(mask_group=4, options=depth)
    params, extra = jax.eval_shape(task.init, jax.random.key(0))
    batch = jax.eval_shape(task.prepare, task.batch_spec(4), jax.random.key(0))
    forward = lambda *args: task.loss(*args, jax.random.key(0))[0]
    counted = cost.macs(forward, params, extra, batch)
    teacher = lambda params, batch: task.answers(
        params, {"image": batch["image"]}, task.masked(batch)
    )
    of_teacher = cost.macs(teacher, extra["teacher"], batch)
    koleo = 2 * 4 * 4 * 12
    expected = 2 * (3 * (counted - of_teacher - koleo) + of_teacher) / 4
    assert task.training_flops() == pytest.approx(expected, rel=0.01)
    fewer = task_of(mask_group=4, options=options | depth | {"drop_path_group": 8})
    saved = task.training_flops() - fewer.training_flops()
    one, two = (
        cost.forward_flops(m.replace(depth=d)) for d in (1, 2) for m in [task.model]
    )
    small = [
        cost.forward_flops(task.model_of(jnp.zeros((8, 8, 3))).replace(depth=d))
        for d in (1, 2)
    ]
    blocks = 2 * (two - one) + 2 * (small[1] - small[0])
    assert saved == 3 * 0.5 * 2 * blocks


def entropy_after(steps, **keys):
    """Trains on noisy copies of 16 images; returns the teacher's entropy by ln K."""
    task = task_of(options={"width": 24, "depth": 1}, teacher_temperature=0.04, **keys)
    params, extra = jax.jit(task.init)(jax.random.key(0))
    adam = optax.adam(3e-3)
    state, rng = adam.init(params), np.random.default_rng(0)
    images = rng.normal(size=(16, 1, 16, 24, 3))

    @jax.jit
    def train(params, extra, state, batch, step):
        key = jax.random.fold_in(jax.random.key(1), step)
        grads, (metrics, stats) = jax.grad(task.loss, has_aux=True)(
            params, extra, batch, key
        )
        updates, state = adam.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        metrics, stats = divide_ratios((metrics, stats))
        return params, task.update(extra, params, stats, step + 1), state, metrics

    for step in range(steps):
        noise = lambda *shape: 0.3 * rng.normal(size=(16, 2, *shape, 3))
        batch = {
            "image": images + noise(16, 24),
            "small_crops": images[:, :, 4:12, 4:12] + noise(8, 8),
            "mask_noise": rng.uniform(size=(16, 2, block_masks.num_draws(24, False))),
        }
        batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch)
        given = params, extra, state, batch, jnp.asarray(step)
        params, extra, state, metrics = train(*given)
    return float(metrics["teacher_entropy"]) / math.log(task.head.num_outputs)


@pytest.mark.slow
def test_controls_collapse_and_the_published_forms_do_not():
    assert 0.75 < entropy_after(100) < 0.99
    assert 0.75 < entropy_after(100, centering="center") < 0.99
    center = {"centering": "center", "koleo_weight": 0.0}
    assert entropy_after(100, **center, center_momentum=1.0) < 0.25
    still = {"teacher_momentum": 0.0, "teacher_momentum_end": 0.0}
    # It takes longer from heads of DINOv2's own deviation.
    assert entropy_after(160, **center, **still) < 0.25


def test_a_collapse_is_told_for_either_head():
    task = task_of(patch_num_outputs=48)
    for name, K in (("teacher_entropy", 24), ("patch_entropy", 48)):
        metrics = {"teacher_entropy": 1.0, "patch_entropy": 1.0, name: math.log(K)}
        found = [task.warning(metrics) for _ in range(5)]
        assert not any(found[:4]) and "collapsed to equal outputs" in found[4]
        assert ("patches" in found[4]) == (name == "patch_entropy")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mask_ratio": (0.5, 0.1)}, "must be the smallest and the largest"),
        ({"koleo_group": 1}, "task.koleo_group=1: a single image has no"),
        (
            {"gram_weight": 1.0, "gram_scale": 2.0},
            r"must cut large crops of \(16, 24\)",
        ),
        (
            {"gram_weight": 1.0, "large_transforms": ("flip", "")},
            "task.gram_weight with Flip in task.large_transforms",
        ),
        ({"centering": "none"}, "not one of sinkhorn, center"),
    ],
)
def test_bad_input_is_told_in_one_line(keys, message):
    with pytest.raises(UserError, match=message):
        config = tiny_config(
            data={"num_classes": 0, "train_transform": "multi_crop(small_size=4)"},
            task={"name": "dinov2"} | keys,
        )
        config.task.build(config.build_model(), config.data, RUN)


@pytest.mark.parametrize(
    ("batch_size", "keys", "message"),
    [
        (15, {"koleo_group": 4}, "task.koleo_group=4 with 15 images at once"),
        (8, {"accumulate": 8}, "task.koleo_group=0 with 1 images at once"),
        (8, {"koleo_group": 4, "accumulate": 8}, "task.koleo_group=4 with 1 images"),
    ],
)
def test_koleo_of_single_images_is_refused(batch_size, keys, message):
    with pytest.raises(UserError, match=message):
        setup_of(batch_size, **keys)


def test_groups_and_losses_that_microbatches_change_are_named_at_the_start():
    assert setup_of(8, koleo_group=4, mask_group=2).notes == ()
    (line,) = setup_of(6, koleo_group=4).notes
    assert line.startswith("task.koleo_group=4") and "6 images" in line and "2" in line
    (line,) = setup_of(6, mask_group=4, koleo_weight=0.0).notes
    assert line.startswith("task.mask_group=4")
    (line,) = setup_of(8, accumulate=2).notes
    assert line.startswith("optim.grad_accum_steps=2: Sinkhorn-Knopp, KoLeo")
    free = {"koleo_weight": 0.0, "centering": "center"}
    (line,) = setup_of(8, accumulate=2, **free).notes
    assert line.startswith("optim.grad_accum_steps=2: the groups of masks")
    dropped = {"drop_path_rate": 0.3, "drop_path_schedule": "constant"}
    lines = setup_of(6, model={"drop_path_group": 8} | dropped).notes
    assert ["12 rows of image" in line for line in lines] == [True, False]


def setup_of(batch_size, accumulate=1, model=None, **task):
    """Returns the setup of a run with two large and two small crops of each image."""
    config = tiny_config(
        batch_size=batch_size,
        data={
            "num_classes": 0,
            "train_transform": "multi_crop(num_small=2, small_size=4)",
        },
        model=model or {},
        task={"name": "dinov2", "mask_group": 0} | task,
        optim={"grad_accum_steps": accumulate},
        evals={},
    )
    mesh = meshes.create(config.mesh, jax.devices()[:1])
    return train_setup.build(config, mesh, num_examples=20)


def test_a_network_without_class_token_is_refused():
    with pytest.raises(UserError, match="learns from a class token and patches"):
        task_of(options={"pool": "gap"})


def test_masks_that_hide_nothing_are_refused():
    with pytest.raises(UserError, match=r"task.mask_share=0.1 .* mask no patch of 4"):
        task_of(mask_share=0.1, mask_group=2)
    task = task_of(mask_share=0.25, mask_group=4)
    with pytest.raises(UserError, match="mask no patch of 2 crops"):
        task.masked(batch_of(task, 3))
