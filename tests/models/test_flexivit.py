"""Patch kernels of other sides (FlexiViT), alone and in a network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import draw_params

from vit_jax import models
from vit_jax.models import flexivit
from vit_jax.models.flexivit import resize_patch_kernel
from vit_jax.models.patches import PatchSequences

TINY = {"num_classes": 3, "width": 12, "depth": 1, "num_heads": 3, "mlp_dim": 20}
SIDES = [(5, 8), (4, 12), (7, 7)]


def resize_matrix(old, new):
    """Bilinear, half-pixel centres, edges repeated: as np.interp does it on an axis."""
    at = (np.arange(new) + 0.5) * old / new - 0.5
    return np.stack([np.interp(at, np.arange(old), row) for row in np.eye(old)], axis=1)


def grow(patches, new):
    """Resizes patches (..., P, P, C)."""
    matrix = resize_matrix(patches.shape[-2], new)
    grown = np.einsum("ij,...jkc,lk->...ilc", matrix, patches, matrix)
    return grown.astype(patches.dtype)


@pytest.mark.parametrize(("old", "new"), SIDES)
def test_resized_kernel_sees_a_grown_patch_as_before(old, new):
    rng = np.random.default_rng(0)
    kernel, patch = rng.normal(size=(old, old, 3, 6)), rng.normal(size=(old, old, 3))
    np.testing.assert_allclose(
        np.einsum("yxc,yxcd->d", grow(patch, new), resize_patch_kernel(kernel, new)),
        np.einsum("yxc,yxcd->d", patch, kernel),
        atol=1e-9,
    )


def test_resized_kernel_is_least_squares_where_patches_shrink():
    old, new = 6, 4
    kernel = np.random.default_rng(0).normal(size=(old, old, 1, 2))
    matrix = resize_matrix(old, new)
    whole = np.kron(matrix, matrix)  # Resizes a patch flattened row by row.
    expected, *_ = np.linalg.lstsq(whole.T, kernel.reshape(old**2, 2), rcond=None)
    np.testing.assert_allclose(
        resize_patch_kernel(kernel, new).reshape(new**2, 2), expected, atol=1e-9
    )


@pytest.mark.parametrize(("old", "new"), [(4, 7), (8, 5)])
def test_a_traced_kernel_is_resized_as_one_of_numpy(old, new):
    kernel = np.random.default_rng(0).normal(size=(old, old, 3, 6)).astype("f")
    expected = resize_patch_kernel(kernel, new)
    resize = jax.jit(resize_patch_kernel, static_argnums=1)
    np.testing.assert_allclose(resize(jnp.asarray(kernel), new), expected, atol=1e-5)
    assert isinstance(expected, np.ndarray) and expected.dtype == np.float32


@pytest.mark.parity
@pytest.mark.parametrize("method", flexivit.METHODS)
@pytest.mark.parametrize(("old", "new"), [(32, 16), (16, 32), (16, 10), (8, 30)])
def test_kernels_are_those_of_timm(old, new, method):
    from import_timm import import_timm, torch

    import_timm()
    from timm.layers.patch_embed import resample_patch_embed

    kernel = np.random.default_rng(0).normal(size=(old, old, 3, 5)).astype("f")
    how = {"interpolation": "bilinear", "antialias": False}
    theirs = resample_patch_embed(
        torch.from_numpy(kernel.transpose(3, 2, 0, 1)),
        [new, new],
        **how if method == "bilinear_plain" else {},  # timm's defaults.
    )
    found = resize_patch_kernel(kernel, new, method)
    expected = theirs.numpy().transpose(2, 3, 1, 0)
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


def sequence_of(patches, grid):
    """Returns a sequence of one image, of its patches (N, S, S, C), and one of padding."""
    pixels = np.concatenate([*patches, np.full_like(patches[0], 9.0)])
    return PatchSequences(jnp.asarray(pixels)[None], jnp.array([[grid]]))


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"pool": "gap", "rope": "axial"}],
)
def test_a_network_sees_grown_patches_as_before(options):
    model = models.create("Ti/4", image_size=(8, 12), **TINY, **options)
    params = draw_params(model)
    patches = np.random.default_rng(0).normal(size=(6, 4, 4, 3)).astype("f")
    apply = jax.jit(model.apply)
    expected = apply(params, sequence_of(patches, (2, 3)))["logits"]
    for side in (4, 7, 8):
        found = apply(params, sequence_of(grow(patches, side), (2, 3)))
        np.testing.assert_allclose(found["logits"], expected, atol=2e-5)


@pytest.mark.parametrize("side", [pytest.param(3, marks=pytest.mark.slow), 8])
def test_a_network_is_that_of_a_resized_kernel_and_so_is_its_gradient(side):
    model = models.create("Ti/4", image_size=(8, 12), **TINY)
    params = draw_params(model)
    own = models.create(f"Ti/{side}", image_size=(2 * side, 3 * side), **TINY)
    patches = np.random.default_rng(0).normal(size=(6, side, side, 3)).astype("f")
    image = patches.reshape(2, 3, side, side, 3).swapaxes(1, 2)
    image = jnp.asarray(image.reshape(1, 2 * side, 3 * side, 3))

    @jax.jit
    def flexible(params):
        return model.apply(params, sequence_of(patches, (2, 3)))["logits"]

    @jax.jit
    def resized(params):
        kernel = resize_patch_kernel(params["embedding"]["kernel"], side)
        embedding = params["embedding"] | {"kernel": kernel}
        return own.apply(params | {"embedding": embedding}, image)["logits"]

    np.testing.assert_allclose(flexible(params), resized(params), atol=2e-5)
    gradients = [
        jax.jit(jax.grad(lambda params, f=f: (f(params) ** 2).sum()))(params)
        for f in (flexible, resized)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), *gradients)
    assert np.abs(gradients[0]["embedding"]["kernel"]).max() > 0.01
