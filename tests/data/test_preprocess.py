"""The description of evaluation images: read from an eval line, written as one, applied."""

import sys

import numpy as np
import pytest

from vit_jax.data.decode import DamagedImage
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError
from vit_jax.weights.network_images import prepare_image

SIZE = (24, 36)
FIELDS = [
    {"squash": True},
    {"squash": True, "crop_fraction": 0.8, "crop_down": True},
    {"interpolation": "bicubic"},
    {"crop_fraction": 0.75, "interpolation": "area", "crop_down": True},
    {"crop_fraction": 0.75, "short_side": True},
    {"cut": (2, 3), "crop_fraction": 0.8125},
    {"cut": (3, 1), "squash": True},
    {"fill": (10, 200, 30)},
    {"fill": (0,), "crop_fraction": 0.8125, "cut": (2, 3)},
    {"max_tokens": 20, "patch": 6, "interpolation": "bicubic"},
]


def of_line(line, size=SIZE):
    data = {"image_size": size, "mean": (0.5,), "std": (0.2,), "channels": 3}
    return Preprocess.of_data(data | {"eval_transform": line})


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_line_says_the_fields_and_gives_them_back(fields):
    how = Preprocess(SIZE, **fields)
    again = of_line(how.line)
    assert (again.transform, again.line) == ("", how.line)
    assert again.transforms == how.transforms
    assert again.describe().split(", mean")[0] == how.describe().split(", mean")[0]


@pytest.mark.parametrize(
    "line",
    [
        "resize_small(20) | pad | central_crop",
        "resize_small(40) | central_crop((30, 40)) | resize(interpolation='lanczos')",
        "resize(60) | naflex(12, patch=6)",
    ],
)
def test_any_line_prepares_images_as_the_evaluation_of_its_run(line):
    how, rng = of_line(line), np.random.default_rng(0)
    assert how.transform == how.line == line
    assert line in how.describe() and line in how.explain()
    image = rng.integers(0, 256, (61, 83, 3), np.uint8)
    expected = image
    for op in parse.parse_eval(line, SIZE):
        expected = op(expected, rng)
    found = prepare_image(image, how)
    if how.max_tokens:
        np.testing.assert_array_equal(found.grids, expected["grids"])
        found, expected = found.pixels, expected["image"]
    np.testing.assert_array_equal(found, expected)


def test_a_transform_of_the_users_is_imported_when_an_image_is_prepared(
    tmp_path, monkeypatch
):
    (tmp_path / "half.py").write_text(
        "import dataclasses\n\n\n@dataclasses.dataclass(frozen=True)\nclass Half:\n"
        '    runs_on = "host"\n    in_eval = True\n\n'
        "    def __call__(self, image, rng):\n        return image // 2\n"
    )
    sequences = of_line("half:Half | naflex(20, patch=6)")
    assert (sequences.max_tokens, sequences.patch) == (20, 6)
    how = of_line("resize | half:Half")
    assert "half" not in sys.modules
    image = np.full((30, 40, 3), 100, np.uint8)
    with pytest.raises(UserError, match=r"half"):
        how.prepare(image)
    monkeypatch.syspath_prepend(tmp_path)
    np.testing.assert_array_equal(how.prepare(image), np.full((*SIZE, 3), 50))
    assert prepare_image(image, sequences).pixels.max() == 50


def test_images_that_a_line_makes_of_another_size_are_refused():
    image = np.zeros((61, 83, 3), np.uint8)
    with pytest.raises(DamagedImage, match=r"\(20, 27, 3\).*'resize_small\(20\)'"):
        of_line("resize_small(20)").prepare(image)
    with pytest.raises(DamagedImage, match="24x36.* 20x27"):
        of_line("resize_small(20) | central_crop").prepare(image)


def test_another_size_replaces_a_line_whose_sizes_are_fixed():
    how = of_line("resize_small(20) | pad(40) | central_crop((24, 36))")
    assert how.transform and how.replace(mean=(0.25,)).transform
    other = how.replace(image_size=(12, 18))
    image = np.zeros((50, 70, 3), np.uint8)
    assert other.prepare(image).shape == (12, 18, 3)


def test_fields_replace_a_line_if_they_resize_in_another_way():
    how = of_line("resize_small(20, interpolation='area') | pad | central_crop")
    kept = how.replace(mean=(0.1,), image_size=(18, 18), interpolation="area")
    assert (kept.transform, kept.mean) == (how.transform, (0.1,))
    assert how.replace(crop_fraction=0.9).transform == ""
    assert how.replace(max_tokens=9).transform == ""
    assert how.whole((8, 8)).line == "resize(interpolation='area')"


def test_the_box_of_a_line_is_the_whole_image():
    assert of_line("resize(40) | central_crop(30) | resize").crop_box((50, 60)) == (
        *(0.0, 0.0),
        *(1.0, 1.0),
    )
