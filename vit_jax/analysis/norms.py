"""Lengths of tokens, layer by layer: a few may grow far beyond the others.

Such outliers hold what concerns the whole image in patches of little content (Darcet et
al., "Vision Transformers Need Registers", arXiv:2309.16588).
Letters: B images, N tokens, D width, P patches, L layers, Q quantiles.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.analysis import finite
from vit_jax.errors import UserError

QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
OUTLIER = 3.0  # Times the median.
_FINE = 32  # Bins for a factor of two: 2.2 % each.
_LEAST, _MOST = -20, 20  # Powers of two that have bins.


def lengths(tokens: Float[Array, "B N D"]) -> Float[Array, "B N"]:
    """Returns the Euclidean norm of each token."""
    return jnp.linalg.norm(tokens, axis=-1)


class Distribution:
    """How long the patches' tokens of each layer are, over any number of images.

    Kept are counts of lengths in bins of 2.2 %, not the lengths.
    """

    def __init__(self) -> None:
        self._counts: list[np.ndarray] = []
        self._longest: list[float] = []

    def add(self, norms: Sequence[Float[np.ndarray, "B P"]]) -> None:
        """Adds images: the lengths of each layer's patches.

        Raises:
          UserError: one of them is not finite.
        """
        if not self._counts:
            self._counts = [np.zeros(_FINE * (_MOST - _LEAST), int) for _ in norms]
            self._longest = [0.0] * len(norms)
        for i, of_layer in enumerate(norms):
            finite.check(of_layer, f"the length of a token after layer {i + 1}")
            powers = np.log2(np.maximum(of_layer, 2.0**_LEAST)).ravel()
            bins = ((powers - _LEAST) * _FINE).astype(int)
            np.add.at(self._counts[i], np.minimum(bins, len(self._counts[i]) - 1), 1)
            self._longest[i] = max(self._longest[i], float(np.max(of_layer)))

    def quantiles(
        self, fractions: Sequence[float] = QUANTILES
    ) -> Float[np.ndarray, "L Q"]:
        """Returns lengths that these fractions of the tokens do not reach.

        Raises:
          UserError: there were no images.
        """
        return np.array([_quantiles(counts, fractions) for counts in self._known()])

    def longest(self) -> Float[np.ndarray, " L"]:
        """Returns the greatest length of each layer, exactly."""
        self._known()
        return np.array(self._longest)

    def beyond(self, times: float = OUTLIER) -> Float[np.ndarray, " L"]:
        """Returns the fraction of each layer's tokens beyond so many medians."""
        edges = _edges()[:-1]
        medians = self.quantiles((0.5,))
        return np.array(
            [
                counts[edges >= times * median].sum() / counts.sum()
                for counts, (median,) in zip(self._known(), medians, strict=True)
            ]
        )

    def _known(self):
        if not self._counts:
            raise UserError("there are no images whose tokens were measured: give some")
        return self._counts


def _edges() -> np.ndarray:
    return 2.0 ** np.linspace(_LEAST, _MOST, _FINE * (_MOST - _LEAST) + 1)


def _quantiles(counts, fractions) -> np.ndarray:
    """Returns quantiles, linear within a bin."""
    shares, edges = counts / counts.sum(), _edges()
    sums = shares.cumsum()
    # The last sum may be a hair below 1.
    bins = np.searchsorted(sums, np.minimum(fractions, sums[-1]))
    inside = (fractions - (sums[bins] - shares[bins])) / shares[bins]
    return edges[bins] + (edges[bins + 1] - edges[bins]) * np.clip(inside, 0, 1)
