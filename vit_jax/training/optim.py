"""Optimisers: Adam, SGD, LARS, LAMB; weight decay, clipping, layer decay, freezing."""

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
from vit_jax.models import NetworkConfig, stacking
from vit_jax.training.schedules import SCHEDULES, Number, Schedule, ScheduleConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Keys of `config.optim` that every optimiser has."""

    name: str = key("adam", '"adam" or "adamw", the same; "sgd", "lars" or "lamb".')
    learning_rate: float = key(0.0, "Peak learning rate: this ...", in_step=False)
    base_learning_rate: float = key(
        0.0, "... or this, times batch_size / 256.", in_step=False
    )
    schedule: ScheduleConfig = choice(SCHEDULES, "cosine")
    warmup_steps: int = key(0, "Linear warmup in steps, or else ...")
    warmup_epochs: float = epochs("... in epochs, or else ...")
    warmup_fraction: float = key(0.0, "... as a fraction of the run.")
    warmup_ends_at_peak: bool = key(
        False,
        "Reach the peak in the last step of the warmup, not in the one after it, as "
        "DINO's code does.",
    )
    weight_decay: float = key(0.0, "Decoupled from the loss, times the scheduled rate.")
    weight_decay_end: float = key(
        0.0, "Half a cosine leads from `weight_decay` to this; 0 is off."
    )
    weight_decay_steps: int = key(
        0, "Length of that half cosine in steps; all three 0: the whole run."
    )
    weight_decay_epochs: float = epochs("The same in epochs, or else ...")
    weight_decay_fraction: float = key(0.0, "... as a fraction of the run.")
    weight_decay_mask: tuple[str, ...] = key(
        (r"/kernel$",), "Regular expressions: what weight decay touches."
    )
    layer_decay: float = key(
        0.0, "Rate of a layer by that of the one above it; 0 is off.", at_most=1
    )
    learning_rate_factors: tuple[str, ...] = key(
        (),
        "Factors of the learning rate of the parameters that regular expressions match: "
        '"network/embedding/ -> 0.2".',
    )
    grad_clip_norm: float = key(0.0, "Largest global gradient norm; 0 is off.")
    grad_clip_norm_per_part: float = key(
        0.0,
        "Largest gradient norm of each part of a task by itself: its network, each of "
        "its heads; 0 is off.",
    )
    grad_clip_norm_per_parameter: float = key(
        0.0, "Largest gradient norm of each parameter by itself; 0 is off."
    )
    grad_accum_steps: int = key(
        1, "Microbatches per step.", at_least=1, changes_result=False
    )
    sam_rho: float = key(
        0.0,
        "SAM (arXiv:2010.01412): distance uphill at which the gradient is taken, in two "
        "passes per step; 0 is off.",
    )
    sam_rho_end: float = key(
        0.0,
        "GSAM: `sam_rho` falls with the learning rate to this at the last rate; 0: it "
        "stays.",
    )
    sam_adaptive: str = key(
        "none",
        'Uphill in units of the parameters: "asam" (arXiv:2102.11600), "scaled" (of '
        "big_vision).",
        choices=("none", "asam", "scaled"),
    )
    sam_batch_size: int = key(
        0,
        "Images that go uphill together (the m of m-sharpness), on any number of "
        "devices; 0: the batch.",
    )
    gsam_alpha: float = key(
        0.0, "GSAM (arXiv:2203.08065): weight of what turns the gradient; 0 is off."
    )
    gsam_minimize: str = key(
        "robust",
        'Loss that GSAM\'s turn leaves alone: the one uphill, or "clean", the one here.',
        choices=("robust", "clean"),
    )
    mu_dtype: str = key(
        "float32",
        "Of Adam's first moment, SGD's momentum; or \"bfloat16\".",
        choices=("float32", "bfloat16"),
    )
    freeze: tuple[str, ...] = key(
        (), "Regular expressions: parameters that do not move ..."
    )
    freeze_steps: int = key(0, "... for this many steps; all three 0: the whole run.")
    freeze_epochs: float = epochs("The same in epochs, or else ...")
    freeze_fraction: float = key(0.0, "... as a fraction of the run.")

    def __post_init__(self):
        if bool(self.learning_rate) == bool(self.base_learning_rate):
            raise UserError(
                f"optim.learning_rate={self.learning_rate} and "
                f"optim.base_learning_rate={self.base_learning_rate}: set exactly one of "
                "them above 0"
            )

    def peak_learning_rate(self, batch_size: int) -> float:
        """Returns the highest learning rate of a run."""
        return self.learning_rate or self.base_learning_rate * batch_size / 256

    def moments(self) -> list[optax.GradientTransformation]:
        """Returns transformations from gradients to a direction."""
        raise NotImplementedError

    def direction(
        self, params: dict, decay: list[optax.GradientTransformation]
    ) -> list[optax.GradientTransformation]:
        """Returns transformations from gradients to a step, up to the learning rate.

        Args:
          params: model parameters, as arrays or shapes.
          decay: transformations that add the weight decay, if any.
        """
        return [*self.moments(), *decay]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamConfig(OptimConfig):
    """Adam (arXiv:1412.6980)."""

    b1: float = key(0.9, "Adam's beta1, the decay of the mean gradient.", below=1)
    b2: float = key(0.999, "Adam's beta2, that of the mean square.", below=1)
    eps: float = key(1e-8, "Adam's epsilon, added to the root of the mean square.")

    def moments(self) -> list[optax.GradientTransformation]:
        return [
            optax.scale_by_adam(
                b1=self.b1, b2=self.b2, eps=self.eps, mu_dtype=self.mu_dtype
            )
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgdConfig(OptimConfig):
    """SGD with momentum."""

    name: str = key("sgd", "")
    momentum: float = key(
        0.9, "Decay of the sum of gradients per step; 0 is plain SGD.", below=1
    )
    nesterov: bool = key(False, "Nesterov momentum.")

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LarsConfig(OptimConfig):
    """LARS (arXiv:1708.03888), in the form of MAE's linear probe.

    Parameters that `weight_decay_mask` matches have weight decay and a trust ratio, both
    before the momentum; for the rest it is SGD with momentum.
    """

    name: str = key("lars", "")
    momentum: float = key(0.9, "Decay of the sum of steps.", below=1)
    trust_coefficient: float = key(
        0.001, "Norm of a step by that of its parameter.", above=0
    )

    def moments(self) -> list[optax.GradientTransformation]:
        # Not optax.lars, which multiplies by the rate before the momentum.
        return [optax.trace(decay=self.momentum, accumulator_dtype=self.mu_dtype)]

    def direction(
        self, params: dict, decay: list[optax.GradientTransformation]
    ) -> list[optax.GradientTransformation]:
        mask = match(params, self.weight_decay_mask, "optim.weight_decay_mask")
        trust = scale_by_trust_ratio(mask, self.trust_coefficient)
        return [*decay, trust, *self.moments()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LambConfig(AdamConfig):
    """LAMB (arXiv:1904.00962), in the form of timm, which DeiT III trains with.

    Parameters with weight decay have a trust ratio; for the rest it is Adam. timm also
    clips the gradient: `grad_clip_norm=1.0`.
    """

    name: str = key("lamb", "")
    eps: float = key(1e-6, "Adam's epsilon, added to the root of the mean square.")

    def direction(
        self, params: dict, decay: list[optax.GradientTransformation]
    ) -> list[optax.GradientTransformation]:
        if not decay:
            return self.moments()
        mask = match(params, self.weight_decay_mask, "optim.weight_decay_mask")
        return [*self.moments(), *decay, scale_by_trust_ratio(mask)]


OPTIMIZERS = {
    "adam": AdamConfig,
    "adamw": AdamConfig,  # Weight decay is decoupled in any case.
    "sgd": SgdConfig,
    "lars": LarsConfig,
    "lamb": LambConfig,
}


def learning_rate(optim: OptimConfig, peak: Number, run: RunLength) -> Schedule:
    """Returns the learning rate as a function of the steps already taken.

    It is linear from 0 over the warmup, then follows the schedule to the end of the run.

    Args:
      optim: section `optim`.
      peak: highest learning rate; it may be an argument of a jitted function.
      run: length of the run.

    Raises:
      UserError: the warmup is longer than the run, or the schedule does not fit it.
    """
    warmup = length_in_steps(optim, "warmup", run)
    if warmup > run.total_steps:
        raise UserError(
            f"the warmup takes {warmup} steps but the run only {run.total_steps}: lower "
            f"optim.{length_key(optim, 'warmup')} or raise {run.key}"
        )
    ramp = optax.linear_schedule(
        0.0, peak, max(1, warmup - 1 if optim.warmup_ends_at_peak else warmup)
    )
    rest = optim.schedule.build(peak, warmup, run)
    return optax.join_schedules([ramp, rest], [warmup])


def weight_decay(optim: OptimConfig, run: RunLength) -> Number | Schedule:
    """Returns the weight decay: a number, or a function of the steps already taken."""
    start, end = optim.weight_decay, optim.weight_decay_end
    if not end:
        return start
    length = length_in_steps(optim, "weight_decay", run) or run.total_steps

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
    """Builds the optimiser.

    It is a chain of clipping, the direction with weight decay, which is decoupled from the
    loss and multiplied by the scheduled rate, the rate, its layer decay, and freezing.

    Args:
      optim: section `optim`.
      params: model parameters, as arrays or shapes, in either layout of the blocks.
      rate: learning rate by step, from `learning_rate`.
      run: length of the run.
      network: `Model.config`, which knows the layers of the parameters.
      within: path of the network's parameters among `params`; "": they are all; None:
        they are not among them.

    Raises:
      UserError: a regular expression of `weight_decay_mask` or `freeze` matches no
        parameter, or `layer_decay` is set for a model without blocks.
    """
    chain = []
    if optim.grad_clip_norm:
        chain.append(optax.clip_by_global_norm(optim.grad_clip_norm))
    if optim.grad_clip_norm_per_part:
        chain.append(clip_by_part_norm(optim.grad_clip_norm_per_part))
    if optim.grad_clip_norm_per_parameter:
        chain.append(clip_by_parameter_norm(optim.grad_clip_norm_per_parameter))
    decay = []
    if optim.weight_decay or optim.weight_decay_end:
        mask = match(params, optim.weight_decay_mask, "optim.weight_decay_mask")
        decay = [_decay(weight_decay(optim, run), mask)]
    chain += optim.direction(params, decay)
    chain.append(optax.scale_by_learning_rate(rate))
    if optim.layer_decay:
        chain.append(_scale(layer_factors(params, optim.layer_decay, network, within)))
    if optim.learning_rate_factors:
        chain.append(_scale(matched_factors(params, optim.learning_rate_factors)))
    if optim.freeze:
        mask = match(params, optim.freeze, "optim.freeze")
        until = length_in_steps(optim, "freeze", run)
        # After the rest, so that weight decay does not move them either. Parameters that
        # stay frozen are hidden from clipping and moments too; those that move later need
        # warm moments, or Adam's first free steps are several times too long.
        gate = _freeze(mask, until)
        chain = [*chain, gate] if until else [gate, *chain, gate]
    return optax.chain(*chain)


def stop_frozen_gradients(params: dict, optim: OptimConfig) -> dict:
    """Stops gradients to parameters that are frozen for the whole run.

    This saves their backward pass. Others keep their gradients, which warm their moments.
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
      Nested dict of bools; for stacked blocks that differ, an array that broadcasts
      against the parameter.

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


