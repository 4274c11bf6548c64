"""Patch embeddings for patches of other sizes (FlexiViT, arXiv:2212.08013, section 3.4).

Letters: P and p side of a patch in pixels, before and after, C channels, D model width.
"""

import numpy as np
from jaxtyping import Array, Float

from vit_jax.models import resizing
from vit_jax.models.layers import PatchEmbedding

# Methods of `resizing.RESIZE_METHODS` for patches -> library that uses this method.
METHODS = {"bilinear_plain": "big_vision", "bicubic": "timm"}
DEFAULT = "bilinear_plain"  # Method of FlexiViT's authors.


def resize_patch_kernel(
    kernel: Float[np.ndarray, "P P C D"] | Float[Array, "P P C D"],
    patch: int,
    method: str = DEFAULT,
) -> Float[np.ndarray, "p p C D"] | Float[Array, "p p C D"]:
    """Resizes a patch embedding so that resized patches have the same output.

    The kernel is multiplied by the pseudo-inverse of the resize of patches (PI-resize),
    which is exact if patches grow, and optimal in the least-squares sense if they
    shrink.

    Args:
      kernel: kernel of the patch embedding; NumPy arrays stay NumPy arrays.
      patch: side p of the new patches in pixels.
      method: method of resizing patches, one of METHODS.
    """
    P, _, C, D = kernel.shape
    # The resize of a square is a Kronecker product, and so is its pseudo-inverse.
    matrix = np.linalg.pinv(resizing.resize_matrix(method, P, patch).T)
    flat = resizing.resample(kernel.reshape(P, P, C * D), matrix, matrix)
    return flat.reshape(patch, patch, C, D)


class ResizedPatchEmbedding(PatchEmbedding):
    """A patch embedding for patches of another size than its kernel.

    Attributes:
      patch: side of a patch in pixels.
      resize: method of resizing patches, one of METHODS.
    """

    patch: int = 0
    resize: str = DEFAULT

    def kernel(
        self, kernel: Float[Array | np.ndarray, "P P C D"]
    ) -> Float[Array | np.ndarray, "p p C D"]:
        if self.patch == self.side:
            return kernel
        return resize_patch_kernel(kernel, self.patch, self.resize)
