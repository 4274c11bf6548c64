"""Optimisers: Adam or SGD, weight decay, clipping, layer decay, freezing."""

import dataclasses
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.config.fields import choice, epochs, key
from vit_jax.config.lengths import RunLength, length_in_steps, length_key
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.training.schedules import (
    SCHEDULES,
    Number,
    Schedule,
    ScheduleConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """What `config.optim` states of every optimiser."""

    name: str = key("adam", '"adam" or "sgd".')
    learning_rate: float = key(0.0, "Peak learning rate: this ...", in_step=False)
    base_learning_rate: float = key(
        0.0,
        "... or this, times batch_size / 256.",
        in_step=False,
        formerly="optim.rate_per_256",
    )
    schedule: ScheduleConfig = choice(SCHEDULES, "cosine", formerly="optim.decay")
    warmup_steps: int = key(0, "Linear warmup in steps, or else ...")
    warmup_epochs: float = epochs("... in epochs, or else ...")
    warmup_fraction: float = key(0.0, "... as a fraction of the run.")
    weight_decay: float = key(0.0, "Decoupled from the loss, times the scheduled rate.")
    weight_decay_mask: tuple[str, ...] = key(
        (r"/kernel$",), "Regular expressions: what weight decay touches."
    )
    layer_decay: float = key(
        0.0, "Rate of a layer by that of the one above it; 0 is off.", at_most=1
    )
    grad_clip_norm: float = key(0.0, "Largest global gradient norm; 0 is off.")
    grad_accum_steps: int = key(
        1,
        "Microbatches per step.",
        at_least=1,
        changes_result=False,
        formerly="optim.accumulate",
    )
    mu_dtype: str = key(
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
        if bool(self.learning_rate) == bool(self.base_learning_rate):
            raise UserError(
                f"config states optim.learning_rate={self.learning_rate} and "
                f"optim.base_learning_rate={self.base_learning_rate}: set exactly one of "
                "them"
            )

    def peak_learning_rate(self, batch_size: int) -> float:
        """Returns the highest learning rate of a run."""
        return self.learning_rate or self.base_learning_rate * batch_size / 256

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
                b1=self.b1, b2=self.b2, eps=self.eps, mu_dtype=self.mu_dtype
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
                accumulator_dtype=self.mu_dtype,
            )
        ]


OPTIMIZERS = {"adam": AdamConfig, "sgd": SgdConfig}


def learning_rate(optim: OptimConfig, peak: Number, run: RunLength) -> Schedule:
    """Returns the learning rate as a function of the step.

    Args:
      optim: section `optim`.
      peak: highest learning rate, see `OptimConfig.peak_learning_rate`; it may be an
        argument of a jitted function.
      run: length of the run.

    Returns:
      Function from the steps already taken to the rate of the next one: linear from 0
      over the warmup, then the schedule over the rest of the run.

    Raises:
      UserError: the warmup is longer than the run, or the schedule does not fit it.
    """
    warmup = length_in_steps(optim, "warmup", run)
    if warmup > run.total_steps:
        raise UserError(
            f"the warmup takes {warmup} steps but the run only {run.total_steps}: lower "
            f"optim.{length_key(optim, 'warmup')} or raise {run.key}"
        )
    ramp = optax.linear_schedule(0.0, peak, max(1, warmup))
    rest = optim.schedule.build(peak, warmup, run)
    return optax.join_schedules([ramp, rest], [warmup])


