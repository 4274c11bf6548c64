"""ConvMixer (arXiv:2201.09792), whose BatchNorm has running means: a network with state."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.config.fields import key
from vit_jax.models import NetworkConfig
from vit_jax.models.layers import classify


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvMixerConfig(NetworkConfig):
    """Patches, then residual blocks of depthwise and pointwise convolutions."""

    width: int = key(64, "Features per patch.", at_least=1)
    depth: int = key(4, "Residual blocks.", at_least=1)
    patch_size: int = key(4, "Side of a patch in pixels.", at_least=1)
    kernel_size: int = key(5, "Side of the depthwise kernels.", at_least=1)
    momentum: float = key(0.9, "Part of the running means kept per step.", below=1)

    def build(self, num_classes, image_shape):
        return ConvMixer(self, num_classes)


class ConvMixer(nn.Module):
    config: ConvMixerConfig
    num_classes: int

    @nn.compact
    def __call__(self, images, *, train=False):
        c = self.config

        def normalized(x, name):
            norm = nn.BatchNorm(
                use_running_average=not train,
                momentum=c.momentum,
                dtype=c.dtype,
                name=name,
            )
            return norm(nn.gelu(x))

        sides, square = (c.patch_size,) * 2, (c.kernel_size,) * 2
        embed = nn.Conv(c.width, sides, sides, dtype=c.dtype, name="embedding")
        x = normalized(embed(images), "norm")
        for i in range(c.depth):
            spatial = nn.Conv(
                c.width,
                square,
                feature_group_count=c.width,
                dtype=c.dtype,
                name=f"spatial_{i}",
            )
            x = x + normalized(spatial(x), f"spatial_norm_{i}")
            channels = nn.Conv(c.width, (1, 1), dtype=c.dtype, name=f"channels_{i}")
            x = normalized(channels(x), f"channels_norm_{i}")
        features = x.astype(jnp.float32).mean((1, 2))
        return classify(features, self.num_classes, c.head_bias_init)
