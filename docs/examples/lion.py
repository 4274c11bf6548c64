"""The Lion optimiser (arXiv:2302.06675)."""

import dataclasses

import optax

from vit_jax.config.fields import key
from vit_jax.training.optim import OptimConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LionConfig(OptimConfig):
    """Signs of an interpolated momentum."""

    b1: float = key(0.9, "Weight of the momentum in a step.", below=1)
    b2: float = key(0.99, "Decay of the momentum per step.", below=1)

    def moments(self):
        return [optax.scale_by_lion(self.b1, self.b2, mu_dtype=self.mu_dtype)]
