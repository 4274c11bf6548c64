import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats

from vit_jax.data.transforms import randaugment
from vit_jax.data.transforms.randaugment import RandAugment

GREY = (128, 128, 128)
MAGNITUDES = (0, 3, 10, 15, 20, 30)


def rng(i=0):
    return np.random.Generator(np.random.Philox(i))


def operate(name, image, magnitude, *more, **named):
    return randaugment.operate(name, image, float(magnitude), *more, **named)


def affine(picture, *matrix):
    return picture.transform(
        picture.size, Image.Transform.AFFINE, matrix, fillcolor=GREY
    )


def enhanced(enhance):
    return lambda picture, m: enhance(picture).enhance(0.18 * m + 0.1)


def contrasted(picture, m):
    """Blends with a grey of the number of pixels by 256, as google-research/big_vision."""
    grey = min(picture.width * picture.height / 256, 255)
    other = Image.new("RGB", picture.size, (int(grey),) * 3)
    return Image.blend(other, picture, 0.18 * m + 0.1)


# Pillow's own operation for a magnitude m, and the mean absolute error in grey levels.
PILLOW = {
    "autocontrast": (lambda p, m: ImageOps.autocontrast(p), 0.01),
    "equalize": (lambda p, m: ImageOps.equalize(p), 0),
    "invert": (lambda p, m: ImageOps.invert(p), 0),
    "rotate": (lambda p, m: p.rotate(3 * m, fillcolor=GREY), 0.1),
    "posterize": (lambda p, m: ImageOps.posterize(p, min(max(int(0.4 * m), 1), 8)), 0),
    "solarize": (lambda p, m: ImageOps.solarize(p, int(25.6 * m) % 256), 0),
    "color": (enhanced(ImageEnhance.Color), 0.01),
    "contrast": (contrasted, 0.05),
    "brightness": (enhanced(ImageEnhance.Brightness), 0.01),
    "sharpness": (enhanced(ImageEnhance.Sharpness), 0.01),
    "shear_x": (lambda p, m: affine(p, 1, 0.03 * m, 0, 0, 1, 0), 0.02),
    "shear_y": (lambda p, m: affine(p, 1, 0, 0, 0.03 * m, 1, 0), 0.02),
    "translate_x": (
        lambda p, m: affine(p, 1, 0, round(10 * m * p.width / 224), 0, 1, 0),
        0,
    ),
    "translate_y": (
        lambda p, m: affine(p, 1, 0, 0, 0, 1, round(10 * m * p.height / 224)),
        0,
    ),
}


@pytest.mark.parametrize("name", PILLOW)
def test_an_operation_is_pillows_on_photographs(natural, name):
    reference, error = PILLOW[name]
    changed = 0
    for image in natural:
        for magnitude in MAGNITUDES:
            ours = operate(name, image, magnitude).astype(int)
            theirs = np.asarray(reference(Image.fromarray(image), magnitude))
            assert np.abs(ours - theirs).mean() <= error, magnitude
            changed += (ours != image).mean() > 0.1
    assert changed >= 4  # So that a reference that does nothing cannot pass.


@pytest.mark.parametrize(
    "name", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y"]
)
def test_half_of_the_motions_go_the_other_way(natural, name):
    image = natural[0]
    there, back = (operate(name, image, 5, negative) for negative in (False, True))
    assert (there != back).mean() > 0.5
    # There and back is where it was, but for the edges and for rounding.
    again = operate(name, there, 5, True)[60:-60, 60:-60]
    kept = image[60:-60, 60:-60]
    assert np.abs(again.astype(int) - kept).mean() < 6
    assert np.abs(there[60:-60, 60:-60].astype(int) - kept).mean() > 12


def test_contrast_of_images_of_224_pixels_is_about_a_grey_of_196():
    flat = np.full((224, 224, 3), 100, np.uint8)
    assert (operate("contrast", flat, 0) == int(196 + 0.1 * (100 - 196))).all()
    assert (operate("contrast", flat, 10) == int(196 + 1.9 * (100 - 196))).all()


def test_solarize_add_brightens_the_darker_half(natural):
    values = natural[0].astype(int)
    expected = np.where(values < 128, np.minimum(values + 165, 255), values)
    np.testing.assert_array_equal(operate("solarize_add", natural[0], 15), expected)


def test_cutout_is_a_grey_square_cut_off_at_the_edges(natural):
    image = np.array(Image.fromarray(natural[0]).resize((224, 224)))
    expected = image.copy()
    expected[112 - 40 : 112 + 40, 22:102] = 128
    out = operate("cutout", image, 10, place=(0.5, 62.2 / 224))
    np.testing.assert_array_equal(out, expected)
    expected = image.copy()
    expected[:80, 224 - 80 :] = 128
    out = operate("cutout", image, 20, place=(0.0, 0.9999))
    np.testing.assert_array_equal(out[:80, 144:], expected[:80, 144:])
    np.testing.assert_array_equal(out[80:], image[80:])
    np.testing.assert_array_equal(operate("cutout", image, 0), image)


@pytest.mark.parametrize("name", randaugment.NAMES)
@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 7, 3), (2, 3, 1), (5, 200, 1)])
def test_any_shape_is_kept_and_the_image_left_alone(name, shape):
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    before = image.copy()
    for magnitude in MAGNITUDES:
        assert operate(name, image, magnitude, True, (0.99, 0.0)).shape == shape
    np.testing.assert_array_equal(image, before)


def test_an_image_of_one_value_stays_under_histogram_operations():
    flat = np.full((3, 5, 3), 77, np.uint8)
    for name in ("autocontrast", "equalize"):
        np.testing.assert_array_equal(operate(name, flat, 9), flat)


def test_all_operations_are_drawn_equally_often(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        randaugment, "operate", lambda *args: drawn.append(args) or args[1]
    )
    image, generator = np.zeros((3, 5, 3), np.uint8), rng()
    op = RandAugment(3, 7)
    for _ in range(2000):
        op(image, generator)
    names, _, magnitudes, negative, place = zip(*drawn, strict=True)
    assert set(names) == set(randaugment.NAMES)
    counts = np.unique(names, return_counts=True)[1]
    assert stats.chisquare(counts).pvalue > 0.001
    assert set(magnitudes) == {7}
    assert stats.binomtest(int(np.sum(negative)), len(drawn)).pvalue > 0.001
    rows, columns = np.transpose(place)
    for values in (rows, columns):
        assert stats.kstest(values, "uniform").pvalue > 0.001
    assert abs(stats.pearsonr(rows, columns).statistic) < 0.05
    # One layer's draw says nothing about the next one's.
    numbers = np.array([randaugment.NAMES.index(name) for name in names])
    assert abs(stats.pearsonr(numbers[:-1], numbers[1:]).statistic) < 0.05


def test_the_result_is_a_function_of_the_generator(natural):
    op, image = RandAugment(2, 15), natural[1]
    first = [op(image, rng(i)) for i in range(12)]
    for i, out in enumerate(first):
        np.testing.assert_array_equal(op(image, rng(i)), out)
        assert out.shape == image.shape
    assert len({out.tobytes() for out in first}) > 9
    np.testing.assert_array_equal(RandAugment(0, 9)(image, rng()), image)
