"""What fine-tuning chooses for a set of images."""

import numpy as np
import pytest

from vit_jax.data.config import DataConfig
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.arrays import ArraySource
from vit_jax.data.sources.open import open_source
from vit_jax.tools.finetuning import rule

FLOWERS = rule.Images(2_934, 240.0, False, 1.4)
DIGITS = rule.Images(1_438, 8.0, True, 1.1)


def test_images_are_looked_at():
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (30, 12, 20, 1), np.uint8)
    labels = np.array([0] * 24 + [1] * 6)
    found = rule.look_at(ArraySource("grey", grey, labels), labels.tolist())
    assert found == rule.Images(30, 12.0, True, 4.0)
    colours = rng.integers(0, 256, (9, 40, 20, 3), np.uint8)
    found = rule.look_at(ArraySource("colours", colours, None), None)
    assert found == rule.Images(9, 20.0, False, 1.0)
    almost = grey.repeat(3, -1)  # Three channels without colours.
    assert rule.look_at(ArraySource("almost", almost, None), None).grey


def test_an_image_that_is_none_is_not_looked_at(encode, tmp_path):
    huge = bytearray(encode(np.zeros((1, 1, 3), np.uint8), "BMP"))
    huge[18:26] = (60_000).to_bytes(4, "little") * 2  # Width and height.
    good = encode(np.zeros((12, 20, 3), np.uint8), "PNG")
    (tmp_path / "train" / "bee").mkdir(parents=True)
    for name, data in {"a.bmp": huge, "b.png": b"none", "c.png": good}.items():
        (tmp_path / "train" / "bee" / name).write_bytes(data)
    keys = {"name": "folder", "data_dir": str(tmp_path), "num_classes": 1}
    assert rule.look_at(open_source(DataConfig(**keys), "train"), None).side == 12


@pytest.mark.parametrize(
    ("side", "weights", "patch", "expected"),
    [
        (240, 224, 16, 224),
        (100, 224, 16, 224),  # Not below a quarter.
        (32, 224, 16, 128),
        (8, 224, 16, 96),
        (8, 64, 16, 64),  # Never above the weights.
        (32, 224, 14, 126),
    ],
)
def test_small_images_are_enlarged_fourfold(side, weights, patch, expected):
    images = rule.Images(100, float(side), False, 1.0)
    assert rule.side_of(images, weights, patch) == expected


def test_grey_images_are_not_mirrored():
    how = Preprocess((224, 224), interpolation="bicubic", crop_fraction=0.875)
    found = rule.transforms_of(FLOWERS, how, (224, 224))
    assert found == {
        "train_transform": "random_resized_crop(area=(0.3, 1.0)) | flip",
        "eval_transform": "resize_small(256, interpolation='bicubic') | central_crop",
    }
    found = rule.transforms_of(DIGITS, how, (96, 96))
    assert "flip" not in found["train_transform"]
    wide = rule.transforms_of(FLOWERS, how, (28, 42))
    assert wide["eval_transform"].startswith("resize_small((32, 48), ")
    google = Preprocess(
        (224, 224), interpolation="area", crop_fraction=0.875, crop_down=True
    )
    line = rule.transforms_of(FLOWERS, google, (224, 224))["eval_transform"]
    assert line == "resize_small(256, interpolation='area') | central_crop(down=True)"
    # Nothing to crop off.
    assert found["eval_transform"] == "resize(interpolation='bicubic')"


def test_batches_and_lengths_by_the_number_of_images():
    def images(count):
        return rule.Images(count, 240.0, False, 1.0)

    sizes = (50, 300, 1_400, 3_000, 50_000)
    assert [rule.batch_of(images(n), "cpu", 1) for n in sizes] == [16, 16, 32, 64, 64]
    assert [rule.batch_of(images(n), "gpu", 8) for n in sizes] == [16, 16, 32, 64, 128]
    assert rule.batch_of(images(300), "tpu", 6) == 18
    assert [rule.epochs_of(images(n)) for n in sizes] == [
        *(96, 30),
        pytest.approx(21.4, abs=0.1),
        10,
        3,
    ]


def test_the_time_bounds_length_and_size():
    def fit(minutes, speed=20.0):
        wanted = rule.epochs_of(FLOWERS)
        return rule.fit(FLOWERS, 736, 224, 16, speed, float(minutes), wanted)

    free, long, short, shorter, shortest = map(fit, (0, 60, 10, 4, 0.1))
    assert (free.side, free.epochs) == (224, pytest.approx(10.2, abs=0.1))
    assert long == free  # The time suffices.
    assert short.side == 224 and 3 < short.epochs < 4
    assert 112 <= shorter.side < short.side
    assert shorter.epochs >= rule.LEAST_EPOCHS
    assert shortest.side == 224 and shortest.epochs < 0.1
    for minutes, length in ((10, short), (4, shorter)):
        assert length.seconds <= 60 * minutes * 1.01
    faster = fit(4, speed=200.0)
    assert faster.side == 224 and faster.epochs > shorter.epochs


def test_rates_averages_and_metrics():
    rates = [rule.optimizer(batch)["learning_rate"] for batch in (16, 64)]
    assert rates == [0.01, 0.04]
    assert rule.ema_of(5) == 0.0
    assert rule.ema_of(1_000) == pytest.approx(0.99)
    uneven = rule.Images(100, 240.0, False, 9.0)
    metrics = [
        rule.metric_of(images, {"multi_label": several}, validated)
        for validated in (736, 99)
        for images, several in ((FLOWERS, False), (uneven, False), (uneven, True))
    ]
    uneven = "val/balanced_accuracy"
    assert metrics == ["val/top1", uneven, "val/map", "", uneven, ""]


@pytest.mark.slow
def test_the_interval_covers_as_often_as_it_says():
    # Known values: Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    assert rule.interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert rule.interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert rule.interval(35, 36, looks=12)[0] < rule.interval(35, 36)[0] < 0.861
    # The best of several looks, each of which is right as often as the others.
    best = np.random.default_rng(0).binomial(36, 0.9, (2_000, 12)).max(1)
    low = np.array([rule.interval(int(r), 36, looks=12)[0] for r in best])
    assert 0.95 <= (low <= 0.9).mean()
    alone = np.array([rule.interval(int(r), 36)[0] for r in best])
    assert (alone <= 0.9).mean() < 0.9
