"""Transforms of a whole batch, run inside the training step.

Every choice for an example is a function of the key and of the example's position in
the run, so that a run does not depend on how its batches are spread over devices.
`DEVICE_TRANSFORMS` lists the modules of the transforms. Letters: B examples, H and W
height and width, h and w height and width after resizing, C channels, K classes.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int16, Key, Num, UInt32

from vit_jax.data.transforms.base import Given

Images = Num[Array, "B H W C"]
PerImage = Float[Array, " B"]
Labels = Float[Array, "B K"]


_applied = contextvars.ContextVar("applied", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list]:
    """Yields a list to which `apply` appends the transforms that it applies."""
    applied = []
    token = _applied.set(applied)
    try:
        yield applied
    finally:
        _applied.reset(token)


def apart(ops: Sequence, copies: int) -> tuple:
    """Returns transforms for batches with `copies` successive copies of each image."""
    return tuple(op.apart(copies) for op in ops)


def apply(
    ops: Sequence,
    images: Images,
    labels: Labels,
    index: UInt32[Array, " B"],
    key: Key[Array, ""],
) -> tuple[Float[Array, "B h w C"], Labels]:
    """Applies device transforms in order.

    Args:
      ops: `parse_train(...).device`.
      images: images with values 0..255, or of uint16.
      labels: labels, one-hot or soft.
      index: position of each example in the run, modulo 2**32. Random choices repeat
        after 4.3e9 examples; the order of the records does not.
      key: random key, equal in all steps.

    Returns:
      Images, float32 from 0 to 255 and possibly larger, and labels.
    """
    images = _levels(images)
    for number, op in enumerate(ops):
        images, labels = op(images, labels, index, jax.random.fold_in(key, number))
    if (applied := _applied.get()) is not None:
        applied.extend(ops)
    return images.astype(jnp.float32), labels


def apply_to_maps(
    ops: Sequence,
    maps: Int16[Array, "B H W"],
    index: UInt32[Array, " B"],
    key: Key[Array, ""],
) -> Int16[Array, "B h w"]:
    """Moves the pixels of label maps as `apply` moves those of their images.

    Transforms that change only colours are left out. Class numbers are not mixed: where
    `apply` interpolates between pixels, the nearest one is used.

    Args:
      ops, index, key: arguments of `apply` for the images.
      maps: class numbers, or IGNORED, -1, for pixels without a class. Pixels from
        outside of the image become IGNORED.
    """
    maps = (maps + 1)[..., None]  # Then black, 0, means no class.
    labels = jnp.zeros((len(index), 1))
    for number, op in enumerate(ops):
        if op.moves_pixels:
            maps, _ = op(maps, labels, index, jax.random.fold_in(key, number))
    return maps[..., 0] - 1


def _levels(
    images: Num[Array | np.ndarray, "B H W C"],
) -> Num[Array | np.ndarray, "B H W C"]:
    """Converts images of 16 bits to floats from 0 to 255."""
    if images.dtype != jnp.uint16:
        return images
    return images.astype(jnp.float32) * np.float32(1 / 257)


def normalize(
    images: Num[Array | np.ndarray, "B H W C"],
    mean: Sequence[float],
    std: Sequence[float],
) -> Float[Array | np.ndarray, "B H W C"]:
    """Returns (images / 255 - mean) / std, with one mean and std, or one per channel.

    Images of uint16 are divided by 65,535. NumPy arrays stay NumPy arrays.
    """
    images = _levels(images)
    # One product and one sum per pixel; the constants are computed beforehand.
    mean, std = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    factor, offset = 1 / (255 * std), -mean / std
    shape = (1, 1, 1, -1)
    return images.astype(jnp.float32) * factor.reshape(shape) + offset.reshape(shape)


def example_keys(index: UInt32[Array, " B"], key: Key[Array, ""]) -> Key[Array, " B"]:
    """Returns a separate key per example, which depends on its position in the run."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(index)


def example_uniform(
    index: UInt32[Array, " B"], key: Key[Array, ""], count: int
) -> Float[Array, "B {count}"]:
    """Draws `count` numbers in [0, 1) per example, from the example's key."""
    return jax.vmap(lambda k: jax.random.uniform(k, (count,)))(example_keys(index, key))


def where_drawn(
    p: Given,
    changed: Num[Array, "B H W C"],
    images: Images,
    index: UInt32[Array, " B"],
    key: Key[Array, ""],
) -> Num[Array, "B H W C"]:
    """Returns the changed image of each example with probability p, else the image."""
    if p == 1:
        return changed
    drawn = example_uniform(index, key, 1)[:, 0] < p
    return jnp.where(drawn[:, None, None, None], changed, images)
