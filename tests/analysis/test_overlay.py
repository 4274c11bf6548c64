"""Overlays and contact sheets, against interpolation and preprocessing written out."""

import tracemalloc

import jax
import numpy as np
import pytest
from helpers import draw_params
from PIL import Image

from vit_jax import models
from vit_jax.analysis import embeddings, overlay
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.weights.network_images import prepare_image

# Of contact sheets: patches down and across, and pixels.
Y, X, PATCH_SIZE, MARGIN = 3, 5, 4, 8


def bilinear(values, row, column):
    """Interpolates between the centres of cells, and repeats the edges."""
    (Y, X), total = values.shape, 0.0
    row, column = (
        min(max(place - 0.5, 0), side - 1) for place, side in ((row, Y), (column, X))
    )
    for y in range(Y):
        for x in range(X):
            near = max(0, 1 - abs(row - y)) * max(0, 1 - abs(column - x))
            total += near * values[y, x]
    return total


@pytest.mark.parametrize("size", [(12, 20), (13, 23), (3, 5)])
def test_values_are_interpolated_between_the_centres_of_patches(size):
    values = np.random.default_rng(1).random((3, 5)).astype(np.float32)
    found = overlay.upsample(values.ravel(), (3, 5), size)
    wanted = [
        [
            bilinear(values, (y + 0.5) * 3 / size[0], (x + 0.5) * 5 / size[1])
            for x in range(size[1])
        ]
        for y in range(size[0])
    ]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_rescaled_values_are_from_0_to_1_and_equal_ones_0():
    np.testing.assert_allclose(overlay.rescale(np.array([3, 5, 4.0])), [0, 1, 0.5])
    np.testing.assert_array_equal(overlay.rescale(np.full(3, 0.2)), 0)
    with pytest.raises(UserError, match="the overlay is not finite: the checkpoint"):
        overlay.rescale(np.array([1.0, np.nan, 2.0]))


def test_large_values_are_bright_colours_and_small_ones_the_dimmed_image():
    image = np.full((2, 2, 3), 100, np.uint8)
    values = np.array([[0, 1], [0.5, np.nan]], np.float32)
    out = overlay.blend(image, values).astype(int)
    np.testing.assert_array_equal(out[0, 0], [75, 75, 75])
    assert out[0, 1].sum() > out[1, 0].sum() > out[0, 0].sum() > out[1, 1].sum()
    assert np.ptp(out[0, 1]) > 50
    np.testing.assert_array_equal(out[1, 1], [35, 35, 35])
    grey = overlay.blend(image[..., :1], values)
    np.testing.assert_array_equal(grey, out)


def test_a_large_image_is_blended_like_its_parts():
    rng = np.random.default_rng(1)
    image = rng.integers(0, 256, (601, 3, 3), dtype=np.uint8)
    values = rng.random((601, 3)).astype(np.float32)
    values[250:300, 1] = np.nan
    whole = overlay.blend(image, values)
    for row in (0, 255, 256, 511, 512, 600):
        part = overlay.blend(image[row : row + 1], values[row : row + 1])
        np.testing.assert_array_equal(whole[row : row + 1], part)


def test_blending_a_large_image_takes_little_memory():
    image = np.zeros((2000, 1000, 3), np.uint8)
    values = np.zeros((2000, 1000), np.float32)
    tracemalloc.start()
    overlay.blend(image, values)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * image.nbytes


@pytest.mark.parametrize("size", [(90, 140), (141, 83), (64, 64)])
@pytest.mark.parametrize(
    "preprocess",
    [
        Preprocess((32, 32), crop_fraction=0.9),
        Preprocess((32, 48), crop_fraction=0.8),
        Preprocess((32, 32)),
        Preprocess((32, 48), squash=True),
    ],
)
def test_the_crop_region_is_what_the_model_sees(size, preprocess):
    top, left, height, width = overlay.crop_region(size, preprocess)
    # The colour of each pixel encodes its position.
    image = np.zeros((*size, 3), np.uint8)
    image[..., 0] = np.linspace(0, 255, size[0])[:, None]
    image[..., 1] = np.linspace(0, 255, size[1])
    seen = prepare_image(image, preprocess)
    cut = image[top : top + height, left : left + width]
    again = np.array(
        Image.fromarray(cut).resize(
            preprocess.image_size[::-1], Image.Resampling.BILINEAR
        )
    )
    np.testing.assert_allclose(again.astype(int), seen.astype(int), atol=5)
    out = overlay.overlay_patches(image, np.arange(4.0), (2, 2), preprocess)
    assert out.shape == image.shape


