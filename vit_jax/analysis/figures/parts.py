"""What all figures of images have in common: layers feed them as images pass."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Array, Float

from vit_jax.analysis.batches import Batch
from vit_jax.analysis.figures.canvas import Picture
from vit_jax.models.inside import Layer


class Part:
    """A figure that is fed by `Subject.look`."""

    def see(self, layer: Layer, images: range) -> None:
        """Takes what it needs of a layer.

        Args:
          layer: of some of a batch's images.
          images: which these are; what is beyond them is of none.
        """
        raise NotImplementedError


class OfAll(Part):
    """A figure of all images together."""

    def end(self, batch: Batch) -> None:
        """Notes that all layers of a batch were seen."""
        raise NotImplementedError

    def picture(self) -> Picture:
        """Draws what was seen.

        Raises:
          UserError: it was too little.
        """
        raise NotImplementedError


class OfEach(Part):
    """A figure of each image."""

    def pictures(self, batch: Batch) -> Iterator[Picture]:
        """Draws images whose layers were all seen; images seen beyond are forgotten."""
        raise NotImplementedError


class Kept:
    """Something of each layer, of images that come some at once."""

    def __init__(self) -> None:
        self._found: dict[int, list[np.ndarray]] = {}

    def add(self, images: range, of_layer: Float[Array, "R ..."]) -> None:
        """Adds what is of a layer and some images; see `Part.see`."""
        self._found.setdefault(images.start, []).append(np.asarray(of_layer))

    def take(self, count: int) -> Float[np.ndarray, "L B ..."]:
        """Returns what is of the first images, and forgets all."""
        found = [np.stack(layers) for layers in self._found.values()]
        self._found = {}
        return np.concatenate(found, axis=1)[:, :count]