def matched_factors(params: dict, rules: Sequence[str]) -> dict:
    """Returns factors of the learning rate, the product of all rules that match.

    Args:
      params: see `match`.
      rules: "REGEX -> FACTOR" each.

    Raises:
      UserError: a rule has another form, or its expression matches nothing.
    """
    name, factors = "optim.learning_rate_factors", []
    for rule in rules:
        pattern, arrow, number = map(str.strip, rule.rpartition("->"))
        try:
            factor = float(number)
        except ValueError:
            arrow = ""
        if not arrow or not pattern:
            raise UserError(f"{name}: {rule!r} is not 'REGEX -> FACTOR'")
        matched = match(params, [pattern], name)
        factors.append(jax.tree.map(lambda m, f=factor: np.where(m, f, 1.0), matched))
    return jax.tree.map(lambda *of_rules: np.prod(of_rules, axis=0), *factors)


def _scale(factors: dict) -> optax.GradientTransformation:
    """Multiplies updates by factors that broadcast against them."""
    return optax.stateless(
        lambda updates, _: jax.tree.map(lambda u, f: u * f, updates, factors)
    )


def clip_by_part_norm(limit: float) -> optax.GradientTransformation:
    """Clips the norm of each entry of the gradients by itself, as DINOv2 does.

    Entries that are single arrays, such as a mask token, belong to "network".
    """
    clip = optax.clip_by_global_norm(limit)

    def update(updates, params=None):
        del params
        parts = {}
        for name, grads in updates.items():
            part = name if isinstance(grads, dict) else "network"
            parts.setdefault(part, {})[name] = grads
        clipped = [clip.update(part, clip.init(part))[0] for part in parts.values()]
        return {name: part[name] for part in clipped for name in part}

    return optax.stateless(update)


