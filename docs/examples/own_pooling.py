"""A Vision Transformer with generalised mean pooling (GeM, arXiv:1711.02512)."""

import dataclasses

import jax.numpy as jnp

from vit_jax.config.fields import key
from vit_jax.models import variants
from vit_jax.models.varied import VariedConfig


def generalized_mean(config, x, weights=None):
    """Returns the generalised mean of the patches, of positive features alone."""
    patches = x[:, len(config.prefix_tokens) :].astype(jnp.float32)
    powers = jnp.maximum(patches, 1e-6) ** config.power
    means = powers.mean(1) if weights is None else weights.means(powers)
    return means ** (1 / config.power)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeneralizedMeanConfig(VariedConfig):
    """A Vision Transformer whose pooling lies between the mean and the maximum."""

    base: str = key("Ti/16", "Size of the network and of its patches.")
    pool: str = key("gap", "No class token.", choices=("gap",))
    power: float = key(3.0, "1 is the mean, a large number the maximum.", above=0)

    pooling = staticmethod(generalized_mean)

    @property
    def numbers(self):
        return variants.parse(self.base)
