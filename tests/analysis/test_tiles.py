"""Tile sheets and heat maps."""

import numpy as np
import pytest

from vit_jax.analysis import charts


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
    assert charts.native_tile_width(image) * charts.DPI == pytest.approx(pixels)
    tile_width = charts.native_tile_width(image)
    figure = charts.draw_tiles([image], 1, title="t", tile_width=tile_width)
    (axes,) = figure.axes
    shown = axes.images[0].get_array().shape
    assert shown[1] == min(size[1], pixels)
    assert shown[0] == pytest.approx(size[0] * shown[1] / size[1], abs=0.5)
    assert axes.get_position().width * figure.get_size_inches()[0] * 200 >= shown[1] - 1


@pytest.mark.parametrize("shape", [(12, 12), (209, 209), (5, 11), (24, 3), (3, 24)])
def test_the_texts_of_a_heat_map_are_within_the_figure(shape):
    values = np.random.default_rng(1).random(shape)
    ticks = [([0, side - 1], ["1", str(side)]) for side in shape[::-1]]
    texts = {"title": "b", "x_label": "layer of a", "y_label": "layer of another"}
    figure = charts.draw_heatmap(
        values, **texts, colorbar_label="CKA", limits=(0, 1), ticks=ticks
    )
    width, height = figure.get_size_inches() * charts.DPI
    assert [axes.get_ylabel() for axes in figure.axes] == [texts["y_label"], "CKA"]
    for axes in figure.axes:
        box = axes.get_tightbbox()
        assert box.x0 >= 0 and box.y0 >= 0
        assert box.x1 <= width and box.y1 <= height
    heat, bar = (axes.get_window_extent().height for axes in figure.axes)
    assert bar > 0.5 * heat


def test_dark_mode_changes_paper_and_ink_only():
    figure = charts.draw_tiles(
        [np.eye(3)], 1, title="t", captions=["c"], row_labels=["r"]
    )
    light = charts.to_svg(figure)
    dark = charts.to_dark_svg(figure)
    assert "@media screen and (prefers-color-scheme:dark)" in dark
    assert '[style*="fill: #1b1b1b"]{fill:#e9e7e2!important}' in dark
    assert "fill: #1b1b1b" in light and "#000000" not in light