_FUSED = re.compile(r"/(query|key|value)/")


def parameter_norms(tree: dict) -> dict:
    """Returns norms, float32, that broadcast against a tree of parameters or gradients.

    As in the PyTorch code of these methods, each of several stacked blocks has a separate
    norm, and query, key and value of an attention share one.
    """
    squares = {}

    def name(keys):
        path = "/".join(key.key for key in keys)
        return _FUSED.sub("/qkv/", path), int(stacking.is_stacked(path))

    def add(keys, leaf):
        path, first = name(keys)
        axes = tuple(range(first, leaf.ndim))
        square = jnp.square(leaf.astype(jnp.float32)).sum(axes)
        squares[path] = squares.get(path, 0) + square

    def norm(keys, leaf):
        path, first = name(keys)
        shape = leaf.shape[:first] + (1,) * (leaf.ndim - first)
        return jnp.sqrt(squares[path]).reshape(shape)

    jax.tree.map_with_path(add, tree)
    return jax.tree.map_with_path(norm, tree)


def clip_by_parameter_norm(limit: float) -> optax.GradientTransformation:
    """Clips the norm of each gradient, see `parameter_norms`, separately, as DINO does."""

    def update(updates, params=None):
        del params
        return jax.tree.map(
            # PyTorch's form: the sum avoids a division by 0.
            lambda u, n: u * jnp.minimum(1, limit / (n + 1e-6)).astype(u.dtype),
            updates,
            parameter_norms(updates),
        )

    return optax.stateless(update)


