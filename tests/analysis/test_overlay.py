"""Overlays, against interpolation written out and the preprocessing itself."""

import dataclasses
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from vit_jax.analysis import overlay
from vit_jax.errors import UserError
from vit_jax.weights import preprocess as preprocessing
from vit_jax.weights.pretrained import Preprocess


def bilinear(values, row, column):
    """Interpolates between the centres of cells, and repeats the edges."""
    (Y, X), total = values.shape, 0.0
    row, column = (
        min(max(place - 0.5, 0), side - 1) for place, side in ((row, Y), (column, X))
    )
    for y in range(Y):
        for x in range(X):
            near = max(0, 1 - abs(row - y)) * max(0, 1 - abs(column - x))
            total += near * values[y, x]
    return total


@pytest.mark.parametrize("size", [(12, 20), (13, 23), (3, 5)])
def test_values_are_interpolated_between_the_centres_of_patches(size):
    values = np.random.default_rng(1).random((3, 5)).astype(np.float32)
    found = overlay.upsample(values.ravel(), (3, 5), size)
    wanted = [
        [
            bilinear(values, (y + 0.5) * 3 / size[0], (x + 0.5) * 5 / size[1])
            for x in range(size[1])
        ]
        for y in range(size[0])
    ]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_scaled_values_are_from_0_to_1_and_equal_ones_0():
    np.testing.assert_allclose(overlay.scaled(np.array([3, 5, 4.0])), [0, 1, 0.5])
    np.testing.assert_array_equal(overlay.scaled(np.full(3, 0.2)), 0)


def test_values_that_diverged_are_refused():
    with pytest.raises(UserError, match="laid over an image is not finite: the checkp"):
        overlay.scaled(np.array([1.0, np.nan, 2.0]))


def test_the_most_is_bright_and_coloured_and_the_least_the_dimmed_image():
    image = np.full((2, 2, 3), 100, np.uint8)
    map = np.array([[0, 1], [0.5, np.nan]], np.float32)
    out = overlay.blend(image, map).astype(int)
    np.testing.assert_array_equal(out[0, 0], [75, 75, 75])
    assert out[0, 1].sum() > out[1, 0].sum() > out[0, 0].sum() > out[1, 1].sum()
    assert np.ptp(out[0, 1]) > 50
    np.testing.assert_array_equal(out[1, 1], [35, 35, 35])
    grey = overlay.blend(image[..., :1], map)
    np.testing.assert_array_equal(grey, out)


def test_a_large_image_is_blended_as_its_parts_are():
    rng = np.random.default_rng(1)
    image = rng.integers(0, 256, (601, 3, 3), dtype=np.uint8)
    map = rng.random((601, 3)).astype(np.float32)
    map[250:300, 1] = np.nan
    whole = overlay.blend(image, map)
    for row in (0, 255, 256, 511, 512, 600):
        part = overlay.blend(image[row : row + 1], map[row : row + 1])
        np.testing.assert_array_equal(whole[row : row + 1], part)


def test_floats_of_a_large_image_take_little():
    image = np.zeros((2000, 1000, 3), np.uint8)
    map = np.zeros((2000, 1000), np.float32)
    tracemalloc.start()
    overlay.blend(image, map)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * image.nbytes


@pytest.mark.parametrize("size", [(90, 140), (141, 83), (64, 64)])
@pytest.mark.parametrize(
    "preprocess",
    [
        Preprocess((32, 32), crop_fraction=0.9),
        Preprocess((32, 48), crop_fraction=0.8),
        Preprocess((32, 32)),
        Preprocess((32, 48), squash=True),
    ],
)
def test_the_region_is_what_the_network_sees(size, preprocess):
    top, left, height, width = overlay.region(size, preprocess)
    # In this image each pixel tells its place.
    image = np.zeros((*size, 3), np.uint8)
    image[..., 0] = np.linspace(0, 255, size[0])[:, None]
    image[..., 1] = np.linspace(0, 255, size[1])
    seen = preprocessing.prepare(image, dataclasses.replace(preprocess))
    cut = image[top : top + height, left : left + width]
    again = np.array(
        Image.fromarray(cut).resize(
            preprocess.image_size[::-1], Image.Resampling.BILINEAR
        )
    )
    np.testing.assert_allclose(again.astype(int), seen.astype(int), atol=5)
    out = overlay.on_image(image, np.arange(4.0), (2, 2), preprocess)
    assert out.shape == image.shape


def test_what_was_cropped_away_stays_dark():
    image = np.full((40, 80, 3), 200, np.uint8)
    out = overlay.on_image(image, np.array([0.0, 1.0]), (1, 2), Preprocess((32, 32)))
    assert (out[:, :19] == 70).all() and (out[:, 61:] == 70).all()
    assert (out[:, 20:25] == 150).all()
    assert out[20, 58, 0] > 220
