import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from vit_jax.data.transforms import host as host_transforms


@pytest.fixture(scope="module")
def china():
    """A photograph with fine detail, 341x427."""
    return load_sample_image("china.jpg")[:341, :427].copy()


def exact(image, size):
    """Resizes every channel in float32 by Pillow's bilinear filter."""
    planes = [
        Image.fromarray(plane) for plane in image.astype(np.float32).T.swapaxes(1, 2)
    ]
    return np.stack([np.array(p.resize(size[::-1], 2)) for p in planes], -1)


# Measured with china.jpg: mean absolute errors with and without the low pass.
@pytest.mark.parametrize(
    ("times", "most", "plain"),
    [(0.6, 0.3, 0.0), (1.2, 1.2, 1.4), (1.5, 1.4, 2.4), (2, 0.5, 3.5), (3.4, 0.3, 6)],
)
def test_the_fast_resize_is_close_to_the_exact_filter(china, times, most, plain):
    size = round(341 / times), round(427 / times)
    expected = exact(china, size)
    error = np.abs(host_transforms.resize_fast(china, size) - expected).mean()
    aliased = np.abs(
        host_transforms.resize_fast(china, size, antialias=False) - expected
    )
    assert error < most
    assert aliased.mean() > plain


def test_the_fast_resize_treats_height_and_width_apart(china):
    size = 170, 640  # Half, and half as much again.
    assert (
        np.abs(host_transforms.resize_fast(china, size) - exact(china, size)).mean()
        < 0.6
    )
    turned = china.swapaxes(0, 1).copy()
    there = host_transforms.resize_fast(turned, size[::-1]).swapaxes(0, 1)
    np.testing.assert_allclose(
        there.astype(int), host_transforms.resize_fast(china, size), atol=1
    )


def test_the_fast_resize_keeps_one_channel(china):
    grey = host_transforms.resize_fast(china[..., 1:2], (37, 300))
    assert grey.shape == (37, 300, 1)
    colour = host_transforms.resize_fast(china, (37, 300))
    np.testing.assert_allclose(grey[..., 0].astype(int), colour[..., 1], atol=1)


def test_a_box_of_fractions_is_that_of_the_larger_image(china):
    halves = china[:340, :426].reshape(170, 2, 213, 2, 3).mean((1, 3)).round()
    box = 10.5, 20.5, 140.0, 150.0
    image = host_transforms.resize_box(halves.astype(np.uint8), box, (40, 50))
    expected = host_transforms.resize_bilinear(china[21:301, 41:341], (40, 50))
    assert np.abs(image - expected.astype(int)).mean() < 1
    shifted = host_transforms.resize_box(
        halves.astype(np.uint8), (11, 21, 140, 150), (40, 50)
    )
    assert np.abs(shifted - expected.astype(int)).mean() > 2
