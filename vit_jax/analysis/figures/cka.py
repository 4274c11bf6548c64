"""CKA between the layers of one model, or of two (arXiv:2010.15327)."""

import numpy as np

from vit_jax import analysis
from vit_jax.analysis.figures.figure import Figure, Picture, layer_ticks
from vit_jax.errors import UserError


class CKA(Figure):
    """The matrix of CKA between all pairs of layers."""

    help = (
        "similarity of layers (linear CKA), of one model or between two with "
        "--compare=CHECKPOINT; over all images, at least 4"
    )
    reads = "all images"
    reads_layers = True
    min_images = 4  # The unbiased HSIC divides by n - 3.

    def missing(self, loaded):
        return super().missing(loaded) or self.of_any_size(
            loaded,
            "images with different grids have no tokens at equal positions to compare",
        )

    def start(self, loaded, batch_size=0, other=None):
        if other and (missing := self.missing(other)):
            raise UserError(f"--compare: {other.name}: {missing}")
        self.loaded, self._other = loaded, other or loaded
        self._chunk_size = batch_size or self._other.max_chunk_size()
        self._grams, self._cka = (
            _GramMatrices(),
            analysis.representations.MinibatchCKA(),
        )

    def update(self, layer, images):
        self._grams.update(layer, images)

    def draw_batch(self, batch):
        grams = others = self._grams.pop()
        # Only the first batch can be smaller, and it is the only one then.
        if len(batch.names) >= self.min_images:
            if self._other is not self.loaded:
                others = self._other_grams(batch)
            self._cka.update(grams, others)
        return ()

    def _other_grams(self, batch) -> list[np.ndarray]:
        if not self._cka.num_images:  # Later batches are padded to this size.
            self._chunk_size = min(self._chunk_size, len(batch.names))
        grams = _GramMatrices()
        for layer, images in self._other.iter_layers(
            batch.pixels[1], batch.names, self._chunk_size
        ):
            grams.update(layer, images)
            del layer  # Frees its attention before the next is computed.
        return grams.pop()

    def draw(self):
        matrix, num_images = self._cka.compute(), self._cka.num_images
        drawing = analysis.charts.draw_heatmap(
            matrix,
            title=f"linear CKA of layers, {num_images} images",
            x_label=f"layer of {self._other.name}",
            y_label=f"layer of {self.loaded.name}",
            colorbar_label="CKA",
            limits=(0, 1),
            ticks=tuple(
                ([number - 1 for number in numbers], list(map(str, numbers)))
                for numbers in map(layer_ticks, matrix.shape[::-1])
            ),
        )
        yield Picture(drawing, {"cka": matrix, "images": np.array(num_images)})


class _GramMatrices:
    """The Gram matrix of each layer of a batch.

    Keeps the tokens of one layer at a time, until all chunks have passed the layer.
    """

    def __init__(self) -> None:
        self._tokens, self._grams = [], []

    def update(self, layer, images: range) -> None:
        if images.start == 0:  # The first chunk of the next layer begins.
            self._end_layer()
        self._tokens.append(np.asarray(layer.tokens)[: len(images)])

    def pop(self) -> list[np.ndarray]:
        self._end_layer()
        grams, self._grams = self._grams, []
        return grams

    def _end_layer(self) -> None:
        if self._tokens:
            tokens = np.concatenate(self._tokens)
            self._grams.append(analysis.representations.gram_matrix(tokens))
        self._tokens = []
