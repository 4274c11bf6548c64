"""Schedule-free optimisers (arXiv:2405.15682), which evaluate a mean of the iterates.

optax's functions wrap only Adam or SGD. Here optax's wrapper is applied to the whole
chain, so that weight decay, layer decay and freezing act on the iterates z, as in the
authors' code.
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
    """Schedule-free SGD; see `OutsideConfig` for the attributes."""

    function: ClassVar[Callable[..., optax.GradientTransformation]]
    left_out: ClassVar[tuple[str, ...]] = ()
    has_average: ClassVar[bool] = True

    b1: float = key(
        0.9,
        "Weight of the mean of the iterates in the parameters at which the gradient is "
        "computed (beta in the paper).",
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
                # optax's wrapper counts steps from 1, the chain from 0.
                learning_rate=lambda step: rate(step - 1),
                b1=self.b1,
                weight_lr_power=self.weight_lr_power,
            )
        ]

    def evaluated(self, opt_state: optax.OptState, params: dict) -> dict:
        is_one = lambda node: isinstance(node, optax.contrib.ScheduleFreeState)
        state = next(filter(is_one, jax.tree.leaves(opt_state, is_leaf=is_one)))
        means = optax.contrib.schedule_free_eval_params(state, params)
        # If y and z are equal, as for frozen parameters, the mean is equal too, but
        # rounding may change it.
        exact = lambda mean, y, z: jnp.where(y == z, y, mean)
        return jax.tree.map(exact, means, params, state.z)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleFreeAdamBase(ScheduleFreeBase):
    """Schedule-free Adam."""

    def moments(self) -> list[optax.GradientTransformation]:
        return [
            optax.scale_by_rms(
                self.b2, self.eps, eps_in_sqrt=False, bias_correction=True
            )
        ]
