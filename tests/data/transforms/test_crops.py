"""Crops and resizes on photographs, and how the random ones are distributed."""

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from vit_jax.data.transforms import host as host_transforms
from vit_jax.data.transforms.host import CentralCrop, InceptionCrop, RandomCrop

# Large, so that rounding to pixels does not show.
HEIGHT, WIDTH = 11_000, 16_000


def rng(i=0):
    return np.random.Generator(np.random.Philox(i))


def boxes(op, count=4000):
    """Draws parts: top, left, height and width."""
    generator = rng()
    return np.transpose([op.box(HEIGHT, WIDTH, generator) for _ in range(count)])


def area_cdf(least, most, ratio, aspect):
    """Distribution of the area, given that the part fits, in closed form.

    Of an area a those log-ratios fit that lie within log(aspect) -+ log(1 / a).
    """
    areas = np.linspace(least, most, 20_001)
    low = np.maximum(np.log(ratio[0]), np.log(aspect * areas))
    high = np.minimum(np.log(ratio[1]), np.log(aspect / areas))
    density = np.maximum(high - low, 0)
    total = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return lambda x: np.interp(x, areas, total / total[-1])


@pytest.mark.parametrize("least", [0.05, 0.3])
def test_areas_are_distributed_in_closed_form(least):
    op = InceptionCrop(7, area=(least, 1.0))
    _, _, height, width = boxes(op)
    areas = height * width / (HEIGHT * WIDTH)
    expected = area_cdf(least, 1.0, op.ratio, WIDTH / HEIGHT)
    assert stats.kstest(areas, expected).pvalue > 0.001
    # A test that does not see a wrong lower bound, or areas that always fit, is none.
    wrong = area_cdf(least + 0.05, 1.0, op.ratio, WIDTH / HEIGHT)
    assert stats.kstest(areas, wrong).pvalue < 1e-6
    assert stats.kstest(areas, "uniform", (least, 1 - least)).pvalue < 1e-6


def test_ratios_of_parts_that_always_fit_are_log_uniform():
    # At most half the image: of any shape allowed it fits.
    top, left, height, width = boxes(InceptionCrop(7, area=(0.05, 0.5)))
    areas, ratios = height * width / (HEIGHT * WIDTH), np.log(width / height)
    low, high = np.log(3 / 4), np.log(4 / 3)
    assert stats.kstest(ratios, "uniform", (low, high - low)).pvalue > 0.001
    assert stats.kstest(areas, "uniform", (0.05, 0.45)).pvalue > 0.001
    assert abs(stats.pearsonr(ratios, areas).statistic) < 0.08
    rows, columns = top / (HEIGHT - height), left / (WIDTH - width)
    for place in (rows, columns):
        assert stats.kstest(place, "uniform").pvalue > 0.001
    assert abs(stats.pearsonr(rows, columns).statistic) < 0.08


def test_an_inception_crop_is_near_pillows_antialiased_one(natural):
    for i, image in enumerate(natural):
        op = InceptionCrop((57, 63), area=(0.4, 1.0))
        top, left, height, width = op.box(*image.shape[:2], rng(i))
        assert height > 57
        assert width > 63
        picture = Image.fromarray(image[top : top + height, left : left + width])
        errors = {
            name: np.abs(op(image, rng(i)) - np.asarray(resized, float)).mean()
            for name in ("BILINEAR", "NEAREST")
            for resized in [picture.resize((63, 57), Image.Resampling[name])]
        }
        assert errors["BILINEAR"] < 1.5
        assert errors["NEAREST"] > 3


def test_cuts_are_parts_of_the_photograph(natural):
    for image in natural:
        height, width = image.shape[:2]
        top, left = round((height - 97) / 2), round((width - 131) / 2)
        expected = Image.fromarray(image).crop((left, top, left + 131, top + 97))
        np.testing.assert_array_equal(CentralCrop((97, 131))(image, rng()), expected)
        part = RandomCrop((97, 131))(image, rng(1))
        windows = np.lib.stride_tricks.sliding_window_view(image, (97, 131, 3))
        assert (windows == part).all((3, 4, 5)).sum() == 1


@pytest.mark.parametrize("size", [64, 201])
def test_a_short_side_is_resized_as_pillow_does(natural, size):
    for image in natural:
        height, width = image.shape[:2]
        expected = Image.fromarray(image).resize(
            (width * size // height, size), Image.Resampling.BILINEAR
        )
        out = host_transforms.ResizeSmall(size)(image, rng())
        assert np.abs(out.astype(int) - np.asarray(expected)).mean() == 0
