"""What DINOv3 adds: crops of several sizes, schedules of weights, a norm for small crops."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import draw_params, kill_after, tiny_config, train

import vit_jax
from vit_jax import models, show_batch
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.data.pipeline import train_batches
from vit_jax.data.sources.open import open_source
from vit_jax.errors import UserError
from vit_jax.tasks import dino_losses, dinov2
from vit_jax.tasks.task import divide_ratios
from vit_jax.weights.initial import load_initial

RUN = RunLength(100, 10.0)
HEADS = {"num_outputs": 24, "hidden_dim": 16, "bottleneck_dim": 8}
# Large crops of the student are (8, 16) and (16, 24); their anchors' 1.5 times as
# large.
SIZES = "sizes=(((12, 24), 4), ((24, 36), 8)), shares=(3, 1), num_small=2"
ANCHOR = {"gram_weight": 2.0, "gram_scale": 1.5}
OF_SIZES = [((8, 16), (12, 24), 4), ((16, 24), (24, 36), 8)]


def task_of(crops=f"multi_crop({SIZES})", image_size=(8, 16), options=None, **keys):
    sizes = {"width": 12, "depth": 1, "num_heads": 3, "mlp_dim": 20} | (options or {})
    model = models.create("Ti/4", num_classes=0, image_size=image_size, **sizes)
    data = DataConfig(image_size=image_size, num_classes=0, train_transform=crops)
    config = dinov2.Dinov2Config(**HEADS | {"mask_ratio": (0.2, 0.5)} | keys)
    return config.build(model, data, RUN)


def state_of(task):
    """Returns made parameters and extra state: those of `init` cost a program."""
    params, extra = draw_params(task)
    return params, extra | {"step": jnp.zeros([], jnp.int32)}


def raw_batch(loaded, small, size=4):
    rng = np.random.default_rng(0)
    shapes = {"image": (2, *loaded, 3), "small_crops": (2, small, small, 3)}
    batch = {
        name: rng.integers(0, 256, (size, *shape), np.uint8)
        for name, shape in shapes.items()
    }
    return batch | {"index": np.arange(size, dtype=np.uint32)}


def batch_of(task, *sizes):
    return jax.jit(task.prepare)(raw_batch(*sizes), jax.random.key(0))


# Crops of several sizes.


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_masks_and_anchors_have_the_size_of_the_batch(exact):
    task = task_of(**ANCHOR, mask_exact=exact, mask_group=4)
    params, extra = state_of(task)

    @jax.jit
    def find(raw):
        batch = task.prepare(raw, jax.random.key(0))
        mask = task.masked(batch).mask
        if not exact:
            return batch, mask, None
        return batch, mask, task.loss(params, extra, batch, jax.random.key(1))

    for large, loaded, small in OF_SIZES:
        batch, mask, lost = jax.device_get(find(raw_batch(loaded, small)))
        shapes = {name: x.shape[2:4] for name, x in batch.items() if x.ndim == 5}
        sides = {"image": large, "anchor": loaded, "small_crops": (small, small)}
        assert shapes == sides
        num_patches = large[0] * large[1] // 16
        assert mask.shape == (8, num_patches)
        counts = np.sort(mask.sum(1))
        most = [
            int(num_patches * (0.2 + 0.3 * part)) for part in (1 / 4, 1 / 2, 3 / 4, 1)
        ]
        assert (counts[:4] == 0).all() and (counts[4:] <= most).all()
        if not exact:
            continue
        assert (counts[4:] == most).all()
        loss, (metrics, _) = lost
        assert np.isfinite(loss) and metrics["gram_loss"] > 0


def test_the_cost_is_the_mean_of_the_sizes():
    both = task_of(**ANCHOR).training_flops()
    one, other = (
        task_of(
            f"multi_crop({loaded}, small_size={small}, num_small=2)", large, **ANCHOR
        )
        for large, loaded, small in OF_SIZES
    )
    assert both == round(0.75 * one.training_flops() + 0.25 * other.training_flops())
    spec = task_of(**ANCHOR).batch_spec(5)
    assert {k: v.shape for k, v in spec.items()} == {
        "image": (5, 2, 24, 36, 3),
        "small_crops": (5, 2, 8, 8, 3),
        "index": (5,),
    }


def config_of(crops, **sections):
    data = {"num_classes": 0, "image_size": (8, 16), "train_transform": crops}
    return tiny_config(data=data, seed=6, evals={}, **sections)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trains with anchors and a norm of small crops: the config, workdir and report."""
    crops = "multi_crop((12, 24), small_size=4, num_small=2)"
    task = {"name": "dinov2", "koleo_group": 2, "small_norm": True} | ANCHOR
    config = config_of(crops, task=HEADS | task)
    workdir = tmp_path_factory.mktemp("runs") / "dinov2"
    return config, workdir, train(config, workdir)


