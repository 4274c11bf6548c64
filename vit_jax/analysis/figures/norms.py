"""Norms of the tokens by depth, which show the outliers of arXiv:2309.16588."""

import numpy as np

from vit_jax import analysis
from vit_jax.analysis.figures.figure import Figure, LayerBuffer, Picture, layer_ticks


class Norms(Figure):
    """Maximum and quantiles of the patches, and the mean of each prefix token."""

    help = "norms of tokens, by depth; over all images"
    reads = "all images"
    reads_layers = True

    def start(self, loaded, batch_size=0, other=None):
        self.loaded = loaded
        self._histogram = analysis.representations.NormHistogram()
        self._buffer, self._prefix_sums, self._num_images = LayerBuffer(), 0.0, 0

    def update(self, layer, images):
        self._buffer.append(images, analysis.representations.token_norms(layer.tokens))

    def draw_batch(self, batch):
        norms = self._buffer.pop(len(batch.names))
        P = self.loaded.model.num_prefix_tokens
        self._histogram.update(list(norms[..., P:]))
        self._prefix_sums = self._prefix_sums + norms[..., :P].sum(1, dtype=np.float64)
        self._num_images += len(batch.names)
        return ()

    def draw(self):
        charts, representations = analysis.charts, analysis.representations
        quantiles, maximum = self._histogram.quantiles(), self._histogram.max()
        low, _, median, _, high = quantiles.T
        prefix = self._prefix_sums / self._num_images
        lines = [("maximum", maximum), ("99 %", high), ("median", median), ("1 %", low)]
        lines += zip(self.loaded.model.config.prefix_tokens, prefix.T, strict=True)
        layers = tuple(range(1, len(maximum) + 1))
        chart = charts.Chart(
            "norms",
            f"{self.loaded.name}: norms of patch tokens, {self._num_images} images",
            "layer",
            "Euclidean norm",
            tuple(
                charts.Series(
                    label, layers, tuple(map(float, line)), i, i, dashes=i % 4
                )
                for i, (label, line) in enumerate(lines)
            ),
            ticks=layer_ticks(len(layers)),
        )
        factor = representations.OUTLIER_FACTOR
        data = {
            "quantiles": quantiles,
            "fractions": np.array(representations.QUANTILES),
            "longest": maximum,
            "front_tokens": prefix,
            f"beyond_{factor:g}_medians": self._histogram.outlier_fraction(factor),
            "images": np.array(self._num_images),
        }
        yield Picture(charts.draw(chart), data)
