"""Transforms that make several arrays from an image, and their loaders.

Several images may share a row of these arrays, one after the other (NaViT,
arXiv:2307.06304).
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from vit_jax.data.fields.base import Spec
from vit_jax.data.loader import Batch, Loader
from vit_jax.data.transforms.base import HostTransform
from vit_jax.errors import UserError

# Keeps the draws of shapes apart from other uses of the same seed.
_SHAPES = 0x736861


class Views(HostTransform):
    """A host transform that ends a line and returns several arrays from an image.

    The result is a dict of arrays, for example crops (..., h, w, C), including
    "image". The task's batch has these arrays under the same names.

    Attributes:
      numbers: names of the arrays that contain int32 instead of pixels.
      packs: number of successive images in a batch that share a row of its arrays;
        `of_share` returns the transform of one of them.
    """

    makes_arrays = True
    numbers: ClassVar[tuple[str, ...]] = ()
    packs: ClassVar[int] = 1

    def output_shapes(self, channels: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the results by name, for a number of channels."""
        raise NotImplementedError

    def alternatives(self) -> list[tuple["Views", float]]:
        """Returns transforms with different `output_shapes`, each with its weight.

        Each batch draws one of these transforms.
        """
        return [(self, 1.0)]

    def specs(self, channels: int, pixels: str) -> dict[str, Spec]:
        """Returns shape and dtype of the results, for images of dtype `pixels`."""
        return {
            name: (tuple(shape), "int32" if name in self.numbers else pixels)
            for name, shape in self.output_shapes(channels).items()
        }

    def check_rows(self, rows: int, batch_size: int) -> None:
        """Raises UserError unless images share whole rows.

        Args:
          rows: number of images of a process.
          batch_size: number of images of all processes, for the message.
        """
        if rows % self.packs:
            raise UserError(
                f"batch_size={batch_size}: {rows} images of a process are not a multiple "
                f"of the {self.packs} that share a row: change batch_size or "
                "data.train_transform"
            )

    def loader(self, loader: Loader) -> Loader:
        """Returns the loader for a line that ends in this transform."""
        kind = PackedLoader if self.packs > 1 else ViewsLoader
        return kind(**vars(loader))


def ending_in(loader: Loader, op: Views) -> Loader:
    """Returns a loader with another last transform."""
    specs = op.specs(loader.data.channels, loader.data.pixels)
    return dataclasses.replace(loader, ops=(*loader.ops[:-1], op), specs=specs)


class ViewsLoader(Loader):
    """Loads images for a last transform that may have `alternatives`."""

    def of_step(self, step: int) -> Loader:
        alternatives = self.ops[-1].alternatives()
        drawn = _drawn(self.seed, step, [weight for _, weight in alternatives])
        op, _ = alternatives[drawn]
        return ending_in(self, op)


class PackedLoader(ViewsLoader):
    """Loads images for a last transform that puts `packs` images in a row."""

    @property
    def packs(self) -> int:
        """Number of images that share a row of the arrays."""
        return self.ops[-1].packs

    def empty(self, rows: int) -> Batch:
        """Returns a batch of blank rows for `rows` images."""
        shared = super().empty(rows // self.packs)
        single = super().empty(rows)
        return {
            name: (shared if name in self.specs else single)[name] for name in single
        }

    def fill(self, batch: Batch, row: int, record: int, position: int) -> None:
        """Loads an image into a row, after the images that are in it already."""
        line, place = divmod(row, self.packs)
        strip, grids = batch["image"][line], batch["grids"][line]
        side = strip.shape[1]
        used = int(grids.prod(-1).sum())
        left = len(strip) // side - used
        one = ending_in(self, self.ops[-1].of_share(left, self.packs - place))
        for name, values in one.load_next(record, position).items():
            if name not in self.specs:
                batch[name][row] = values
            elif name == "grids":
                grids[place] = values[0]
            else:
                strip[used * side :][: len(values)] = values


def _drawn(seed: int, step: int, weights: Sequence[float]) -> int:
    """Draws an index for the batch of a step, with probabilities by weight."""
    bits = np.random.Philox(
        key=np.array([seed % 2**64, _SHAPES], np.uint64),
        counter=np.array([0, 0, 0, step], np.uint64),
    )
    bounds = np.cumsum(weights)
    drawn = np.random.Generator(bits).random() * bounds[-1]
    return int(np.searchsorted(bounds, drawn, side="right"))
