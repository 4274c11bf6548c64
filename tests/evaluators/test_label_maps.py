"""Pictures of masks: what is written beside predictions."""

import numpy as np
import pytest
from PIL import Image

from vit_jax.data import masks
from vit_jax.evaluators import label_maps

LABELS = np.array([[0, 1, 2], [-1, 2, 20]], np.int16)


def test_colours_are_pascal_voc_s_or_those_of_the_data_set():
    colors = masks.palette(257)
    assert len({*map(tuple, colors.tolist())}) == 256 + 1
    expected = [(0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0), (0, 0, 128)]
    assert [*map(tuple, colors[:5].tolist())] == expected
    assert tuple(colors[20]) == (0, 64, 128)
    known = ((1, 2, 3), (4, 5, 6))
    np.testing.assert_array_equal(masks.palette(2, known), known)


@pytest.mark.parametrize("bands", [1, 3])
def test_an_overlay_leaves_pixels_without_a_class(bands):
    image = np.full((2, 3, bands), 100, np.uint8)
    over = label_maps.overlay(image, LABELS, masks.palette(21))
    assert over.shape == (2, 3, 3)
    assert (over[1, 0] == 100).all()
    assert over[0, 1].tolist() == [115, 45, 45]  # 45 % of 100, 55 % of (128, 0, 0).


@pytest.mark.parametrize(("count", "mode"), [(21, "P"), (300, "I;16")])
def test_masks_are_written_as_numbers(tmp_path, count, mode):
    writer = label_maps.Writer(str(tmp_path / "out"), count)
    image, label_map = np.full((2, 3, 3), 100, np.uint8), LABELS.clip(0)
    paths = [writer.write("a/photo.jpg", image, label_map) for _ in range(2)]
    assert paths[0]["mask"] != paths[1]["mask"]
    for each in paths:
        with Image.open(each["mask"]) as mask, Image.open(each["overlay"]) as over:
            assert mask.mode == mode and over.size == (3, 2)
            np.testing.assert_array_equal(np.asarray(mask), label_map)
    if count == 21:
        assert mask.getpalette()[3:6] == [128, 0, 0]
