import pathlib

import numpy as np
import pytest

from vit_jax.errors import UserError
from vit_jax.weights import resample

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("side", [24, 7])
def test_position_embeddings_resize_as_in_the_original_code(side):
    case = np.load(GOLDEN / "google_posemb_interp.npz")
    resized = resample.positions(case["posemb_14"], (14, 14), (side, side), tokens=1)
    np.testing.assert_allclose(resized, case[f"posemb_{side}"], atol=1e-6)
    assert resized.dtype == np.float32


@pytest.mark.parametrize("grid", [(3, 4), (9, 11), (8, 2), (14, 3)])
def test_bicubic_resize_is_that_of_pytorch(grid):
    case = np.load(GOLDEN / "torch_bicubic.npz")
    resized = resample.positions(
        case["posemb_5x7"], (5, 7), grid, tokens=2, method="bicubic"
    )
    expected = case[f"posemb_{grid[0]}x{grid[1]}"]
    np.testing.assert_allclose(resized, expected, atol=1e-5)


def test_resize_is_exact_on_a_plane_over_a_non_square_grid():
    def plane(rows, columns):
        y, x = np.meshgrid(
            np.linspace(0, 1, rows), np.linspace(0, 1, columns), indexing="ij"
        )
        return np.stack([y, x, 2 * y - 3 * x], axis=-1).reshape(1, -1, 3)

    resized = resample.positions(plane(3, 5), (3, 5), (7, 4), tokens=0)
    np.testing.assert_allclose(resized, plane(7, 4), atol=1e-12)


@pytest.mark.parametrize("method", resample.MATRICES)
def test_resize_to_the_same_grid_changes_nothing(method):
    embedding = np.random.default_rng(0).normal(size=(1, 2 + 15, 6))
    same = resample.positions(embedding, (3, 5), (3, 5), tokens=2, method=method)
    np.testing.assert_allclose(same, embedding, atol=1e-12)


@pytest.mark.parametrize("method", resample.MATRICES)
def test_tables_of_rows_and_columns_resize_like_the_grid_of_their_sums(method):
    rng = np.random.default_rng(0)
    rows, columns = rng.normal(size=(3, 6)), rng.normal(size=(5, 6))
    whole = (rows[:, None] + columns).reshape(1, 15, 6)
    resized = resample.positions(whole, (3, 5), (7, 4), tokens=0, method=method)
    rows, columns = (
        resample.table(t, n, method=method) for t, n in ((rows, 7), (columns, 4))
    )
    np.testing.assert_allclose(
        (rows[:, None] + columns).reshape(1, 28, 6), resized, atol=1e-12
    )


def test_rows_that_do_not_fit_the_grid_are_refused():
    with pytest.raises(UserError, match="has 10 rows, but 1 extra tokens and a grid"):
        resample.positions(np.ones((1, 10, 2)), (4, 4), (2, 2), tokens=1)


@pytest.mark.parametrize(("old", "new"), [(5, 8), (4, 12), (7, 7)])
def test_resized_kernel_sees_a_grown_patch_as_before(old, new):
    rng = np.random.default_rng(0)
    kernel, patch = rng.normal(size=(old, old, 3, 6)), rng.normal(size=(old, old, 3))
    # Bilinear, half-pixel centres, edges repeated: as np.interp does it on an axis.
    at = (np.arange(new) + 0.5) * old / new - 0.5
    grown = patch
    for axis in (0, 1):
        grown = np.apply_along_axis(
            lambda line: np.interp(at, np.arange(old), line), axis, grown
        )
    np.testing.assert_allclose(
        np.einsum("yxc,yxcd->d", grown, resample.patch_kernel(kernel, new)),
        np.einsum("yxc,yxcd->d", patch, kernel),
        atol=1e-9,
    )


def test_resized_kernel_is_least_squares_where_patches_shrink():
    old, new = 6, 4
    kernel = np.random.default_rng(0).normal(size=(old, old, 1, 2))
    at = (np.arange(new) + 0.5) * old / new - 0.5
    matrix = np.stack([np.interp(at, np.arange(old), row) for row in np.eye(old)], 1)
    whole = np.kron(matrix, matrix)  # Resizes a patch flattened row by row.
    expected, *_ = np.linalg.lstsq(whole.T, kernel.reshape(old**2, 2), rcond=None)
    np.testing.assert_allclose(
        resample.patch_kernel(kernel, new).reshape(new**2, 2), expected, atol=1e-9
    )


def test_kernels_of_grey_and_rgb_images_agree_on_grey_ones():
    rng = np.random.default_rng(0)
    grey = rng.normal(size=(4, 4, 1)).astype(np.float32)
    rgb = np.repeat(grey, 3, axis=2)

    def embed(image, kernel):
        return np.einsum("yxc,yxcd->d", image, kernel)

    of_rgb = rng.normal(size=(4, 4, 3, 5)).astype(np.float32)
    of_grey = resample.input_channels(of_rgb, 1)
    assert of_grey.shape == (4, 4, 1, 5)
    np.testing.assert_allclose(embed(grey, of_grey), embed(rgb, of_rgb), atol=1e-5)
    back = resample.input_channels(of_grey, 3)
    assert back.dtype == np.float32
    np.testing.assert_allclose(embed(rgb, back), embed(grey, of_grey), atol=1e-5)


def test_other_channels_are_refused():
    with pytest.raises(UserError, match="images of 4 channels and the model for 3"):
        resample.input_channels(np.ones((2, 2, 4, 3)), 3)
