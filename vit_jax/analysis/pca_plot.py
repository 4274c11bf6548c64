"""Principal components of patch features as colours, as in DINOv2's figure 1."""

from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Float

from vit_jax.analysis import canvas
from vit_jax.analysis.canvas import Picture, UniqueStems
from vit_jax.analysis.loaded_model import Batch, LoadedModel
from vit_jax.errors import UserError

_PERCENTILES = 2, 98  # Of a component, which become 0 and full intensity.


class PCAPlot:
    """One sheet per image: the image, and its patches in the colours of three components.

    The components are those of all images of a batch together, so that parts that are alike
    have the same colour in each (arXiv:2304.07193, section 7.5).

    Args:
      loaded: a model with features of patches.
      stems: file names.

    Raises:
      UserError: the model has none.
    """

    def __init__(self, loaded: LoadedModel, stems: UniqueStems):
        if not loaded.model.has_patch_features:
            raise UserError(
                f"--figure=pca: {loaded.name} has no features of patches: leave it out"
            )
        self._loaded, self._stems = loaded, stems
        self._features = jax.jit(loaded.model.patch_features)

    def draw(self, batch: Batch) -> Iterator[Picture]:
        """Draws the sheets of a batch."""
        images = self._loaded.normalize(batch.pixels[0])
        features = np.asarray(self._features(self._loaded.params, images))
        components, shares = project(features)
        colours = to_intensities(components)
        for name, pixels, tile, values in zip(
            batch.names, batch.pixels[0], colours, components, strict=True
        ):
            figure = canvas.draw_tiles(
                [pixels.repeat(3 // pixels.shape[-1], -1), _enlarge(tile, pixels)],
                2,
                title=f"{self._loaded.name}: components of patch features",
                captions=["image", f"3 components, {sum(shares):.0%} of the variance"],
                tile_width=2.4,
            )
            arrays = {"components": values, "shares": shares, "image": pixels}
            yield Picture(f"pca/{self._stems.stem(name)}", figure, arrays)


def project(
    features: Float[np.ndarray, "B Y X D"],
) -> tuple[Float[np.ndarray, "B Y X 3"], Float[np.ndarray, " 3"]]:
    """Returns the three strongest components, and their shares of the variance.

    Each has the sign with which the sum of its cubes is not negative, so that the same
    features give the same colours on every machine.

    Args:
      features: of D, at least 3.
    """
    rows = features.reshape(-1, features.shape[-1]).astype(np.float64)
    rows -= rows.mean(0)
    left, sizes, _ = np.linalg.svd(rows, full_matrices=False)
    found = left[:, :3] * sizes[:3]
    found *= np.where((found**3).sum(0) < 0, -1, 1)
    shares = np.square(sizes) / max(np.square(sizes).sum(), np.finfo(float).tiny)
    shape = (*features.shape[:-1], 3)
    return found.reshape(shape).astype(np.float32), shares[:3].astype(np.float32)


def to_intensities(
    components: Float[np.ndarray, "B Y X 3"],
) -> Float[np.ndarray, "B Y X 3"]:
    """Returns each component from 0 to 1, over all images."""
    low, high = np.percentile(components, _PERCENTILES, axis=(0, 1, 2))
    return ((components - low) / np.maximum(high - low, 1e-12)).clip(0, 1)


def _enlarge(tile: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    """Returns a tile of patches in the shape of an image, uint8."""
    rows, columns = (
        np.arange(to) * size // to
        for to, size in zip(pixels.shape[:2], tile.shape[:2], strict=True)
    )
    return np.rint(255 * tile[rows][:, columns]).astype(np.uint8)
