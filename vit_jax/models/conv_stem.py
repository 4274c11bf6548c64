"""Vision Transformers with a convolutional stem (arXiv:2106.14881).

Convolutions of 3x3 take the place of most of the patch's side: "C+S/16" has four of stride
2, and patches of one feature each. Each is followed by a norm over its features, where
the paper has BatchNorm, and a ReLU. The paper leaves one block out, so that the costs
stay equal: `depth=11`. Letters: B images, Y by X pixels, C channels, D features.
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
    """ViTs with a convolutional stem, as `C+S/16`"""

    encoder_stride = 0  # Features of the stem cannot be edited as patches can.

    stem_widths: tuple[int, ...] = key(
        (0,),
        "Features of each convolution of the stem. (0,): they double up to the width "
        "of the model, with one convolution for each factor of 2 in the side of a "
        "patch.",
        below=2**31,
    )
    stem_strides: tuple[int, ...] = key(
        (0,), "Stride of each convolution of the stem; (0,) is 2 for all.", below=2**31
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
                f"model.stem_widths={self.stem_widths} must be one width above 0 or more"
            )
        if (
            len(self.stem_strides) != len(self.stem_widths)
            or min(self.stem_strides) < 1
        ):
            raise UserError(
                f"model.stem_strides={self.stem_strides} must be one stride of 1 or more "
                f"for each of model.stem_widths={self.stem_widths}"
            )
        if self.patch_size % math.prod(self.stem_strides):
            raise UserError(
                f"model.stem_strides={self.stem_strides} do not divide patches of "
                f"{self.patch_size} pixels: leave some convolutions out, or change "
                "model.variant"
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
                use_bias=False,  # The norm has one.
                dtype=self.dtype,
                name=f"stem_conv_{i}",
            )
            x = nn.relu(self.norm(name=f"stem_norm_{i}")(conv(x)))
        return x
