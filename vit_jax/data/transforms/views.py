"""Transforms that make several arrays of an image, and loaders of images that share a row.

Several images may share a row of those arrays, one behind the other (NaViT,
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
    """A host transform that ends a line, and returns several arrays of an image.

    They are a dict of arrays, crops (..., h, w, C) for example, with "image" among them. The
    batch that the task gets holds them under their names.

    Attributes:
      numbers: names of the arrays that hold int32 rather than pixels.
      packs: number of images, one after the other in a batch, that share a row of its
        arrays; `of_share` returns the transform of one of them.
    """

    makes_arrays = True
    numbers: ClassVar[tuple[str, ...]] = ()
    packs: ClassVar[int] = 1

    def output_shapes(self, channels: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the results by name, of images of so many channels."""
        raise NotImplementedError

    def alternatives(self) -> list[tuple["Views", float]]:
        """Returns transforms of other `output_shapes`, each with its weight.

        Each batch draws one of them.
        """
        return [(self, 1.0)]

    def specs(self, channels: int, pixels: str) -> dict[str, Spec]:
        """Returns shape and dtype of the results, of images of a dtype `pixels`."""
        return {
            name: (tuple(shape), "int32" if name in self.numbers else pixels)
            for name, shape in self.output_shapes(channels).items()
        }

    def check_rows(self, rows: int, batch_size: int) -> None:
        """Raises UserError unless images share whole rows.

        Args:
          rows: images of a process.
          batch_size: images of all, for the message.
        """
        if rows % self.packs:
            raise UserError(
                f"batch_size={batch_size}: {rows} images of a process are not a multiple "
                f"of the {self.packs} that share a row: change batch_size or "
                "data.train_transform"
            )

    def loader(self, loader: Loader) -> Loader:
        """Returns the loader of a line of images that ends in this transform."""
        kind = PackedLoader if self.packs > 1 else ViewsLoader
        return kind(**vars(loader))


def ending_in(loader: Loader, op: Views) -> Loader:
    """Returns a loader with another last transform."""
    specs = op.specs(loader.data.channels, loader.data.pixels)
    return dataclasses.replace(loader, ops=(*loader.ops[:-1], op), specs=specs)


class ViewsLoader(Loader):
    """Loads images whose last transform may have `alternatives`."""

    def of_step(self, step: int) -> Loader:
        alternatives = self.ops[-1].alternatives()
        drawn = _drawn(self.seed, step, [weight for _, weight in alternatives])
        op, _ = alternatives[drawn]
        return ending_in(self, op)


class PackedLoader(ViewsLoader):
    """Loads images whose last transform has `packs` of them share a row."""

    @property
    def packs(self) -> int:
        """Number of images that share a row of the arrays made of them."""
        return self.ops[-1].packs

    def empty(self, rows: int) -> Batch:
        """Returns a batch of blank rows; `rows` counts images."""
        shared = super().empty(rows // self.packs)
        single = super().empty(rows)
        return {
            name: (shared if name in self.specs else single)[name] for name in single
        }

    def fill(self, batch: Batch, row: int, record: int, position: int) -> None:
        """Loads the image of a number behind those that it shares a row with."""
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
    """Returns the number of the weight that the batch of a step draws."""
    bits = np.random.Philox(
        key=np.array([seed % 2**64, _SHAPES], np.uint64),
        counter=np.array([0, 0, 0, step], np.uint64),
    )
    bounds = np.cumsum(weights)
    drawn = np.random.Generator(bits).random() * bounds[-1]
    return int(np.searchsorted(bounds, drawn, side="right"))
