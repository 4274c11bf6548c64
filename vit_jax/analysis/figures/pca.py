"""Principal components of patch features as colours (arXiv:2304.07193, figure 1)."""

import numpy as np

from vit_jax import analysis
from vit_jax.analysis.figures.figure import Figure, Picture


class PCA(Figure):
    """One sheet per image: the image, and its patches in the colours of three components.

    The components are those of all images of a batch together, so that similar parts
    have the same colour in each (section 7.5).
    """

    help = (
        "three principal components of patch features as colours, for all images "
        "together (DINOv2's figure)"
    )
    reads = "images"

    def missing(self, loaded):
        return "" if loaded.model.has_patch_features else "no features of patches"

    def draw_batch(self, batch):
        representations = analysis.representations
        features = self.loaded.patch_features(batch.pixels[0])
        components, shares = representations.project(features)
        colours = representations.to_intensities(components)
        for stem, pixels, tile, values in zip(
            batch.stems, batch.pixels[0], colours, components, strict=True
        ):
            tile = representations.enlarge(tile, pixels.shape[:2])
            drawing = analysis.charts.draw_tiles(
                [pixels, np.rint(255 * tile).astype(np.uint8)],
                2,
                title=f"{self.loaded.name}: components of patch features",
                captions=["image", f"3 components, {sum(shares):.0%} of the variance"],
                tile_width=2.4,
            )
            data = {"components": values, "shares": shares, "image": pixels}
            yield Picture(drawing, data, stem)
