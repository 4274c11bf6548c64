"""Windows of images of any size: each pixel of each image once, as mmsegmentation slides."""

import itertools
import math

import cv2
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.data.transforms.host import resize_all
from vit_jax.evaluators import sliding_window
from vit_jax.evaluators.sliding_window import Sliding, _starts, interpolate
from vit_jax.models import segmenter


def shades(size, seed=0):
    """Returns a picture of large patches of grey."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 7), np.uint8)
    return cv2.resize(small, size[::-1], interpolation=cv2.INTER_LINEAR)[..., None]


def maps_of(how, images, logits_of, batch_size):
    """Returns the classes of images, whose numbers come back in their order."""
    found = list(how.label_maps(enumerate(images), logits_of, batch_size))
    assert [number for number, _ in found] == list(range(len(images)))
    return [label_map for _, label_map in found]


def by_cell(windows, cell=4, classes=3):
    """Returns logits of cells by their mean shade: as a network without context."""
    B, h, w, _ = windows.shape
    cells = windows.reshape(B, h // cell, cell, w // cell, cell).mean((2, 4)) / 255
    centres = (np.arange(classes) + 0.5) / classes
    return -10 * np.abs(cells[..., None] - centres).astype(np.float32)


def slide(image, window, stride, resized):
    """mmsegmentation's `slide_inference` and `postprocess_result`, with OpenCV's resize."""
    image = resize_all(image, resized)[..., None].reshape(*resized, 1)
    total, count = np.zeros((*resized, 3), np.float32), np.zeros((*resized, 1))
    grids = [
        max(size - part + step - 1, 0) // step + 1
        for size, part, step in zip(resized, window, stride, strict=True)
    ]
    for i, j in itertools.product(*map(range, grids)):
        bottom = min(i * stride[0] + window[0], resized[0])
        right = min(j * stride[1] + window[1], resized[1])
        top, left = max(bottom - window[0], 0), max(right - window[1], 0)
        part = image[top:bottom, left:right]
        logits = cv2.resize(by_cell(part[None])[0], (right - left, bottom - top))
        total[top:bottom, left:right] += logits
        count[top:bottom, left:right] += 1
    return total / count


def test_windows_are_those_of_mmsegmentation():
    image, how = shades((40, 110)), Sliding((16, 16), overlap=0.25)
    (found,) = maps_of(how, [image], by_cell, 3)
    assert found.shape == (40, 110) and found.dtype == np.int16
    # Of 16x44 pixels: four windows of 16, three steps of 12 and the last at the end.
    assert _starts(44, 16, 0.25) == [0, 12, 24, 28]
    mean = slide(image, (16, 16), (12, 12), (16, 44))
    expected = cv2.resize(mean, (110, 40)).argmax(-1)
    assert (found == expected).mean() > 0.999  # Their sums are rounded differently.


@pytest.mark.parametrize("resize", ["cover", "none", "whole"])
@pytest.mark.parametrize("size", [(16, 16), (9, 30), (50, 33), (16, 17)])
def test_every_pixel_gets_the_class_of_its_shade(resize, size):
    image, how = shades(size), Sliding((16, 16), resize)
    (found,) = maps_of(how, [image], by_cell, 4)
    assert found.shape == size
    true = np.minimum(image[..., 0].astype(int) * 3 // 256, 2)
    # Cells of 4 pixels are coarse for small images, and less so for large ones.
    assert (found == true).mean() > 0.6
    assert np.isin(found, [0, 1, 2]).all()


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_images_come_in_order_whatever_the_batch(batch_size):
    sizes = [(16, 16), (16, 70), (20, 20), (90, 31), (16, 16)]
    images = [shades(size, seed) for seed, size in enumerate(sizes)]
    asked = []

    def logits_of(windows):
        asked.append(len(windows))
        return by_cell(windows)

    found = maps_of(Sliding((16, 16)), images, logits_of, batch_size)
    assert [one.shape for one in found] == sizes
    assert max(asked) <= batch_size
    for image, one in zip(images, found, strict=True):
        (alone,) = maps_of(Sliding((16, 16)), [image], by_cell, 1)
        np.testing.assert_array_equal(one, alone)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_what_is_smaller_than_a_window_is_padded_with_the_mean(dtype):
    image, seen = np.full((9, 30, 3), 7, dtype), []

    def logits_of(windows):
        seen.extend(windows)
        return by_cell(windows[..., :1])

    mean = (0.485, 0.456, 0.406)
    (found,) = maps_of(Sliding((16, 16), "none", mean=mean), [image], logits_of, 4)
    assert found.shape == (9, 30)
    for window in seen:
        assert (window[:9] == 7).all() and window.dtype == dtype
        white = {"uint16": 65_535}.get(dtype, 255)
        # Normalised it is 0 within half a grey level.
        level = window[9:].astype(np.float64) / white
        np.testing.assert_allclose(level, np.broadcast_to(mean, level.shape), atol=2e-3)


def test_what_has_no_image_keeps_its_place():
    items = [("a", None), ("b", shades((16, 50))), ("c", None), ("d", None)]
    found = list(Sliding((16, 16)).label_maps(items, by_cell, 64))
    assert [name for name, _ in found] == ["a", "b", "c", "d"]
    assert [label_map is None for _, label_map in found] == [True, False, True, True]


def test_a_network_that_knows_the_place_shows_that_nothing_is_shifted():
    image = np.zeros((33, 47, 1), np.uint8)
    image[:, 20:] = 255
    (found,) = maps_of(Sliding((16, 16), "none", 0.5), [image], by_cell, 2)
    border = (found[:, :-1] != found[:, 1:]).argmax(1)
    assert np.ptp(border) <= 4 and abs(border.mean() - 19.5) < 3


def test_interpolation_is_that_of_the_device():
    for size, classes in (((17, 13), 4), ((3, 2), 70), ((5, 9), 150)):
        maps = np.random.default_rng(0).normal(size=(5, 3, classes))
        maps = maps.astype(np.float32)
        on_device = np.asarray(segmenter.resize(jnp.asarray(maps[None]), size))[0]
        np.testing.assert_allclose(interpolate(maps, size), on_device, atol=1e-6)


def test_classes_are_the_same_however_many_fit_into_memory(monkeypatch):
    logits = np.random.default_rng(0).normal(size=(5, 3, 11)).astype(np.float32)
    logits[..., 7] = logits[..., 2]  # Of equal logits the first counts.
    expected = interpolate(logits, (17, 13)).argmax(-1)
    for classes in (1, 3, 11):
        monkeypatch.setattr(sliding_window, "_MOST_BYTES", 4 * 17 * 13 * classes)
        found = sliding_window.largest(logits, (17, 13))
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == np.int16


def test_windows_overlap_by_at_least_what_is_asked():
    for length, overlap in itertools.product((16, 17, 40, 100, 131), (0, 0.3, 0.9)):
        starts = _starts(length, 16, overlap)
        assert starts[0] == 0 and starts[-1] == length - 16
        steps = np.diff(starts)
        assert (steps <= max(1, math.floor(16 * (1 - overlap))) + 1).all()
