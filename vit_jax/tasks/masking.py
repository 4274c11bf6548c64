"""Base class of tasks that hide patches of images and predict them, without labels.

Letters: B images, Y by X pixels, C channels, N patches, P side of a patch, D width.
"""

import abc
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num, UInt32

from vit_jax.data.config import DataConfig
from vit_jax.data.transforms import device as device_transforms
from vit_jax.errors import UserError
from vit_jax.models import Model
from vit_jax.tasks.task import Batch, ImageTask, Pictures, Tree

Mask = Float[Array, "B N"] | Bool[Array, "B N"]  # 1 or True where a patch is hidden.


class MaskedImageTask(ImageTask):
    """A task that hides a part of each image and predicts it, without labels.

    The parameters are "network" and those that the task adds. The random numbers of an
    image depend on its position in the run, so results do not depend on the mesh, on
    the number of microbatches or on resumes. A subclass defines `init`, `predict` and
    `metrics`.

    Args:
      name: name of the task, for messages.
      model: network without a classifier; a Vision Transformer if `needs_vit`.
      data: `config.data`.

    Raises:
      UserError: the data has classes, or the network has no patches to hide.
    """

    needs_vit: ClassVar[bool] = True

    def __init__(self, name: str, model: Model, data: DataConfig):
        check_unlabelled(name, data)
        if not model.config.encoder_stride or (
            self.needs_vit and not model.config.has_encoder
        ):
            raise UserError(
                f"model.variant={model.options['variant']!r} with task.name={name!r}, "
                "which hides patches of the image: choose a Vision Transformer, such as "
                f"B/16{'' if self.needs_vit else ', or a Swin Transformer'}"
            )
        super().__init__(model, data)
        self.num_patches = math.prod(model.grid)

    def prepare(self, batch: Batch, rng: jax.Array) -> Batch:
        """Returns image (B, Y, X, C), normalised, and the random numbers of `draw`."""
        return super().prepare(batch, rng) | self.draw(batch["index"], rng)

    def draw(self, index: UInt32[Array, " B"], rng: jax.Array) -> Batch:
        """Draws the random numbers of each image, (B, ...)."""
        key = jax.random.fold_in(rng, _MASKS)
        return {
            "noise": device_transforms.example_uniform(index, key, self.num_patches)
        }

    @abc.abstractmethod
    def predict(
        self,
        params: dict,
        batch: Batch,
        *,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> tuple[Float[Array, "B N outputs"], Mask]:
        """Returns predictions for all tokens, and the mask of the hidden ones.

        A token covers a square of `encoder_stride` by `encoder_stride` pixels, which is
        a patch in a Vision Transformer.

        Args:
          params: trained parameters, see `init`.
          batch: image (B, Y, X, C), normalised, and the arrays of `draw`.
          train, key: arguments of `Model.apply`.
        """

    @abc.abstractmethod
    def metrics(
        self,
        extra: Tree,
        batch: Batch,
        predicted: Float[Array, "B N outputs"],
        mask: Mask,
    ) -> dict[str, Float[Array, " B"]]:
        """Returns metrics per image, among them "loss".

        Args:
          extra: state beside the parameters.
          batch: input of `predict`.
          predicted, mask: output of `predict`.
        """

    def pixels_of(
        self, predicted: Float[Array, "B N outputs"], images: Float[Array, "B Y X C"]
    ) -> Float[Array, "B N PPC"]:
        """Converts predictions to normalised pixels; by default they are pixels."""
        return predicted

    def loss(self, params, extra, batch, rng):
        predicted, mask = self.predict(params, batch, train=True, key=rng)
        metrics = self.metrics(extra, batch, predicted, mask)
        means = {name: value.mean() for name, value in metrics.items()}
        return means["loss"], (means, None)

    def held_out_metrics(self, params, extra, batch, rng):
        batch = batch | self.draw(batch["index"], rng)
        return self.metrics(extra, batch, *self.predict(params, batch))

    def pictures(self, params, extra, batch, rng):
        batch = batch | self.draw(batch["index"], rng)
        images, side = batch["image"], self.model.config.encoder_stride
        predicted, mask = self.predict(params, batch)
        patches = self.pixels_of(predicted, images)
        grid = images.shape[1] // side, images.shape[2] // side
        return Pictures(
            images,
            fill(images, mask, 0.0, side),
            unpatchify(patches, grid, side),
            fill(images, mask, patches, side),
        )

    def backbone(self, params, extra):
        return params["network"]

    def pixels(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B Y X C"]:
        """Returns normalised images as pixels in [0, 1]."""
        mean, std = (
            np.asarray(v, np.float32).reshape(1, 1, 1, -1)
            for v in (self.data.mean, self.data.std)
        )
        return images.astype(jnp.float32) * std + mean


# Separates the random bits of masks from those of the transforms, which count from 0.
_MASKS = 0x6D61736B


def check_unlabelled(name: str, data: DataConfig) -> None:
    """Raises UserError if the config has classes: the task would not learn them."""
    if data.num_classes:
        raise UserError(
            f"data.num_classes={data.num_classes} with task.name={name!r}, which reads no "
            "labels: set data.num_classes to 0"
        )


def ranks(noise: Float[Array, "B N"]) -> Int[Array, "B N"]:
    """Returns the rank of each number in its row, 0 for the lowest."""
    return jnp.argsort(jnp.argsort(noise, axis=1), axis=1)


def mean_over(values: Num[Array, "B N"], mask: Mask) -> Float[Array, " B"]:
    """Returns the mean per image over its hidden patches."""
    return (values * mask).sum(-1) / mask.sum(-1)


def patchify(images: Num[Array, "B Y X C"], side: int) -> Num[Array, "B N PPC"]:
    """Cuts images into patches, row by row, and flattens each with channels last."""
    B, Y, X, C = images.shape
    x = images.reshape(B, Y // side, side, X // side, side, C)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, -1, side * side * C)


def unpatchify(
    patches: Float[Array, "B N PPC"], grid: Sequence[int], side: int
) -> Float[Array, "B Y X C"]:
    """Assembles images from patches: the inverse of `patchify`.

    Args:
      patches: pixels of the patches.
      grid: patches down and across.
      side: side of a patch in pixels.
    """
    rows, columns = grid
    B, _, size = patches.shape
    x = patches.reshape(B, rows, columns, side, side, size // side**2)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, rows * side, columns * side, -1)


def fill(
    images: Float[Array, "B Y X C"],
    mask: Mask,
    patches: Float[Array, "B N PPC"] | float,
    side: int,
) -> Float[Array, "B Y X C"]:
    """Replaces the hidden patches of images.

    Args:
      images: images to change.
      mask: hidden patches.
      patches: pixels that replace the hidden patches, or one number for all of them.
      side: side of a patch in pixels.
    """
    grid = images.shape[1] // side, images.shape[2] // side
    shown = jnp.where(mask[..., None] > 0, patches, patchify(images, side))
    return unpatchify(shown, grid, side)
