"""Figures of many images together: attention distance, lengths of tokens, CKA.

Each is fed layer by layer while batches pass, and draws once at the end.
"""

import jax.numpy as jnp
import numpy as np

from vit_jax.analysis import attention, cka, norms
from vit_jax.analysis.figures import sheets
from vit_jax.analysis.figures.canvas import Picture
from vit_jax.analysis.subject import Batch, Subject
from vit_jax.errors import UserError
from vit_jax.models.inside import Layer
from vit_jax.report.pages import draw
from vit_jax.report.pages.blocks import Chart, Series


class Part:
    """A figure that is fed as batches pass the network."""

    def see(self, layer: Layer) -> None:
        """Takes what it needs of a layer; they come in order."""
        raise NotImplementedError

    def end(self, batch: Batch) -> None:
        """Notes that all layers of a batch were seen."""
        raise NotImplementedError

    def picture(self) -> Picture:
        """Draws what was seen."""
        raise NotImplementedError


class Distance(Part):
    """How far each head looks, by depth (arXiv:2010.11929, figure 7 right)."""

    def __init__(self, subject: Subject):
        model = subject.model
        self._name, self._extra = subject.name, model.extra
        self._between = jnp.asarray(attention.between_patches(model.grid, model.patch))
        self._seen, self._sums, self._images = [], 0.0, 0

    def see(self, layer: Layer) -> None:
        """Keeps a number an image and head."""
        reach = attention.reach(layer.attention, self._between, self._extra)
        self._seen.append(np.asarray(reach))

    def end(self, batch: Batch) -> None:
        """Adds the batch to the sums."""
        self._sums = self._sums + np.stack(self._seen).sum(1, dtype=np.float64)
        self._images += len(batch.names)
        self._seen = []

    def picture(self) -> Picture:
        """Draws a point a head, and the heads' mean."""
        far = self._sums / self._images
        layers = range(1, len(far) + 1)
        points = [
            (layer, float(v))
            for layer, row in zip(layers, far, strict=True)
            for v in row
        ]
        x, y = zip(*points, strict=True)
        mean = tuple(float(v) for v in far.mean(1))
        chart = Chart(
            "distance",
            f"{self._name}: attention distance, {self._images} images",
            "layer",
            "mean distance in pixels",
            (
                Series("a head", x, y, colour=0, line=False, hollow=True),
                Series(
                    "mean of the heads", tuple(layers), mean, colour=1, marked=False
                ),
            ),
            ticks=_some(layers),
        )
        data = {"pixels": far.astype(np.float32), "images": np.array(self._images)}
        return Picture("distance", draw.figure(chart), data)


class Norms(Part):
    """How long tokens are, by depth."""

    def __init__(self, subject: Subject):
        self._name, self._extra = subject.name, subject.model.extra
        self._known = norms.Distribution()
        self._seen, self._front, self._images = [], 0.0, 0

    def see(self, layer: Layer) -> None:
        """Keeps the length of each token."""
        self._seen.append(np.asarray(norms.lengths(layer.tokens)))

    def end(self, batch: Batch) -> None:
        """Counts the lengths."""
        self._known.add([lengths[:, self._extra :] for lengths in self._seen])
        front = [lengths[:, : self._extra].sum(0, float) for lengths in self._seen]
        self._front = self._front + np.stack(front)
        self._images += len(batch.names)
        self._seen = []

    def picture(self) -> Picture:
        """Draws the longest, quantiles, and the mean of the tokens in front."""
        low, _, middle, _, high = self._known.quantiles().T
        longest, front = self._known.longest(), self._front / self._images
        lines = [("longest", longest), ("99 %", high), ("median", middle), ("1 %", low)]
        names = ("class token", "distillation token")
        lines += list(zip(names, front.T, strict=False))
        layers = range(1, len(longest) + 1)
        chart = Chart(
            "norms",
            f"{self._name}: lengths of patches' tokens, {self._images} images",
            "layer",
            "Euclidean norm",
            tuple(
                Series(
                    label, tuple(layers), tuple(map(float, line)), i, i, dashes=i % 4
                )
                for i, (label, line) in enumerate(lines)
            ),
            ticks=_some(layers),
        )
        data = {
            "quantiles": self._known.quantiles(),
            "fractions": np.array(norms.QUANTILES),
            "longest": longest,
            "front_tokens": front,
            f"beyond_{norms.OUTLIER:g}_medians": self._known.beyond(),
            "images": np.array(self._images),
        }
        return Picture("norms", draw.figure(chart), data)


class Cka(Part):
    """How alike layers represent images: of one network, or of two.

    Args:
      subject: the first, whose layers are fed.
      other: the second; its images are the second of each batch.
    """

    def __init__(self, subject: Subject, other: Subject | None = None):
        self._subject, self._other = subject, other
        self._grams, self._found, self.left_out = [], cka.Alignment(), 0

    def see(self, layer: Layer) -> None:
        """Keeps the products of all pairs of images."""
        if len(layer.tokens) >= cka.LEAST:
            self._grams.append(cka.gram(np.asarray(layer.tokens)))

    def end(self, batch: Batch) -> None:
        """Adds the batch; one of too few images is left out and counted."""
        one, self._grams = self._grams, []
        if not one:
            self.left_out += len(batch.names)
            return
        other = self._of_other(batch) if self._other else one
        self._found.add(one, other)

    def _of_other(self, batch: Batch):
        subject, grams = self._other, []
        images = subject.images(batch.pixels[1])
        for layer in subject.model.inside(subject.params, images):
            grams.append(cka.gram(np.asarray(layer.tokens)))
            del layer  # Before the next one is computed.
        return grams

    def picture(self) -> Picture:
        """Draws all pairs of layers.

        Raises:
          UserError: no batch had images enough.
        """
        if not self._found.images:
            raise UserError(
                f"{self.left_out} images are too few for the figure cka: give "
                f"{cka.LEAST} or more, in batches (--batch_size) of as many"
            )
        table = self._found.result()
        other = self._other or self._subject
        drawn = sheets.heat(
            table,
            title=f"linear CKA of layers, {self._found.images} images",
            x_label=f"layer of {other.name}",
            y_label=f"layer of {self._subject.name}",
            label="CKA",
            limits=(0, 1),
            ticks=tuple(_numbers(count) for count in table.shape[::-1]),
        )
        data = {"cka": table, "images": np.array(self._found.images)}
        return Picture("cka", drawn, data)


def _some(layers: range) -> tuple[int, ...]:
    """Returns numbers of layers that an axis has room for."""
    return tuple(layers[:: -(-len(layers) // 12)])


def _numbers(count: int) -> tuple[list[int], list[str]]:
    """Returns places and texts of numbers from 1 on, as many as there is room for."""
    chosen = _some(range(1, count + 1))
    return [number - 1 for number in chosen], [f"{number}" for number in chosen]
