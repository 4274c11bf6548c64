"""Colour jitter, on a whole batch inside the training step.

Letters: B examples, H and W height and width, C channels, K classes.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from vit_jax.data import draws

Images = Num[Array, "B H W C"]
Labels = Float[Array, "B K"]
Given = Any  # What a user wrote in a config; `__post_init__` checks it.

_GREY = (0.299, 0.587, 0.114)  # Rec. 601, as Pillow's mode L.


@dataclasses.dataclass(frozen=True)
class ColorJitter:
    """Changes brightness, contrast, saturation and hue, in an order of its own.

    What each does is as in torchvision's ColorJitter; between them values are cut to
    0..255 but not rounded. Grey images have neither saturation nor hue.

    Args:
      brightness: factors are drawn from 1 - brightness (at least 0) to 1 + brightness.
      contrast: the same, about the image's mean grey.
      saturation: the same, about each pixel's grey.
      hue: largest turn either way; 0.5 is half the circle, where red becomes cyan.
    """

    brightness: Given = 0.4
    contrast: Given = 0.4
    saturation: Given = 0.4
    hue: Given = 0.0

    def __post_init__(self):
        for name in ("brightness", "contrast", "saturation"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} below 0")
        if not 0 <= self.hue <= 0.5:
            raise ValueError(f"hue={self.hue} is not within 0..0.5")

    def __call__(self, images: Images, labels: Labels, index, key):
        u = draws.uniform(index, key, 8)
        factors = []
        for i, strength in enumerate((self.brightness, self.contrast, self.saturation)):
            least = max(0.0, 1 - strength)
            factors.append(least + u[:, i] * (1 + strength - least))
        order = jnp.argsort(u[:, 4:], axis=1)
        turn = self.hue * (2 * u[:, 3] - 1) if self.hue else None
        return jitter(images, *factors, turn, order), labels


def jitter(
    images: Images,
    brightness: Float[Array, " B"],
    contrast: Float[Array, " B"],
    saturation: Float[Array, " B"],
    hue: Float[Array, " B"] | None,
    order: Num[Array, "B 4"],
) -> Float[Array, "B H W C"]:
    """Changes colours by given amounts.

    Args:
      images: values 0..255.
      brightness: factor; 1 changes nothing.
      contrast: factor.
      saturation: factor.
      hue: turn as a fraction of the circle; None for no change, which saves work.
      order: for each example, which change comes first, second, ...: 0 brightness,
        1 contrast, 2 saturation, 3 hue.
    """
    x = images.astype(jnp.float32)
    wide = lambda a: a[:, None, None, None]
    factors = jnp.stack([brightness, contrast, saturation, jnp.ones_like(contrast)], 1)
    # Each round does for every example whichever change is next for it. The first
    # three are one blend, away from black, from the mean grey or from the pixel's grey.
    for i in range(4):
        now = order[:, i]
        grey = _grey(x)
        mean = grey.mean((1, 2, 3), keepdims=True)
        base = jnp.where(wide(now == 1), mean, grey) * wide(now != 0)
        factor = wide(jnp.take_along_axis(factors, now[:, None], axis=1)[:, 0])
        changed = jnp.clip(factor * x + (1 - factor) * base, 0, 255)
        if hue is not None and x.shape[-1] == 3:
            changed = jnp.where(wide(now == 3), turn_hue(x, hue), changed)
        x = changed
    return x


def turn_hue(
    images: Float[Array, "B H W 3"], turn: Float[Array, " B"]
) -> Float[Array, "B H W 3"]:
    """Turns the hue and keeps saturation and value (of HSV).

    Args:
      images: values from 0.
      turn: fraction of the circle.
    """
    red, green, blue = images[..., 0], images[..., 1], images[..., 2]
    value, least = images.max(-1), images.min(-1)
    chroma = value - least
    safe = jnp.where(chroma > 0, chroma, 1)
    # Not `value == red`: a compiler that works red out twice may round it differently.
    hue = jnp.where(
        (red >= green) & (red >= blue),
        (green - blue) / safe,
        jnp.where(green >= blue, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = hue[..., None] + 6 * turn[:, None, None, None]
    # A channel is full within one sixth of its own hue and gone beyond two.
    place = (hue + jnp.array([5, 3, 1], jnp.float32)[None, None, None, :]) % 6
    short = jnp.clip(jnp.minimum(place, 4 - place), 0, 1)
    return value[..., None] - chroma[..., None] * short


def _grey(x: Float[Array, "B H W C"]) -> Float[Array, "B H W 1"]:
    if x.shape[-1] == 1:
        return x
    weights = jnp.array(_GREY, jnp.float32)[None, None, None, :]
    return (x * weights).sum(-1, keepdims=True)
