"""Operations on a whole batch, run inside the training step.

Every choice for an example is a function of the key and of the example's position in
the run, so that a run does not depend on how its batches are spread over devices.
Letters: B examples, H and W height and width, h and w after enlarging, C channels,
K classes.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, Num, UInt32

from vit_jax.data import host_ops
from vit_jax.data.colour import ColorJitter
from vit_jax.data.draws import uniform
from vit_jax.data.erasing import RandomErasing
from vit_jax.data.mixing import Cutmix, Mixup, MixupOrCutmix
from vit_jax.errors import UserError

Images = Num[Array, "B H W C"]
Labels = Float[Array, "B K"]
Given = Any  # What a user wrote in a config; `__post_init__` checks it.


@dataclasses.dataclass(frozen=True)
class Flip:
    """Mirrors left and right, with a chance of one half an example."""

    def __call__(self, images: Images, labels: Labels, index, key):
        heads = uniform(index, key, 1)[:, 0] < 0.5
        return jnp.where(heads[:, None, None, None], images[:, :, ::-1], images), labels


@dataclasses.dataclass(frozen=True)
class PadCrop:
    """Shifts by up to `pad` pixels each way: pads with black and crops back."""

    pad: Given = 4

    def __post_init__(self):
        if type(self.pad) is not int or self.pad < 0:
            raise ValueError(f"pad={self.pad!r} is not a whole number from 0 on")

    def __call__(self, images: Images, labels: Labels, index, key):
        _, H, W, _ = images.shape
        u = uniform(index, key, 2)
        shift = jnp.floor(u * (2 * self.pad + 1)).astype(jnp.int32) - self.pad
        rows = jnp.arange(H)[None, :] + shift[:, :1]
        columns = jnp.arange(W)[None, :] + shift[:, 1:]
        images = _take(images, rows[:, :, None], columns[:, None, :])
        return images, labels


@dataclasses.dataclass(frozen=True)
class Affine:
    """Moves, turns and scales about the centre, bilinear, black outside.

    Args:
      shift: largest shift each way, as a fraction of height and width.
      rotate: largest turn either way, in degrees.
      scale: smallest and largest factor; over 1 enlarges.
    """

    shift: Given = 0.0
    rotate: Given = 0.0
    scale: Given = (1.0, 1.0)

    def __post_init__(self):
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1]:
            raise ValueError(f"scale={self.scale} is not 0 < least <= most")
        if self.shift < 0 or self.rotate < 0:
            raise ValueError(f"shift={self.shift}, rotate={self.rotate} below 0")

    def __call__(self, images: Images, labels: Labels, index, key):
        _, H, W, _ = images.shape
        u = uniform(index, key, 4)
        angle = (2 * u[:, 0] - 1) * math.radians(self.rotate)
        scale = self.scale[0] + u[:, 1] * (self.scale[1] - self.scale[0])
        down = (2 * u[:, 2] - 1) * self.shift * H
        right = (2 * u[:, 3] - 1) * self.shift * W
        return warp(images, angle, scale, down, right), labels


@dataclasses.dataclass(frozen=True)
class Upsample:
    """Enlarges to exactly `size` pixels, bilinear with half-pixel centres.

    So a set of small images travels and is stored small. What comes from the loader
    has the size of the last crop or resize there, or of the set in memory.
    """

    size: Given = None

    def __post_init__(self):
        host_ops.check_size(self.size)

    def __call__(self, images: Images, labels: Labels, index, key):
        B, H, W, C = images.shape
        height, width = host_ops.pair(self.size)
        if H > height or W > width:
            raise UserError(
                f"data.ops: upsample to {height}x{width} of images that have "
                f"{H}x{W}: end the operations of the loader with resize or a crop"
            )
        images = images.astype(jnp.float32)
        return jax.image.resize(images, (B, height, width, C), "linear"), labels


def apply(
    ops: Sequence,
    images: Images,
    labels: Labels,
    index: UInt32[Array, " B"],
    key: Key[Array, ""],
) -> tuple[Float[Array, "B h w C"], Labels]:
    """Applies device operations in order.

    Args:
      ops: `parse_train(...).device`.
      images: values 0..255.
      labels: one-hot or soft.
      index: position of each example in the run, modulo 2**32. The choices repeat
        after 4.3e9 examples; the order of the records does not.
      key: of the run; the same at every step.

    Returns:
      Images, still 0..255 but float32 and enlarged if asked for, and labels.
    """
    for number, op in enumerate(ops):
        images, labels = op(images, labels, index, jax.random.fold_in(key, number))
    return images.astype(jnp.float32), labels


def normalize(
    images: Images, mean: Sequence[float], std: Sequence[float]
) -> Float[Array, "B H W C"]:
    """Returns (images / 255 - mean) / std.

    Args:
      images: values 0..255.
      mean: one, or one a channel, as a fraction of 255.
      std: the same.
    """
    # One product and one sum a pixel, with the constants worked out beforehand.
    mean, std = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    factor, offset = 1 / (255 * std), -mean / std
    shape = (1, 1, 1, -1)
    return images.astype(jnp.float32) * factor.reshape(shape) + offset.reshape(shape)


def warp(
    images: Images,
    angle: Float[Array, " B"],
    scale: Float[Array, " B"],
    down: Float[Array, " B"],
    right: Float[Array, " B"],
) -> Float[Array, "B H W C"]:
    """Turns and scales images about their centres, then shifts them; bilinear.

    Args:
      images: values of any range; black (0) outside.
      angle: radians, positive from the vertical axis (down) towards the right.
      scale: factor; over 1 enlarges.
      down: shift in pixels.
      right: shift in pixels.
    """
    _, H, W, _ = images.shape
    angle, scale, down, right = (a[:, None, None] for a in (angle, scale, down, right))
    y = (jnp.arange(H) - (H - 1) / 2)[None, :, None] - down
    x = (jnp.arange(W) - (W - 1) / 2)[None, None, :] - right
    # Where each pixel of the result comes from: the inverse of the motion.
    sine, cosine = jnp.sin(angle) / scale, jnp.cos(angle) / scale
    source_y = cosine * y + sine * x + (H - 1) / 2
    source_x = cosine * x - sine * y + (W - 1) / 2

    images = images.astype(jnp.float32)
    top, left = jnp.floor(source_y), jnp.floor(source_x)
    total = jnp.zeros_like(images)
    for row in (top, top + 1):
        for column in (left, left + 1):
            weight = (1 - abs(source_y - row)) * (1 - abs(source_x - column))
            corner = _take(images, row.astype(jnp.int32), column.astype(jnp.int32))
            total += weight[..., None] * corner
    return total


def _take(images: Images, rows, columns) -> Images:
    """Returns images[b, rows[b], columns[b]], black outside."""
    B, H, W, C = images.shape
    rows, columns = jnp.broadcast_arrays(rows, columns)
    inside = (rows >= 0) & (rows < H) & (columns >= 0) & (columns < W)
    flat = (rows.clip(0, H - 1) * W + columns.clip(0, W - 1)).reshape(B, -1, 1)
    taken = jnp.take_along_axis(images.reshape(B, H * W, C), flat, axis=1)
    taken = taken.reshape(*rows.shape, C)
    return jnp.where(inside[..., None], taken, jnp.zeros((), images.dtype))


DEVICE_OPS = {
    "flip": Flip,
    "pad_crop": PadCrop,
    "affine": Affine,
    "color_jitter": ColorJitter,
    "random_erasing": RandomErasing,
    "upsample": Upsample,
    "mixup": Mixup,
    "cutmix": Cutmix,
    "mixup_or_cutmix": MixupOrCutmix,
}