def optimizer(
    optim: OptimConfig,
    params: dict,
    rate: Schedule,
    run: RunLength,
) -> optax.GradientTransformation:
    """Builds the optimiser.

    Args:
      optim: `config.optim`.
      params: model parameters, as arrays or shapes, in either layout of the blocks.
      rate: from `learning_rate`.
      run: length of the run.

    Returns:
      optax transformation: clipping, Adam or momentum, weight decay that is decoupled
      from the loss and multiplied by the scheduled rate, the rate, its decay from layer
      to layer, freezing.

    Raises:
      UserError: a regular expression of `weight_decay_mask` or `freeze` matches no
        parameter, or `layer_decay` is set for a model without blocks.
    """
    chain = []
    if optim.grad_clip_norm:
        chain.append(optax.clip_by_global_norm(optim.grad_clip_norm))
    chain += optim.moments()
    if optim.weight_decay:
        mask = match(params, optim.weight_decay_mask, "optim.weight_decay_mask")
        chain.append(_decay(optim.weight_decay, mask))
    chain.append(optax.scale_by_learning_rate(rate))
    if optim.layer_decay:
        chain.append(scale_by_layer(params, optim.layer_decay))
    if optim.freeze:
        mask = match(params, optim.freeze, "optim.freeze")
        until = length_in_steps(optim, "freeze", run)
        # After the rest, so that weight decay does not move them either. What is frozen
        # for good is hidden from clipping and moments too; what will move needs
        # moments that are warm, or Adam's first free steps are several times too long.
        gate = _freeze(mask, until)
        chain = [*chain, gate] if until else [gate, *chain, gate]
    return optax.chain(*chain)


def stop_frozen_gradients(params: dict, optim: OptimConfig) -> dict:
    """Stops gradients to parameters that are frozen for the whole run.

    This saves their backward pass. What is frozen for a part of the run keeps its
    gradients, which warm its moments.

    Args:
      params: model parameters.
      optim: `config.optim`.

    Returns:
      The same parameters.
    """
    if not optim.freeze or length_key(optim, "freeze"):
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


_INPUT = re.compile(
    r"(cls|dist)$|(embedding|conv_root|gn_root|block\d+)/"
    r"|Transformer/(posembed_input|posembed_0)/"
)
# What is added before or within a block belongs to it.
_BLOCK = re.compile(r"Transformer/(?:encoderblock|posembed|relative_embedding)_(\d+)")
_OUTPUT = re.compile(
    # One table for the attention of all blocks; BEiT has it at the full rate too.
    r"Transformer/(encoder_norm/|relative_embedding$)"
    r"|(MAPHead_0|fc_norm|pre_logits|head|head_dist)/"
)


def scale_by_layer(params: dict, decay: float) -> optax.GradientTransformation:
    """Multiplies the updates of each parameter by the factor of its layer.

    The learning rate of a layer is `decay` times that of the layer above it, as in BEiT
    (arXiv:2106.08254) and MAE (arXiv:2111.06377, table 9). Layers from the bottom: what
    makes tokens of an image (a whole ResNet included) with its position embeddings; each
    block; all that comes after the blocks, at the full rate.

    Args:
      params: model parameters, as arrays or shapes, in either layout of the blocks.
      decay: factor from a layer to the one below it.

    Returns:
      Transformation without a state.

    Raises:
      UserError: the model has no encoder blocks.
    """
    by_parameter = layer_factors(params, decay)

    def update(updates, params=None):
        del params
        return jax.tree.map(lambda u, f: u * f, updates, by_parameter)

    return optax.stateless(update)


def layer_factors(params: dict, decay: float) -> dict:
    """Returns the factor of each parameter's rate.

    Args and Raises: as `scale_by_layer`.

    Returns:
      Nested dict of floats; of stacked blocks, arrays that broadcast against them.
    """
    depth = 0

    def look(path):
        nonlocal depth
        if match := _BLOCK.match(path):
            depth = max(depth, int(match[1]) + 1)

    stacking.map_paths(params, look)
    if not depth:
        raise UserError(
            f"optim.layer_decay={decay} needs the blocks of a Transformer, which this "
            "model has not: set it to 0, or choose another model.variant"
        )
    return stacking.map_paths(
        params, lambda path: decay ** (depth + 1 - _layer(path, depth))
    )


def _layer(path: str, depth: int) -> int:
    """Returns 0 for the input, 1 to `depth` for the blocks, one more for the output."""
    if _INPUT.match(path):
        return 0
    if match := _BLOCK.match(path):
        return int(match[1]) + 1
    if _OUTPUT.match(path):
        return depth + 1
    raise UserError(
        f"optim.layer_decay: {path} is of no layer, which only parameters with the names "
        "of a Vision Transformer are: set it to 0"
    )
