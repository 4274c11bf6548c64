"""Changes of colour, and blur, of a whole batch, inside the training step.

Grayscale, blur, solarize and colour jitter are the colour augmentations of BYOL
(arXiv:2006.07733, appendix B) and DINO. Values are 0..255 and are not rounded. Letters:
B examples, H and W height and width, C channels, T taps, L length.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from vit_jax.config.fields import key as field
from vit_jax.data.transforms.base import DeviceTransform, Given, check_range
from vit_jax.data.transforms.device import (
    Images,
    Labels,
    PerImage,
    example_uniform,
    where_drawn,
)

_REACH = 4  # Standard deviations to each side; the rest is less than a grey level.
_GREY = (0.299, 0.587, 0.114)  # Rec. 601, as Pillow's mode L.


def jitter(
    images: Images,
    brightness: PerImage,
    contrast: PerImage,
    saturation: PerImage,
    hue: PerImage | None,
    order: Num[Array, "B 4"],
) -> Float[Array, "B H W C"]:
    """Changes colours by given amounts.

    Args:
      images: images with values 0..255.
      brightness, contrast, saturation: factors; 1 changes nothing.
      hue: rotation as a fraction of the circle; None for no change, which is faster.
      order: order of the changes of each example: 0 brightness, 1 contrast, 2
        saturation, 3 hue.
    """
    x = images.astype(jnp.float32)
    wide = lambda a: a[:, None, None, None]
    factors = jnp.stack([brightness, contrast, saturation, jnp.ones_like(contrast)], 1)

    # Each round applies the next change of every example. Brightness, contrast and
    # saturation are the same blend, with black, with the mean grey or with the pixel's
    # grey.
    def change(x, now):
        greys = grey(x)
        mean = greys.mean((1, 2, 3), keepdims=True)
        base = jnp.where(wide(now == 1), mean, greys) * wide(now != 0)
        factor = wide(jnp.take_along_axis(factors, now[:, None], axis=1)[:, 0])
        changed = jnp.clip(factor * x + (1 - factor) * base, 0, 255)
        if hue is not None and x.shape[-1] == 3:
            changed = jnp.where(wide(now == 3), turn_hue(x, hue), changed)
        return changed, None

    # A loop, because XLA for GPUs compiles four unrolled rounds four times as long.
    return jax.lax.scan(change, x, order.T)[0]


def turn_hue(
    images: Float[Array, "B H W 3"], turn: PerImage
) -> Float[Array, "B H W 3"]:
    """Rotates the hue by fractions of the circle; keeps saturation and value (HSV)."""
    red, green, blue = images[..., 0], images[..., 1], images[..., 2]
    value, least = images.max(-1), images.min(-1)
    chroma = value - least
    safe = jnp.where(chroma > 0, chroma, 1)
    # Not `value == red`: a compiler that computes red twice may round it differently.
    hue = jnp.where(
        (red >= green) & (red >= blue),
        (green - blue) / safe,
        jnp.where(green >= blue, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = hue[..., None] + 6 * turn[:, None, None, None]
    # A channel is at its maximum within one sixth of its hue, at its minimum beyond
    # two.
    place = (hue + jnp.array([5, 3, 1], jnp.float32)[None, None, None, :]) % 6
    short = jnp.clip(jnp.minimum(place, 4 - place), 0, 1)
    return value[..., None] - chroma[..., None] * short


def grey(x: Float[Array, "B H W C"]) -> Float[Array, "B H W 1"]:
    """Returns the grey level of each pixel, as in Pillow's mode L but not rounded."""
    if x.shape[-1] == 1:
        return x
    weights = jnp.array(_GREY, jnp.float32)[None, None, None, :]
    return (x * weights).sum(-1, keepdims=True)


def blur(images: Images, radius: PerImage, reach: int) -> Float[Array, "B H W C"]:
    """Convolves each image with a Gaussian.

    Pixels up to `reach` to each side are used; pixels at the border are repeated beyond
    it.
    """
    _, H, W, _ = images.shape
    offsets = jnp.arange(-reach, reach + 1)
    taps = jnp.exp(-((offsets[None, :] / radius[:, None]) ** 2) / 2)
    taps /= taps.sum(1, keepdims=True)
    # Two products with banded matrices, which are four times faster on a CPU than a sum
    # of shifted images, and fast on accelerators. Not in bfloat16, the default of TPUs:
    # results would be off by half a grey level.
    times = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    x = times("bhi,biwc->bhwc", _bands(taps, H), images.astype(jnp.float32))
    return times("bwi,bhic->bhwc", _bands(taps, W), x)


