"""Patch embeddings for patches of other sizes (FlexiViT, arXiv:2212.08013, section 3.4).

Letters: P and p side of a patch in pixels, before and after, C channels, D model width.
"""

import numpy as np
from jaxtyping import Array, Float

from vit_jax.models import resizing
from vit_jax.models.layers import PatchEmbedding

# Method of `resizing.RESIZE_METHODS` to the library that resizes patches by it.
METHODS = {"bilinear_plain": "big_vision", "bicubic": "timm"}
DEFAULT = "bilinear_plain"  # Of FlexiViT's authors.


def resize_patch_kernel(
    kernel: Float[np.ndarray, "P P C D"] | Float[Array, "P P C D"],
    patch: int,
    method: str = DEFAULT,
) -> Float[np.ndarray, "p p C D"] | Float[Array, "p p C D"]:
    """Resizes a patch embedding so that resized patches have the same output.

    This is the pseudo-inverse of the patches' resize (PI-resize): exact if patches grow,
    optimal in the least-squares sense if they shrink.

    Args:
      kernel: kernel of the patch embedding; NumPy stays NumPy.
      patch: p.
      method: how patches are resized, one of METHODS.
    """
    P, _, C, D = kernel.shape
    # The resize of a square is a Kronecker product, and so is its pseudo-inverse.
    matrix = np.linalg.pinv(resizing.resize_matrix(method, P, patch).T)
    flat = resizing.resample(kernel.reshape(P, P, C * D), matrix, matrix)
    return flat.reshape(patch, patch, C, D)


class ResizedPatchEmbedding(PatchEmbedding):
    """Embeds patches of another side than that of its parameters.

    Attributes:
      patch: side of a patch in pixels.
      resize: how patches are resized, one of METHODS.
    """

    patch: int = 0
    resize: str = DEFAULT

    def kernel(
        self, kernel: Float[Array | np.ndarray, "P P C D"]
    ) -> Float[Array | np.ndarray, "p p C D"]:
        if self.patch == self.side:
            return kernel
        return resize_patch_kernel(kernel, self.patch, self.resize)
