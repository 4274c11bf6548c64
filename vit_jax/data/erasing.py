"""Random erasing, on a whole batch inside the training step.

Letters: B examples, H and W height and width, C channels, K classes.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from vit_jax.data import draws, host_ops

Images = Num[Array, "B H W C"]
Labels = Float[Array, "B K"]
Given = Any  # What a user wrote in a config; `__post_init__` checks it.

_ATTEMPTS = 10


@dataclasses.dataclass(frozen=True)
class RandomErasing:
    """Replaces a rectangle of some images by noise or one value (arXiv:1708.04896).

    The ratio is drawn uniformly in its logarithm and a shape that does not fit is
    drawn again, ten times at most, as timm does.

    Args:
      p: probability for an image.
      area: smallest and largest part of the image's area.
      ratio: smallest and largest height by width of the part.
      fill: "pixel" for noise, uniform in 0..255 a pixel and channel, or one value
        for all.
    """

    p: Given = 0.25
    area: Given = (0.02, 1 / 3)
    ratio: Given = (0.3, 1 / 0.3)
    fill: Given = "pixel"

    def __post_init__(self):
        if not 0 <= self.p <= 1:
            raise ValueError(f"p={self.p} is not a probability")
        host_ops.check_part(self.area, self.ratio)
        number = type(self.fill) in (int, float) and 0 <= self.fill <= 255
        if self.fill != "pixel" and not number:
            raise ValueError(f"fill={self.fill!r} is not 'pixel' or a number in 0..255")

    def __call__(self, images: Images, labels: Labels, index, key):
        _, H, W, C = images.shape
        inside = self.parts(H, W, index, key)[..., None]
        if self.fill == "pixel":
            # Four values from each number drawn: a quarter of the time.
            words = -(-H * W * C // 4)
            keys = draws.keys(index, jax.random.fold_in(key, 1))
            drawn = jax.vmap(lambda k: jax.random.bits(k, (words,), "uint32"))(keys)
            noise = jax.lax.bitcast_convert_type(drawn, jnp.uint8)
            noise = noise.reshape(len(index), -1)[:, : H * W * C]
            noise = noise.reshape(images.shape)
        else:
            noise = jnp.asarray(self.fill)
        return jnp.where(inside, noise.astype(images.dtype), images), labels

    def parts(self, H: int, W: int, index, key):
        """Draws what to erase: (B, H, W), true inside."""
        u = draws.uniform(index, key, 3 + 2 * _ATTEMPTS)
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
