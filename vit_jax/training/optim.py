"""From config to optax: schedule, optimiser, weight decay, clipping, freezing."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.config.fields import epochs, key
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.training import layer_decay

Number = jax.Array | float
Schedule = Callable[[jax.Array | int], Number]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """What `config.optim` states of every optimiser."""

    name: str = key("adam", '"adam" or "sgd".')
    rate: float = key(0.0, "Peak learning rate: this ...", in_step=False)
    rate_per_256: float = key(
        0.0, "... or this, times batch_size / 256.", in_step=False
    )
    decay: str = key(
        "cosine",
        'Of the rate: "cosine", "linear", "rsqrt", "staircase" or "constant".',
        choices=("linear", "cosine", "rsqrt", "constant", "staircase"),
    )
    end_rate: float = key(
        0.0,
        "Where the decay ends, one step after the last.",
        only_if={"decay": ("linear", "cosine")},
    )
    timescale: int = key(
        10_000,
        "In steps: peak / sqrt(1 + steps after warmup / timescale), at the end linearly "
        "to 0.",
        at_least=1,
        only_if={"decay": ("rsqrt",)},
    )
    cooldown_steps: int = key(
        0,
        "The way to 0 in steps; 0 in all units is none.",
        only_if={"decay": ("rsqrt",)},
    )
    cooldown_epochs: float = epochs(
        "The same in epochs, or else ...", only_if={"decay": ("rsqrt",)}
    )
    cooldown_fraction: float = key(
        0.0, "... as a fraction of the run.", only_if={"decay": ("rsqrt",)}
    )
    boundaries: tuple[int, ...] = key(
        (0,),
        "Steps at which the rate falls ...",
        only_if={"decay": ("staircase",)},
    )
    factor: float = key(
        0.1, "... to this part of what it was.", only_if={"decay": ("staircase",)}
    )
    warmup_steps: int = key(0, "Linear warmup in steps, or else ...")
    warmup_epochs: float = epochs("... in epochs, or else ...")
    warmup_fraction: float = key(0.0, "... as a fraction of the run.")
    weight_decay: float = key(0.0, "Decoupled from the loss, times the scheduled rate.")
    decay_mask: tuple[str, ...] = key(
        (r"/kernel$",), "Regular expressions: what weight decay touches."
    )
    layer_decay: float = key(
        0.0, "Rate of a layer by that of the one above it; 0 is off.", at_most=1
    )
    clip_norm: float = key(0.0, "Largest global gradient norm; 0 is off.")
    accumulate: int = key(1, "Microbatches a step.", at_least=1, changes_result=False)
    moment_dtype: str = key(
        "float32",
        "Of Adam's first moment, SGD's momentum; or \"bfloat16\".",
        choices=("float32", "bfloat16"),
    )
    freeze: tuple[str, ...] = key(
        (), "Regular expressions: parameters that do not move ..."
    )
    freeze_steps: int = key(0, "... for so many steps; all three 0: the whole run.")
    freeze_epochs: float = epochs("The same in epochs, or else ...")
    freeze_fraction: float = key(0.0, "... as a fraction of the run.")

    def __post_init__(self):
        if bool(self.rate) == bool(self.rate_per_256):
            raise UserError(
                f"config states optim.rate={self.rate} and optim.rate_per_256="
                f"{self.rate_per_256}: set exactly one of them"
            )

    def peak_rate(self, batch_size: int) -> float:
        """Returns the highest learning rate of a run."""
        return self.rate or self.rate_per_256 * batch_size / 256

    def moments(self) -> list[optax.GradientTransformation]:
        """Returns what makes a direction of the gradients."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamConfig(OptimConfig):
    """Adam (arXiv:1412.6980)."""

    b1: float = key(0.9, "Decay of the mean of gradients, a step.", below=1)
    b2: float = key(0.999, "Decay of the mean of their squares, a step.", below=1)
    eps: float = key(1e-8, "Added to the root of that, by which steps are divided.")

    def moments(self) -> list[optax.GradientTransformation]:
        return [
            optax.scale_by_adam(
                b1=self.b1, b2=self.b2, eps=self.eps, mu_dtype=self.moment_dtype
            )
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgdConfig(OptimConfig):
    """SGD with momentum."""

    name: str = key("sgd", '"adam" or "sgd".')
    momentum: float = key(
        0.9, "Decay of the sum of gradients, a step; 0 is plain SGD.", below=1
    )
    nesterov: bool = key(False, "Looks ahead along the momentum.")

    def moments(self) -> list[optax.GradientTransformation]:
        if not self.momentum:
            return []
        return [
            optax.trace(
                decay=self.momentum,
                nesterov=self.nesterov,
                accumulator_dtype=self.moment_dtype,
            )
        ]


OPTIMIZERS = {"adam": AdamConfig, "sgd": SgdConfig}


def schedule(
    optim: OptimConfig,
    peak: Number,
    total_steps: int,
    steps_per_epoch: float,
    length_key: str = "total_steps",
) -> Schedule:
    """Builds the learning rate as a function of the step.

    Args:
      optim: `config.optim`.
      peak: highest rate, see `OptimConfig.peak_rate`; it may be an argument of a jitted
        function.
      total_steps: length of the run.
      steps_per_epoch: training examples by batch size.
      length_key: what states the length of the run, for messages.

    Returns:
      Function from the steps already taken to the rate of the next one: linear from 0
      over the warmup, then the decay over the rest of the run.

    Raises:
      UserError: the warmup, or warmup and cooldown, are longer than the run, or
        `boundaries` are not in order between the warmup and the end.
    """
    warmup = steps(optim, "warmup", total_steps, steps_per_epoch)
    rest = total_steps - warmup
    if rest < 0:
        raise UserError(
            f"the warmup takes {warmup} steps but the run only {total_steps}: lower "
            f"{_stated(optim, 'warmup')} or raise {length_key}"
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
        cooldown = steps(optim, "cooldown", total_steps, steps_per_epoch)
        if cooldown > rest:
            raise UserError(
                f"warmup ({warmup} steps) and cooldown ({cooldown}) are longer than the "
                f"run ({total_steps}): lower {_stated(optim, 'cooldown')} or raise {length_key}"
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


def _stated(optim: OptimConfig, name: str) -> str:
    """Names the key that states a part's length."""
    return "optim." + next(unit for unit in _units(name) if getattr(optim, unit))


def _units(name: str) -> tuple[str, str, str]:
    return f"{name}_steps", f"{name}_epochs", f"{name}_fraction"


def steps(
    optim: OptimConfig, name: str, total_steps: int, steps_per_epoch: float
) -> int:
    """Returns a length in steps that is stated as steps, epochs or a fraction.

    Args:
      optim: `config.optim`, with `{name}_steps`, `{name}_epochs` and `{name}_fraction`.
      name: which length: "warmup", "cooldown" or "freeze".
      total_steps: length of the run.
      steps_per_epoch: training examples by batch size.

    Raises:
      UserError: more than one of them is set.
    """
    factors = dict(zip(_units(name), (1, steps_per_epoch, total_steps), strict=True))
    given = {unit: getattr(optim, unit) for unit in factors if getattr(optim, unit)}
    if len(given) > 1:
        stated = " and ".join(f"{unit}={value}" for unit, value in given.items())
        raise UserError(
            f"config states {stated}: keep one of them, set the others to 0"
        )
    return sum(max(1, round(value * factors[unit])) for unit, value in given.items())


def _rsqrt(peak: Number, timescale: int, cooldown: int, rest: int) -> Schedule:
    """Reciprocal square root with a linear cooldown to 0 (arXiv:2106.04560)."""

    def rate(steps_after_warmup):
        rate = peak / jnp.sqrt(1 + steps_after_warmup / timescale)
        left = (rest - steps_after_warmup) / max(1, cooldown)
        return rate * jnp.clip(left, 0, 1) if cooldown else rate

    return rate


def optimizer(
    optim: OptimConfig,
    params: dict,
    rate: Schedule,
    total_steps: int,
    steps_per_epoch: float,
) -> optax.GradientTransformation:
    """Builds the optimiser.

    Args:
      optim: `config.optim`.
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
    chain = []
    if optim.clip_norm:
        chain.append(optax.clip_by_global_norm(optim.clip_norm))
    chain += optim.moments()
    if optim.weight_decay:
        mask = match(params, optim.decay_mask, "optim.decay_mask")
        chain.append(_decay(optim.weight_decay, mask))
    chain.append(optax.scale_by_learning_rate(rate))
    if optim.layer_decay:
        chain.append(layer_decay.scale(params, optim.layer_decay))
    if optim.freeze:
        mask = match(params, optim.freeze, "optim.freeze")
        until = steps(optim, "freeze", total_steps, steps_per_epoch)
        # After the rest, so that weight decay does not move them either. What is frozen
        # for good is hidden from clipping and moments too; what will move needs
        # moments that are warm, or Adam's first free steps are several times too long.
        gate = _freeze(mask, until)
        chain = [*chain, gate] if until else [gate, *chain, gate]
    return optax.chain(*chain)


def hold(params: dict, optim: OptimConfig) -> dict:
    """Lets no gradient reach what is frozen for the whole run.

    So it costs no backward pass either. What is frozen for a part of the run keeps its
    gradients, which warm its moments.

    Args:
      params: model parameters.
      optim: `config.optim`.

    Returns:
      The same parameters.
    """
    if not optim.freeze or any(getattr(optim, unit) for unit in _units("freeze")):
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
