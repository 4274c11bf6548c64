"""Transforms that move the pixels of a whole batch, inside the training step.

Label maps, int16, are moved like images, but class numbers are not mixed: the nearest
pixel is used instead of interpolation. Letters: B examples, H and W height and width, C
channels.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from vit_jax.config.fields import key as field
from vit_jax.data.transforms.base import (
    DeviceTransform,
    Given,
    check_range,
    pair,
    to_size,
)
from vit_jax.data.transforms.device import Images, Labels, PerImage, example_uniform
from vit_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Flip(DeviceTransform):
    """Flips left and right with probability 0.5 per example."""

    moves_pixels = True

    def __call__(self, images: Images, labels: Labels, index, key):
        heads = example_uniform(index, key, 1)[:, 0] < 0.5
        return jnp.where(heads[:, None, None, None], images[:, :, ::-1], images), labels


@dataclasses.dataclass(frozen=True)
class PadCrop(DeviceTransform):
    """Shifts by up to `pad` pixels in each direction: pads with black and crops."""

    moves_pixels = True

    pad: Given = field(4, "Largest shift, in pixels.")

    def __call__(self, images: Images, labels: Labels, index, key):
        _, H, W, _ = images.shape
        u = example_uniform(index, key, 2)
        shift = jnp.floor(u * (2 * self.pad + 1)).astype(jnp.int32) - self.pad
        rows = jnp.arange(H)[None, :] + shift[:, :1]
        columns = jnp.arange(W)[None, :] + shift[:, 1:]
        images = _take(images, rows[:, :, None], columns[:, None, :])
        return images, labels


@dataclasses.dataclass(frozen=True)
class Affine(DeviceTransform):
    """Shifts, rotates and scales about the centre, with bilinear interpolation.

    `scale` is the smallest and largest factor. Pixels from outside are black.
    """

    moves_pixels = True

    shift: Given = field(0.0, "Largest shift, as a fraction of height and width.")
    rotate: Given = field(0.0, "Largest rotation, in degrees.")
    scale: Given = (1.0, 1.0)

    def __post_init__(self):
        super().__post_init__()
        check_range("scale", self.scale)

    def __call__(self, images: Images, labels: Labels, index, key):
        _, H, W, _ = images.shape
        u = example_uniform(index, key, 4)
        angle = (2 * u[:, 0] - 1) * math.radians(self.rotate)
        scale = self.scale[0] + u[:, 1] * (self.scale[1] - self.scale[0])
        down = (2 * u[:, 2] - 1) * self.shift * H
        right = (2 * u[:, 3] - 1) * self.shift * W
        return warp(images, angle, scale, down, right), labels


@dataclasses.dataclass(frozen=True)
class Upsample(DeviceTransform):
    """Enlarges to exactly `size` pixels, bilinear with half-pixel centres.

    So small images are stored and transferred small. The loader's images have the size
    of its last crop or resize, or of the data set in memory.
    """

    moves_pixels = True
    output_size = to_size

    size: Given = None

    def __call__(self, images: Images, labels: Labels, index, key):
        B, H, W, C = images.shape
        height, width = pair(self.size)
        if H > height or W > width:
            raise UserError(
                f"data.train_transform: upsample to {height}x{width}, but images have "
                f"{H}x{W}: end the operations of the loader with resize or a crop"
            )
        how = "nearest"
        if images.dtype != jnp.int16:
            images, how = images.astype(jnp.float32), "linear"
        return jax.image.resize(images, (B, height, width, C), how), labels


def warp(
    images: Images, angle: PerImage, scale: PerImage, down: PerImage, right: PerImage
) -> Num[Array, "B H W C"]:
    """Rotates and scales images about their centres, then shifts them; bilinear.

    Args:
      images: images with any range of values; pixels from outside are black (0). For
        label maps, int16, the nearest pixel is used.
      angle: angle in radians, positive from the vertical axis (down) to the right.
      scale: factor; above 1 it enlarges.
      down, right: shifts in pixels.
    """
    _, H, W, _ = images.shape
    angle, scale, down, right = (a[:, None, None] for a in (angle, scale, down, right))
    y = (jnp.arange(H) - (H - 1) / 2)[None, :, None] - down
    x = (jnp.arange(W) - (W - 1) / 2)[None, None, :] - right
    # The source of each pixel of the result, by the inverse of the motion.
    sine, cosine = jnp.sin(angle) / scale, jnp.cos(angle) / scale
    source_y = cosine * y + sine * x + (H - 1) / 2
    source_x = cosine * x - sine * y + (W - 1) / 2

    if images.dtype == jnp.int16:
        nearest = (jnp.round(a).astype(jnp.int32) for a in (source_y, source_x))
        return _take(images, *nearest)
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
