"""Grey, blur, solarisation and the probability of colour jitter, against Pillow."""

import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow_but
from PIL import Image, ImageEnhance
from scipy import ndimage, stats

from vit_jax.data.transforms import photometric
from vit_jax.data.transforms.photometric import (
    ColorJitter,
    GaussianBlur,
    Grayscale,
    Solarize,
    ThreeAugment,
)

# Of Pillow and torchvision; tests/golden/README.md.
GOLDEN = np.load(pathlib.Path(__file__).parents[2] / "golden" / "augment.npz")
PICTURE = GOLDEN["picture"]
KEY = jax.random.key(7)
# How far Pillow's three box blurs lie from a Gaussian on this picture, whose border is
# mirrored: worst and mean, of 255. With a repeated border, as Pillow's, it is less.
PILLOW = {0.5: (3.47, 0.65), 2: (7.88, 0.66)}
ORDERS = np.array(list(itertools.permutations(range(4))))


def images(count, image=PICTURE, dtype=jnp.uint8):
    return jnp.broadcast_to(jnp.asarray(image, dtype), (count, *image.shape))


# Compiled once for all tests.
jitted = functools.cache(jax.jit)


def run(op, batch, key=KEY, start=0):
    """Applies an operation to a batch of which no labels are known."""
    index = jnp.arange(start, start + len(batch), dtype=jnp.uint32)
    labels = jnp.zeros((len(batch), 0))
    found, same = jitted(op)(batch, labels, index, key)
    assert same.shape == labels.shape
    return np.asarray(found)


@pytest.mark.parametrize(
    ("op", "name"), [(Grayscale(p=1), "grey"), (Solarize(p=1), "solarize")]
)
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.float32])
def test_grey_and_solarisation_are_pillows(op, name, dtype):
    (found,) = run(op, images(1, dtype=dtype))
    assert np.abs(found - GOLDEN[name].astype(float)).max() <= 1
    assert np.abs(found - PICTURE.astype(float)).max() > 50


def test_values_from_the_threshold_on_are_inverted():
    values = np.array([0, 127, 128, 255]).reshape(1, 4, 1, 1)
    found = run(Solarize(p=1), jnp.asarray(values, jnp.uint8)).ravel()
    assert found.tolist() == [0, 127, 127, 0]


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "hue"])
def test_changes_of_colour_are_torchvisions(name):
    keys = [key for key in GOLDEN.files if key.startswith(f"{name}_pillow/")]
    assert len(keys) == 2
    for key in keys:
        amount = jnp.full(1, float(key.partition("/")[2]))
        one = jnp.ones(1)
        amounts = {"brightness": one, "contrast": one, "saturation": one, "hue": None}
        amounts[name] = amount
        order = jnp.arange(4)[None]
        (found,) = jitted(photometric.jitter)(images(1), **amounts, order=order)
        exact = GOLDEN[key.replace("pillow", "float")] * 255
        assert np.abs(found - exact).max() < 0.02
        # Pillow rounds the mean grey, and hue and saturation to 256 values.
        error = np.abs(found - GOLDEN[key].astype(float))
        assert error.max() <= (9.01 if name == "hue" else 1.2)
        assert error.mean() < (1.5 if name == "hue" else 0.6)


@pytest.mark.parametrize("radius", [0.1, 0.5, 2])
def test_the_blur_is_a_gaussian(radius):
    batch = images(3)
    radii = jnp.asarray([radius, 0.7, 1.9])  # Each example has its own.
    found = np.asarray(jax.jit(photometric.blur, static_argnums=2)(batch, radii, 8))
    for ours, sigma in zip(found, radii.tolist(), strict=True):
        exact = ndimage.gaussian_filter(
            PICTURE.astype(float), (sigma, sigma, 0), mode="nearest", radius=(8, 8, 0)
        )
        np.testing.assert_allclose(ours, exact, atol=2e-3)
    pillow = GOLDEN[f"blur_pillow/{radius}"].astype(float)
    worst, mean = PILLOW.get(radius, (0, 0))
    error = np.abs(found[0] - pillow)
    assert error.max() <= worst + 0.01
    assert error.mean() <= mean + 0.01


