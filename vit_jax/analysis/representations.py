"""Representations of the layers: CKA, norms of tokens, components of patch features.

Letters: n images of a batch, F and G features, L and M layers, B images, N tokens,
D width, P or Y by X patches, Q quantiles.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.analysis.loaded_model import check_finite
from vit_jax.errors import UserError

MIN_CKA_IMAGES = 4  # The unbiased HSIC divides by n - 3.

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
OUTLIER_FACTOR = 3.0  # An outlier's norm is at least this multiple of the median.
_COLOUR_PERCENTILES = 2, 98  # Of a component; they map to 0 and full intensity.
_BINS_PER_OCTAVE = 32  # Makes bins 2.2 % wide.
_MIN_OCTAVE, _MAX_OCTAVE = -20, 20  # Norms outside 2**-20 to 2**20 go to the end bins.


def check_num_cka_images(num_images: int) -> None:
    """Raises UserError if there are too few images for CKA."""
    if num_images < MIN_CKA_IMAGES:
        raise UserError(
            f"images={num_images}: too few to compare layers (cka); give "
            f"{MIN_CKA_IMAGES} or more"
        )


def linear_cka(x: Float[np.ndarray, "n F"], y: Float[np.ndarray, "n G"]) -> float:
    """Returns the linear CKA of two representations of the same images.

    This is ||y'x||^2 / (||x'x|| ||y'y||) for centred features (Kornblith et al.,
    arXiv:1905.00414, section 3). The estimate is biased: for more features than images
    it is near 1 for any two representations; use `MinibatchCKA` there.

    Returns:
      A number from 0 to 1; 0 if a representation is constant.
    """
    x, y = (v.astype(np.float64) - v.mean(0, dtype=np.float64) for v in (x, y))
    similarity = np.linalg.norm(y.T @ x) ** 2
    norms = np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)
    return float(similarity / norms) if norms else 0.0


def gram_matrix(features: Float[np.ndarray, "n ..."]) -> Float[np.ndarray, "n n"]:
    """Returns the inner products of the features of all pairs of images.

    Args:
      features: features of any shape per image. They are flattened, so a token is
        compared with the token at the same position of another image.
    """
    flat = np.asarray(features, np.float64).reshape(len(features), -1)
    # HSIC ignores constant offsets; removing them first increases precision.
    flat = flat - flat.mean(0)
    return flat @ flat.T


def unbiased_hsic(x: Float[np.ndarray, "n n"], y: Float[np.ndarray, "n n"]) -> float:
    """Returns the unbiased estimate of the Hilbert-Schmidt independence criterion.

    Args:
      x, y: Gram matrices of the same images, at least MIN_CKA_IMAGES of them.

    Source: Song et al., "Feature Selection via Dependence Maximization" (JMLR 2012),
      equation 5.
    """
    n = len(x)
    x, y = (matrix - np.diag(np.diag(matrix)) for matrix in (x, y))
    total = (x * y).sum() - 2 * (x.sum(0) @ y.sum(0)) / (n - 2)
    total += x.sum() * y.sum() / ((n - 1) * (n - 2))
    return float(total / (n * (n - 3)))


class MinibatchCKA:
    """Linear CKA between all pairs of layers, accumulated over batches of images.

    HSIC estimates are averaged over batches before the division, so the result depends
    neither on the batch size nor on the number of features (Nguyen et al.,
    arXiv:2010.15327, section 3.1).

    Attributes:
      num_images: number of images added so far.
    """

    def __init__(self) -> None:
        self._hsic_xy = self._hsic_xx = self._hsic_yy = 0.0
        self.num_images = 0

    def update(
        self,
        x: Sequence[Float[np.ndarray, "n n"]],
        y: Sequence[Float[np.ndarray, "n n"]],
    ) -> None:
        """Adds a batch.

        Args:
          x, y: `gram_matrix` of each layer of two networks, for the same images. To
            compare the layers of one network, pass the same list twice.

        Raises:
          UserError: the batch has fewer than MIN_CKA_IMAGES images.
        """
        n = len(x[0])
        check_num_cka_images(n)
        # Batches are weighted by their number of images.
        self._hsic_xy += n * np.array([[unbiased_hsic(a, b) for b in y] for a in x])
        self._hsic_xx += n * np.array([unbiased_hsic(a, a) for a in x])
        self._hsic_yy += n * np.array([unbiased_hsic(b, b) for b in y])
        self.num_images += n

    def compute(self) -> Float[np.ndarray, "L M"]:
        """Returns the CKA of each layer of x with each layer of y.

        Raises:
          UserError: there were no images.
        """
        check_num_cka_images(self.num_images)
        hsic_xx, hsic_yy = (np.maximum(v, 0) for v in (self._hsic_xx, self._hsic_yy))
        norms = np.sqrt(hsic_xx[:, None] * hsic_yy)
        safe = np.where(norms > 0, norms, 1)
        return np.where(norms > 0, self._hsic_xy / safe, 0)


def token_norms(tokens: Float[Array, "B N D"]) -> Float[Array, "B N"]:
    """Returns the Euclidean norm of each token."""
    return jnp.linalg.norm(tokens, axis=-1)


class NormHistogram:
    """Distribution of the norms of patch tokens per layer, over any number of images.

    A few tokens may grow far beyond the others. Such outliers store information about
    the whole image in patches of little content (Darcet et al., "Vision Transformers
    Need Registers", arXiv:2309.16588). Norms are counted in bins that are 2.2 % wide,
    so memory does not grow with the number of images. Results have one row per layer,
    and no rows before the first images.
    """

    def __init__(self) -> None:
        self._counts: list[np.ndarray | int] = []
        self._max: list[float] = []

    def update(self, norms: Sequence[Float[np.ndarray, "B P"]]) -> None:
        """Adds images.

        Args:
          norms: norms of the patch tokens after each layer.

        Raises:
          UserError: a norm is not finite.
        """
        if not self._counts:
            self._counts, self._max = [0] * len(norms), [0.0] * len(norms)
        edges = _bin_edges()
        for i, layer_norms in enumerate(norms):
            check_finite(layer_norms, f"the norm of a token after layer {i + 1}")
            known = np.clip(layer_norms, edges[0], edges[-1])
            self._counts[i] += np.histogram(known, edges)[0]
            self._max[i] = max(self._max[i], float(np.max(layer_norms)))

    def quantiles(
        self, fractions: Sequence[float] = QUANTILES
    ) -> Float[np.ndarray, "L Q"]:
        """Returns quantiles of the norms, interpolated within bins."""
        return np.array([_quantiles(counts, fractions) for counts in self._counts])

    def max(self) -> Float[np.ndarray, " L"]:
        """Returns the exact largest norm of each layer."""
        return np.array(self._max)

    def outlier_fraction(
        self, factor: float = OUTLIER_FACTOR
    ) -> Float[np.ndarray, " L"]:
        """Returns the fraction of tokens whose norm is at least `factor` medians."""
        edges = _bin_edges()[:-1]
        medians = self.quantiles((0.5,))
        return np.array(
            [
                counts[edges >= factor * median].sum() / counts.sum()
                for counts, (median,) in zip(self._counts, medians, strict=True)
            ]
        )


def project(
    features: Float[np.ndarray, "... D"],
) -> tuple[Float[np.ndarray, "... 3"], Float[np.ndarray, " 3"]]:
    """Returns the three strongest principal components, and their variance fractions.

    The sign of each is chosen so that the sum of its cubes is not negative. The same
    features therefore give the same colours on every machine.

    Args:
      features: features of at least 3 patches.
    """
    rows = features.reshape(-1, features.shape[-1]).astype(np.float64)
    rows -= rows.mean(0)
    left, sizes, _ = np.linalg.svd(rows, full_matrices=False)
    components = left[:, :3] * sizes[:3]
    components *= np.where((components**3).sum(0) < 0, -1, 1)
    shares = np.square(sizes) / max(np.square(sizes).sum(), np.finfo(float).tiny)
    shape = (*features.shape[:-1], 3)
    return components.reshape(shape).astype(np.float32), shares[:3].astype(np.float32)


def to_intensities(
    components: Float[np.ndarray, "... 3"],
) -> Float[np.ndarray, "... 3"]:
    """Returns each component rescaled to [0, 1], over all patches."""
    every = components.reshape(-1, 3)
    low, high = np.percentile(every, _COLOUR_PERCENTILES, axis=0)
    return ((components - low) / np.maximum(high - low, 1e-12)).clip(0, 1)


def enlarge(
    values: Float[np.ndarray, "y x D"], size: Sequence[int]
) -> Float[np.ndarray, "Y X D"]:
    """Returns the values of patches at a larger size, constant within each patch."""
    rows, columns = (
        np.arange(to) * count // to
        for to, count in zip(size, values.shape[:2], strict=True)
    )
    return values[rows][:, columns]


def _bin_edges() -> np.ndarray:
    num_bins = _BINS_PER_OCTAVE * (_MAX_OCTAVE - _MIN_OCTAVE)
    return 2.0 ** np.linspace(_MIN_OCTAVE, _MAX_OCTAVE, num_bins + 1)


def _quantiles(counts, fractions) -> np.ndarray:
    """Returns quantiles of a histogram, interpolated linearly within bins."""
    shares, edges = counts / counts.sum(), _bin_edges()
    sums = shares.cumsum()
    # Rounding may make the last sum slightly smaller than 1.
    bins = np.searchsorted(sums, np.minimum(fractions, sums[-1]))
    position = (fractions - (sums[bins] - shares[bins])) / shares[bins]
    return edges[bins] + (edges[bins + 1] - edges[bins]) * np.clip(position, 0, 1)
