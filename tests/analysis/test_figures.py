"""The figures: their contents are at the right place, and legible."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from vit_jax import models
from vit_jax.analysis import attention, charts
from vit_jax.analysis.figures import posemb
from vit_jax.analysis.figures.attention import Attention
from vit_jax.analysis.figures.writing import Batch
from vit_jax.analysis.loaded_model import LoadedModel
from vit_jax.data.preprocess import Preprocess
from vit_jax.models.intermediates import Layer

PREPROCESS = Preprocess((224, 224), (0.5,), (0.5,))


def attention_sheet(depth=1, **options):
    """Draws even attention on a black image of 224 pixels."""
    model = models.create("S/16", num_classes=5, depth=depth)
    loaded = LoadedModel("s", model, {}, PREPROCESS)
    figure = Attention(**options)
    figure.start(loaded)
    even = Layer(jnp.full((1, 6, 197, 197), 1 / 197), jnp.zeros((1, 197, 1)))
    for _ in range(depth):
        figure.update(even, range(1))
    black = np.zeros((1, 224, 224, 3), np.uint8)
    (picture,) = figure.draw_batch(Batch(["a.png"], ["a"], [], [black]))
    return picture


@pytest.mark.parametrize("patch", [(3, 10), (13, 13), (0, 0)])
def test_the_ring_is_on_the_query_patch(patch):
    figure = attention_sheet(query=patch).drawing
    rendered = np.array(Image.open(io.BytesIO(charts.to_png(figure))).convert("RGB"))
    H, W, _ = rendered.shape
    red, green, blue = np.moveaxis(rendered.astype(int), -1, 0)
    down, across = np.nonzero((red > 200) & (green < 120) & (blue < 120))
    (axes,) = (axes for axes in figure.axes if axes.get_title() == "image")
    box = axes.get_position()
    row, column = patch
    found = (across.mean() + 0.5) / W, 1 - (down.mean() + 0.5) / H
    wanted = (
        box.x0 + box.width * (column + 0.5) / 14,
        box.y1 - box.height * (row + 0.5) / 14,
    )
    # Half a patch is 0.8 / 28 inches.
    np.testing.assert_allclose(np.subtract(found, wanted) * [W, H] / 200, 0, atol=0.01)


@pytest.mark.slow
def test_chosen_or_some_layers_are_drawn_and_all_are_in_the_data():
    def drawn(depth, **options):
        picture = attention_sheet(depth, **options)
        assert picture.data["attention"].shape == (depth, 6, 197)
        return [text.get_text() for text in picture.drawing.texts][1:]

    assert drawn(3, layers=(2, 0)) == ["layer 3", "layer 1"]
    assert drawn(3) == ["layer 1", "layer 2", "layer 3"]
    of_many = drawn(24)
    assert len(of_many) == 12 and of_many[::11] == ["layer 1", "layer 24"]


@pytest.mark.parametrize(
    ("side", "count"),
    [(1, 1), (14, 14), (32, 32), (37, 37), (64, 22), (2000, 1)],
)
def test_of_a_large_grid_some_patches_are_drawn(side, count):
    rows = posemb.drawn_patches(side)
    assert len(rows) == count and rows[0] == 0 and rows[-1] < side


@pytest.mark.parametrize("side", [224, 512])
def test_every_cell_of_the_positions_has_two_pixels(side):
    model = models.create("B/16", num_classes=5, image_size=(side, side), width=24)
    grid = side // 16
    table = np.random.default_rng(1).standard_normal((1, 1 + grid**2, 24))
    params = {"Transformer": {"posembed_input": {"pos_embedding": table}}}
    positions = posemb.Posemb()
    positions.start(LoadedModel("s", model, params, PREPROCESS))
    (picture,) = positions.draw()
    figure = picture.drawing
    axes = figure.axes[0]
    rows, columns = axes.images[0].get_array().shape
    assert rows == columns == grid * (grid + 1) - 1
    width, height = figure.get_size_inches() * axes.get_position().size * 200
    assert width >= 2 * columns and height >= 2 * rows


def test_a_mosaic_has_each_grid_at_its_place():
    grids = np.arange(36, dtype=np.float32).reshape(2, 3, 2, 3)
    mosaic = posemb._mosaic(grids)
    assert mosaic.shape == (2 * 3 - 1, 3 * 4 - 1)
    np.testing.assert_array_equal(mosaic[3:5, 4:7], grids[1, 1])
    assert np.isnan(mosaic[2]).all() and np.isnan(mosaic[:, 3]).all()


def precisions(jaxpr):
    """Yields the precision of each product, also within inner functions."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.params["precision"]
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from precisions(value.jaxpr)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda a, b: attention.head_distances(a, b, 1), [(2, 3, 7, 7), (6, 6)]),
        (attention.rollout_step, [(2, 7, 7), (2, 3, 7, 7)]),
        (attention._propagate_relevance, [(2, 7), (2, 3, 7, 7), (2, 3, 7, 7)]),
        (attention.weighted_query, [(2, 3, 7, 7), (7,)]),
    ],
    ids=["distance", "rollout", "relevance", "query"],
)
def test_products_are_exact_on_accelerators_too(function, shapes):
    # By default their operands have 8 or 11 bits there.
    jaxpr = jax.make_jaxpr(function)(*map(jnp.ones, shapes)).jaxpr
    highest = jax.lax.Precision.HIGHEST
    assert list(precisions(jaxpr)) == [(highest, highest)]
