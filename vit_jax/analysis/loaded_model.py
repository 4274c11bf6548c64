"""Checkpoints loaded for analysis, and the images that pass through them.

Letters: B images, R images per chunk, N tokens, D width, Y by X pixels, C channels.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num, UInt8

from vit_jax.data.bands import PixelFormat
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.evaluators import prediction
from vit_jax.models import Model, Params, intermediates
from vit_jax.models.intermediates import Layer
from vit_jax.weights import surgery
from vit_jax.weights.network_images import network_input
from vit_jax.weights.pretrained import Pretrained

_MOST_GRIDS = 32  # Maximum number of networks, one per grid, that are kept.
# Limits of a chunk: bytes of one layer's attention, and images.
_MAX_ATTENTION_BYTES, _MAX_CHUNK_SIZE = 256 << 20, 32


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its parameters and preprocessing.

    Attributes:
      name: name of the model in titles and messages.
      model, params: the model and its parameters; with `preprocess.max_tokens` for the
        model's original grid, see `fitted`.
      preprocess: image size, crop and normalisation.
      class_names: class names in label order; empty if unknown.
      pictures: function of the parameters and normalised images (B, Y, X, C) that
        returns inputs and predictions of the pretraining task, a NamedTuple of
        normalised images; None if the task has no predictions.
    """

    name: str
    model: Model
    params: Params
    preprocess: Preprocess
    class_names: tuple[str, ...] = ()
    pictures: Callable[[Params, Array], NamedTuple] | None = None

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        pretrained: Pretrained,
        preprocess: Preprocess,
        class_names: tuple[str, ...] = (),
    ) -> "LoadedModel":
        """Returns the model of a checkpoint, with its parameters on the device.

        Args:
          name: name of the model in titles and messages.
          pretrained: output of `weights.open_pretrained`.
          preprocess: image size, crop and normalisation; position embeddings are
            resized if the image size differs from the checkpoint's, and with
            `max_tokens` for each image.
          class_names: class names in label order; () for the checkpoint's.

        Raises:
          UserError: class names or preprocessing do not fit the model.
        """
        names = pretrained.class_names
        if class_names:
            names = prediction.names_of(pretrained, class_names)
        model, params = surgery.fit_network(pretrained, preprocess)
        if preprocess.max_tokens:
            # This model reads images, not sequences, with the preprocessing's patch
            # size.
            size = tuple(count * preprocess.patch for count in model.grid)
            model, params = surgery.fit_network(pretrained, preprocess.whole(size))
            preprocess = dataclasses.replace(preprocess, image_size=size)
        return cls(name, model, jax.device_put(params), preprocess, tuple(names))

    @property
    def channels(self) -> int:
        """Number of channels of the input images: 3 for RGB, 1 for grey."""
        return self.model.image_shape[-1]

    @property
    def form(self) -> PixelFormat:
        """Channels and depth that are read from an image file."""
        return self.preprocess.form(self.channels)

    def prepare(self, pixels: Num[np.ndarray, "_ _ C"]) -> Num[np.ndarray, "Y X C"]:
        """Resizes and crops an image, decoded by `form`, to the model's input size.

        With `preprocess.max_tokens`, Y and X depend on the image, see `fitted`.
        """
        return self.preprocess.of_image(pixels.shape[:2]).prepare(pixels)

    def fitted(self, size: tuple[int, int]) -> "LoadedModel":
        """Returns the model for prepared images of a height and width.

        It is the model itself; with `preprocess.max_tokens` it is a model whose
        position embeddings are resized to the grid of these images.
        """
        if not self.preprocess.max_tokens:
            return self
        if size not in self._fitted:
            if len(self._fitted) == _MOST_GRIDS:
                self._fitted.clear()
                jax.clear_caches()  # Each network has its own compiled programs.
            model = self.model.at_size(size)
            self._fitted[size] = dataclasses.replace(
                self,
                model=model,
                params=model.resize(self.params, self.model),
                preprocess=self.preprocess.whole(size),
            )
        return self._fitted[size]

    @functools.cached_property
    def _fitted(self) -> dict[tuple[int, int], "LoadedModel"]:
        return {}

    def normalize(
        self, pixels: UInt8[np.ndarray, "B Y X C"]
    ) -> Float[Array, "B Y X C"]:
        """Returns prepared images as normalised inputs of the model."""
        return network_input(pixels, self.preprocess, self.model.options["dtype"])

    def iter_chunks(
        self, pixels: UInt8[np.ndarray, "B Y X C"], size: int
    ) -> Iterator[tuple[range, Float[Array, "R Y X C"]]]:
        """Yields the indices of up to `size` images, and `size` normalised images.

        The last chunk is padded with black images, so that all share one program.
        """
        for start in range(0, len(pixels), size):
            chunk = pixels[start : start + size]
            padding = (0, size - len(chunk)), (0, 0), (0, 0), (0, 0)
            yield (
                range(start, start + len(chunk)),
                self.normalize(np.pad(chunk, padding)),
            )

    def draw_task(
        self, pixels: UInt8[np.ndarray, "B Y X C"]
    ) -> dict[str, UInt8[np.ndarray, "B Y X C"]]:
        """Returns inputs and predictions of the pretraining task, see `pictures`."""
        images = self.normalize(pixels).astype(jnp.float32)
        pictures = jax.device_get(jax.jit(self.pictures)(self.params, images))
        mean, std = (
            np.asarray(values, np.float32)
            for values in (self.preprocess.mean, self.preprocess.std)
        )
        return {
            name: (255 * (values * std + mean)).round().clip(0, 255).astype(np.uint8)
            for name, values in pictures._asdict().items()
        }

    def patch_features(
        self, pixels: UInt8[np.ndarray, "B Y X C"]
    ) -> Float[np.ndarray, "B y x D"]:
        """Returns `Model.patch_features` of prepared images."""
        return np.asarray(self._patch_features(self.params, self.normalize(pixels)))

    @functools.cached_property
    def _patch_features(self):
        return jax.jit(self.model.patch_features)

    def class_name(self, label: int) -> str:
        """Returns the name of a class, or "class LABEL" if names are unknown."""
        return self.class_names[label] if self.class_names else f"class {label}"

    def max_chunk_size(self, num_arrays: int = 1) -> int:
        """Returns the number of images whose attention in one layer fits in memory.

        It is at least 1, even if one image exceeds the limit.

        Args:
          num_arrays: number of arrays of the size of one layer's attention that exist
            at the same time.
        """
        if not self.model.config.has_encoder:
            return _MAX_CHUNK_SIZE
        num_tokens = self.model.num_prefix_tokens + math.prod(self.model.grid)
        per_image = 4 * self.model.options["num_heads"] * num_tokens**2
        fitting = _MAX_ATTENTION_BYTES // (num_arrays * per_image)
        return max(1, min(_MAX_CHUNK_SIZE, fitting))

    def iter_layers(
        self,
        pixels: UInt8[np.ndarray, "B Y X C"],
        image_names: Sequence[str],
        chunk_size: int,
    ) -> Iterator[tuple[Layer, range]]:
        """Runs a batch through the model layer by layer, and each layer in chunks.

        All chunks pass a layer before the next layer begins. Drop each result before
        requesting the next, and the attention of only one chunk and one layer is in
        memory at a time.

        Args:
          pixels: prepared images.
          image_names: names of the images, for messages.
          chunk_size: images per chunk, see `iter_chunks`.

        Yields:
          Attention and tokens of a chunk, and the indices of its images; rows beyond
          these indices are padding.

        Raises:
          UserError: the model has no attention, or its output is not finite.
        """
        layers_of_chunks = [
            (chunk, intermediates.layers(self.model, self.params, images))
            for chunk, images in self.iter_chunks(pixels, chunk_size)
        ]
        for _ in range(self.model.options["depth"]):
            for chunk, layers in layers_of_chunks:
                # A local variable here would keep the layer in memory.
                yield (
                    self._checked(next(layers), image_names[chunk.start : chunk.stop]),
                    chunk,
                )

    def classify(self, tokens: Float[Array, "B N D"]) -> dict[str, Array]:
        """Returns the outputs of `Model.apply` from the last tokens of `iter_layers`."""
        return intermediates.classify_tokens(self.model, self.params, tokens)

    def _checked(self, layer: Layer, image_names: Sequence[str]) -> Layer:
        magnitudes = np.asarray(abs(layer.tokens).max((1, 2)))  # NaNs propagate.
        for name, magnitude in zip(image_names, magnitudes, strict=False):
            check_finite(magnitude, f"{self.name}'s output for {name}")
        return layer


def check_finite(
    values: Float[np.ndarray, "..."] | Float[Array, "..."] | np.floating, what: str
) -> None:
    """Raises UserError if a value is not finite.

    Args:
      values: parameters of a checkpoint, or outputs computed from them.
      what: subject of the message, such as "B/16's output for a.png".
    """
    if not np.isfinite(values).all():
        raise UserError(
            f"{what} is not finite: the checkpoint is damaged, or diverged in training"
        )