@pytest.mark.slow
def test_a_killed_run_resumes_bit_identical(run, tmp_path):
    config, workdir, report = run
    copy = shutil.copytree(workdir, tmp_path / "copy")
    kill_after(3, copy)
    assert train(config, copy)["params_sha256"] == report["params_sha256"]


def test_a_resumed_stream_has_the_same_sizes_and_crops():
    config = config_of("multi_crop(sizes=(((12, 24), 4), ((24, 36), 8)), num_small=2)")
    source = open_source(config.data, "train")

    def stream(start):
        how = {"batch_size": 8, "seed": 6, "start": start, "stop": 6}
        with train_batches(source, config.data, **how) as batches:
            return list(batches)

    whole, resumed = stream(0), stream(3)
    drawn = [batch["small_crops"].shape[2] for batch in whole]
    assert {*drawn[:3]} == {*drawn[3:]} == {4, 8}
    for one, other in zip(whole[3:], resumed, strict=True):
        for name in ("image", "small_crops"):
            np.testing.assert_array_equal(one[name], other[name])


def test_dino_takes_crops_of_several_sizes_too():
    crops = "multi_crop(sizes=(((8, 16), 4), ((16, 24), 8)), num_small=2)"
    config = config_of(crops, task=HEADS | {"name": "dino"})
    setup = vit_jax.train_setup(config, 20)
    loss = jax.eval_shape(setup.train_step, setup.layout.shapes, setup.layout.batch)[1][
        "loss"
    ]
    assert loss.shape == ()


def load_notes(config):
    model = config.build_model()
    task = config.task.build(model, config.data, RUN)
    params, extra = jax.eval_shape(task.init, jax.random.key(0))
    *_, lines = load_initial(
        config.init,
        config.data,
        model,
        lambda: model.init(jax.random.key(0)),
        head_bias_init=0.0,
        task="dinov2",
        left_out=functools.partial(task.left_out, params, extra),
    )
    return lines


@pytest.mark.slow
def test_a_norm_of_small_crops_that_a_run_has_not_is_told(run):
    first, workdir, _ = run
    assert first.task.small_norm
    crops = "multi_crop(small_size=4, num_small=2)"
    keys = {"task": HEADS | {"name": "dinov2"}, "init": {"checkpoint": str(workdir)}}
    loaded = load_notes(config_of(crops, **keys))
    left = [line for line in loaded if "left out" in line]
    assert {line.split()[0] for line in left} == {
        *("small_norm_scale", "small_norm_bias"),
        *("teacher/small_norm_scale", "teacher/small_norm_bias"),
    }
    assert "mask_token of the task: loaded" in loaded


