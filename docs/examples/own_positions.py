"""A Vision Transformer whose patches know their distance to the centre of the image."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from vit_jax.config.fields import key
from vit_jax.models import variants
from vit_jax.models.positions.added import AddedPosition
from vit_jax.models.varied import VariedConfig


class Rings(AddedPosition):
    """A learnt vector for each whole distance to the centre, in patches."""

    def embedding(self, param, places=None):
        if places is not None:
            raise NotImplementedError("images of one size have rings")
        rows, columns = np.indices(self.grid, dtype=float)
        Y, X = self.grid
        ring = np.hypot(rows - (Y - 1) / 2, columns - (X - 1) / 2).round().astype(int)
        shape = (ring.max() + 1, self.config.width)
        vectors = param("rings", nn.initializers.normal(0.02), shape)
        return self.pad_prefix(jnp.asarray(vectors)[ring.reshape(1, -1)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingsConfig(VariedConfig):
    """A Vision Transformer whose positions are rings."""

    base: str = key("Ti/16", "Size of the network and of its patches.")

    positions = (Rings,)

    @property
    def numbers(self):
        return variants.parse(self.base)
