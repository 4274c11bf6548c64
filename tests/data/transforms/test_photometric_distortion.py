"""mmsegmentation's PhotoMetricDistortion: to the bit, and how its changes are drawn."""

import itertools

import cv2
import numpy as np
import pytest
from scipy import stats

from vit_jax.data.transforms import photometric_distortion
from vit_jax.data.transforms.photometric_distortion import (
    PhotometricDistortion,
    distort,
)

CHANGES = [
    *itertools.product((None, -31.4, 0.3, 31.9), (None, 0.52, 1.47)),
]


def original(image, brightness, contrast, saturation, hue, contrast_early):
    """The formula of mmsegmentation, with given draws, on an image that begins with blue."""

    def convert(levels, alpha=1, beta=0):
        levels = levels.astype(np.float32) * alpha + beta
        return np.clip(levels, 0, 255).astype(np.uint8)

    image = image[..., ::-1]
    if brightness is not None:
        image = convert(image, beta=brightness)
    if contrast_early and contrast is not None:
        image = convert(image, alpha=contrast)
    if saturation is not None:
        hsv = cv2.cvtColor(image, cv2.COLOR_BGR2HSV)
        hsv[..., 1] = convert(hsv[..., 1], alpha=saturation)
        image = cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)
    if hue is not None:
        hsv = cv2.cvtColor(image, cv2.COLOR_BGR2HSV)
        hsv[..., 0] = (hsv[..., 0].astype(int) + hue) % 180
        image = cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR)
    if not contrast_early and contrast is not None:
        image = convert(image, alpha=contrast)
    return image[..., ::-1]


@pytest.mark.parametrize(("brightness", "contrast"), CHANGES)
def test_changes_are_those_of_mmsegmentation(brightness, contrast, natural):
    noise = np.random.default_rng(0).integers(0, 256, (37, 53, 3), np.uint8)
    others = itertools.product((None, 0.51, 1.49), (None, -18, 17), (False, True))
    for saturation, hue, early in others:
        given = brightness, contrast, saturation, hue, early
        for image in (natural[0][::3, ::2], noise):
            before = image.copy()
            found = distort(image, *given)
            np.testing.assert_array_equal(found, original(image, *given))
            np.testing.assert_array_equal(image, before)
            assert found.dtype == np.uint8


def test_whole_levels_are_cut_off_after_each_change():
    image = np.array([[[250, 100, 0], [3, 2, 1]]], np.uint8)
    # 250 + 20 is 255 before it is halved, and 127.5 becomes 127.
    found = distort(image, 20.0, 0.5, None, None, True)
    np.testing.assert_array_equal(found, [[[127, 60, 10], [11, 11, 10]]])


def test_grey_images_keep_their_shape_and_have_no_hue():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 1), np.uint8)
    assert distort(image, None, 1.3, 0.5, 9, True).shape == (5, 7, 1)
    np.testing.assert_array_equal(distort(image, None, None, 0.5, 9, True), image)


def test_each_change_is_drawn_in_half_of_the_cases(monkeypatch):
    drawn = []

    def record(image, *given):
        drawn.append(given)
        return image

    monkeypatch.setattr(photometric_distortion, "distort", record)
    generator = np.random.Generator(np.random.Philox(0))
    op, image = PhotometricDistortion(), np.zeros((4, 6, 3), np.uint8)
    for _ in range(4000):
        op(image, generator)
    *changes, early = (np.array(values, float) for values in zip(*drawn, strict=True))
    assert early.mean() == pytest.approx(0.5, abs=0.03)
    for values in changes:  # Independent of each other.
        assert np.isnan(values).mean() == pytest.approx(0.5, abs=0.03)
        together = np.isnan(values) & (early == 1)
        assert together.mean() == pytest.approx(0.25, abs=0.03)
    brightness, contrast, saturation, hue = (v[~np.isnan(v)] for v in changes)
    assert stats.kstest(brightness, "uniform", (-32, 64)).pvalue > 0.001
    assert stats.kstest(contrast, "uniform", (0.5, 1)).pvalue > 0.001
    assert stats.kstest(saturation, "uniform", (0.5, 1)).pvalue > 0.001
    steps, counts = np.unique(hue, return_counts=True)
    np.testing.assert_array_equal(steps, np.arange(-18, 18))
    assert stats.chisquare(counts).pvalue > 0.001
