"""Principal components of the first filters (arXiv:2010.11929, figure 7 left)."""

import numpy as np

from vit_jax import analysis
from vit_jax.analysis.figures.figure import Figure, Picture
from vit_jax.errors import UserError

_COLUMNS = 7  # Number of columns in the paper's figure.


class Filters(Figure):
    """The components in rows, each below its fraction of the variance."""

    help = "principal components of the first filters"

    def missing(self, loaded):
        try:
            analysis.embeddings.first_kernel(loaded.params)
        except UserError as error:
            return str(error)
        return ""

    def draw(self):
        embeddings = analysis.embeddings
        kernel = embeddings.first_kernel(self.loaded.params)
        components, explained = embeddings.principal_components(kernel)
        tiles = embeddings.components_to_intensities(components)
        if tiles.shape[-1] != 3:
            tiles = tiles.mean(-1, keepdims=True)
        drawing = analysis.charts.draw_tiles(
            list((255 * tiles).round().astype(np.uint8)),
            min(_COLUMNS, len(components)),
            title=f"{self.loaded.name}: components of the first filters, with their variance",
            captions=[f"{fraction:.1%}" for fraction in explained],
            tile_width=0.8,
        )
        data = {"components": components, "explained": explained, "kernels": kernel}
        yield Picture(drawing, data)
