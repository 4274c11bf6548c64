"""From config to optax: schedule, optimiser, weight decay, clipping, freezing."""

import itertools
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from vit_jax import config as configuration
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.training import layer_decay

Number = jax.Array | float
Schedule = Callable[[jax.Array | int], Number]


def peak_rate(config: ConfigDict) -> float:
    """Returns the highest learning rate of a run."""
    return config.optim.rate or config.optim.rate_per_256 * config.batch_size / 256


def schedule(
    config: ConfigDict,
    total_steps: int,
    steps_per_epoch: float,
    peak: Number | None = None,
) -> Schedule:
    """Builds the learning rate as a function of the step.

    Args:
      config: complete config; `config.optim` and `batch_size` are read.
      total_steps: length of the run.
      steps_per_epoch: training examples by batch size.
      peak: in place of `peak_rate(config)`; it may be an argument of a jitted function.

    Returns:
      Function from the steps already taken to the rate of the next one: linear from 0
      over the warmup, then the decay over the rest of the run.

    Raises:
      UserError: the warmup, or warmup and cooldown, are longer than the run, or
        `boundaries` are not in order between the warmup and the end.
    """
    optim = config.optim
    peak = peak_rate(config) if peak is None else peak
    warmup = configuration.steps(optim, "warmup", total_steps, steps_per_epoch)
    rest = total_steps - warmup
    if rest < 0:
        raise UserError(
            f"the warmup takes {warmup} steps but the run only {total_steps}: lower "
            f"{_stated(config, 'warmup')}"
        )
    if optim.decay == "constant":
        decay = optax.constant_schedule(peak)
    elif optim.decay == "linear":
        decay = optax.linear_schedule(peak, optim.end_rate, max(1, rest))
    elif optim.decay == "cosine":
        decay = optax.cosine_decay_schedule(
            peak, max(1, rest), alpha=optim.end_rate / peak
        )
    elif optim.decay == "staircase":
        decay = _staircase(peak, optim.boundaries, optim.factor, warmup, total_steps)
    else:
        cooldown = configuration.steps(optim, "cooldown", total_steps, steps_per_epoch)
        if cooldown > rest:
            raise UserError(
                f"warmup ({warmup} steps) and cooldown ({cooldown}) are longer than the "
                f"run ({total_steps}): lower {_stated(config, 'cooldown')}"
            )
        decay = _rsqrt(peak, optim.timescale, cooldown, rest)
    ramp = optax.linear_schedule(0.0, peak, max(1, warmup))
    return optax.join_schedules([ramp, decay], [warmup])


def _staircase(
    peak: Number,
    boundaries: Sequence[int],
    factor: float,
    warmup: int,
    total_steps: int,
) -> Schedule:
    """Constant rate, multiplied by `factor` at each boundary."""
    stairs = [warmup, *boundaries, total_steps]
    if any(a >= b for a, b in itertools.pairwise(stairs)):
        raise UserError(
            f"optim.boundaries={tuple(boundaries)} must ascend between the end of the "
            f"warmup ({warmup}) and that of the run ({total_steps})"
        )
    return optax.piecewise_constant_schedule(
        peak, {step - warmup: factor for step in boundaries}
    )


def _stated(config: ConfigDict, name: str) -> str:
    """Names the key that states a part's length, and the one that states the run's."""
    units = (f"{name}_steps", f"{name}_epochs", f"{name}_fraction")
    part = next(unit for unit in units if config.optim.get(unit))
    return f"optim.{part} or raise {'epochs' if config.epochs else 'total_steps'}"


def _rsqrt(peak: Number, timescale: int, cooldown: int, rest: int) -> Schedule:
    """Reciprocal square root with a linear cooldown to 0 (arXiv:2106.04560)."""

    def rate(steps_after_warmup):
        rate = peak / jnp.sqrt(1 + steps_after_warmup / timescale)
        left = (rest - steps_after_warmup) / max(1, cooldown)
        return rate * jnp.clip(left, 0, 1) if cooldown else rate

    return rate


