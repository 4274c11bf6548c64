"""A Vision Transformer whose heads learn a temperature: a block with another attention."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.config.fields import key
from vit_jax.models import variants
from vit_jax.models.encoder import Block
from vit_jax.models.layers import MultiHeadAttention
from vit_jax.models.varied import VariedConfig


class TemperedAttention(MultiHeadAttention):
    """Attention whose logits have a learnt factor per head, 1 at first."""

    def attend(self, q, k, v, positions):
        logarithm = self.param("temperature", nn.initializers.zeros, (self.num_heads,))
        factor = jnp.exp(logarithm).reshape(1, -1, 1, 1).astype(q.dtype)
        return super().attend(factor * q, k, v, positions)


class TemperedBlock(Block):
    attention_kind = TemperedAttention


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemperedConfig(VariedConfig):
    """A Vision Transformer with a temperature per head."""

    base: str = key("Ti/16", "Size of the network and of its patches.")

    block = TemperedBlock

    @property
    def numbers(self):
        return variants.parse(self.base)