def test_what_was_cropped_away_stays_dark():
    image = np.full((40, 80, 3), 200, np.uint8)
    out = overlay.overlay_patches(
        image, np.array([0.0, 1.0]), (1, 2), Preprocess((32, 32))
    )
    assert (out[:, :19] == 70).all() and (out[:, 61:] == 70).all()
    assert (out[:, 20:25] == 150).all()
    assert out[20, 58, 0] > 220


def random_model(**options):
    options = {"width": 12, "depth": 1, "num_heads": 3, "mlp_dim": 5} | options
    size = (PATCH_SIZE * Y, PATCH_SIZE * X)
    model = models.create("B/4", num_classes=7, image_size=size, **options)
    return model, jax.tree.map(np.array, draw_params(model))


def tile(sheet, number, columns, size, count):
    """Cuts a tile of a size in pixels out of a sheet with one line of text a row."""
    rows = -(-count // columns)
    height = (sheet.height - MARGIN) // rows
    row, column = divmod(number, columns)
    top, left = MARGIN + row * height, MARGIN + column * (size[1] + MARGIN)
    return np.array(sheet)[top : top + size[0], left : left + size[1]]


def test_token_sheets_leave_prefix_tokens_out():
    model, _ = random_model(distillation=True)
    assert model.num_prefix_tokens == 2
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (PATCH_SIZE * Y, PATCH_SIZE * X, 3), np.uint8)
    tokens = rng.random((3, 2 + Y * X)).astype(np.float32)
    tokens[:, :2] = 1e6  # Prefix tokens, which would leave the patches dark.
    sheet = overlay.token_sheet(model, pixels, tokens, ["a", "b", "c"], columns=2)
    factor = 128 // (PATCH_SIZE * X)
    size = factor * PATCH_SIZE * Y, factor * PATCH_SIZE * X
    for i in range(3):
        values = overlay.upsample(tokens[i, 2:], (Y, X), pixels.shape[:2])
        wanted = overlay.blend(pixels, overlay.rescale(values))
        wanted = wanted.repeat(factor, 0).repeat(factor, 1)
        np.testing.assert_array_equal(tile(sheet, i, 2, size, 3), wanted)


def test_filter_sheets_show_the_components():
    _, params = random_model()
    sheet = overlay.filter_sheet(params, num_components=5, columns=3)
    components, _ = embeddings.principal_components(embeddings.first_kernel(params), 5)
    wanted = np.round(255 * embeddings.components_to_intensities(components)).astype(
        np.uint8
    )
    factor = 128 // PATCH_SIZE
    for i in range(5):
        found = tile(sheet, i, 3, (128, 128), 5)
        np.testing.assert_array_equal(
            found, wanted[i].repeat(factor, 0).repeat(factor, 1)
        )


def test_position_sheets_show_two_corners_and_the_centre():
    model, params = random_model()
    sheet = overlay.position_sheet(model, params, columns=3)
    similarity = embeddings.position_similarity(model, params)
    factor = 128 // X
    for i, place in enumerate([(0, 0), (1, 2), (2, 4)]):
        found = tile(sheet, i, 3, (factor * Y, factor * X), 3)[..., 0]
        wanted = np.round(255 * overlay.rescale(similarity[place])).astype(np.uint8)
        np.testing.assert_array_equal(found, wanted.repeat(factor, 0).repeat(factor, 1))
        # A patch is most similar to itself.
        assert np.unravel_index(found.argmax(), found.shape) == tuple(
            index * factor for index in place
        )
