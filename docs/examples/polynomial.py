"""A polynomial learning rate schedule (DeepLab, arXiv:1606.00915, equation 3)."""

import dataclasses

from vit_jax.config.fields import key
from vit_jax.training.schedules import ScheduleConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolynomialConfig(ScheduleConfig):
    """A power of the share of the run that is left."""

    power: float = key(0.9, "Exponent; 1 is a straight line.", above=0)

    def build(self, peak, warmup, run):
        steps = max(1, run.total_steps - warmup)
        return lambda step: peak * (1 - step / steps) ** self.power