def _bands(taps: Float[Array, "B T"], length: int) -> Float[Array, "B L L"]:
    """Returns the matrices that convolve vectors of a length, with repeated ends."""
    reach = taps.shape[1] // 2
    rows, columns = jnp.arange(length)[None, :, None], jnp.arange(length)[None, None]
    sources = rows + jnp.arange(taps.shape[1])[:, None, None] - reach
    places = jnp.clip(sources, 0, length - 1) == columns
    # A matrix product, because XLA for GPUs takes minutes to compile a sum over the
    # taps.
    return jnp.einsum(
        "bt,trc->brc",
        taps,
        places.astype(taps.dtype),
        precision=jax.lax.Precision.HIGHEST,
    )


@dataclasses.dataclass(frozen=True)
class ColorJitter(DeviceTransform):
    """Changes brightness, contrast, saturation and hue in a random order.

    Each change is that of torchvision's ColorJitter; after each, values are clipped to
    0..255 but not rounded. Factors are drawn from 1 - strength (at least 0) to 1 +
    strength. Contrast is relative to the image's mean grey, saturation to each pixel's
    grey; a hue of 0.5 is half the circle, which turns red to cyan. Saturation and hue
    of grey images do not change.
    """

    on_colors = True

    brightness: Given = field(0.4, "Largest change of the brightness factor.")
    contrast: Given = field(0.4, "Largest change of the contrast factor.")
    saturation: Given = field(0.4, "Largest change of the saturation factor.")
    hue: Given = field(
        0.0, "Largest rotation of the hue, as a fraction of the circle.", at_most=0.5
    )
    p: Given = field(1.0, "Probability for an image.", at_most=1)

    def __call__(self, images: Images, labels: Labels, index, key):
        u = example_uniform(index, key, 8)
        factors = []
        for i, strength in enumerate((self.brightness, self.contrast, self.saturation)):
            least = max(0.0, 1 - strength)
            factors.append(least + u[:, i] * (1 + strength - least))
        order = jnp.argsort(u[:, 4:], axis=1)
        turn = self.hue * (2 * u[:, 3] - 1) if self.hue else None
        changed = jitter(images, *factors, turn, order)
        key = jax.random.fold_in(key, 1)
        return where_drawn(self.p, changed, images, index, key), labels


@dataclasses.dataclass(frozen=True)
class Grayscale(DeviceTransform):
    """Converts some images to grey levels, with the same number of channels."""

    on_colors = True

    p: Given = field(0.2, "Probability for an image.", at_most=1)

    def __call__(self, images: Images, labels: Labels, index, key):
        changed = jnp.broadcast_to(grey(images.astype(jnp.float32)), images.shape)
        return where_drawn(self.p, changed, images, index, key), labels


@dataclasses.dataclass(frozen=True)
class GaussianBlur(DeviceTransform):
    """Blurs some images with a Gaussian; pixels at the border are repeated beyond it.

    The standard deviation, in pixels, is drawn uniformly from `radius`, (smallest,
    largest). DINO's code uses Pillow's blur, three box blurs, which on a photograph
    differ from the Gaussian by 0.6 of 255 on average, and by at most 4.5.
    """

    p: Given = field(0.5, "Probability for an image.", at_most=1)
    radius: Given = (0.1, 2.0)

    def __post_init__(self):
        super().__post_init__()
        check_range("radius", self.radius)

    def __call__(self, images: Images, labels: Labels, index, key):
        least, most = self.radius
        u = example_uniform(index, jax.random.fold_in(key, 1), 1)[:, 0]
        blurred = blur(images, least + u * (most - least), math.ceil(_REACH * most))
        return where_drawn(self.p, blurred, images, index, key), labels


@dataclasses.dataclass(frozen=True)
class Solarize(DeviceTransform):
    """Inverts the bright values of some images."""

    on_colors = True

    p: Given = field(0.2, "Probability for an image.", at_most=1)
    threshold: Given = field(128.0, "Smallest value that is inverted.", at_most=255)

    def __call__(self, images: Images, labels: Labels, index, key):
        x = images.astype(jnp.float32)
        inverted = jnp.where(x < self.threshold, x, 255 - x)
        return where_drawn(self.p, inverted, images, index, key), labels


@dataclasses.dataclass(frozen=True)
class ThreeAugment(DeviceTransform):
    """Turns each image grey, inverts its bright values or blurs it (arXiv:2204.07118).

    The three are equally likely, as in DeiT III, whose colour jitter and crop are
    separate transforms. The standard deviation of the blur, in pixels, is drawn from
    `radius`.
    """

    on_colors = True

    radius: Given = (0.1, 2.0)

    def __post_init__(self):
        super().__post_init__()
        check_range("radius", self.radius)

    def __call__(self, images: Images, labels: Labels, index, key):
        three = Grayscale(1.0), Solarize(1.0), GaussianBlur(1.0, self.radius)
        drawn = jnp.floor(3 * example_uniform(index, key, 1)[:, 0])[:, None, None, None]
        changed = images
        for i, operation in enumerate(three):
            result, _ = operation(images, labels, index, jax.random.fold_in(key, 2))
            changed = jnp.where(drawn == i, result, changed)
        return changed, labels
