"""A checkpoint that is looked into, and how images pass through it.

Letters: B images, R of them at once, Y by X pixels, C channels.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from vit_jax.analysis import finite
from vit_jax.data import device_ops
from vit_jax.evaluation import network, prediction
from vit_jax.models import Model, Params
from vit_jax.models.inside import Layer
from vit_jax.weights import preprocess as preprocessing
from vit_jax.weights.pretrained import Preprocess, Pretrained

# What a layer's attention may take, and images at once at most.
_BYTES, _MOST = 256 << 20, 32


@dataclasses.dataclass(frozen=True)
class Subject:
    """A network with its parameters, and how it wants its images.

    Attributes:
      name: for titles.
      model, params: the network.
      preprocess: of its images.
      class_names: in label order, or empty.
    """

    name: str
    model: Model
    params: Params
    preprocess: Preprocess
    class_names: tuple[str, ...] = ()

    @property
    def channels(self) -> int:
        """Of its images: 3 for RGB, 1 for grey."""
        return self.model.image_shape[-1]

    def images(self, pixels: UInt8[np.ndarray, "B Y X C"]) -> Float[Array, "B Y X C"]:
        """Normalises prepared images for the network."""
        how = self.preprocess
        images = device_ops.normalize(jnp.asarray(pixels), how.mean, how.std)
        return images.astype(self.model.options["dtype"])

    def prepare(
        self, data: bytes | UInt8[np.ndarray, "_ _ _"]
    ) -> UInt8[np.ndarray, "Y X C"]:
        """Decodes, resizes and crops an image for the network."""
        return preprocessing.prepare(data, self.preprocess, self.channels)

    def class_name(self, label: int) -> str:
        """Returns what a class is called."""
        return self.class_names[label] if self.class_names else f"class {label}"

    def batch_size(self, arrays: int = 1) -> int:
        """Returns how many images at once keep a layer's attention within bounds.

        Of one image it may be beyond them.

        Args:
          arrays: of the size of a layer's attention that are there at a time.
        """
        tokens = self.model.extra + math.prod(self.model.grid)
        one = 4 * self.model.options.get("heads", 1) * tokens**2
        return max(1, min(_MOST, _BYTES // (arrays * one)))

    def look(
        self, pixels: UInt8[np.ndarray, "B Y X C"], names: Sequence[str], rows: int
    ) -> Iterator[tuple[Layer, range]]:
        """Takes images through the network, some at once, all of them layer by layer.

        So the attention of no more than `rows` images is there at a time, if the caller
        drops it before the next, and still a layer's tokens of all images come one after
        the other.

        Args:
          pixels: prepared.
          names: of the images, for messages.
          rows: images at once. Fewer are filled up with black ones: one program serves
            all.

        Yields:
          What a block did, and to which of the images; what is beyond them is of black
          ones.

        Raises:
          UserError: the network has no attention, or its output is not finite.
        """
        parts = [
            range(start, min(start + rows, len(pixels)))
            for start in range(0, len(pixels), rows)
        ]
        inside = [
            self.model.inside(
                self.params, self.images(filled(pixels[part.start : part.stop], rows))
            )
            for part in parts
        ]
        for _ in range(self.model.options["depth"]):
            for part, layers in zip(parts, inside, strict=True):
                # Without a name for the layer, which would keep it.
                yield self._checked(next(layers), names[part.start : part.stop]), part

    def _checked(self, layer: Layer, names: Sequence[str]) -> Layer:
        largest = np.asarray(_largest(layer.tokens))
        for name, value in zip(names, largest, strict=False):
            finite.check(value, f"{self.name}'s output for {name}")
        return layer


def make(
    name: str,
    pretrained: Pretrained,
    preprocess: Preprocess,
    class_names: tuple[str, ...] = (),
) -> Subject:
    """Makes a subject of a checkpoint.

    Args:
      name: for titles.
      pretrained: what `weights.open_pretrained` returns.
      preprocess: of images; its size is the network's.
      class_names: in label order; the checkpoint's if empty.

    Raises:
      UserError: something does not fit.
    """
    names = pretrained.class_names
    if class_names:
        names = prediction.names_of(pretrained, class_names)
    model, params = network.fit(pretrained, preprocess)
    return Subject(name, model, jax.device_put(params), preprocess, tuple(names))


def filled(
    pixels: UInt8[np.ndarray, "B Y X C"], rows: int
) -> UInt8[np.ndarray, "R Y X C"]:
    """Fills images up with black ones to `rows` of them, or leaves them as they are."""
    missing = max(0, rows - len(pixels))
    return np.pad(pixels, ((0, missing), (0, 0), (0, 0), (0, 0)))


@jax.jit
def _largest(tokens: Float[Array, "B N D"]) -> Float[Array, " B"]:
    """Returns the largest size of each image's tokens; NaN if one of them is."""
    return abs(tokens).max((1, 2))
