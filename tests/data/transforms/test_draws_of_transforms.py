"""Each draw of a transform is by itself, and follows the seed of the run."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import recorded_draws

from vit_jax.data import normalization
from vit_jax.data.config import DataConfig
from vit_jax.data.transforms import (
    DEVICE_TRANSFORMS,
    parse,
    photometric,
    randaugment,
    views,
)
from vit_jax.data.transforms import device as device_transforms

B, SIDE = 3, 4
# Each place of a line has draws of its own, also where a transform is there twice.
LINES = {
    "flip": "flip | flip",
    "pad_crop": "pad_crop(1) | pad_crop(1)",
    "affine": "affine(shift=0.1, rotate=9) | affine(rotate=9)",
    "color_jitter": "color_jitter(hue=0.1, p=0.8) | color_jitter(p=0.5)",
    "grayscale": "grayscale | grayscale",
    "gaussian_blur": "gaussian_blur | gaussian_blur",
    "solarize": "solarize | solarize",
    "three_augment": "three_augment | flip",
    "random_erasing": "random_erasing | random_erasing(fill='normal')",
    "mixup": "flip | mixup(0.2)",
    "cutmix": "flip | cutmix",
    "mixup_or_cutmix": "flip | mixup_or_cutmix(group=2)",
    "upsample": "upsample",  # Draws nothing.
}


def test_each_example_place_and_seed_of_a_transform_has_its_own_key(monkeypatch):
    assert LINES.keys() == {*DEVICE_TRANSFORMS}
    drawn = recorded_draws.record(monkeypatch)
    images = jnp.full((B, SIDE, SIDE, 3), 100, jnp.uint8)
    labels, index = jnp.eye(B), jnp.arange(B, dtype=jnp.uint32)
    for name, line in LINES.items():
        ops, found = parse.parse_train(line, (SIDE, SIDE)).device, []
        for seed in range(2):
            drawn.clear()
            device_transforms.apply(ops, images, labels, index, jax.random.key(seed))
            jax.effects_barrier()
            found.append(collections.Counter(drawn))
        repeated = [draw for draw, count in found[0].items() if count > 1]
        assert not repeated, (name, repeated)
        assert not found[0] & found[1], name
        assert bool(found[0]) == (name != "upsample"), name
        assert len(found[0]) == len(found[1]), name


def test_factors_and_order_of_colour_changes_are_independent(monkeypatch):
    given = []

    def jitter(images, *drawn):
        given.extend(np.asarray(x, np.float64).reshape(len(x), -1) for x in drawn)
        return images

    monkeypatch.setattr(photometric, "jitter", jitter)
    count = 2_000
    (op,) = parse.parse_train("color_jitter(hue=0.1)", (1, 1)).device
    images, labels = jnp.zeros((count, 1, 1, 3)), jnp.zeros((count, 1))
    op(images, labels, jnp.arange(count, dtype=jnp.uint32), jax.random.key(0))
    *factors, order = given
    assert [x.shape[1] for x in given] == [1, 1, 1, 1, 4]
    # The place of each change.
    columns = np.concatenate([*factors, np.argsort(order, axis=1)], axis=1)
    between = np.corrcoef(columns.T)
    # Places exclude each other.
    between[4:, 4:] = 0
    np.fill_diagonal(between, 0)
    assert np.abs(between).max() < 0.1  # 4.5 standard deviations.


def test_randaugment_draws_operation_side_and_place_by_themselves(monkeypatch):
    drawn = []

    def operate(name, image, magnitude, negative, place):
        drawn.append((randaugment.NAMES.index(name), negative, *place))
        return image

    monkeypatch.setattr(randaugment, "operate", operate)
    rng = np.random.default_rng(0)
    op = randaugment.RandAugment(layers=2_000)
    op(np.zeros((1, 1, 3), np.uint8), rng)
    columns = np.array(drawn, float)
    between = np.corrcoef(columns.T) - np.eye(4)
    assert np.abs(between).max() < 0.1
    assert {*columns[:, 0]} == {*range(len(randaugment.NAMES))}
    assert abs(columns[:, 1:].mean(0) - 0.5).max() < 0.05


def test_the_sizes_of_batches_follow_the_seed():
    found = [
        [views._drawn(seed, step, (1.0, 1.0)) for step in range(40)] for seed in (0, 1)
    ]
    assert found[0] != found[1]
    assert all(10 < sum(each) < 30 for each in found)


def test_the_images_of_an_estimated_mean_follow_the_seed(monkeypatch):
    monkeypatch.setattr(normalization, "_MOST", 5)
    pixels = np.arange(40, dtype=np.uint8).reshape(40, 1, 1, 1)
    source = [{"image": x} for x in pixels]
    data = DataConfig(mean="estimate", std="estimate", channels=1, image_size=(1, 1))
    first, again, other = (
        normalization.resolve(data, source, seed).mean for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_white_is_the_largest_number(dtype):
    white = np.full((1, 1, 1, 3), np.iinfo(dtype).max, dtype)
    found = device_transforms.normalize(jnp.asarray(white), (0.25,), (0.5,))
    np.testing.assert_allclose(found, 1.5, rtol=1e-6)
