"""Two transforms: one of single images in the loader, one of batches on the device."""

import dataclasses

import jax
import numpy as np

from vit_jax.config.fields import key
from vit_jax.data.transforms.base import check_arguments
from vit_jax.data.transforms.device import example_keys


@dataclasses.dataclass(frozen=True)
class Speckle:
    """Replaces some pixels by white."""

    runs_on = "host"
    share: float = key(0.1, "Share of the pixels.", at_most=1)

    def __call__(self, image, rng):
        white = rng.random(image.shape[:2]) < self.share
        return np.where(white[..., None], np.uint8(255), image)


@dataclasses.dataclass(frozen=True)
class Noise:
    """Adds normal noise to every pixel."""

    runs_on = "device"
    std: float = key(8.0, "Standard deviation, of values in [0, 255].")

    def __post_init__(self):
        check_arguments(self)  # The parser does it too; here also for use in Python.

    def __call__(self, images, labels, index, key):
        draw = lambda k: jax.random.normal(k, images.shape[1:])
        noise = jax.vmap(draw)(example_keys(index, key))
        return (images + self.std * noise).clip(0, 255), labels
