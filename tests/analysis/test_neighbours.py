"""The picture of nearest neighbours before and after training."""

import numpy as np
import pytest
from PIL import Image

from vit_jax.analysis import neighbours

N = 23


def image(i):
    """An image that shows its number by one colour, of another shape each."""
    shape = [(40, 60), (90, 30), (7, 200), (50, 50)][i % 4]
    return np.full((*shape, 3), (10 * i, 255 - 10 * i, 90), np.uint8)


def features(seed):
    return np.random.default_rng(seed).normal(size=(N, 6)).astype(np.float32)


def number_of(colour):
    return round(int(colour[0]) / 10)


def shown(picture):
    """Returns the numbers of the images in the cells of each row."""
    pixels = np.asarray(picture)
    step = neighbours._CELL + neighbours._GAP
    lefts = neighbours._lefts([1, 5, 5])
    columns = [lefts[0], *(left + i * step for left in lefts[1:] for i in range(5))]
    rows = (picture.height - neighbours._TITLE - neighbours._GAP) // step
    half = neighbours._CELL // 2
    return [
        [
            number_of(pixels[neighbours._TITLE + row * step + half, left + half])
            for left in columns
        ]
        for row in range(rows)
    ]


def direct(features, query):
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    order = np.argsort(-(unit @ unit[query]))
    return [i for i in order.tolist() if i != query][:5]


def test_a_row_is_a_query_and_its_neighbours_by_both_networks():
    before, after = features(0), features(1)[:, :4]
    read = []
    picture = neighbours.neighbours_figure(
        lambda i: read.append(i) or image(i), before, after
    )
    rows = shown(picture)
    assert [row[0] for row in rows] == [1, 4, 7, 10, 12, 15, 18, 21]
    for query, *others in rows:
        assert others == direct(before, query) + direct(after, query)
    assert len(read) == len({*read})  # Each is read once, and not all are.
    again = neighbours.neighbours_figure(image, before, after, queries=[3, 0])
    assert [row[0] for row in shown(again)] == [3, 0]


def test_few_images_and_equal_features_are_drawn():
    same = np.ones((3, 4), np.float32)
    picture = neighbours.neighbours_figure(image, same, same)
    assert picture.height < neighbours._TITLE + 4 * neighbours._CELL
    grey = lambda i: np.full((30, 500, 1), 40 * i, np.uint16)
    neighbours.neighbours_figure(grey, same, same)
    with pytest.raises(ValueError, match="two or more"):
        neighbours.neighbours_figure(image, same[:1], same[:1])


def test_long_images_show_their_middle_and_small_ones_stay_sharp():
    pixels = np.zeros((10, 100, 3), np.uint8)
    pixels[:, 35:65] = 200
    picture = np.asarray(neighbours._thumbnail(pixels))
    assert picture.shape == (47, 140, 3)
    assert (picture == 200).all()
    small = np.asarray(
        neighbours._thumbnail(np.eye(4, dtype=np.uint8)[..., None] * 255)
    )
    assert {*np.unique(small)} == {0, 255}


def test_titles_are_cut_and_files_are_written(tmp_path):
    before = features(0)
    titles = "photograph", "weights of " + 40 * "a long name ", "菊"
    picture = neighbours.neighbours_figure(image, before, before, titles=titles)
    for name, form in (("a.png", "PNG"), ("b.jpg", "JPEG")):
        neighbours.write(tmp_path / name, picture)
        with Image.open(tmp_path / name) as file:
            assert (file.format, file.size) == (form, picture.size)


def test_queries_are_spread_over_all_images():
    assert neighbours.spread(800) == [50, 150, 250, 350, 450, 550, 650, 750]
    assert neighbours.spread(3) == [0, 1, 2]
    assert neighbours.spread(9, 2) == [2, 6]
