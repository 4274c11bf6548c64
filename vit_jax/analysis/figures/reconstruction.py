"""Predictions of hidden patches by a network that was pretrained to make them."""

import numpy as np

from vit_jax import analysis
from vit_jax.analysis.figures.figure import Figure, Picture


class Reconstruction(Figure):
    """A sheet with a row per image: the image, its visible patches, the prediction."""

    help = (
        "hidden patches of images as a network predicts them that was pretrained to do "
        "so, on one sheet"
    )
    reads = "images"

    def missing(self, loaded):
        if loaded.pictures is not None:
            return self.of_any_size(
                loaded, "its task hides patches of images of one size"
            )
        return (
            "the weights include no task that predicts images: give the workdir of a "
            "run of masked_patch, mae or simmim, or a file of MAE with its decoder"
        )

    def start(self, loaded, batch_size=0, other=None):
        self.loaded, self._names, self._batches = loaded, [], []

    def draw_batch(self, batch):
        self._names += batch.names
        self._batches.append(self.loaded.draw_task(batch.pixels[0]))
        return ()

    def draw(self):
        images = {
            name: np.concatenate([batch[name] for batch in self._batches])
            for name in self._batches[0]
        }
        rows = zip(*images.values(), strict=True)
        drawing = analysis.charts.draw_tiles(
            [tile for row in rows for tile in row],
            len(images),
            title=f"{self.loaded.name}: reconstruction",
            captions=[name.replace("_", " ") for name in images],
            tile_width=1.6,
        )
        data = images | {"images": np.array(self._names)}
        yield Picture(drawing, data)
