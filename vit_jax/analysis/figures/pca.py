"""Principal components of patch features as colours (arXiv:2304.07193, figure 1)."""

import numpy as np

from vit_jax import analysis
from vit_jax.analysis.figures.figure import Figure, Picture


class PCA(Figure):
    """One sheet per image: the image, and its patches in the colours of three components.

    The components are computed from all images together, so that similar parts have the
    same colour in every image (section 7.5).
    """

    help = (
        "three principal components of patch features as colours, computed from all "
        "images together (DINOv2's figure)"
    )
    reads = "images"

    def missing(self, loaded):
        return "" if loaded.model.has_patch_features else "no features of patches"

    def start(self, loaded, batch_size=0, other=None):
        self.loaded, self._shown = loaded, []

    def draw_batch(self, batch):
        features = self.loaded.patch_features(batch.pixels[0])
        self._shown += zip(batch.stems, batch.pixels[0], features, strict=True)
        return ()

    def draw(self):
        representations = analysis.representations
        features = [of_image for *_, of_image in self._shown]
        grids = [of_image.shape[:2] for of_image in features]
        components, shares = representations.project(
            np.concatenate(
                [of_image.reshape(-1, of_image.shape[-1]) for of_image in features]
            )
        )
        colours = representations.to_intensities(components)
        ends = np.cumsum([rows * columns for rows, columns in grids])[:-1]
        for (stem, pixels, _), grid, *coloured in zip(
            self._shown,
            grids,
            np.split(components, ends),
            np.split(colours, ends),
            strict=True,
        ):
            values, tile = (of_image.reshape(*grid, 3) for of_image in coloured)
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
