"""Vision Transformers with a convolutional stem (arXiv:2106.14881).

Convolutions of 3x3 with stride 2 take the place of most of the patch's side: "C+S/16" has
four, and patches of one feature each. Each is followed by a norm over its features, where
the paper has BatchNorm, and a ReLU. The paper leaves one block out, so that the costs
stay equal: `depth=11`. Letters: B images, Y by X pixels, C channels, D features.
"""

import dataclasses

import flax.linen as nn
from jaxtyping import Array, Float

from vit_jax.config.fields import key
from vit_jax.errors import UserError
from vit_jax.models.vit import ViTConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvStemConfig(ViTConfig):
    """ViTs with a convolutional stem, as `C+S/16`"""

    encoder_stride = 0  # Features of the stem cannot be edited as patches can.

    stem_widths: tuple[int, ...] = key(
        (0,),
        "Features of each convolution; (0,): they double up to the model's width, one "
        "convolution for each factor of 2 in the side of a patch.",
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
        return self.patch_size // 2 ** len(self.stem_widths)

    def sized(self) -> "ConvStemConfig":
        """See `NetworkConfig.sized`."""
        config = super().sized()
        if any(config.stem_widths):
            return config
        halvings = (config.patch_size & -config.patch_size).bit_length() - 1
        widths = (config.width // 2**i for i in reversed(range(halvings)))
        return dataclasses.replace(config, stem_widths=tuple(widths))

    def build(self, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
        if min(self.stem_widths, default=0) < 1:
            raise UserError(
                f"model.stem_widths={self.stem_widths} must be one width above 0 or more"
            )
        if self.patch_size % 2 ** len(self.stem_widths):
            raise UserError(
                f"model.stem_widths={self.stem_widths} are {len(self.stem_widths)} "
                f"convolutions, which do not halve patches of {self.patch_size} pixels as "
                "often: leave some out, or change model.variant"
            )
        return super().build(num_classes, image_shape)

    def stem(self, images: Float[Array, "B Y X C"]) -> Float[Array, "B y x D"]:
        """Returns the features of the convolutions; call it in a compact method."""
        x = images
        for i in self._stages:
            conv = nn.Conv(
                self.stem_widths[i],
                (3, 3),
                strides=2,
                padding=1,
                use_bias=False,  # The norm has one.
                dtype=self.dtype,
                name=f"stem_conv_{i}",
            )
            x = nn.relu(self.norm(name=f"stem_norm_{i}")(conv(x)))
        return x
