"""Figures: that what they show is where it belongs, and legible."""

import io

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from vit_jax import models
from vit_jax.analysis import charts
from vit_jax.analysis.batches import Batch
from vit_jax.analysis.figures import (
    canvas,
    choices,
    of_images,
    of_weights,
    tiling,
)
from vit_jax.analysis.subject import Subject
from vit_jax.errors import UserError
from vit_jax.models.inside import Layer
from vit_jax.weights.pretrained import Preprocess

PREPROCESS = Preprocess((224, 224), (0.5,), (0.5,))


def attention_sheet(choice, depth=1):
    """Draws even attention on a black image of 224 pixels."""
    model = models.create("S/16", classes=5, depth=depth)
    subject = Subject("s", model, {}, PREPROCESS)
    query = choices.Query(subject, choice.query)
    part = of_images.Attention(subject, query, choices.Names(), choice)
    even = Layer(jnp.full((1, 6, 197, 197), 1 / 197), jnp.zeros((1, 197, 1)))
    for _ in range(depth):
        part.see(even, range(1))
    black = np.zeros((1, 224, 224, 3), np.uint8)
    (picture,) = part.pictures(Batch(["a.png"], [], [black]))
    return picture


@pytest.mark.parametrize("place", [(3, 10), (13, 13), (0, 0)])
def test_the_ring_is_on_the_patch_that_asks(place):
    drawn = attention_sheet(choices.Choice(query=place)).figure
    rendered = np.array(Image.open(io.BytesIO(charts.to_png(drawn))).convert("RGB"))
    H, W, _ = rendered.shape
    red, green, blue = np.moveaxis(rendered.astype(int), -1, 0)
    down, across = np.nonzero((red > 200) & (green < 120) & (blue < 120))
    (axes,) = (axes for axes in drawn.axes if axes.get_title() == "image")
    box = axes.get_position()
    row, column = place
    found = (across.mean() + 0.5) / W, 1 - (down.mean() + 0.5) / H
    wanted = (
        box.x0 + box.width * (column + 0.5) / 14,
        box.y1 - box.height * (row + 0.5) / 14,
    )
    # Half a patch is 0.8 / 28 inches.
    np.testing.assert_allclose(np.subtract(found, wanted) * [W, H] / 200, 0, atol=0.01)


def test_chosen_layers_are_drawn_and_all_are_in_the_data():
    picture = attention_sheet(choices.Choice(layers=(2, 0)), depth=3)
    texts = [text.get_text() for text in picture.figure.texts]
    assert texts[1:] == ["layer 3", "layer 1"]
    assert picture.data["attention"].shape == (3, 6, 197)
    picture = attention_sheet(choices.Choice(), depth=3)
    texts = [text.get_text() for text in picture.figure.texts]
    assert texts[1:] == ["layer 1", "layer 2", "layer 3"]
    with pytest.raises(UserError, match="--layers: layer 3 is not one of the 3 of s"):
        attention_sheet(choices.Choice(layers=(1, 3)), depth=3)


def test_of_many_layers_some_are_drawn():
    picture = attention_sheet(choices.Choice(), depth=24)
    texts = [text.get_text() for text in picture.figure.texts][1:]
    assert len(texts) == 12 and texts[0] == "layer 1" and texts[-1] == "layer 24"


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
    assert tiling.own_side(image) * charts.DPI == pytest.approx(pixels)
    drawn = tiling.sheet([image], 1, side=tiling.own_side(image))
    (axes,) = drawn.axes
    shown = axes.images[0].get_array().shape
    assert shown[1] == min(size[1], pixels)
    assert shown[0] == pytest.approx(size[0] * shown[1] / size[1], abs=0.5)
    assert axes.get_position().width * drawn.get_size_inches()[0] * 200 >= shown[1] - 1


