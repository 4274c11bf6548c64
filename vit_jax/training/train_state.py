"""The state that a step changes, and its initialisation."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax

Leaf = Any  # An array, or what a tree of them is mapped to: a shape, a sharding.


@flax.struct.dataclass
class TrainState:
    """The state of a run, which checkpoints hold.

    Attributes:
      step: optimiser steps taken, int32.
      params: nested dict, float32.
      opt_state: state of the optax transformation.
      average: Polyak average of `params`, or None.
      extra: arrays of the task beside the parameters, or None.
      key: typed PRNG key of the run; every draw is a function of it and the step.
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
    tx: optax.GradientTransformation,
    *,
    seed: int,
    average: bool,
) -> TrainState:
    """Builds the state before the first step; call it under jit with shardings."""
    return TrainState(
        step=jnp.zeros([], jnp.int32),
        params=params,
        opt_state=tx.init(params),
        average=jax.tree.map(jnp.copy, params) if average else None,
        extra=extra,
        key=run_key(seed),
    )


def run_key(seed: int) -> jax.Array:
    """Returns the key from which a run's transforms and dropout are drawn."""
    return jax.random.fold_in(jax.random.key(seed), 1)


def update_ema(
    old: dict, params: dict, step: jax.Array, decay: float, warmup: bool
) -> dict:
    """Returns the Polyak average after a step.

    Args:
      old: average before the step.
      params: parameters after the step.
      step: steps taken, this one included.
      decay: weight of the old average.
      warmup: whether the first steps use less, (1 + step) / (10 + step), so that a short
        run is not stuck at its initial values.
    """
    if warmup:
        decay = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda a, p: a + (1 - decay) * (p - a), old, params)