def test_a_kernel_reaches_far_enough_for_the_largest_radius(monkeypatch):
    reached = []
    monkeypatch.setattr(
        photometric, "blur", lambda x, radius, reach: reached.append(reach) or x
    )
    for most in (0.5, 2.0, 3.1):
        GaussianBlur(radius=(0.1, most))(
            images(1), jnp.zeros((1, 0)), jnp.zeros(1, jnp.uint32), KEY
        )
    assert reached == [2, 8, 13]


def test_radii_are_uniform_in_their_range():
    # The blur of a step tells its radius: the slope in its middle.
    step = np.zeros((9, 40, 1), np.uint8)
    step[:, 20:] = 255
    found = run(GaussianBlur(p=1, radius=(0.5, 2.5)), images(800, step))
    slopes = found[:, 4, 20, 0] / 255
    # With taps summing to 1 the pixel right of the step holds half plus half a tap.
    offsets = np.arange(-10, 11)
    radii = np.linspace(0.5, 2.5, 2001)
    taps = np.exp(-((offsets / radii[:, None]) ** 2) / 2)
    taps /= taps.sum(1, keepdims=True)
    known = 0.5 + taps[:, 10] / 2
    drawn = np.interp(-slopes, -known, radii)
    assert stats.kstest(drawn, "uniform", (0.5, 2)).pvalue > 0.001
    assert stats.kstest(drawn, "uniform", (0.3, 2.2)).pvalue < 1e-6


OPS = [
    Grayscale(p=0.3),
    GaussianBlur(p=0.3),
    Solarize(p=0.3),
    ColorJitter(0.4, 0.4, 0.2, 0.1, p=0.3),
]


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
def test_each_acts_with_its_probability(op):
    small = PICTURE[:12, :10]
    found = run(op, images(1000, small))
    changed = np.abs(found - small.astype(float)).max((1, 2, 3)) > 0
    # A weak blur or jitter may change nothing that shows.
    assert 0.25 < changed.mean() < 0.35
    assert stats.binomtest(int(changed.sum()), 1000, 0.3).pvalue > 1e-4
    # Neighbours are drawn apart, and a step later others.
    assert 0.02 < (changed[1:] & changed[:-1]).mean() < 0.16
    later = run(op, images(1000, small), start=1000)
    assert (later != found).any()


@pytest.mark.parametrize(
    "op", slow_but([OPS[1]], OPS[1::2]), ids=lambda op: type(op).__name__
)
def test_choices_follow_the_place_in_the_run_alone(op):
    batch = jnp.stack([jnp.roll(images(1)[0], i, axis=0) for i in range(16)])
    whole = run(op, batch)
    np.testing.assert_array_equal(run(op, batch[5:11], start=5), whole[5:11])
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.NamedSharding(mesh, jax.P("data"))
    spread = run(op, jax.device_put(batch, place))
    np.testing.assert_allclose(spread, whole, atol=2e-3)


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
def test_grey_images_are_taken_too(op):
    grey = PICTURE[..., :1]
    found = run(op, images(40, grey))
    assert found.shape == (40, *grey.shape)
    assert (found >= 0).all()
    assert (found <= 255.01).all()


@pytest.mark.slow
def test_three_augment_is_one_of_three_for_each_image():
    batch = images(300)
    found = run(ThreeAugment(radius=(1.5, 1.5)), batch)
    blurred = GaussianBlur(p=1, radius=(1.5, 1.5))
    alone = [run(op, batch[:1])[0] for op in (Grayscale(p=1), Solarize(p=1), blurred)]
    kinds = [[np.abs(image - other).max() < 1e-3 for other in alone] for image in found]
    counts = np.sum(kinds, 0)
    assert counts.sum() == 300
    assert stats.chisquare(counts).pvalue > 1e-3
    np.testing.assert_array_equal(
        run(ThreeAugment(), batch[:9], start=5), run(ThreeAugment(), images(14))[5:]
    )


def jitter(image, factors, hue, orders):
    """Jitters one image in several orders."""
    count = len(orders)
    images = jnp.broadcast_to(jnp.asarray(image), (count, *image.shape))
    amounts = (jnp.full(count, factor) for factor in factors)
    turn = None if hue is None else jnp.full(count, hue)
    run = jitted(photometric.jitter)
    return np.asarray(run(images, *amounts, turn, jnp.asarray(orders)))


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

    monkeypatch.setattr(photometric, "jitter", record)
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
