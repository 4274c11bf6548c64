"""Host transforms: the same pixels as Pillow, and how the random ones are distributed."""

import pathlib

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from sklearn.datasets import load_sample_image

from vit_jax.data.transforms import host as host_transforms
from vit_jax.data.transforms.base import TooSmall
from vit_jax.data.transforms.host import (
    CentralCrop,
    ClippedCrop,
    InceptionCrop,
    RandomCrop,
    RandomResizedCrop,
)
from vit_jax.data.transforms.parse import parse_eval

# Of TensorFlow 2.21; tests/golden/README.md.
GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
TENSORFLOW = np.load(GOLDEN / "tensorflow_images.npz")

H, W = 37, 53
# Large, so that rounding to pixels does not show.
HEIGHT, WIDTH = 11_000, 16_000


def rng(i=0):
    return np.random.Generator(np.random.Philox(i))


def test_resize_keeps_one_channel(photograph):
    image = host_transforms.Resize((11, 19))(photograph[..., :1], rng())
    expected = Image.fromarray(photograph[..., 0]).resize((19, 11), 2)
    np.testing.assert_array_equal(image[..., 0], expected)


def test_resize_small_to_a_pair_covers_both_sides(photograph):
    covers = lambda *size: host_transforms.ResizeSmall(size)(photograph, rng()).shape
    assert covers(28, 42) == (29, 42, 3)  # Of 37x53: the width decides,
    assert covers(28, 14) == (28, 40, 3)  # and here the height.


def test_random_crop_reaches_every_place_equally_often():
    image = np.arange(3 * 4, dtype=np.uint8).reshape(3, 4, 1)
    op, generator = host_transforms.RandomCrop((2, 2)), rng()
    corners = [int(op(image, generator)[0, 0, 0]) for _ in range(3000)]
    values, counts = np.unique(corners, return_counts=True)
    assert list(values) == [0, 1, 2, 4, 5, 6]
    np.testing.assert_allclose(counts, 500, atol=110)  # 5 standard deviations.


@pytest.mark.parametrize(
    "op", [host_transforms.CentralCrop(38), host_transforms.RandomCrop((5, 54))]
)
def test_a_crop_larger_than_the_image_says_so(photograph, op):
    with pytest.raises(TooSmall, match=r"37x53: put resize_small\(\(.*before it"):
        op(photograph, rng())


def test_random_resized_crop_of_the_whole_image_is_a_resize(photograph):
    op = host_transforms.RandomResizedCrop((H, W), area=(1, 1), ratio=(W / H, W / H))
    np.testing.assert_array_equal(op(photograph, rng()), photograph)


def test_random_resized_crop_of_an_extreme_shape_takes_the_middle():
    image = np.zeros((2, 200, 3), np.uint8)
    image[:, 99:101] = 9
    op = host_transforms.RandomResizedCrop((3, 5), area=(0.9, 1))
    assert op.box(2, 200, rng()) == (0, 98, 2, 3)
    assert op(image, rng()).max() == 9


def boxes(op, count=4000, sides=(HEIGHT, WIDTH)):
    """Draws parts: top, left, height and width."""
    generator = rng()
    return np.transpose([op.box(*sides, generator) for _ in range(count)])


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


@pytest.mark.parametrize(
    ("op", "least"),
    [(RandomResizedCrop(7), 0.05), (RandomResizedCrop(7, area=(0.3, 1)), 0.3)],
)
def test_areas_are_distributed_in_closed_form(op, least):
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
    top, left, height, width = boxes(RandomResizedCrop(7, area=(0.05, 0.5)))
    assert min(top.min(), left.min()) >= 0
    assert (top + height).max() <= HEIGHT and (left + width).max() <= WIDTH
    areas, ratios = height * width / (HEIGHT * WIDTH), np.log(width / height)
    low, high = np.log(3 / 4), np.log(4 / 3)
    assert stats.kstest(ratios, "uniform", (low, high - low)).pvalue > 0.001
    assert stats.kstest(areas, "uniform", (0.05, 0.45)).pvalue > 0.001
    assert abs(stats.pearsonr(ratios, areas).statistic) < 0.08
    rows, columns = top / (HEIGHT - height), left / (WIDTH - width)
    for place in (rows, columns):
        assert stats.kstest(place, "uniform").pvalue > 0.001
    assert abs(stats.pearsonr(rows, columns).statistic) < 0.08


