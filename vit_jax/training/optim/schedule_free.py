"""Schedule-free optimisers (arXiv:2405.15682): steps of one sequence, scores of its mean.

optax's functions wrap Adam or SGD. Here the same wraps the whole chain, so that weight
decay, layer decay and freezing act on the sequence z that steps, as its authors have it.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from vit_jax.config.fields import key
from vit_jax.training.optim.sharpness import OptimConfig
from vit_jax.training.schedules import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleFreeBase(OptimConfig):
    """SGD without momentum; see `OutsideConfig` for the attributes."""

    function: ClassVar[Callable[..., optax.GradientTransformation]]
    left_out: ClassVar[tuple[str, ...]] = ()
    has_average: ClassVar[bool] = True

    b1: float = key(
        0.9,
        "Weight of the mean of the steps in the parameters at which the gradient is "
        "taken.",
        above=0,
        below=1,
    )

    def moments(self) -> list[optax.GradientTransformation]:
        return []

    def wrap(
        self, chain: list[optax.GradientTransformation], rate: Schedule
    ) -> list[optax.GradientTransformation]:
        return [
            optax.contrib.schedule_free(
                optax.chain(*chain),
                # It counts from 1, and the chain from 0.
                learning_rate=lambda step: rate(step - 1),
                b1=self.b1,
                weight_lr_power=self.weight_lr_power,
            )
        ]

    def evaluated(self, opt_state: optax.OptState, params: dict) -> dict:
        is_one = lambda node: isinstance(node, optax.contrib.ScheduleFreeState)
        state = next(filter(is_one, jax.tree.leaves(opt_state, is_leaf=is_one)))
        means = optax.contrib.schedule_free_eval_params(state, params)
        # Where the two sequences are equal, as for frozen parameters, so is the mean, which
        # rounding may change.
        exact = lambda mean, y, z: jnp.where(y == z, y, mean)
        return jax.tree.map(exact, means, params, state.z)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleFreeAdamBase(ScheduleFreeBase):
    """Adam without momentum."""

    def moments(self) -> list[optax.GradientTransformation]:
        return [
            optax.scale_by_rms(
                self.b2, self.eps, eps_in_sqrt=False, bias_correction=True
            )
        ]