def optimizer(
    config: ConfigDict,
    params: dict,
    rate: Schedule,
    total_steps: int,
    steps_per_epoch: float,
) -> optax.GradientTransformation:
    """Builds the optimiser.

    Args:
      config: complete config; `config.optim` is read.
      params: model parameters, as arrays or shapes, in either layout of the blocks.
      rate: from `schedule`.
      total_steps: length of the run.
      steps_per_epoch: training examples by batch size.

    Returns:
      optax transformation: clipping, Adam or momentum, weight decay that is decoupled
      from the loss and multiplied by the scheduled rate, the rate, its decay from layer
      to layer, freezing.

    Raises:
      UserError: a regular expression of `decay_mask` or `freeze` matches no parameter,
        or `layer_decay` is set for a model without blocks.
    """
    optim = config.optim
    chain = []
    if optim.clip_norm:
        chain.append(optax.clip_by_global_norm(optim.clip_norm))
    dtype = optim.moment_dtype
    if optim.name == "adam":
        chain.append(
            optax.scale_by_adam(b1=optim.b1, b2=optim.b2, eps=optim.eps, mu_dtype=dtype)
        )
    elif optim.momentum:
        chain.append(
            optax.trace(
                decay=optim.momentum, nesterov=optim.nesterov, accumulator_dtype=dtype
            )
        )
    if optim.weight_decay:
        mask = match(params, optim.decay_mask, "optim.decay_mask")
        chain.append(_decay(optim.weight_decay, mask))
    chain.append(optax.scale_by_learning_rate(rate))
    if optim.layer_decay:
        chain.append(layer_decay.scale(params, optim.layer_decay))
    if optim.freeze:
        mask = match(params, optim.freeze, "optim.freeze")
        until = configuration.steps(optim, "freeze", total_steps, steps_per_epoch)
        # After the rest, so that weight decay does not move them either. What is frozen
        # for good is hidden from clipping and moments too; what will move needs
        # moments that are warm, or Adam's first free steps are several times too long.
        gate = _freeze(mask, until)
        chain = [*chain, gate] if until else [gate, *chain, gate]
    return optax.chain(*chain)


def hold(params: dict, config: ConfigDict) -> dict:
    """Lets no gradient reach what is frozen for the whole run.

    So it costs no backward pass either. What is frozen for a part of the run keeps its
    gradients, which warm its moments.

    Args:
      params: model parameters.
      config: complete config; `config.optim` is read.

    Returns:
      The same parameters.
    """
    optim = config.optim
    units = ("freeze_steps", "freeze_epochs", "freeze_fraction")
    if not optim.freeze or any(optim[unit] for unit in units):
        return params
    return jax.tree.map(
        lambda p, m: jax.lax.stop_gradient(p) if np.all(m) else p,
        params,
        match(params, optim.freeze, "optim.freeze"),
    )


def match(params: dict, patterns: Sequence[str], name: str) -> dict:
    """Marks the parameters whose path matches any of the regular expressions.

    Args:
      params: nested dict of arrays or shapes; a path is
        "Transformer/encoderblock_0/.../kernel", also where blocks are stacked.
      patterns: searched for, not anchored.
      name: config key that holds them, for the message.

    Returns:
      Nested dict of bools; of stacked blocks that are not alike, an array that
      broadcasts against the parameter.

    Raises:
      UserError: an expression matches nothing, or is not a regular expression.
    """
    paths = []
    stacking.map_paths(params, paths.append)
    for pattern in patterns:
        try:
            matched = any(re.search(pattern, path) for path in paths)
        except re.error as error:
            raise UserError(
                f"{name}: {pattern!r} is not a regular expression ({error})"
            ) from error
        if not matched:
            raise UserError(
                f"{name}: {pattern!r} matches none of the {len(paths)} parameters, "
                f"such as {paths[0]}"
            )
    return stacking.map_paths(
        params, lambda path: any(re.search(p, path) for p in patterns)
    )


def _decay(weight: float, mask: dict) -> optax.GradientTransformation:
    """Adds `weight` times what is masked of the parameters."""
    plain = optax.add_decayed_weights(weight, jax.tree.map(np.any, mask))

    def update(updates, state, params):
        updates = jax.tree.map(
            lambda u, p, m: u + weight * p * m if np.any(m) else u,
            updates,
            params,
            mask,
        )
        return updates, state

    return optax.GradientTransformation(plain.init, update)


def _freeze(mask: dict, until: int) -> optax.GradientTransformation:
    """Zeroes what is masked for `until` steps, or always if that is 0."""

    def update(updates, state, params=None):
        del params
        frozen = jnp.asarray(True) if not until else state.count < until
        updates = jax.tree.map(
            lambda u, m: jnp.where(frozen & m, 0, u) if np.any(m) else u,
            updates,
            mask,
        )
        return updates, optax.ScaleByScheduleState(state.count + 1)

    def init(params):
        del params
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    return optax.GradientTransformation(init, update)
