import colorsys
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance
from scipy import stats

from vit_jax.data.transforms import device as device_transforms
from vit_jax.data.transforms.device import ColorJitter

KEY = jax.random.key(7)
ORDERS = np.array(list(itertools.permutations(range(4))))


def jitter(image, factors, hue, orders):
    """Jitters one image in several orders."""
    count = len(orders)
    images = jnp.broadcast_to(jnp.asarray(image), (count, *image.shape))
    amounts = (jnp.full(count, factor) for factor in factors)
    turn = None if hue is None else jnp.full(count, hue)
    run = jax.jit(device_transforms.jitter)
    return np.asarray(run(images, *amounts, turn, jnp.asarray(orders)))


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.7])
@pytest.mark.parametrize("which", ["Brightness", "Contrast", "Color"])
def test_a_change_is_pillows_on_photographs(natural, which, factor):
    factors = [1.0, 1.0, 1.0]
    factors[("Brightness", "Contrast", "Color").index(which)] = factor
    for image in natural:
        ours = jitter(image, factors, None, ORDERS[:1])[0]
        enhance = getattr(ImageEnhance, which)(Image.fromarray(image))
        # Pillow cuts off after the comma, and rounds the grey before.
        error = np.abs(ours - np.asarray(enhance.enhance(factor), float)).mean()
        assert error < (0.001 if factor == 1 else 0.75)


def test_changes_come_in_the_order_given(natural):
    image, factors = natural[1], (1.5, 0.5, 1.8)
    ours = jitter(image, factors, None, ORDERS)
    enhances = ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color
    distinct = []
    for i in range(len(ORDERS)):
        picture = Image.fromarray(image)
        for which in ORDERS[i]:
            if which < 3:
                picture = enhances[which](picture).enhance(factors[which])
        assert np.abs(ours[i] - np.asarray(picture, float)).mean() < 1.5
        # Equal orders may be rounded otherwise by the compiler.
        if not any(np.allclose(ours[i], other, atol=0.01) for other in distinct):
            distinct.append(ours[i])
    # Brightness and saturation commute where nothing is clipped.
    assert 4 <= len(distinct) <= 6
    first, last = ours[0].mean(), ours[-1].mean()
    assert abs(first - last) > 3  # More than the tolerance: the order shows.


def test_hue_turns_as_in_hsv(natural):
    for image, turn in zip(natural, (0.13, -0.37), strict=True):
        image = np.concatenate([image[::17, ::23], np.zeros_like(image[:1, ::23])])
        images = jnp.asarray(image[None], jnp.float32)
        ours = np.asarray(
            jax.jit(device_transforms.turn_hue)(images, jnp.array([turn]))
        )
        for pixel, out in zip(image.reshape(-1, 3), ours.reshape(-1, 3), strict=True):
            h, s, v = colorsys.rgb_to_hsv(*(pixel / 255))
            expected = np.array(colorsys.hsv_to_rgb((h + turn) % 1, s, v)) * 255
            np.testing.assert_allclose(out, expected, atol=0.01)


def test_hue_is_near_pillows_of_eight_bits(natural):
    for image in natural:
        hsv = np.array(Image.fromarray(image).convert("HSV"))
        hsv[..., 0] += 64
        theirs = np.asarray(Image.fromarray(hsv, "HSV").convert("RGB"), float)
        ours = jitter(image, (1.0, 1.0, 1.0), 64 / 255, ORDERS[:1])[0]
        assert np.abs(ours - theirs).mean() < 2


def test_grey_images_have_no_colour_to_change():
    image = np.arange(35, dtype=np.uint8).reshape(5, 7, 1)
    out = jitter(image, (1.0, 1.0, 0.2), 0.3, ORDERS[:2])
    np.testing.assert_allclose(out[1], image, atol=1e-5)
    brighter = jitter(image, (2.0, 1.0, 1.0), 0.3, ORDERS[:1])[0]
    np.testing.assert_allclose(brighter, 2.0 * image, atol=1e-5)


def test_factors_are_uniform_and_orders_equally_common(monkeypatch):
    seen = {}

    def record(images, *amounts):
        seen["amounts"] = jax.tree.map(np.asarray, amounts)
        return images

    monkeypatch.setattr(device_transforms, "jitter", record)
    op = ColorJitter(0.3, 0.6, 1.5, hue=0.2)
    images, labels = jnp.zeros((3000, 1, 1, 3)), jnp.zeros((3000, 2))
    op(images, labels, jnp.arange(3000, dtype=jnp.uint32), KEY)
    brightness, contrast, saturation, hue, order = seen["amounts"]
    for values, low, high in (
        (brightness, 0.7, 1.3),
        (contrast, 0.4, 1.6),
        (saturation, 0, 2.5),
        (hue, -0.2, 0.2),
    ):
        assert stats.kstest(values, "uniform", (low, high - low)).pvalue > 0.001
    counts = np.unique(order, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 0.001
    assert abs(stats.pearsonr(brightness, contrast)[0]) < 0.1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"brightness": -0.1}, "brightness=-0.1 must be at least 0"),
        ({"saturation": -1}, "saturation=-1 must be at least 0"),
        ({"hue": 0.6}, "hue=0.6 must be at most 0.5"),
    ],
)
def test_a_wrong_argument_is_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        ColorJitter(**arguments)
