"""A small ConvNet: patches, then residual blocks of depthwise and pointwise layers."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.config.fields import key
from vit_jax.models import NetworkConfig
from vit_jax.models.layers import classify


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvNetConfig(NetworkConfig):
    """ConvMixer (arXiv:2201.09792) with LayerNorm."""

    width: int = key(64, "Features per patch.", at_least=1)
    depth: int = key(4, "Residual blocks.", at_least=1)
    patch_size: int = key(4, "Side of a patch in pixels.", at_least=1)
    dropout: float = key(0.0, "Rate before the classifier.", below=1)

    def build(self, num_classes, image_shape):
        return ConvNet(self, num_classes)


class ConvNet(nn.Module):
    config: ConvNetConfig
    num_classes: int

    @nn.compact
    def __call__(self, images, *, train=False):
        c = self.config
        sides = (c.patch_size, c.patch_size)
        embed = nn.Conv(c.width, sides, sides, dtype=c.dtype, name="embedding")
        x = nn.gelu(embed(images))
        for i in range(c.depth):
            spatial = nn.Conv(
                c.width,
                (5, 5),
                feature_group_count=c.width,
                dtype=c.dtype,
                name=f"spatial_{i}",
            )
            x = x + nn.gelu(spatial(nn.LayerNorm(dtype=c.dtype)(x)))
            x = nn.gelu(nn.Dense(c.width, dtype=c.dtype, name=f"channels_{i}")(x))
        features = x.astype(jnp.float32).mean((1, 2))
        features = nn.Dropout(c.dropout, deterministic=not train)(features)
        return classify(features, self.num_classes, c.head_bias_init)
