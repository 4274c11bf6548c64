"""Sheets for notebooks: each tile is what the functions below them say, in its place."""

import jax
import numpy as np
import pytest

from vit_jax import models
from vit_jax.analysis import filters, overlay, positions, sheets
from vit_jax.errors import UserError

Y, X, PATCH = 3, 5, 4
MARGIN = 8  # Of the sheet, in pixels.


def drawn(**options):
    options = {"width": 12, "depth": 1, "heads": 3, "mlp_dim": 5} | options
    size = (PATCH * Y, PATCH * X)
    model = models.create("B/4", classes=7, image_size=size, **options)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(3)
    leaves = [rng.standard_normal(leaf.shape, np.float32) for leaf in leaves]
    return model, jax.tree.unflatten(tree, leaves)


def tile(sheet, number, columns, size, count):
    """Cuts a tile of a size in pixels out of a sheet with one line of text a row."""
    rows = -(-count // columns)
    height = (sheet.height - MARGIN) // rows
    row, column = divmod(number, columns)
    top, left = MARGIN + row * height, MARGIN + column * (size[1] + MARGIN)
    return np.array(sheet)[top : top + size[0], left : left + size[1]]


def test_tokens_are_laid_over_the_image_without_those_in_front():
    model, _ = drawn(distillation=True)
    assert model.extra == 2
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (PATCH * Y, PATCH * X, 3), np.uint8)
    tokens = rng.random((3, 2 + Y * X)).astype(np.float32)
    tokens[:, :2] = 1e6  # Would leave the patches dark.
    sheet = sheets.of_tokens(model, pixels, tokens, ["a", "b", "c"], columns=2)
    factor = 128 // (PATCH * X)
    size = factor * PATCH * Y, factor * PATCH * X
    for i in range(3):
        values = overlay.upsample(tokens[i, 2:], (Y, X), pixels.shape[:2])
        wanted = overlay.blend(pixels, overlay.scaled(values))
        wanted = wanted.repeat(factor, 0).repeat(factor, 1)
        np.testing.assert_array_equal(tile(sheet, i, 2, size, 3), wanted)


def test_filters_are_drawn_as_their_components():
    _, params = drawn()
    sheet = sheets.of_filters(params, count=5, columns=3)
    components, _ = filters.components(filters.kernels(params), 5)
    wanted = np.round(255 * filters.tiles(components)).astype(np.uint8)
    factor = 128 // PATCH
    for i in range(5):
        found = tile(sheet, i, 3, (128, 128), 5)
        np.testing.assert_array_equal(
            found, wanted[i].repeat(factor, 0).repeat(factor, 1)
        )


def test_positions_are_those_of_two_corners_and_of_the_middle():
    model, params = drawn()
    sheet = sheets.of_positions(model, params, columns=3)
    alike = positions.similarity(model, params)
    factor = 128 // X
    for i, place in enumerate([(0, 0), (1, 2), (2, 4)]):
        found = tile(sheet, i, 3, (factor * Y, factor * X), 3)[..., 0]
        wanted = np.round(255 * overlay.scaled(alike[place])).astype(np.uint8)
        np.testing.assert_array_equal(found, wanted.repeat(factor, 0).repeat(factor, 1))
        # A patch is most like itself.
        assert np.unravel_index(found.argmax(), found.shape) == tuple(
            index * factor for index in place
        )


def test_without_position_embeddings_there_is_no_sheet():
    model, params = drawn(posemb="none")
    with pytest.raises(UserError, match="no position embeddings"):
        sheets.of_positions(model, params, columns=3)
