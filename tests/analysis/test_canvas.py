"""Tile sheets and heat maps, and their files."""

import numpy as np
import pytest

from vit_jax.analysis import canvas, charts


@pytest.mark.parametrize(
    ("size", "pixels"),
    [
        ((480, 640), 640),
        ((1600, 1200), 1200),
        ((3000, 4000), 1600),
        ((4000, 3000), 1200),
        ((28, 28), 480),
        ((90, 30), 480),
        ((5000, 100), 32),
    ],
)
def test_an_image_keeps_its_pixels_up_to_a_limit(size, pixels):
    image = np.zeros((*size, 3), np.uint8)
    assert canvas.native_tile_width(image) * charts.DPI == pytest.approx(pixels)
    figure = canvas.draw_tiles([image], 1, tile_width=canvas.native_tile_width(image))
    (axes,) = figure.axes
    shown = axes.images[0].get_array().shape
    assert shown[1] == min(size[1], pixels)
    assert shown[0] == pytest.approx(size[0] * shown[1] / size[1], abs=0.5)
    assert axes.get_position().width * figure.get_size_inches()[0] * 200 >= shown[1] - 1


def test_a_mosaic_has_each_grid_at_its_place():
    grids = np.arange(36, dtype=np.float32).reshape(2, 3, 2, 3)
    mosaic = canvas.mosaic(grids)
    assert mosaic.shape == (2 * 3 - 1, 3 * 4 - 1)
    np.testing.assert_array_equal(mosaic[3:5, 4:7], grids[1, 1])
    assert np.isnan(mosaic[2]).all() and np.isnan(mosaic[:, 3]).all()


@pytest.mark.parametrize("shape", [(12, 12), (209, 209), (5, 11), (24, 3), (3, 24)])
def test_the_texts_of_a_heat_map_are_within_the_figure(shape):
    values = np.random.default_rng(1).random(shape)
    texts = {"title": "b", "x_label": "layer of a", "y_label": "layer of another"}
    figure = canvas.draw_heatmap(values, **texts, colorbar_label="CKA", limits=(0, 1))
    width, height = figure.get_size_inches() * charts.DPI
    assert [axes.get_ylabel() for axes in figure.axes] == [texts["y_label"], "CKA"]
    for axes in figure.axes:
        box = axes.get_tightbbox()
        assert box.x0 >= 0 and box.y0 >= 0
        assert box.x1 <= width and box.y1 <= height
    heat, bar = (axes.get_window_extent().height for axes in figure.axes)
    assert bar > 0.5 * heat


def test_dark_mode_changes_paper_and_ink_only():
    figure = canvas.draw_tiles(
        [np.eye(3)], 1, title="t", captions=["c"], row_labels=["r"]
    )
    light = charts.to_svg(figure)
    dark = canvas.add_dark_mode(light)
    assert "@media screen and (prefers-color-scheme:dark)" in dark
    assert '[style*="fill: #1b1b1b"]{fill:#e9e7e2!important}' in dark
    assert "fill: #1b1b1b" in light and "#000000" not in light


def test_a_file_is_replaced_as_a_whole(tmp_path):
    picture = canvas.Picture(
        "attention/a", canvas.draw_tiles([np.eye(3)], 1), {"eye": np.eye(3)}
    )
    names = canvas.save(picture, tmp_path)
    assert names == [f"attention/a.{form}" for form in ("png", "svg", "npz")]
    old = {name: (tmp_path / name).read_bytes() for name in names}
    for i, name in enumerate(names):
        (tmp_path / f"old {i}").hardlink_to(tmp_path / name)
        (tmp_path / f"old {i}").write_bytes(b"other")
    canvas.save(picture, tmp_path)
    for i, name in enumerate(names):
        assert (tmp_path / f"old {i}").read_bytes() == b"other"
        assert len((tmp_path / name).read_bytes()) == len(old[name])
    assert {path.name for path in (tmp_path / "attention").iterdir()} == {
        "a.png",
        "a.svg",
        "a.npz",
    }


def test_images_of_one_name_have_distinct_stems():
    found = canvas.UniqueStems()
    stems = [found.stem(path) for path in ("x/a.png", "y/A.jpg", "a b?.gif", "-")]
    assert stems == ["a", "A_2", "a_b", "image"]
    assert found.stem("y/A.jpg") == "A_2"
