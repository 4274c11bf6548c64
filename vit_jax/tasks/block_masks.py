"""Masks of blocks of patches, as in BEiT (arXiv:2106.08254), iBOT and DINOv2.

Rectangles are added until a given number of patches is hidden; sizes, shapes and ratios
are those of facebookresearch/dinov2. Rectangles are drawn on the device, so the number
of tries is bounded. Letters: C crops, T tries, Y by X patches, N patches.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# The original needed more tries for 2 of 2,000 masks of 37x37 patches, and for none of
# 2,000 masks of 16x16 patches.
TRIES = 32
_SMALLEST = 4  # Patches in the smallest rectangle.
_LARGEST_ASPECT = 1 / 0.3
_FAILURES = 10  # A mask is finished when this many rectangles in a row do not fit.


def upper_counts(
    num_crops: int, share: float, ratio: tuple[float, float], num_patches: int
) -> np.ndarray:
    """Returns the largest number of hidden patches of each masked crop, ascending.

    Args:
      num_crops: number of crops, masked or not.
      share: fraction of the crops that are masked.
      ratio: smallest and largest fraction of the patches; the masked crops divide the
        range into equal steps.
      num_patches: number of patches per crop, N.
    """
    bounds = np.linspace(*ratio, int(num_crops * share) + 1)
    return np.floor(num_patches * bounds[1:] + 1e-6).astype(int)


def num_draws(num_patches: int, exact: bool) -> int:
    """Returns how many random numbers the mask of a crop needs.

    Args:
      num_patches: number of patches per crop, N.
      exact: whether `complete` hides single patches too, as in DINOv3.
    """
    single = num_patches if exact else 0
    return 2 + 4 * TRIES + single


def draw_counts(
    noise: Float[Array, "groups C 2"],
    share: float,
    ratio: tuple[float, float],
    num_patches: int,
    exact: bool,
) -> Int[Array, "groups C"]:
    """Draws the number of patches to hide in each crop, see `upper_counts`.

    Args:
      noise: uniform numbers in [0, 1): the first orders the crops of a group, which
        assigns the steps of `ratio`; the second places a crop's ratio in its step.
      share, ratio, num_patches: arguments of `upper_counts`, for each group.
      exact: whether each crop has the largest ratio of its step, as in DINOv3.
    """
    num_masked = int(noise.shape[1] * share)
    rank = jnp.argsort(jnp.argsort(noise[..., 0], axis=1), axis=1)
    if exact:
        most = upper_counts(noise.shape[1], share, ratio, num_patches)
        most = np.append(most, 0)
        return jnp.asarray(most, jnp.int32)[jnp.minimum(rank, num_masked)]
    low, high = ratio
    part = low + (high - low) * (rank + noise[..., 1]) / max(1, num_masked)
    counts = jnp.floor(num_patches * part).astype(jnp.int32)
    return jnp.where(rank < num_masked, counts, 0)


def draw_masks(
    noise: Float[Array, "C T 4"], counts: Int[Array, " C"], grid: tuple[int, int]
) -> Bool[Array, "C N"]:
    """Draws masks of at most `counts` patches each; few have less.

    Args:
      noise: uniform numbers in [0, 1): area, shape, row and column of each rectangle.
      counts: number of patches to hide.
      grid: Y and X.
    """
    sides = np.asarray(grid)[None]
    rows, columns = np.indices((1, *grid))[1:]
    largest = math.prod(grid) // 2

    def try_one(state, noise):
        mask, count, failures = state
        most = jnp.minimum(counts - count, largest)
        area = _SMALLEST + (most - _SMALLEST) * noise[:, 0]
        stretch = jnp.exp(math.log(_LARGEST_ASPECT) * (noise[:, 1] - 0.5))
        size = jnp.stack([jnp.sqrt(area) * stretch, jnp.sqrt(area) / stretch], axis=1)
        size = jnp.round(size).astype(jnp.int32)
        start = jnp.floor(noise[:, 2:] * (sides - size + 1)).astype(jnp.int32)
        end = start + size
        inside = True
        for i, at in enumerate((rows, columns)):
            first, last = (edge[:, i, None, None] for edge in (start, end))
            inside &= (at >= first) & (at < last)
        new = inside & ~mask
        added = new.sum((1, 2))
        good = (size < sides).all(1) & (added > 0) & (added <= most)
        good &= (failures < _FAILURES) & (count < counts)
        mask |= new & good[:, None, None]
        return (mask, count + added * good, jnp.where(good, 0, failures + 1)), None

    zeros = jnp.zeros_like(counts)
    start = jnp.zeros((len(counts), *grid), bool), zeros, zeros
    (mask, _, _), _ = jax.lax.scan(try_one, start, noise.swapaxes(0, 1))
    return mask.reshape(len(counts), -1)


def complete(
    mask: Bool[Array, "C N"], counts: Int[Array, " C"], noise: Float[Array, "C N"]
) -> Bool[Array, "C N"]:
    """Hides random further patches until `counts` are hidden, as in DINOv3.

    Args:
      mask: output of `draw_masks`.
      counts: number of patches to hide.
      noise: uniform numbers in [0, 1), one per patch.
    """
    order = jnp.where(mask, -1.0, noise)
    return jnp.argsort(jnp.argsort(order, axis=1), axis=1) < counts[:, None]