def test_the_sheet_shows_the_sizes_of_the_first_batch():
    config = config_of(
        "multi_crop(sizes=(((8, 16), 4), ((16, 24), 8)), num_small=2)",
        task={"name": "dinov2"} | HEADS,
    )
    source = open_source(config.data, "train")
    images, _, views = show_batch.see(source, config, 3)
    assert views == ["image 1", "image 2", "small_crops 1", "small_crops 2"]
    assert images.shape == (
        12,
        16,
        24,
        3,
    )  # The first step of this seed has the second.


@pytest.mark.parametrize(
    ("crops", "keys", "message"),
    [
        ("multi_crop((12, 24))", {}, r"must cut large crops of \(8, 16\)"),
        (
            "multi_crop((12, 24))",
            ANCHOR | {"gram_scale": 2.0},
            r"of \(16, 32\), data.im",
        ),
        (
            "multi_crop(sizes=(((12, 24), 4), ((13, 24), 4)))",
            ANCHOR,
            r"task.gram_scale=1.5: large crops of \(13, 24\)",
        ),
        (
            "multi_crop(sizes=(((8, 16), 4), ((8, 18), 4)))",
            {},
            r"crops of \(8, 18\) are not multiples of the patch size 4",
        ),
        (
            "multi_crop(sizes=(((12, 24), 4),))",
            {},
            "set one of the sizes of multi_crop",
        ),
        (
            "multi_crop(sizes=(((8, 16), 4), ((4, 4), 4)))",
            {"mask_ratio": (0.1, 0.5)},
            "mask no patch of 16 crops of 1 patches",
        ),
        ("multi_crop(num_small=0)", {"small_norm": True}, "task.small_norm=True"),
        ("multi_crop(sizes=(8, 4))", {}, "sizes=.* 8 is no"),
        ("multi_crop(sizes=((8, 4),), shares=(1, 2))", {}, "shares=.* one for each of"),
        ("multi_crop(sizes=((8, 4),), shares=(0,))", {}, "shares=.* above 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(crops, keys, message):
    with pytest.raises(UserError, match=message):
        task_of(crops, **keys)


def test_scales_that_are_no_binary_fractions_suit_whole_pixels():
    crops = "multi_crop(440, small_size=40, num_small=1)"
    assert 400 * 1.1 != 440
    task = task_of(crops, (400, 400), gram_weight=1.0, gram_scale=1.1)
    (sizes,) = task.crops.sizes
    assert sizes.large == (400, 400) and sizes.loaded == (440, 440)


# Weights of parts of the loss.


def test_small_crops_have_their_weight_in_the_loss():
    """The sum of the local and the global term of DINOv3, each with its share of pairs."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, 5, 7)))
    targets = jax.nn.softmax(jnp.asarray(rng.normal(size=(3, 2, 7))))
    logs = np.asarray(jax.nn.log_softmax(logits))
    terms = -np.einsum("bgk,bvk->gv", np.asarray(targets), logs) / 3
    of_large, of_small = terms[0, 1] + terms[1, 0], terms[:, 2:].sum()
    for weight in (1.0, 0.3):
        found = dino_losses.cross_entropies(logits, targets, weight).mean()
        expected = (2 / 8) * of_large / 2 + (6 / 8) * weight * of_small / 6
        assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_weights_change_by_half_a_cosine():
    crops = "multi_crop((12, 24), small_size=4, num_small=2)"
    schedule = {"small_weight_end": 0.5, "small_weight_steps": 4}
    warmup = {"gram_start_steps": 2, "gram_warmup_steps": 2}
    task = task_of(crops, **schedule, **ANCHOR, **warmup)
    params, extra = state_of(task)
    batch, lose = batch_of(task, (12, 24), 4), jax.jit(task.loss)
    constant = jax.jit(task_of(crops, **ANCHOR).loss)

    def parts(loss, step):
        state = extra | {"step": jnp.asarray(step)}
        metrics, _ = loss(params, state, batch, jax.random.key(1))[1]
        return {name: float(value) for name, value in divide_ratios(metrics).items()}

    plain = parts(constant, 0)
    found = [parts(lose, step) for step in range(6)]
    rest = [
        m["loss"] - m["dino_loss"] - m["patch_loss"] - 0.1 * m["koleo_loss"]
        for m in found
    ]
    gram = plain["gram_loss"]
    np.testing.assert_allclose(rest, np.array([0, 0, 0, 1, 2, 2]) * gram, atol=1e-5)
    small = [m["dino_loss"] for m in found]
    cosine = [0.75 + 0.25 * np.cos(np.pi * min(step, 4) / 4) for step in range(6)]
    of_small = (plain["dino_loss"] - small[4]) / 0.5
    expected = plain["dino_loss"] - (1 - np.array(cosine)) * of_small
    np.testing.assert_allclose(small, expected, atol=1e-5)
    assert of_small > 1


# The norm of small crops.


def test_small_crops_have_their_norm_in_the_student_alone():
    crops = "multi_crop(small_size=4, num_small=2)"
    task, plain = task_of(crops, small_norm=True), task_of(crops)
    params, extra = jax.jit(task.init)(jax.random.key(0))
    scale, bias = params["small_norm_scale"], params["small_norm_bias"]
    assert (
        scale.shape == bias.shape == (12,) and extra["teacher"].keys() == params.keys()
    )
    batch, key = batch_of(task, (8, 16), 4), jax.random.key(1)
    masked = jax.jit(task.masked)(batch)
    answer = lambda task: jax.jit(
        lambda params: task.answers(params, batch, masked, train=True, key=key)
    )
    of_task, of_plain = answer(task), answer(plain)
    moved = params | {
        "small_norm_scale": 1.0 + np.arange(12),
        "small_norm_bias": bias + 3,
    }
    found, first = of_task(moved), of_task(params)
    # At first it is the other norm.
    for one, other in zip(first, of_plain(params), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    np.testing.assert_array_equal(found.features, first.features)
    np.testing.assert_array_equal(found.patches, first.patches)
    np.testing.assert_array_equal(found.outputs[:, :2], first.outputs[:, :2])
    # The rule of the original: the class token before the norm, with this norm alone.
    norm = moved["network"]["Transformer"]["encoder_norm"]
    swapped = {
        **moved["network"]["Transformer"],
        "encoder_norm": {
            "scale": moved["small_norm_scale"],
            "bias": moved["small_norm_bias"],
        },
    }
    assert norm.keys() == {"scale", "bias"}
    network = moved["network"] | {"Transformer": swapped}
    expected = of_plain(moved | {"network": network}).outputs[:, 2:]
    np.testing.assert_allclose(found.outputs[:, 2:], expected, atol=1e-5)


@pytest.mark.parametrize("cls_norm", [False, True])
def test_a_norm_of_small_crops_begins_as_the_last_of_other_weights(cls_norm):
    crops, options = "multi_crop(small_size=4, num_small=2)", {"cls_norm": cls_norm}
    task = task_of(crops, options=options, small_norm=True)
    plain = task_of(crops, options=options)
    params, extra = draw_params(plain)
    teacher = extra["teacher"].pop("network")
    last = "cls_norm" if cls_norm else "encoder_norm"

    def check(params, network):
        norm = network["Transformer"][last]
        for name in ("scale", "bias"):
            np.testing.assert_array_equal(params[f"small_norm_{name}"], norm[name])

    # Of the network alone, and of a run without it, student and teacher.
    state = task.with_backbone(*state_of(task), teacher)
    for each in (state[0], state[1]["teacher"]):
        check(each, teacher)
    whole = params | {"teacher": extra["teacher"]}
    found, beside = task.with_task_params(*state, whole)
    check(found, params["network"])
    check(beside["teacher"], teacher)
    np.testing.assert_array_equal(found["mask_token"], params["mask_token"])
    alone = {"teacher": whole["teacher"]}
    found, _ = task.with_task_params(*state, alone)
    check(found, teacher)
