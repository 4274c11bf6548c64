"""The `evals` of a config: a split each, or a kind of evaluation with its own keys."""

import difflib
from collections.abc import Mapping

from ml_collections import ConfigDict

from vit_jax import bounds
from vit_jax.errors import UserError
from vit_jax.schema import EVALS, EVALUATION

_KIND = "kind"
_PLAIN = "classification"
_ABOVE_0 = ("l2", "temperature", "held_out")
_AT_LEAST_1 = ("shots", "seeds", "k", "iterations")
SKIPPED = "skipped"  # How many damaged images an evaluation has left out.


def complete_all(given: Mapping) -> dict[str, str | dict]:
    """Adds the defaults of each evaluation and checks its keys and types.

    Args:
      given: name of an evaluation to a split, or to a mapping with its `kind`
        ("classification" if it states none) and keys of that kind.

    Returns:
      The same with all keys of each kind; splits stay as they are.

    Raises:
      UserError: unknown kind or key, or a name or value that no evaluation could use.
    """
    for name in given:
        if "/" in name or name in ("", SKIPPED):
            raise UserError(
                f"evals: {name!r} cannot be the name of an evaluation, of which files "
                "and metrics are named: choose another, without /"
            )
    return {name: _complete(f"evals.{name}", given[name]) for name in given}


def spec(value: str | Mapping | ConfigDict) -> ConfigDict:
    """Returns one of a complete config's evaluations with all its keys."""
    if isinstance(value, str):
        return ConfigDict({_KIND: _PLAIN} | EVALS[_PLAIN] | {"split": value})
    return value


def refuse_unread(raw: Mapping) -> None:
    """Refuses a config for evaluation alone that has no evaluation or unread keys.

    Raises:
      UserError: naming the key and those that are read.
    """
    for section, value in raw.items():
        inner = section in EVALUATION and isinstance(value, Mapping)
        known = EVALUATION[section if inner else ""]
        keys = value if inner and known else () if inner else (section,)
        for key in keys:
            if key not in (*known, *(() if inner else EVALUATION)):
                name = f"{section}.{key}" if inner else key
                raise UserError(
                    f"config key {name} is not read where weights are evaluated alone: "
                    f"here are {', '.join(known)}"
                    + ("" if inner else f", {', '.join(filter(None, EVALUATION))}")
                )
    if not raw.get("evals"):
        raise UserError("the config names no evaluation: set evals, as {'val': 'val'}")


def _complete(where: str, value: object) -> str | dict:
    if isinstance(value, str):
        return value
    if not isinstance(value, (Mapping, ConfigDict)):
        raise UserError(
            f"{where}={value!r} is {type(value).__name__}, but it takes str (a split) "
            f"or a dict, as {{'kind': 'fewshot'}}"
        )
    kind = value.get(_KIND, _PLAIN)
    if kind not in EVALS:
        raise UserError(f"{where}.{_KIND}={kind!r} is not one of {', '.join(EVALS)}")
    known = {_KIND: kind} | EVALS[kind]
    for key in value:
        if key not in known:
            raise UserError(_unknown(where, key, kind))
    done = {
        key: bounds.fit(f"{where}.{key}", value.get(key, default), default)
        for key, default in known.items()
    }
    _check(where, done)
    return done


def _unknown(where: str, key: str, kind: str) -> str:
    others = [other for other, keys in EVALS.items() if key in keys]
    if others:
        return (
            f"config key {where}.{key} is read only with {where}.{_KIND}="
            f"{' or '.join(others)}"
        )
    nearest = difflib.get_close_matches(key, EVALS[kind], 1, cutoff=0)[0]
    return f"unknown config key {where}.{key}; the nearest of {kind} is {nearest}"


def _check(where: str, done: Mapping) -> None:
    for key in (*_ABOVE_0, *_AT_LEAST_1):
        values = done.get(key, 1)
        values = values if isinstance(values, tuple) else (values,)
        if not values:
            raise UserError(f"{where}.{key} is empty: state at least one number")
        least = min(values)
        if key in _AT_LEAST_1 and least < 1:
            raise UserError(f"{where}.{key}={done[key]} must be at least 1")
        if key in _ABOVE_0 and least <= 0:
            raise UserError(f"{where}.{key}={done[key]} must be above 0")
        if len(set(values)) < len(values):
            raise UserError(f"{where}.{key}={done[key]} states a number twice")
    for key, value in done.items():
        if bounds.is_number(value, int) and value >= 2**32:
            raise UserError(f"{where}.{key}={value} must be below 2**32")
    if done.get("held_out", 0) >= 1:
        raise UserError(f"{where}.held_out={done['held_out']} must be below 1")
