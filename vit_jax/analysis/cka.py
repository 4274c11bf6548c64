"""Linear centred kernel alignment: how alike the layers of networks represent images.

Letters: n images of a batch, F and G features, L and M layers.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from vit_jax.errors import UserError

LEAST = 4  # Images of a batch that the unbiased estimate takes.


def check_enough(images: int) -> None:
    """Raises UserError unless there are images enough."""
    if images < LEAST:
        raise UserError(
            f"{images} images are too few to compare layers (cka): give {LEAST} or more"
        )


def linear(x: Float[np.ndarray, "n F"], y: Float[np.ndarray, "n G"]) -> float:
    """Returns the linear CKA of two representations of the same images.

    ||y'x||^2 / (||x'x|| ||y'y||) of centred features (Kornblith et al.,
    arXiv:1905.00414, section 3); near 1 for any two where there are more features than
    images, so prefer `Alignment` there. 0 if one of them is the same for all images.
    """
    x, y = (v.astype(np.float64) - v.mean(0, dtype=np.float64) for v in (x, y))
    alike = np.linalg.norm(y.T @ x) ** 2
    sizes = np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)
    return float(alike / sizes) if sizes else 0.0


def gram(features: Float[np.ndarray, "n ..."]) -> Float[np.ndarray, "n n"]:
    """Returns the products of all pairs of images, all that CKA has to know of them.

    Args:
      features: of each image, of any shape; a token's features at one place count
        beside another image's at the same place.
    """
    flat = np.asarray(features, np.float64).reshape(len(features), -1)
    # Constant parts cancel in what follows but for rounding.
    flat = flat - flat.mean(0)
    return flat @ flat.T


def unbiased_hsic(
    one: Float[np.ndarray, "n n"], other: Float[np.ndarray, "n n"]
) -> float:
    """Returns an estimate without bias of how far two Gram matrices go together.

    Args:
      one, other: of the same n images, n at least LEAST.

    Source: Song et al., "Feature Selection via Dependence Maximization" (JMLR 2012),
      equation 5: the Hilbert-Schmidt independence criterion.
    """
    n = len(one)
    one, other = (matrix - np.diag(np.diag(matrix)) for matrix in (one, other))
    total = (one * other).sum() - 2 * (one.sum(0) @ other.sum(0)) / (n - 2)
    total += one.sum() * other.sum() / ((n - 1) * (n - 2))
    return float(total / (n * (n - 3)))


class Alignment:
    """CKA of all pairs of layers, over any number of batches of images.

    The HSIC estimates of batches are averaged before the division, so that neither the
    size of a batch nor that of the features changes what is estimated (Nguyen et al.,
    arXiv:2010.15327, section 3.1).
    """

    def __init__(self) -> None:
        self._across = self._within = None
        self.images = 0

    def add(
        self,
        one: Sequence[Float[np.ndarray, "n n"]],
        other: Sequence[Float[np.ndarray, "n n"]],
    ) -> None:
        """Adds a batch.

        Args:
          one, other: the `gram` of each layer of two networks, or twice of one, for the
            same images.

        Raises:
          UserError: there are fewer than LEAST images.
        """
        n = len(one[0])
        check_enough(n)
        across = np.array([[unbiased_hsic(a, b) for b in other] for a in one])
        within = [
            np.array([unbiased_hsic(a, a) for a in grams]) for grams in (one, other)
        ]
        if self._within is None:
            self._across, self._within = 0 * across, [0 * w for w in within]
        # A batch of more images knows more.
        self._across += n * across
        self._within = [
            w + n * more for w, more in zip(self._within, within, strict=True)
        ]
        self.images += n

    def result(self) -> Float[np.ndarray, "L M"]:
        """Returns the CKA of each layer of the one with each of the other.

        Raises:
          UserError: there were no images.
        """
        if not self.images:
            raise UserError(f"there are no images to compare layers by: give {LEAST}")
        one, other = (np.maximum(w, 0) for w in self._within)
        sizes = np.sqrt(one[:, None] * other)
        safe = np.where(sizes > 0, sizes, 1)
        return np.where(sizes > 0, self._across / safe, 0)
