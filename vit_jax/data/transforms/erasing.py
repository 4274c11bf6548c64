"""Random erasing of a whole batch, inside the training step.

Letters: B examples, H and W height and width, C channels.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from vit_jax.config.fields import key as field
from vit_jax.data import imagenet
from vit_jax.data.transforms.base import DeviceTransform, Given, check_part
from vit_jax.data.transforms.device import (
    Images,
    Labels,
    example_keys,
    example_uniform,
)

_ATTEMPTS = 10  # Number of shapes that random erasing draws per example.


@dataclasses.dataclass(frozen=True)
class RandomErasing(DeviceTransform):
    """Replaces a rectangle of some images by noise or one value (arXiv:1708.04896).

    The logarithm of the ratio is drawn uniformly, and a shape that does not fit is
    drawn again, at most ten times, as in timm.

    Args:
      area: smallest and largest fraction of the image's area.
      ratio: smallest and largest height of the rectangle divided by its width.
      fill: "pixel" for uniform noise, "normal" for timm's normal noise with ImageNet's
        mean and deviation, or one value for all pixels.
    """

    p: Given = field(0.25, "Probability for an image.", at_most=1)
    area: Given = (0.02, 1 / 3)
    ratio: Given = (0.3, 1 / 0.3)
    fill: Given = "pixel"

    def __post_init__(self):
        super().__post_init__()
        check_part(self.area, self.ratio)
        number = type(self.fill) in (int, float) and 0 <= self.fill <= 255
        if self.fill not in ("pixel", "normal") and not number:
            raise ValueError(
                f"fill={self.fill!r} is not 'pixel', 'normal' or a number in 0..255"
            )

    def __call__(self, images: Images, labels: Labels, index, key):
        _, H, W, C = images.shape
        inside = self.parts(H, W, index, key)[..., None]
        if self.fill in ("pixel", "normal"):
            # Four values from each random word take a quarter of the time.
            words = -(-H * W * C // 4)
            keys = example_keys(index, jax.random.fold_in(key, 1))
            drawn = jax.vmap(lambda k: jax.random.bits(k, (words,), "uint32"))(keys)
            noise = jax.lax.bitcast_convert_type(drawn, jnp.uint8)
            noise = noise.reshape(len(index), -1)[:, : H * W * C]
            noise = noise.reshape(images.shape)
            if self.fill == "normal":
                # timm erases after normalisation, so values above white are kept.
                images, noise = images.astype(jnp.float32), _normal(noise)
        else:
            noise = jnp.asarray(self.fill)
        return jnp.where(inside, noise.astype(images.dtype), images), labels

    def parts(self, H: int, W: int, index, key):
        """Draws the rectangles to erase, (B, H, W) bool, True inside."""
        u = example_uniform(index, key, 3 + 2 * _ATTEMPTS)
        area = self.area[0] + u[:, 3 : 3 + _ATTEMPTS] * (self.area[1] - self.area[0])
        low, high = map(math.log, self.ratio)
        ratio = jnp.exp(low + u[:, 3 + _ATTEMPTS :] * (high - low))
        h = jnp.round(jnp.sqrt(area * ratio * H * W))
        w = jnp.round(jnp.sqrt(area / ratio * H * W))

        fits = (h < H) & (w < W)
        first = fits.argmax(1, keepdims=True)
        erased = (u[:, 0] < self.p) & fits.any(1)
        inside = erased[:, None, None]
        for axis, length, part in ((0, H, h), (1, W, w)):
            part = jnp.take_along_axis(part, first, axis=1)
            start = jnp.floor(u[:, 1 + axis, None] * (length - part + 1))
            at = jnp.arange(length)[None, :]
            along = (at >= start) & (at < start + part)
            inside &= jnp.expand_dims(along, 2 - axis)
        return inside


def _normal(noise: UInt8[Array, "B H W C"]) -> Float[Array, "B H W C"]:
    """Converts uniform bytes to normal noise with ImageNet's mean and deviation."""
    mean, std = (255 * np.array(x, np.float32) for x in (imagenet.MEAN, imagenet.STD))
    if noise.shape[-1] != len(mean):
        mean, std = mean.mean(keepdims=True), std.mean(keepdims=True)
    normal = jax.scipy.special.ndtri((noise.astype(jnp.float32) + 0.5) / 256)
    return normal * std.reshape(1, 1, 1, -1) + mean.reshape(1, 1, 1, -1)
