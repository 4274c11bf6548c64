"""Grey, blur and solarisation of some images, inside the training step.

With `color_jitter` these are the colour augmentations of BYOL (arXiv:2006.07733, appendix
B) and DINO. As there, each acts on an image with a probability; values are not rounded
in between. Letters: B examples, H and W height and width, C channels, T taps, L length.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.config.fields import key as field
from vit_jax.data.transforms.base import DeviceTransform, Given
from vit_jax.data.transforms.device import (
    Images,
    Labels,
    example_uniform,
    grey,
    where_drawn,
)

_REACH = 4  # Standard deviations to each side: less than a grey level lies beyond.


@dataclasses.dataclass(frozen=True)
class Grayscale(DeviceTransform):
    """Replaces the colours of some images by their grey; grey images stay."""

    p: Given = field(0.2, "Probability for an image.", at_most=1)

    def __call__(self, images: Images, labels: Labels, index, key):
        found = jnp.broadcast_to(grey(images.astype(jnp.float32)), images.shape)
        return where_drawn(self.p, found, images, index, key), labels


@dataclasses.dataclass(frozen=True)
class GaussianBlur(DeviceTransform):
    """Blurs some images by a Gaussian; pixels at the border are repeated beyond it.

    DINO's code uses Pillow's, three box blurs, which on a photograph are 0.6 of 255 from
    the Gaussian on average, and 4.5 at most.

    Args:
      radius: smallest and largest standard deviation in pixels, drawn uniformly.
    """

    p: Given = field(0.5, "Probability for an image.", at_most=1)
    radius: Given = (0.1, 2.0)

    def __post_init__(self):
        super().__post_init__()
        if len(self.radius) != 2 or not 0 < self.radius[0] <= self.radius[1]:
            raise ValueError(f"radius={self.radius} is not 0 < least <= most")

    def __call__(self, images: Images, labels: Labels, index, key):
        least, most = self.radius
        u = example_uniform(index, jax.random.fold_in(key, 1), 1)[:, 0]
        blurred = blur(images, least + u * (most - least), math.ceil(_REACH * most))
        return where_drawn(self.p, blurred, images, index, key), labels


@dataclasses.dataclass(frozen=True)
class Solarize(DeviceTransform):
    """Inverts the bright values of some images."""

    p: Given = field(0.2, "Probability for an image.", at_most=1)
    threshold: Given = field(128.0, "Values from here on are inverted.", at_most=255)

    def __call__(self, images: Images, labels: Labels, index, key):
        x = images.astype(jnp.float32)
        inverted = jnp.where(x < self.threshold, x, 255 - x)
        return where_drawn(self.p, inverted, images, index, key), labels


@dataclasses.dataclass(frozen=True)
class ThreeAugment(DeviceTransform):
    """Turns each image grey, inverts its bright values or blurs it (arXiv:2204.07118).

    One of the three, drawn alike, as DeiT III does; its colour jitter and its crop are
    operations of their own.

    Args:
      radius: smallest and largest standard deviation of the blur in pixels.
    """

    radius: Given = (0.1, 2.0)

    def __post_init__(self):
        GaussianBlur(1.0, self.radius)  # Checks them.

    def __call__(self, images: Images, labels: Labels, index, key):
        three = Grayscale(1.0), Solarize(1.0), GaussianBlur(1.0, self.radius)
        drawn = jnp.floor(3 * example_uniform(index, key, 1)[:, 0])[:, None, None, None]
        changed = images
        for i, operation in enumerate(three):
            found, _ = operation(images, labels, index, jax.random.fold_in(key, 2))
            changed = jnp.where(drawn == i, found, changed)
        return changed, labels


def blur(
    images: Images, radius: Float[Array, " B"], reach: int
) -> Float[Array, "B H W C"]:
    """Convolves each image with a Gaussian of its own.

    Args:
      images: values of any range.
      radius: standard deviations in pixels.
      reach: pixels to each side that count; beyond the border those at it are repeated.
    """
    _, H, W, _ = images.shape
    offsets = jnp.arange(-reach, reach + 1)
    taps = jnp.exp(-((offsets[None, :] / radius[:, None]) ** 2) / 2)
    taps /= taps.sum(1, keepdims=True)
    # As two products with banded matrices: on a CPU four times faster than a sum of
    # shifted images, and accelerators are made for it. Not in bfloat16, which TPUs take
    # by default: taps would be off by half a grey level.
    times = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    x = times("bhi,biwc->bhwc", _bands(taps, H), images.astype(jnp.float32))
    return times("bwi,bhic->bhwc", _bands(taps, W), x)


def _bands(taps: Float[Array, "B T"], length: int) -> Float[Array, "B L L"]:
    """Returns the matrices that convolve vectors of a length, with repeated ends."""
    reach = taps.shape[1] // 2
    rows, columns = jnp.arange(length)[:, None], jnp.arange(length)[None, :]
    bands = jnp.zeros((len(taps), length, length), taps.dtype)
    for i in range(taps.shape[1]):
        source = jnp.clip(rows + i - reach, 0, length - 1)
        bands += taps[:, i, None, None] * (source == columns)[None]
    return bands


TRANSFORMS = {
    "grayscale": Grayscale,
    "gaussian_blur": GaussianBlur,
    "solarize": Solarize,
    "three_augment": ThreeAugment,
}
