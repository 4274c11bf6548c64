"""Images of five shapes in one batch, as sequences of patches with padding."""

import numpy as np

from vit_jax.models.patches import PatchSequences

# Rows and columns of patches. None has one column: PyTorch 2.13 on a CPU gives each row the
# first row's values when it resizes to a width of 1 with antialiasing.
GRIDS = ((2, 5), (4, 4), (7, 2), (3, 3), (1, 6))
LENGTH = 18  # Patches of a sequence, more than any image has.


def draw(side, channels=3, seed=1):
    """Returns sequences of random patches of `side` pixels, and zeros behind them."""
    rng = np.random.default_rng(seed)
    shape = (len(GRIDS), LENGTH, side, side, channels)
    patches = rng.normal(size=shape).astype(np.float32) * valid()[..., None, None, None]
    pixels = patches.reshape(len(GRIDS), LENGTH * side, side, channels)
    return PatchSequences(pixels, np.array(GRIDS, np.int32)[:, None])


def valid():
    """Returns which patches are of an image, (images, LENGTH)."""
    return np.arange(LENGTH) < np.prod(GRIDS, axis=1)[:, None]


def places():
    """Returns the row and the column of each patch, zeros where there is none."""
    found = np.zeros((len(GRIDS), LENGTH, 2), np.int64)
    for i, grid in enumerate(GRIDS):
        found[i, : np.prod(grid)] = np.indices(grid).reshape(2, -1).T
    return found