def test_grids_stand_where_their_patches_are():
    alike = np.arange(36, dtype=np.float32).reshape(2, 3, 2, 3)
    mosaic = of_weights.mosaic(alike)
    assert mosaic.shape == (2 * 3 - 1, 3 * 4 - 1)
    np.testing.assert_array_equal(mosaic[3:5, 4:7], alike[1, 1])
    assert np.isnan(mosaic[2]).all() and np.isnan(mosaic[:, 3]).all()


@pytest.mark.parametrize(
    ("side", "drawn"),
    [(1, 1), (14, 14), (32, 32), (37, 37), (64, 22), (2000, 1)],
)
def test_of_a_large_grid_some_patches_are_drawn(side, drawn):
    rows = of_weights.drawn_of(side)
    assert len(rows) == drawn and rows[0] == 0 and rows[-1] < side


@pytest.mark.parametrize("side", [224, 512])
def test_every_cell_of_the_positions_has_two_pixels(side):
    model = models.create("B/16", classes=5, image_size=(side, side), width=24)
    grid = side // 16
    table = np.random.default_rng(1).standard_normal((1, 1 + grid**2, 24))
    params = {"Transformer": {"posembed_input": {"pos_embedding": table}}}
    drawn = of_weights.positions_picture(Subject("s", model, params, PREPROCESS)).figure
    axes = drawn.axes[0]
    rows, columns = axes.images[0].get_array().shape
    assert rows == columns == grid * (grid + 1) - 1
    width, height = drawn.get_size_inches() * axes.get_position().size * 200
    assert width >= 2 * columns and height >= 2 * rows


@pytest.mark.parametrize("shape", [(12, 12), (209, 209), (5, 11), (24, 3), (3, 24)])
def test_a_heat_map_has_its_texts_on_the_paper(shape):
    values = np.random.default_rng(1).random(shape)
    texts = {"title": "b", "x_label": "layer of a", "y_label": "layer of another"}
    drawn = tiling.heat(values, **texts, label="likeness", limits=(0, 1))
    width, height = drawn.get_size_inches() * charts.DPI
    assert [axes.get_ylabel() for axes in drawn.axes] == [texts["y_label"], "likeness"]
    for axes in drawn.axes:
        box = axes.get_tightbbox()
        assert box.x0 >= 0 and box.y0 >= 0
        assert box.x1 <= width and box.y1 <= height
    heat, bar = (axes.get_window_extent().height for axes in drawn.axes)
    assert bar > 0.5 * heat


def test_dark_screens_change_paper_and_ink_alone():
    drawn = tiling.sheet([np.eye(3)], 1, title="t", captions=["c"], rows=["r"])
    light = charts.to_svg(drawn)
    dark = canvas.for_dark(light)
    assert "@media screen and (prefers-color-scheme:dark)" in dark
    assert '[style*="fill: #1b1b1b"]{fill:#e9e7e2!important}' in dark
    assert "fill: #1b1b1b" in light and "#000000" not in light


def test_a_file_is_replaced_as_a_whole(tmp_path):
    picture = attention_sheet(choices.Choice())
    names = canvas.save(picture, tmp_path)
    assert names == [f"attention/a.{form}" for form in ("png", "svg", "npz")]
    old = {name: (tmp_path / name).read_bytes() for name in names}
    for i, name in enumerate(names):
        (tmp_path / f"old {i}").hardlink_to(tmp_path / name)
        (tmp_path / f"old {i}").write_bytes(b"of another model")
    canvas.save(picture, tmp_path)
    for i, name in enumerate(names):
        assert (tmp_path / f"old {i}").read_bytes() == b"of another model"
        assert len((tmp_path / name).read_bytes()) == len(old[name])
    assert {path.name for path in (tmp_path / "attention").iterdir()} == {
        "a.png",
        "a.svg",
        "a.npz",
    }


def test_images_of_one_name_have_files_of_their_own():
    found = choices.Names()
    stems = [found.stem(path) for path in ("x/a.png", "y/A.jpg", "a b?.gif", "-")]
    assert stems == ["a", "A_2", "a_b", "image"]
    assert found.stem("y/A.jpg") == "A_2"
