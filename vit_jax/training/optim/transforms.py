"""Transformations that depend on paths of parameters: masks, norms, weight decay."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict

from vit_jax.config.lengths import length_key
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.training.schedules import Number, Schedule


def match(params: dict, patterns: Sequence[str], name: str) -> dict:
    """Marks the parameters whose path matches any of the regular expressions.

    Args:
      params: nested dict of arrays or shapes; a path is
        "Transformer/encoderblock_0/.../kernel", even if blocks are stacked.
      patterns: regular expressions, which may match anywhere in a path.
      name: config key of the patterns, for the message.

    Returns:
      Nested dict of bools; for stacked blocks that differ, an array that broadcasts
      against the parameter.

    Raises:
      UserError: a pattern does not match any path, or is not a regular expression.
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


def decayed(params: dict, optim: object) -> dict:
    """Marks the parameters with weight decay that are not frozen for the whole run.

    Args:
      params: see `match`.
      optim: section `optim` of the config.

    Raises:
      UserError: see `match`.
    """
    mask = match(params, optim.weight_decay_mask, "optim.weight_decay_mask")
    frozen = always_frozen(params, optim)
    return jax.tree.map(lambda m, f: np.logical_and(m, np.logical_not(f)), mask, frozen)


def always_frozen(params: dict, optim: object) -> dict:
    """Marks the parameters that are frozen for the whole run, see `decayed`."""
    patterns = () if length_key(optim, "freeze") else optim.freeze
    return match(params, patterns, "optim.freeze")


def matched_factors(params: dict, rules: Sequence[str]) -> dict:
    """Returns factors of the learning rate: the product over all matching rules.

    Args:
      params: see `match`.
      rules: texts of the form "REGEX -> FACTOR".

    Raises:
      UserError: a rule has another form, or its pattern does not match any path.
    """
    name, factors = "optim.learning_rate_factors", []
    for rule in rules:
        pattern, arrow, number = map(str.strip, rule.rpartition("->"))
        try:
            factor = float(number)
        except ValueError:
            arrow = ""
        if not arrow or not pattern:
            raise UserError(
                f"{name}: {rule!r} is not of the form 'REGEX -> FACTOR': change it, for "
                "example to 'network/embedding/ -> 0.2'"
            )
        matched = match(params, [pattern], name)
        factors.append(jax.tree.map(lambda m, f=factor: np.where(m, f, 1.0), matched))
    return jax.tree.map(lambda *of_rules: np.prod(of_rules, axis=0), *factors)


def clip_by_part_norm(limit: float) -> optax.GradientTransformation:
    """Clips the norm of each top-level entry of the gradients, as DINOv2 does.

    Entries that are single arrays, such as a mask token, count as parts of "network".
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

    As in the PyTorch code of these methods, each block has separate norms, even if
    blocks are stacked, and query, key and value of an attention share one norm.
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
    """Clips the gradient of each parameter separately, as DINO does.

    The norms are those of `parameter_norms`.
    """

    def update(updates, params=None):
        del params
        return jax.tree.map(
            # As in PyTorch, the sum avoids a division by 0.
            lambda u, n: u * jnp.minimum(1, limit / (n + 1e-6)).astype(u.dtype),
            updates,
            parameter_norms(updates),
        )

    return optax.stateless(update)


def scale_by_trust_ratio(
    mask: dict, coefficient: float = 1.0
) -> optax.GradientTransformation:
    """Scales the update of each parameter to the norm of the parameter.

    Unlike optax.scale_by_trust_ratio, it treats the stacked blocks of a scan
    separately. If the norm of the update or of the parameter is 0, the update is not
    scaled.

    Args:
      mask: result of `match`; True marks parameters whose updates are scaled.
      coefficient: norm of the scaled update, divided by the norm of the parameter.
    """

    def scale(update, norm, of_parameter, masked):
        both = masked & (norm > 0) & (of_parameter > 0)
        ratio = coefficient * of_parameter / jnp.where(norm > 0, norm, 1)
        return update * jnp.where(both, ratio, 1).astype(update.dtype)

    def update(updates, params):
        norms = parameter_norms(updates), parameter_norms(params)
        return jax.tree.map(scale, updates, *norms, mask)

    return optax.stateless(update)


def trust_note(optim: object, params: dict) -> str:
    """Returns a warning if parameters with a trust ratio are all 0 at first, or "".

    Args:
      optim: section `optim` of the config, for LARS or LAMB.
      params: initial parameters, nested dict of arrays.
    """
    mask = flatten_dict(decayed(params, optim), sep="/")
    flat = flatten_dict(params, sep="/")
    scaled = {path: x for path, x in flat.items() if np.any(mask[path])}
    moved = jax.jit(lambda tree: jax.tree.map(jnp.any, tree))(scaled)
    zero = [path for path, any_ in jax.device_get(moved).items() if not any_]
    if not zero:
        return ""
    more = f" and {len(zero) - 3} more" if len(zero) > 3 else ""
    return (
        f"warning: optim.name={optim.name!r}: {', '.join(zero[:3])}{more} is initialised to "
        "zeros and takes hundreds of steps to grow, since the norm of an update is "
        "proportional to the norm of its parameter: set model.init='timm' or another "
        "value that does not initialise to zeros, or leave it out of "
        "optim.weight_decay_mask"
    )


class Decay(NamedTuple):
    """Weight decay.

    Attributes:
      weight: a number, or a function of the number of steps taken.
      mask: result of `match`; True marks parameters with weight decay.
    """

    weight: Number | Schedule
    mask: dict

    def at(self, step: jax.Array) -> Number:
        """Returns the weight of the decay at a step."""
        return self.weight(step) if callable(self.weight) else self.weight


def add_decay(decay: Decay) -> optax.GradientTransformation:
    """Returns a transformation that adds weight decay to updates."""
    weight, mask = decay
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