CASES = {
    "375x500": (0.05, 1.0),
    "500x333": (0.3, 1.0),
    "20x300": (0.05, 1.0),
    "9x7": (0.05, 1.0),
    "64x64": (0.9, 1.0),
}


@pytest.mark.parametrize("shape", CASES)
def test_inception_crops_are_drawn_as_in_tensorflow(shape):
    sides = height, width = tuple(map(int, shape.split("x")))
    theirs = TENSORFLOW[f"boxes/{shape}"].astype(int)
    op, generator = InceptionCrop(7, area=CASES[shape]), rng()
    ours = np.array([op.box(*sides, generator) for _ in range(len(theirs))])
    measures = [
        [*boxes.T, boxes[:, 2] * boxes[:, 3], boxes[:, 3] / boxes[:, 2]]
        for boxes in (ours, theirs)
    ]
    for one, other in zip(*measures, strict=True):
        assert stats.ks_2samp(one, other).pvalue > 0.001
    if shape == "375x500":
        areas = ours[:, 2] * ours[:, 3] / (height * width)
        assert areas.mean() == pytest.approx(0.344, abs=0.01)
        assert (areas < 0.1).mean() == pytest.approx(0.144, abs=0.02)
        # A test that does not see torchvision's parts is none.
        op = RandomResizedCrop(7)
        other = np.array([op.box(*sides, generator) for _ in range(len(theirs))])
        assert stats.ks_2samp(other[:, 2], theirs[:, 2]).pvalue < 1e-6


def test_clipped_crops_are_drawn_as_in_mae():
    """`get_params` of util/crop.py of facebookresearch/mae, in NumPy."""
    height, width, generator = 500, 333, np.random.default_rng(3)
    area = height * width * generator.uniform(0.08, 1.0, 3000)
    ratio = np.exp(generator.uniform(np.log(3 / 4), np.log(4 / 3), 3000))
    h = np.minimum(np.round(np.sqrt(area / ratio)), height).astype(int)
    w = np.minimum(np.round(np.sqrt(area * ratio)), width).astype(int)
    theirs = [generator.integers(0, side + 1) for side in (height - h, width - w)]
    theirs += [h, w, h * w, w / h]
    measures = []
    for op in (ClippedCrop(7, area=(0.08, 1)), RandomResizedCrop(7, area=(0.08, 1))):
        top, left, h, w = boxes(op, 3000, (height, width))
        measures.append([top, left, h, w, h * w, w / h])
    ours, torchvision = measures
    for one, other in zip(ours, theirs, strict=True):
        assert stats.ks_2samp(one, other).pvalue > 0.001
    # A test that does not see torchvision's parts is none.
    assert stats.ks_2samp(torchvision[3], theirs[3]).pvalue < 1e-6
    assert (ours[3] == width).mean() > 0.2 > (torchvision[3] == width).mean()


def test_a_random_part_may_lie_at_each_border():
    op, drawn = RandomResizedCrop(7, area=(0.1, 0.3)), rng()
    found = np.array([op.box(9, 8, drawn) for _ in range(500)])
    top, left, height, width = found.T
    assert {top.min(), left.min()} == {0}
    assert ((top + height).max(), (left + width).max()) == (9, 8)


def test_an_image_that_no_part_fits_is_taken_whole_by_inception_crop():
    assert InceptionCrop(7, area=(0.9, 1.0)).box(2, 200, rng()) == (0, 0, 2, 200)


def test_inception_crops_are_resized_as_in_tensorflow():
    image = TENSORFLOW["image"]
    for name in ("17x23", "31x19", "70x65"):
        size = tuple(map(int, name.split("x")))
        whole = InceptionCrop(size).cut(image, (0, 0, *image.shape[:2]))
        apart = np.abs(whole - TENSORFLOW[f"bilinear/{name}"])
        assert apart.max() < 1


