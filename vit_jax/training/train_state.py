"""The training state and its initialisation."""

from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax

from vit_jax.training.config import EmaConfig

Leaf = Any  # An array, or a shape or sharding in trees of those.


@flax.struct.dataclass
class TrainState:
    """The state of a run, which checkpoints store.

    Attributes:
      step: number of optimiser steps taken, int32.
      params: parameters, nested dict of float32 arrays.
      opt_state: state of the optax transformation.
      average: Polyak average of `params`, or None.
      extra: arrays of the task beside the parameters, or None.
      key: typed PRNG key of the run; every draw is a function of this key and the step.
    """

    step: Leaf
    params: dict
    opt_state: optax.OptState
    average: Leaf | dict | None  # A `Leaf` in trees that JAX fills with placeholders.
    extra: Leaf | dict | None
    key: Leaf


def init_key(seed: int) -> jax.Array:
    """Returns the key from which a run's initial parameters are drawn."""
    return jax.random.fold_in(jax.random.key(seed), 0)


def create_train_state(
    params: dict,
    extra: Leaf | dict | None,
    init_optimizer: Callable[[dict], optax.OptState],
    *,
    seed: int,
    average: bool,
) -> TrainState:
    """Builds the state before the first step; call it under jit with shardings.

    Args:
      params: initial parameters.
      extra: arrays of the task beside the parameters, or None.
      init_optimizer: function from parameters to the initial optimiser state.
      seed: seed of the run.
      average: whether the state has a Polyak average.
    """
    return TrainState(
        step=jnp.zeros([], jnp.int32),
        params=params,
        opt_state=init_optimizer(params),
        average=jax.tree.map(jnp.copy, params) if average else None,
        extra=extra,
        key=run_key(seed),
    )


def run_key(seed: int) -> jax.Array:
    """Returns the key from which a run's transforms and dropout are drawn."""
    return jax.random.fold_in(jax.random.key(seed), 1)


def update_average(
    old: dict | None, params: dict, step: jax.Array, ema: EmaConfig
) -> dict | None:
    """Returns the Polyak average after a step; None if the state does not have one.

    Args:
      old: average before the step, or None.
      params: parameters after the step.
      step: number of steps taken, including this one.
      ema: section `ema` of the config. If its decay is 0, the result is `params`.
    """
    if old is None or not ema.decay:
        return None if old is None else params
    decay = ema.decay
    if ema.warmup:  # Without it, the average of a short run is mostly its start.
        decay = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda a, p: a + (1 - decay) * (p - a), old, params)
