"""Figures of many images together: attention distance, lengths of tokens, CKA.

Each is fed layer by layer while batches pass, and draws once at the end.
"""

import jax.numpy as jnp
import numpy as np

from vit_jax.analysis import attention, charts, cka, norms
from vit_jax.analysis.batches import Batch
from vit_jax.analysis.charts import Chart, Series
from vit_jax.analysis.figures import tiling
from vit_jax.analysis.figures.canvas import Picture
from vit_jax.analysis.figures.parts import Kept, OfAll
from vit_jax.analysis.subject import Subject
from vit_jax.models.inside import Layer


class Distance(OfAll):
    """How far each head looks, by depth (arXiv:2010.11929, figure 7 right)."""

    def __init__(self, subject: Subject):
        model = subject.model
        self._name, self._extra = subject.name, model.extra
        self._between = jnp.asarray(attention.between_patches(model.grid, model.patch))
        self._seen, self._sums, self._images = Kept(), 0.0, 0

    def see(self, layer: Layer, images: range) -> None:
        """Keeps a number an image and head."""
        reach = attention.reach(layer.attention, self._between, self._extra)
        self._seen.add(images, reach)

    def end(self, batch: Batch) -> None:
        """Adds the batch to the sums."""
        far = self._seen.take(len(batch.names))
        self._sums = self._sums + far.sum(1, dtype=np.float64)
        self._images += len(batch.names)

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
        return Picture("distance", charts.draw(chart), data)


class Norms(OfAll):
    """How long tokens are, by depth."""

    def __init__(self, subject: Subject):
        self._name, self._extra = subject.name, subject.model.extra
        self._known = norms.Distribution()
        self._seen, self._front, self._images = Kept(), 0.0, 0

    def see(self, layer: Layer, images: range) -> None:
        """Keeps the length of each token."""
        self._seen.add(images, norms.lengths(layer.tokens))

    def end(self, batch: Batch) -> None:
        """Counts the lengths."""
        lengths = self._seen.take(len(batch.names))
        self._known.add(list(lengths[..., self._extra :]))
        front = lengths[..., : self._extra].sum(1, dtype=np.float64)
        self._front = self._front + front
        self._images += len(batch.names)

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
        return Picture("norms", charts.draw(chart), data)


class Cka(OfAll):
    """How alike layers represent images: of one network, or of two.

    Args:
      subject: the first, whose layers are fed.
      other: the second; its images are the second of each batch.
      rows: images that it sees at once, at most.
    """

    def __init__(self, subject: Subject, other: Subject | None = None, rows: int = 1):
        self._subject, self._other, self._rows = subject, other, rows
        self._grams, self._found, self._too_few = _Grams(), cka.Alignment(), 0

    def see(self, layer: Layer, images: range) -> None:
        """Keeps the products of all pairs of images."""
        self._grams.see(layer, images)

    def end(self, batch: Batch) -> None:
        """Adds the batch, unless it has too few images: then no other has more."""
        one = self._grams.take()
        if len(batch.names) < cka.LEAST:
            self._too_few = len(batch.names)
            return
        self._found.add(one, self._of_other(batch) if self._other else one)

    def _of_other(self, batch: Batch):
        if not self._found.images:  # Later batches are filled up to the first.
            self._rows = min(self._rows, len(batch.names))
        grams = _Grams()
        for layer, images in self._other.look(batch.pixels[1], batch.names, self._rows):
            grams.see(layer, images)
            del layer  # Before the next one is computed.
        return grams.take()

    def picture(self) -> Picture:
        """Draws all pairs of layers."""
        if not self._found.images:
            cka.check_enough(self._too_few)
        table = self._found.result()
        other = self._other or self._subject
        drawn = tiling.heat(
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


class _Grams:
    """The products of all pairs of a batch's images, layer by layer.

    Kept are the tokens of one layer, until all images have passed it.
    """

    def __init__(self) -> None:
        self._tokens, self._found = [], []

    def see(self, layer: Layer, images: range) -> None:
        if images.start == 0:  # A layer begins.
            self._close()
        self._tokens.append(np.asarray(layer.tokens)[: len(images)])

    def take(self) -> list[np.ndarray]:
        self._close()
        found, self._found = self._found, []
        return found

    def _close(self) -> None:
        if self._tokens:
            self._found.append(cka.gram(np.concatenate(self._tokens)))
        self._tokens = []


def _some(layers: range) -> tuple[int, ...]:
    """Returns numbers of layers that an axis has room for."""
    return tuple(layers[:: -(-len(layers) // 12)])


def _numbers(count: int) -> tuple[list[int], list[str]]:
    """Returns places and texts of numbers from 1 on, as many as there is room for."""
    chosen = _some(range(1, count + 1))
    return [number - 1 for number in chosen], [f"{number}" for number in chosen]
