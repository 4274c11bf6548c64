"""Learned vectors for the offset of two tokens (arXiv:2010.11929, appendix D.4).

The products of these vectors with the query are added to the attention logits.
"""

import math

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.errors import UserError
from vit_jax.models.positions.base import Position


class Relative(Position):
    """A learned vector per head for each offset in the sequence, 1 - N to N - 1."""

    of_pairs = True

    @classmethod
    def describe(cls, config):
        return "model.posemb='relative'"

    @staticmethod
    def check(config):
        if config.posemb_placement == "stem":
            raise UserError(
                "model.posemb_placement='stem' with model.posemb='relative', which is "
                "used in the attention of each layer: set model.posemb_placement to "
                "'every' or 'shared'"
            )

    def by_block(self, module, places=None, keys=()):
        config = self.config
        N = self.num_prefix_tokens + math.prod(self.grid)
        shape = (config.num_heads, 2 * N - 1, config.width // config.num_heads)
        init = nn.initializers.normal(0.02)

        def table(end):
            name = f"relative_embedding{end}"
            vectors = module.param(name, init, shape, jnp.float32)
            return {"relative": vectors.astype(config.dtype)}

        if config.posemb_placement == "every":
            return [table(f"_{i}") for i in range(config.depth)]
        return [table("")] * config.depth
