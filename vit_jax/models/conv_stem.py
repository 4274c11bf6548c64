"""Vision Transformers with a convolutional stem (arXiv:2106.14881).

Convolutions of 3x3 pixels reduce the resolution before the patch embedding: "C+S/16"
has four convolutions of stride 2, and its patches are single cells of their output.
Each convolution is followed by a norm over its features (BatchNorm in the paper) and a
ReLU. The paper removes one block of the encoder to keep the cost equal: `depth=11`.
Letters: B images, Y by X pixels, C channels, D features.
"""

import dataclasses
import math

import flax.linen as nn
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models.varied import VariedConfig


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

    @property
    def before_blocks(self) -> tuple[str, ...]:
        """See `NetworkConfig`."""
        names = (f"stem_{part}_{i}" for i in self._stages for part in ("conv", "norm"))
        return (*super().before_blocks, *names)

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
            x = nn.relu(self.norm(name=f"stem_norm_{i}")(conv(x)))
        return x
