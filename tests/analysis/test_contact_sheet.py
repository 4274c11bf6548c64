import numpy as np
import pytest

from vit_jax.analysis import contact_sheet
from vit_jax.evaluators import fonts

NAMES = ("ant", "bee", "cat", "dog", "elk")


def test_small_images_are_magnified_in_place_and_pixel_by_pixel():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (5, 7, 9, 1), dtype=np.uint8)  # None is paper.
    sheet = np.array(contact_sheet.draw(images, [["a"]] * 5, columns=3))
    factor = 128 // 9
    assert sheet.shape[1] == 3 * (9 * factor + 8) + 8
    for i, image in enumerate(images):
        left = 8 + i % 3 * (9 * factor + 8)
        top = 8 + i // 3 * (sheet.shape[0] - 8) // 2
        part = sheet[top : top + 7 * factor, left : left + 9 * factor]
        expected = np.repeat(image.repeat(factor, 0).repeat(factor, 1), 3, axis=2)
        np.testing.assert_array_equal(part, expected)
    # The place of a sixth image is blank, and there is ink below each of the five.
    assert (sheet[top : top + 7 * factor, left + 9 * factor + 8 :] == 255).all()
    assert (sheet[top + 7 * factor :, left : left + 20] < 128).any()


def test_large_images_keep_their_size_and_colour():
    images = np.random.default_rng(1).integers(0, 256, (2, 300, 200, 3), np.uint8)
    sheet = np.array(contact_sheet.draw(images, [["x"], ["y", "z"]], columns=2))
    np.testing.assert_array_equal(sheet[8:308, 8:208], images[0])
    np.testing.assert_array_equal(sheet[8:308, 216:416], images[1])


def test_a_long_name_stays_within_its_image():
    image = np.zeros((1, 8, 8, 1), np.uint8)
    short, long = (
        np.array(contact_sheet.draw(image, [[text]], columns=1))
        for text in ("i", "a very long name of a class of animals or plants")
    )
    assert short.shape == long.shape
    assert (long[:, -8:] == 255).all()


@pytest.mark.parametrize(
    "names", [("Brouillé", "Brouillà"), ("雛菊", "向日葵"), ("a\n", "a\t")]
)
@pytest.mark.parametrize("installed", [True, False])
def test_names_that_are_not_ascii_can_be_told_apart(names, installed, monkeypatch):
    if not installed:
        monkeypatch.setattr(fonts, "_INSTALLED", ())
        monkeypatch.setattr(fonts, "_fonts", fonts._fonts.__wrapped__)
    image = np.zeros((1, 90, 90, 1), np.uint8)
    draw = lambda text: np.array(contact_sheet.draw(image, [[text]], columns=1))
    sheets = [draw(name) for name in names]
    assert (sheets[0] != sheets[1]).any()
    if not installed:  # Pillow's own font has ASCII alone.
        escaped = [name.encode("unicode_escape").decode() for name in names]
        for sheet, text in zip(sheets, escaped, strict=True):
            np.testing.assert_array_equal(sheet, draw(text))


def test_a_name_of_a_mac_is_composed():
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert fonts.choose(decomposed, 12)[0] == fonts.choose(composed, 12)[0]


@pytest.mark.parametrize(
    ("shares", "names", "lines"),
    [
        ([0, 0, 1, 0, 0], NAMES, ["cat"]),
        ([0, 0, 1, 0, 0], (), ["class 2"]),
        ([0.25, 0, 0, 0, 0.75], NAMES, ["75.0% elk", "25.0% ant"]),
        (
            [0.1, 0.2, 0.4, 0.25, 0.05],
            NAMES,
            ["40.0% cat", "25.0% dog", "20.0% bee", "15.0% in 2 more"],
        ),
        ([0.3, 0, 0, 0, 0], NAMES, ["30.0% ant"]),
        ([0, 0, 0, 0, 0], NAMES, []),
    ],
)
def test_labels_are_named_with_their_shares(shares, names, lines):
    labels = np.array([shares], np.float32)
    assert contact_sheet.captions(labels, names) == [lines]
