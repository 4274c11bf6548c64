"""Masked patch prediction: classes, corruption and loss to the digit."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import models
from vit_jax.config.lengths import RunLength
from vit_jax.data.config import DataConfig
from vit_jax.errors import UserError
from vit_jax.tasks.masked_patch import MaskedPatchConfig

# A plain computation in NumPy; tests/golden/README.md.
IO = np.load(pathlib.Path(__file__).parents[1] / "golden" / "mpp.io.npz")
RUN = RunLength(4, 1.0)
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
SIZE = {"width": 12, "depth": 1, "num_heads": 3, "mlp_dim": 8}
CORRUPTION = {name: jnp.asarray(IO[name]) for name in ("order", "lot", "source")}


def build(variant="Ti/8", data=None, model=None, **keys):
    """Returns the task, for images of 32x32 unless `data` says otherwise."""
    data = DataConfig(**{"image_size": (32, 32), "num_classes": 0} | (data or {}))
    network = models.create(
        variant,
        num_classes=data.num_classes,
        image_size=data.image_size,
        channels=data.channels,
        **(SIZE if model is None else model),
    )
    return MaskedPatchConfig(**keys).build(network, data, RUN)


def normalised(task, pixels):
    """Returns images as the task gets them, of pixels of 0 to 255."""
    mean, std = np.asarray(task.data.mean), np.asarray(task.data.std)
    return jnp.asarray((pixels / 255 - mean) / std, jnp.float32)


@pytest.mark.parametrize("data", [{}, IMAGENET], ids=["half", "imagenet"])
@pytest.mark.parametrize(
    ("target", "name"), [("mean_color", "class"), ("colors_4x4", "class_4x4")]
)
def test_classes_are_exact_however_images_are_normalised(target, name, data):
    task = build(target=target, data=data)
    found = jax.jit(task.colors)(normalised(task, IO["pictures"]))
    np.testing.assert_array_equal(found.reshape(IO[name].shape), IO[name])


def test_a_mean_on_an_edge_is_of_the_upper_level():
    """Of a patch of 8x8: its sum in 255 parts of 64, at and around every edge."""
    full = 255 * 64
    totals = [t for i in range(8) for t in (i * full // 8 - 1, i * full // 8)]
    totals = [*(t for t in totals if t >= 0), full - 1, full]
    task = build(data={"image_size": (8, 8 * len(totals))})
    patches = np.zeros((len(totals), 64, 3), np.uint8)
    for patch, total in zip(patches, totals, strict=True):
        patch[:] = total // 64
        patch[: total % 64] += 1
    pixels = patches.reshape(-1, 8, 8, 3).transpose(1, 0, 2, 3).reshape(1, 8, -1, 3)
    levels = np.minimum(8 * np.asarray(totals) // full, 7)
    found = task.colors(normalised(task, pixels))[0, :, 0]
    np.testing.assert_array_equal(found, levels * 73)
    assert set(levels) == set(range(8))


def test_corruption_is_the_golden_one():
    task = build()
    np.testing.assert_array_equal(task.chosen(CORRUPTION), IO["chosen"])
    token = jnp.asarray(IO["mask_token"]).reshape(1, 1, -1)
    found = task.corrupt(jnp.asarray(IO["tokens"]), token, CORRUPTION)
    np.testing.assert_array_equal(found, IO["corrupted"])


def test_loss_and_accuracy_are_the_golden_ones():
    task = build()
    logits = jnp.asarray(IO["logits"].astype(np.float32))
    batch = CORRUPTION | {"image": normalised(task, IO["pictures"])}
    extra = {"color_counts": jnp.zeros(512)}
    found = jax.jit(task.metrics)(extra, batch, logits, task.chosen(batch))
    assert float(found["loss"].mean()) == pytest.approx(float(IO["loss"]), abs=1e-6)
    assert float(found["color_accuracy"].mean()) == float(IO["accuracy"])


def test_square_error_of_pixels_counts_the_chosen_patches():
    task = build(target="pixels")
    batch = CORRUPTION | {"image": normalised(task, IO["pictures"])}
    predicted = jax.random.normal(jax.random.key(0), IO["pixels"].shape)
    found = jax.jit(task.metrics)(None, batch, predicted, task.chosen(batch))
    targets = IO["pictures"].reshape(3, 4, 8, 4, 8, 3).transpose(0, 1, 3, 2, 4, 5)
    targets = (targets.reshape(3, 16, 192) / 255 - 0.5) / 0.5
    errors = np.square(np.asarray(predicted) - targets).mean(-1)
    expected = errors[IO["chosen"]].mean()
    assert float(found["loss"].mean()) == pytest.approx(expected, rel=1e-6)


def drawn(task, index, seed=3):
    return task.draw(jnp.asarray(index, jnp.uint32), jax.random.key(seed))


def test_shares_of_what_is_chosen_are_those_of_the_config():
    task = build(mask_ratio=0.25, mask_share=0.5, swap_share=0.3)
    batch = drawn(task, range(3_000))
    tokens = jnp.asarray(np.random.default_rng(0).normal(size=(3_000, 16, 4)))
    token = jnp.full((1, 1, 4), 7.0)
    found = np.asarray(task.corrupt(tokens, token, batch))
    chosen = np.asarray(task.chosen(batch))
    assert (chosen.sum(1) == 4).all()
    np.testing.assert_array_equal(found[~chosen], tokens[~chosen])
    masked = (found == 7).all(-1)
    kept = (found == np.asarray(tokens)).all(-1) & chosen
    # One swap in 16 takes the patch itself.
    shares = [masked[chosen].mean(), kept[chosen].mean()]
    np.testing.assert_allclose(shares, [0.5, 0.2 + 0.3 / 16], atol=0.02)


@pytest.mark.slow
def test_the_commonest_color_is_counted_over_the_run():
    task = build(variant="Ti/4", data={"image_size": (8, 8)})
    pixels = np.zeros((2, 8, 8, 3), np.uint8)
    pixels[:, :, 4:] = 255  # Classes 0 and 511, of two patches each.
    batch = drawn(task, range(2)) | {"image": normalised(task, pixels)}
    params, extra = jax.jit(task.init)(jax.random.key(0))
    assert not extra["color_counts"].any()
    lose = jax.jit(task.loss)
    _, (_, stats) = lose(params, extra, batch, jax.random.key(1))
    extra = task.update(extra, params, stats, 1)
    assert set(np.flatnonzero(extra["color_counts"])) == {0, 511}
    assert float(extra["color_counts"].sum()) == pytest.approx(1)
    pixels[:] = 255
    others = batch | {"image": normalised(task, pixels)}
    _, (_, stats) = lose(params, extra, others, jax.random.key(1))
    extra = task.update(extra, params, stats, 2)
    np.testing.assert_allclose(extra["color_counts"][jnp.array([0, 511])], [0.5, 1.5])
    _, (metrics, _) = lose(params, extra, batch, jax.random.key(1))
    classes = np.asarray(task.colors(batch["image"]))[..., 0]
    chosen = np.asarray(task.chosen(batch))
    assert float(metrics["commonest_accuracy"]) == (classes[chosen] == 511).mean()


def neighbours_by_hand(pixels, chosen, rows, columns, side):
    """Returns the class of the mean of the visible neighbours, patch by patch."""
    sums = pixels.reshape(rows, side, columns, side, 3).sum((1, 3))
    shown = ~chosen.reshape(rows, columns)
    found = np.empty((rows, columns), int)
    for y in range(rows):
        for x in range(columns):
            near = [
                sums[i, j]
                for i in range(max(0, y - 1), min(rows, y + 2))
                for j in range(max(0, x - 1), min(columns, x + 2))
                if shown[i, j] and (i, j) != (y, x)
            ]
            near = near if near else sums[shown]
            levels = 8 * np.sum(near, axis=0) // (255 * side**2 * len(near))
            levels = np.minimum(levels, 7)
            found[y, x] = levels @ [1, 8, 64]
    return found.ravel()


def test_the_color_of_the_neighbours_is_that_of_plain_numpy():
    task = build(data={"image_size": (32, 48)}, mask_ratio=0.8)
    pixels = np.random.default_rng(1).integers(0, 256, (40, 32, 48, 3))
    batch = drawn(task, range(40))
    chosen = task.chosen(batch)
    found = task.colors_of_neighbors(normalised(task, pixels), chosen)
    # What is corrupted alone is asked for, and none of it is among its neighbours.
    chosen = np.asarray(chosen)
    alone = 0
    for i in range(40):
        expected = neighbours_by_hand(pixels[i], chosen[i], 4, 6, 8)
        np.testing.assert_array_equal(
            np.asarray(found)[i][chosen[i]], expected[chosen[i]]
        )
        shown = np.pad(~chosen[i].reshape(4, 6), 1)
        around = sum(
            np.roll(shown, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1)
        )
        alone += (around[1:-1, 1:-1] == 0).sum()
    assert alone  # Some have no visible neighbour.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_ratio": 0.01}, "task.mask_ratio=0.01 corrupts 0 of 16 patches: choose"),
        ({"mask_ratio": 0.99}, "task.mask_ratio=0.99 corrupts 16 of 16 patches"),
        (
            {"mask_share": 0.9, "swap_share": 0.2},
            "task.mask_share=0.9 and task.swap_share=0.2 are more than all",
        ),
        (
            {"data": {"channels": 1}},
            "task.target='mean_color' needs colours, but data.channels=1: set",
        ),
        ({"data": {"num_classes": 3}}, "data.num_classes=3 with task.name='masked_pat"),
        (
            {"variant": "Ti/2", "target": "colors_4x4"},
            "task.target='colors_4x4' needs patches whose side is a multiple of 4, not 2",
        ),
        (
            {"variant": "R50x1", "model": {"stage_depths": (1,), "stem_width": 32}},
            "model.variant='R50x1' with task.name='masked_patch'.*: choose a",
        ),
        pytest.param(
            {"variant": "R+Ti/16", "model": SIZE},
            r"model.variant='R\+Ti/16' with task.name='masked_patch'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(UserError, match=message) as error:
        build(**changes)
    assert "\n" not in str(error.value)
