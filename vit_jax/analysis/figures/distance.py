"""Mean attention distance of each head by depth (arXiv:2010.11929, figure 7 right)."""

import functools

import numpy as np

from vit_jax import analysis
from vit_jax.analysis.figures.figure import Figure, LayerBuffer, Picture, layer_ticks


class Distance(Figure):
    """One point per head, and the mean over heads as a line."""

    help = "mean attention distance of each head, by depth; over all images"
    reads = "all images"
    reads_layers = True

    def start(self, loaded, batch_size=0, other=None):
        self.loaded = loaded
        # Computed once: the same for all layers, and mostly for all images.
        self._distances = functools.lru_cache(1)(analysis.attention.patch_distances)
        self._buffer, self._sums, self._num_images = LayerBuffer(), 0.0, 0

    def update(self, layer, images):
        model = self.loaded.model
        distances = analysis.attention.head_distances(
            layer.attention,
            self._distances(model.grid, model.config.patch_size),
            model.num_prefix_tokens,
        )
        self._buffer.append(images, distances)

    def draw_batch(self, batch):
        distances = self._buffer.pop(len(batch.names))
        self._sums = self._sums + distances.sum(1, dtype=np.float64)
        self._num_images += len(batch.names)
        return ()

    def draw(self):
        charts = analysis.charts
        means = self._sums / self._num_images
        depth, num_heads = means.shape
        layers = tuple(range(1, depth + 1))
        x = tuple(np.repeat(layers, num_heads).tolist())
        y, line = (tuple(v.tolist()) for v in (means.ravel(), means.mean(1)))
        chart = charts.Chart(
            "distance",
            f"{self.loaded.name}: attention distance, {self._num_images} images",
            "layer",
            "mean distance in pixels",
            (
                charts.Series("one head", x, y, colour=0, line=False, hollow=True),
                charts.Series(
                    "mean of the heads", layers, line, colour=1, marked=False
                ),
            ),
            ticks=layer_ticks(depth),
        )
        num_images = np.array(self._num_images)
        data = {"pixels": means.astype(np.float32), "images": num_images}
        yield Picture(charts.draw(chart), data)