def scale_by_trust_ratio(
    mask: dict, coefficient: float = 1.0
) -> optax.GradientTransformation:
    """Scales the update of each parameter to the norm of the parameter.

    optax.scale_by_trust_ratio would take the stacked blocks of a scan as one parameter. If
    the norm of either is 0, nothing is scaled.

    Args:
      mask: result of `match`: True is scaled.
      coefficient: norm of an update by that of its parameter.
    """

    def scale(update, norm, of_parameter, masked):
        both = masked & (norm > 0) & (of_parameter > 0)
        ratio = coefficient * of_parameter / jnp.where(norm > 0, norm, 1)
        return update * jnp.where(both, ratio, 1).astype(update.dtype)

    def update(updates, params):
        norms = parameter_norms(updates), parameter_norms(params)
        return jax.tree.map(scale, updates, *norms, mask)

    return optax.stateless(update)


def _decay(weight: Number | Schedule, mask: dict) -> optax.GradientTransformation:
    """Adds `weight` times the masked parameters."""
    plain = optax.add_decayed_weights(0.0, jax.tree.map(np.any, mask))

    def init(params):
        if not callable(weight):
            return plain.init(params)
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    def update(updates, state, params):
        now = weight
        if callable(weight):
            now = weight(state.count)
            state = optax.ScaleByScheduleState(state.count + 1)
        updates = jax.tree.map(
            lambda u, p, m: u + now * p * m if np.any(m) else u,
            updates,
            params,
            mask,
        )
        return updates, state

    return optax.GradientTransformation(init, update)


def _freeze(mask: dict, until: int) -> optax.GradientTransformation:
    """Zeroes masked updates for `until` steps, or always if that is 0."""

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


def layer_factors(
    params: dict, decay: float, network: NetworkConfig, within: str | None = ""
) -> dict:
    """Returns factors of the learning rate that broadcast against the parameters.

    The rate of a layer is `decay` times that of the layer above it, as in BEiT
    (arXiv:2106.08254) and MAE (arXiv:2111.06377, table 9). Layers from the bottom: the
    embedding of the image (a whole ResNet included) with its positions; each block; the
    rest, at the full rate, as what a task has beside its network, the path `within`.

    Raises:
      UserError: the network has no blocks or is not trained, or no layer rule matches a
        parameter.
    """
    if within is None:
        raise UserError(
            f"optim.layer_decay={decay}: this task does not train the network that it "
            "keeps: set it to 0"
        )
    last = network.num_blocks + 1
    if last == 1:
        raise UserError(
            f"optim.layer_decay={decay} needs the blocks of a Transformer, and "
            f"model.variant={network.variant!r} has none: set it to 0, or choose another"
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
