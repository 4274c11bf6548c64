"""What the first layer looks for (arXiv:2010.11929, figure 7 left).

Letters: K components, Y by X pixels, C channels, D filters.
"""

import numpy as np
from jaxtyping import Float

from vit_jax.analysis import finite
from vit_jax.models import Params

COUNT = 28  # Components, as in the paper.


def kernels(params: Params) -> Float[np.ndarray, "Y X C D"]:
    """Returns the filters that act on pixels.

    They are those of the patch embedding, or of the root convolution where a ResNet
    comes first, as in hybrids.

    Args:
      params: of any network.
    """
    if "root_block" in params:
        found = params["root_block"]["conv_root"]
    else:
        found = params.get("conv_root", params.get("embedding"))
    return np.asarray(found["kernel"], np.float32)


def components(
    kernels: Float[np.ndarray, "Y X C D"], count: int = COUNT
) -> tuple[Float[np.ndarray, "K Y X C"], Float[np.ndarray, " K"]]:
    """Returns the principal components of filters.

    Args:
      kernels: the filters.
      count: of components; fewer where there are not as many.

    Returns:
      Components of length 1, the largest variance first, each of the sign that makes
      its largest entry positive; and the fractions of the filters' variance that they
      explain.

    Raises:
      UserError: the filters are not finite.
    """
    finite.check(kernels, "the first kernel")
    flat = kernels.reshape(-1, kernels.shape[-1]).T.astype(np.float64)
    flat -= flat.mean(0)
    _, sizes, rows = np.linalg.svd(flat, full_matrices=False)
    variance = sizes**2
    share = variance / variance.sum() if variance.any() else variance
    rows = rows[:count]
    largest = np.take_along_axis(rows, abs(rows).argmax(1)[:, None], axis=1)
    rows = rows * np.where(largest < 0, -1, 1)
    shape = (len(rows), *kernels.shape[:3])
    return rows.reshape(shape).astype(np.float32), share[:count].astype(np.float32)


def tiles(components: Float[np.ndarray, "K Y X C"]) -> Float[np.ndarray, "K Y X C"]:
    """Scales each component to 0 to 1, so that 0 becomes the middle grey."""
    largest = abs(components).max(axis=(1, 2, 3), keepdims=True)
    return 0.5 + 0.5 * components / np.where(largest > 0, largest, 1)
