"""Builds the optimiser chain: clipping, steps, layer decay and freezing."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.config.lengths import RunLength, length_in_steps, length_key
from vit_jax.errors import UserError
from vit_jax.models import NetworkConfig, stacking
from vit_jax.training.optim.config import GradFn, Moving
from vit_jax.training.optim.sharpness import OptimConfig
from vit_jax.training.optim.transforms import (
    Decay,
    always_frozen,
    clip_by_parameter_norm,
    clip_by_part_norm,
    decayed,
    match,
    matched_factors,
)
from vit_jax.training.schedules import Number, Schedule


class Optimizer(NamedTuple):
    """An optimiser as the training step uses it.

    Attributes:
      init: (params) -> initial optimiser state.
      update: (gradients, metrics, state, batch, key) -> (updates, next optimiser
        state); the gradients were computed from this training state, batch and key.
      rate: (steps taken) -> learning rate.
      moving: (gradients, steps taken) -> gradients with zeros for parameters that are
        frozen in the next step.
      wrap: gradient function of the loss -> gradient function for the optimiser, see
        `PlainOptimConfig.wrap_gradients`.
      evaluated: (optimiser state, params) -> parameters that evaluations use.
    """

    init: Callable[[dict], optax.OptState]
    update: Callable[..., tuple[dict, optax.OptState]]
    rate: Schedule
    moving: Moving
    wrap: Callable[[GradFn], GradFn]
    evaluated: Callable[[optax.OptState, dict], dict]


def build(
    optim: OptimConfig,
    params: dict,
    peak: Number,
    run: RunLength,
    network: NetworkConfig,
    within: str | None,
    loss: Callable[..., jax.Array],
) -> Optimizer:
    """Builds the optimiser of a run.

    Args:
      optim, params, run, network, within: see `optimizer`.
      peak: highest learning rate; it may be an argument of a jitted function.
      loss: (params, extra, batch, key) -> loss, for optimisers that evaluate the loss.

    Raises:
      UserError: see `learning_rate` and `optimizer`.
    """
    rate = learning_rate(optim, peak, run)
    tx = optimizer(optim, params, rate, run, network, within)
    thawing = Thawing.of(optim, params, run)

    def update(grads, metrics, state, batch, key):
        return tx.update(
            grads,
            state.opt_state,
            state.params,
            step=state.step,
            value=metrics["loss"],
            value_fn=lambda params: loss(params, state.extra, batch, key),
        )

    moving = thawing.moving if thawing else lambda grads, step: grads
    wrap = functools.partial(
        optim.wrap_gradients, rate=rate, peak=peak, run=run, moving=moving
    )
    return Optimizer(tx.init, update, rate, moving, wrap, optim.evaluated)


def learning_rate(optim: OptimConfig, peak: Number, run: RunLength) -> Schedule:
    """Returns the learning rate as a function of the number of steps taken.

    The learning rate is linear over the warmup, then follows the schedule. A warmup that
    is longer than the run takes a tenth of it.

    Args:
      optim: section `optim`.
      peak: highest learning rate; it may be an argument of a jitted function.
      run: length of the run.

    Raises:
      UserError: the schedule does not fit the run.
    """
    warmup = length_in_steps(optim, "warmup", run)
    if warmup > run.total_steps:
        warmup = _shortened(run)
    ramp = optax.linear_schedule(
        optim.warmup_learning_rate,
        peak,
        max(1, warmup - 1 if optim.warmup_ends_at_peak else warmup),
    )
    rest = optim.schedule.build(peak, warmup, run)
    rate = optax.join_schedules([ramp, rest], [warmup])
    if not optim.schedule_by_epochs:
        return rate
    return lambda step: rate(_previous_epoch(step, run.steps_per_epoch))


def _shortened(run: RunLength) -> int:
    return -(-run.total_steps // 10)


def warmup_notes(optim: OptimConfig, run: RunLength) -> tuple[str, ...]:
    """Returns a line if the warmup is longer than the run."""
    warmup = length_in_steps(optim, "warmup", run)
    if warmup <= run.total_steps:
        return ()
    key = length_key(optim, "warmup")
    line = (
        f"optim.{key}={getattr(optim, key)} is a warmup of {warmup:,} steps, but the run "
        f"has only {run.total_steps:,}: shortened to {_shortened(run)}, a tenth of the run"
    )
    return (line,)


def _previous_epoch(step: Number, steps_per_epoch: float) -> Number:
    """Returns the first step of the epoch before that of a step; for epoch 0, step 0.

    Epoch n begins at step round(n * steps_per_epoch), like all lengths in epochs.
    """
    epoch = jnp.floor((step + 0.5) / steps_per_epoch)
    return jnp.round(jnp.maximum(epoch - 1, 0) * steps_per_epoch)


def weight_decay(optim: OptimConfig, run: RunLength) -> Number | Schedule:
    """Returns the weight decay, a number or a function of the number of steps taken."""
    start, end = optim.weight_decay, optim.weight_decay_end
    if not end:
        return start
    length = optim.weight_decay_steps or run.total_steps

    def at(step):
        part = jnp.minimum(step / length, 1)
        return end + 0.5 * (start - end) * (1 + jnp.cos(jnp.pi * part))

    return at


def optimizer(
    optim: OptimConfig,
    params: dict,
    rate: Schedule,
    run: RunLength,
    network: NetworkConfig,
    within: str | None = "",
) -> optax.GradientTransformation:
    """Builds the optimiser chain.

    The chain consists of clipping, the direction of the step with weight decay, the
    learning rate, layer decay and freezing. Weight decay is decoupled from the loss and
    multiplied by the scheduled learning rate.

    Args:
      optim: section `optim` of the config.
      params: model parameters, arrays or shapes, in either layout of the blocks.
      rate: learning rate by step, from `learning_rate`.
      run: length of the run.
      network: `Model.config`, which maps parameters to layers.
      within: path of the network's parameters in `params`. "": `params` are those of
        the network; None: `params` do not contain the network.

    Raises:
      UserError: a regular expression of `weight_decay_mask` or `freeze` matches no
        parameter, or `layer_decay` is set for a model without blocks.
    """
    chain, thawing = [], Thawing.of(optim, params, run)
    if optim.grad_clip_norm:
        clip = optax.clip_by_global_norm(optim.grad_clip_norm)
        chain.append(thawing.apart(clip) if thawing else clip)
    if optim.grad_clip_norm_per_part:
        chain.append(clip_by_part_norm(optim.grad_clip_norm_per_part))
    if optim.grad_clip_norm_per_parameter:
        chain.append(clip_by_parameter_norm(optim.grad_clip_norm_per_parameter))
    if thawing and optim.finds_step_size:
        chain.append(thawing.hidden())
    decay = None
    if optim.weight_decay or optim.weight_decay_end:
        decay = Decay(weight_decay(optim, run), decayed(params, optim))
    chain += optim.steps(params, rate, decay)
    if optim.layer_decay:
        chain.append(_scale(layer_factors(params, optim.layer_decay, network, within)))
    if optim.learning_rate_factors:
        chain.append(_scale(matched_factors(params, optim.learning_rate_factors)))
    if not optim.freeze:
        return optax.chain(*optim.wrap(chain, rate))
    mask = match(params, optim.freeze, "optim.freeze")
    # Frozen parameters are masked at the end of the chain, so that weight decay does
    # not change them either. If they stay frozen for the whole run, they are masked
    # before clipping and moments too. If they are trained later, they need warm
    # moments: otherwise Adam's first steps after that are several times too long.
    gate = _freeze(mask, thawing.until if thawing else 0)
    chain = [*chain, gate] if thawing else [gate, *chain, gate]
    wrapped = optim.wrap(chain, rate)
    # A wrapper of the chain may change frozen parameters by rounding: mask them again.
    return optax.chain(*wrapped, *([] if wrapped is chain else [gate]))


class Thawing(NamedTuple):
    """Parameters that are frozen at the start of the run and trained later.

    Their gradients are computed from the start, because moments need them. But numbers
    that affect other parameters, such as a gradient norm, must not include them.

    Attributes:
      mask: result of `match`; True marks parameters that are frozen at first.
      until: number of steps for which they are frozen.
    """

    mask: dict
    until: int

    @classmethod
    def of(cls, optim: OptimConfig, params: dict, run: RunLength) -> "Thawing | None":
        """Returns the parameters that a config freezes only at first, or None.

        Args:
          optim, params, run: see `optimizer`.
        """
        until = length_in_steps(optim, "freeze", run)
        if not (optim.freeze and until):
            return None
        return cls(match(params, optim.freeze, "optim.freeze"), until)

    def moving(self, grads: dict, step: Number) -> dict:
        """Returns gradients with zeros for parameters that are frozen at a step."""
        return _zeroed(grads, self.mask, step < self.until)

    def apart(self, clip: optax.GradientTransformation):
        """Returns a transformation that clips frozen and trained parameters separately.

        Its `update` needs the number of steps taken as the argument `step`.
        """

        def update(updates, state, params=None, *, step, **extra):
            del extra
            moving = self.moving(updates, step)
            resting = jax.tree.map(jnp.subtract, updates, moving)
            clipped = [
                clip.update(part, state, params)[0] for part in (moving, resting)
            ]
            return jax.tree.map(jnp.add, *clipped), state

        return optax.GradientTransformationExtraArgs(clip.init, update)

    def hidden(self):
        """Returns a transformation that zeroes gradients of still frozen parameters."""

        def update(updates, state, params=None, *, step, **extra):
            del params, extra
            return self.moving(updates, step), state

        return optax.GradientTransformationExtraArgs(
            lambda _: optax.EmptyState(), update
        )


def without_frozen(loss: Callable, optim: OptimConfig) -> Callable:
    """Returns a loss without gradients of parameters that are frozen for the whole run.

    This saves the backward pass of these parameters. Parameters that are frozen only at
    first keep their gradients, which their moments need.

    Args:
      loss: (params, ...) -> loss.
      optim: section `optim` of the config.
    """
    if not optim.freeze:
        return loss

    def stopped(params, *args):
        frozen = always_frozen(params, optim)
        stop = lambda p, m: jax.lax.stop_gradient(p) if np.all(m) else p
        return loss(jax.tree.map(stop, params, frozen), *args)

    return stopped


def _zeroed(updates: dict, mask: dict, frozen: jax.Array | bool) -> dict:
    """Returns updates with zeros where the mask is True, if `frozen` is True."""
    return jax.tree.map(
        lambda u, m: jnp.where(frozen & m, 0, u) if np.any(m) else u, updates, mask
    )


def _freeze(mask: dict, until: int) -> optax.GradientTransformation:
    """Zeroes masked updates for `until` steps, or always if `until` is 0."""

    def update(updates, state, params=None):
        del params
        frozen = jnp.asarray(True) if not until else state.count < until
        updates = _zeroed(updates, mask, frozen)
        return updates, optax.ScaleByScheduleState(state.count + 1)

    def init(params):
        del params
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    return optax.GradientTransformation(init, update)


def _scale(factors: dict) -> optax.GradientTransformation:
    """Multiplies updates by factors that broadcast against them."""
    return optax.stateless(
        lambda updates, _: jax.tree.map(lambda u, f: u * f, updates, factors)
    )


def layer_factors(
    params: dict, decay: float, network: NetworkConfig, within: str | None = ""
) -> dict:
    """Returns factors of the learning rate that broadcast against the parameters.

    The learning rate of a layer is `decay` times that of the layer above it, as in BEiT
    (arXiv:2106.08254) and MAE (arXiv:2111.06377, table 9). The layers from the bottom
    are the embedding of the image (including a whole ResNet) with its positions, each
    block, and the rest, which has the full learning rate. Parameters of the task
    outside the network have the full learning rate too. There are two differences to
    other code: in timm's `param_groups_layer_decay` the last norm has the rate of the
    last block, and in BEiT's code a relative bias that all blocks share has the full
    rate, while here it belongs to the embedding.

    Args:
      params: see `optimizer`.
      decay: factor between the learning rates of neighbouring layers.
      network: see `optimizer`.
      within: see `optimizer`.

    Raises:
      UserError: the network has no blocks or is not trained, or no layer rule matches a
        parameter.
    """
    if within is None:
        raise UserError(
            f"optim.layer_decay={decay}: this task does not train its network: set "
            "optim.layer_decay to 0"
        )
    last = network.num_blocks + 1
    if last == 1:
        raise UserError(
            f"optim.layer_decay={decay}: model.variant={network.variant!r} does not have "
            "the blocks of a Transformer: set optim.layer_decay to 0, or choose "
            "another variant"
        )

    prefix = within and f"{within}/"

    def factor(path):
        if not path.startswith(prefix):
            return 1.0
        layer = network.layer_of(path.removeprefix(prefix))
        if isinstance(layer, range):
            return decay ** (last - np.array(layer, float))[:, None, None, None]
        return decay ** (last - layer)

    return stacking.map_paths(params, factor)