FILTERS = {"area": "area", "bilinear_plain": "bilinear"}  # Ours to TensorFlow's.
# Grey levels; where one side grows and the other shrinks, areas are rounded twice.
MOST = {"area": 1.3, "bilinear_plain": 1}


@pytest.mark.parametrize(
    ("interpolation", "name"),
    [
        (ours, name)
        for ours, theirs in FILTERS.items()
        for name in TENSORFLOW
        if name.startswith(f"{theirs}/")
    ],
)
def test_filters_of_google_are_those_of_tensorflow(interpolation, name):
    image, expected = TENSORFLOW["image"], TENSORFLOW[name]
    resize = host_transforms.Resize(expected.shape[:2], interpolation)
    assert np.abs(resize(image, rng()) - expected).max() < MOST[interpolation]
    deep = resize(image.astype(np.uint16) * 257, rng()) / 257
    assert np.abs(deep - expected).max() < 0.01
    bands = np.concatenate([image] * 22, -1).astype(np.float32)  # 66, more than 64.
    np.testing.assert_allclose(resize(bands, rng())[..., -3:], expected, atol=0.01)
    classes = resize(image[..., :1].astype(np.int16), rng())
    assert set(classes.flat) <= set(image[..., 0].flat)


def test_lines_of_googles_evaluations_are_those_of_tensorflow():
    image = TENSORFLOW["image"]
    cropped = "resize_small(29, interpolation='area') | central_crop(down=True)"
    whole = "resize(interpolation='bilinear_plain')"
    lines = {cropped: "resize_small(29)|central_crop(24)", whole: "resize(24)"}
    for ours, theirs in lines.items():
        found = image
        for op in parse_eval(ours, (24, 24)):
            found = op(found, rng())
        assert np.abs(found - TENSORFLOW[f"line/{theirs}"]).max() < 1


@pytest.mark.slow
def test_photographs_are_resized_as_by_tensorflow(natural):
    tf = pytest.importorskip("tensorflow", reason="needs the extra prepare")
    for image in natural:
        for size in ((64, 64), (61, 200), (224, 131), (400, 90)):
            for ours, theirs in FILTERS.items():
                expected = tf.image.resize(image, size, theirs).numpy()
                found = host_transforms.resize_all(image, size, ours)
                assert np.abs(found - expected).max() < MOST[ours]


def test_cuts_are_parts_of_the_photograph(natural):
    for image in natural:
        height, width = image.shape[:2]
        top, left = round((height - 97) / 2), round((width - 131) / 2)
        expected = Image.fromarray(image).crop((left, top, left + 131, top + 97))
        np.testing.assert_array_equal(CentralCrop((97, 131))(image, rng()), expected)
        part = RandomCrop((97, 131))(image, rng(1))
        windows = np.lib.stride_tricks.sliding_window_view(image, (97, 131, 3))
        assert (windows == part).all((3, 4, 5)).sum() == 1


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [64, 201])
def test_a_short_side_is_resized_as_pillow_does(natural, size, interpolation):
    for image in natural:
        height, width = image.shape[:2]
        expected = Image.fromarray(image).resize(
            (width * size // height, size), Image.Resampling[interpolation.upper()]
        )
        out = host_transforms.ResizeSmall(size, interpolation)(image, rng())
        assert np.abs(out.astype(int) - np.asarray(expected)).mean() == 0


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
    expected = host_transforms.resize_all(china[21:301, 41:341], (40, 50))
    assert np.abs(image - expected.astype(int)).mean() < 1
    shifted = host_transforms.resize_box(
        halves.astype(np.uint8), (11, 21, 140, 150), (40, 50)
    )
    assert np.abs(shifted - expected.astype(int)).mean() > 2


def test_the_middle_of_an_odd_margin_starts_where_each_library_starts():
    image = np.zeros((227, 231, 1), np.uint8)
    image[2, 4] = 2  # Half of 3 and of 7, rounded to even: timm, torchvision.
    image[1, 3] = 1  # Rounded down: Google, Hugging Face.
    for line, value in (("central_crop", 2), ("central_crop(down=True)", 1)):
        (crop,) = parse_eval(line, (224, 224))
        assert crop(image, rng()).shape == (224, 224, 1)
        assert crop(image, rng())[0, 0, 0] == value
