"""Vision Transformers with a convolutional stem (arXiv:2106.14881).

Convolutions of 3x3 pixels reduce the resolution before the patch embedding: "C+S/16"
has four convolutions of stride 2, and its patches are single cells of their output.
Each convolution is followed by a norm and a ReLU. The paper has BatchNorm, and removes one
block of the encoder to keep the cost equal: `depth=11`.
Letters: B images, Y by X pixels, C channels, D features.
"""

import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models.network import STATE
from vit_jax.models.varied import VariedConfig

# Correlations in photographs: of neighbouring pixels, and of channels of a pixel.
_PIXELS, _CHANNELS = 0.95, 0.93
_VARIANCE = 0.25  # Of a pixel between -1 and 1.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvStemConfig(VariedConfig):
    """ViTs with a convolutional stem, such as `C+S/16`"""

    encoder_stride = 0  # Features of the stem cannot be edited like patches.

    stem_widths: tuple[int, ...] = key(
        (0,),
        "Features of each convolution of the stem. With (0,) there is one convolution "
        "for each factor of 2 in the patch size, and the features double up to the "
        "width of the model.",
        below=2**31,
    )
    stem_strides: tuple[int, ...] = key(
        (0,),
        "Stride of each convolution of the stem; (0,) is a stride of 2 for all.",
        below=2**31,
    )
    stem_norm: str = key(
        "layer",
        'Norm after each convolution of the stem: "layer" is the norm of the blocks, '
        '"batch" is BatchNorm.',
        choices=("layer", "batch"),
    )
    stem_whitening: int = key(
        0,
        "Side in pixels of the windows that a fixed convolution of stride 1 whitens before "
        "the stem: its outputs and their negatives pass a ReLU. 0 has no such convolution.",
        below=32,
    )

    @property
    def before_blocks(self) -> tuple[str, ...]:
        """See `NetworkConfig`."""
        names = (f"stem_{part}_{i}" for i in self._stages for part in ("conv", "norm"))
        return (*super().before_blocks, *names)

    @property
    def has_state(self) -> bool:
        """See `NetworkConfig`; the means of BatchNorm."""
        return self.stem_norm == "batch"

    @property
    def _stages(self) -> range:
        return range(len(self.stem_widths))

    @property
    def patch_side(self) -> int:
        return self.patch_size // math.prod(self.stem_strides)

    def sized(self) -> "ConvStemConfig":
        """See `NetworkConfig.sized`."""
        config = super().sized()
        widths, strides = config.stem_widths, config.stem_strides
        if not any(widths):
            halvings = (config.patch_size & -config.patch_size).bit_length() - 1
            widths = tuple(config.width // 2**i for i in reversed(range(halvings)))
        if not any(strides):
            strides = (2,) * len(widths)
        return dataclasses.replace(config, stem_widths=widths, stem_strides=strides)

    def build(self, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        if min(self.stem_widths, default=0) < 1:
            raise UserError(
                f"model.stem_widths={self.stem_widths}: set one or more widths above 0"
            )
        if (
            len(self.stem_strides) != len(self.stem_widths)
            or min(self.stem_strides) < 1
        ):
            raise UserError(
                f"model.stem_strides={self.stem_strides}: set one stride of at least 1 for "
                f"each of model.stem_widths={self.stem_widths}"
            )
        if self.patch_size % math.prod(self.stem_strides):
            raise UserError(
                f"model.stem_strides={self.stem_strides}: their product does not divide "
                f"the patch size of {self.patch_size} pixels: use fewer convolutions, or "
                "change model.variant"
            )
        return super().build(num_classes, image_shape)

    def stem(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B y x D"]:
        """Returns the features of the convolutions; call it in a compact method."""
        x = images
        if side := self.stem_whitening:
            kernel = jnp.asarray(whitening(side, images.shape[-1]), self.dtype)
            kernel = jnp.concatenate([kernel, -kernel], axis=-1)
            x = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = nn.relu(x)
        norm = self.norm
        if self.stem_norm == "batch":
            norm = functools.partial(BatchNorm, momentum=0.9, dtype=self.dtype)
        for i in self._stages:
            conv = nn.Conv(
                self.stem_widths[i],
                (3, 3),
                strides=self.stem_strides[i],
                padding=1,
                use_bias=False,  # The norm has a bias.
                dtype=self.dtype,
                name=f"stem_conv_{i}",
            )
            x = nn.relu(norm(name=f"stem_norm_{i}")(conv(x)))
        return x


def whitening(side: int, channels: int) -> np.ndarray:
    """Returns a kernel that whitens windows of photographs.

    Each output is a product of cosines over rows, columns and channels (a discrete cosine
    transform, in colours grey, red minus blue, and green minus the others), divided by its
    standard deviation where correlations of pixels fall exponentially with their distance.
    Such products are close to the principal components of photographs, so no images are
    needed. Whitening before the first convolution is from arXiv:2404.00498, where the
    components are those of the training images.

    Args:
      side: of a window, in pixels.
      channels: of an image with pixels between -1 and 1.

    Returns:
      Float32 array of shape (side, side, channels, side * side * channels).
    """
    places = np.arange(side)
    rows, of_rows = _cosines(_PIXELS ** np.abs(places[:, None] - places))
    colors, of_colors = _cosines(np.where(np.eye(channels, dtype=bool), 1.0, _CHANNELS))
    variances = _VARIANCE * np.einsum("a,b,c->abc", of_rows, of_rows, of_colors)
    kernel = np.einsum("ya,xb,zc->yxzabc", rows, rows, colors)
    # Small components of an image are mostly noise.
    kernel /= np.sqrt(variances + 5e-3)
    return kernel.reshape(side, side, channels, -1).astype(np.float32)


def _cosines(covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the orthonormal cosines over its places as columns, and their variances."""
    n = len(covariance)
    places = np.arange(n)
    basis = np.cos(np.pi / n * np.outer(places + 0.5, places))
    basis /= np.linalg.norm(basis, axis=0)
    return basis, np.einsum("ia,ij,ja->a", basis, covariance, basis)


class BatchNorm(nn.BatchNorm):
    """A BatchNorm that uses the batch wherever its running means can change.

    `Model.apply_and_update` alone lets them change, so layers in between do not pass on
    whether they train.
    """

    def __call__(self, x: Float[Array, "B Y X D"]) -> Float[Array, "B Y X D"]:
        fixed = not self.is_mutable_collection(STATE)
        return super().__call__(x, use_running_average=fixed)
