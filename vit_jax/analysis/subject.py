"""A checkpoint that is looked into, and the images that it is shown.

Letters: B images, Y by X pixels, C channels.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from vit_jax.data import decode, device_ops
from vit_jax.evaluation import inputs, network
from vit_jax.models import Model, Params
from vit_jax.weights import preprocess as preprocessing
from vit_jax.weights.pretrained import Preprocess, Pretrained

# What a layer's attention of a batch may take, and images of a batch at most.
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

    def images(self, pixels: UInt8[np.ndarray, "B Y X C"]) -> Float[Array, "B Y X C"]:
        """Normalises prepared images for the network."""
        how = self.preprocess
        images = device_ops.normalize(jnp.asarray(pixels), how.mean, how.std)
        return images.astype(self.model.options["dtype"])

    def prepare(
        self, data: bytes | UInt8[np.ndarray, "_ _ _"]
    ) -> UInt8[np.ndarray, "Y X C"]:
        """Decodes, resizes and crops an image for the network."""
        channels = self.model.image_shape[-1]
        return preprocessing.prepare(data, self.preprocess, channels)

    def class_name(self, label: int) -> str:
        """Returns what a class is called."""
        return self.class_names[label] if self.class_names else f"class {label}"

    def batch_size(self) -> int:
        """Returns how many images at once keep a layer's attention within bounds."""
        tokens = self.model.extra + math.prod(self.model.grid)
        one = 4 * self.model.options.get("heads", 1) * tokens**2
        return max(1, min(_MOST, _BYTES // one))


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
    model, params = network.fit(pretrained, preprocess)
    params = jax.device_put(params)
    names = class_names or pretrained.class_names
    return Subject(name, model, params, preprocess, tuple(names))


@dataclasses.dataclass(frozen=True)
class Batch:
    """Some images.

    Attributes:
      names: of their files.
      originals: as they are in the files, RGB, of any sizes.
      pixels: prepared for each subject: (B, Y, X, C) of its own.
    """

    names: list[str]
    originals: list[UInt8[np.ndarray, "_ _ 3"]]
    pixels: list[UInt8[np.ndarray, "_ _ _ _"]]


def read(
    images: Iterable[inputs.Named],
    subjects: Sequence[Subject],
    size: int,
    tell: Callable[[str, str], None],
) -> Iterator[Batch]:
    """Reads images, some ahead in threads.

    Args:
      images: as from `evaluation.inputs.find`.
      subjects: that will see them.
      size: images of a batch; the last may have fewer.
      tell: is given the name of each image that cannot be read, and why.
    """

    def load(image: inputs.Named):
        name, source = image
        try:
            data = inputs.load(source)
            original = decode.decode(data, 3)
            return name, original, [s.prepare(data) for s in subjects]
        except OSError as error:
            return name, f"cannot be read ({error.strerror or error})", None
        except decode.DamagedImage as error:
            return name, str(error), None

    threads = min(8, os.cpu_count() or 1)
    whole = []
    for name, original, prepared in inputs.ahead(
        images, load, threads=threads, limit=max(2, size)
    ):
        if prepared is None:
            tell(name, original)
            continue
        whole.append((name, original, prepared))
        if len(whole) == size:
            yield _batch(whole)
            whole = []
    if whole:
        yield _batch(whole)


def _batch(whole) -> Batch:
    names, originals, prepared = zip(*whole, strict=True)
    pixels = [np.stack(of_subject) for of_subject in zip(*prepared, strict=True)]
    return Batch(list(names), list(originals), pixels)
