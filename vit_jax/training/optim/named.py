"""The optimisers of optax that a config can name.

Every function of optax or optax.contrib with a learning rate is an optimiser.
Parameters of the function that are numbers, texts, bools or None become keys with the
same defaults; their help texts are taken from its docstring. The learning rate, the
weight decay and the dtype of moments are set by the keys that all optimisers share.
"""

import dataclasses
import functools
import importlib
import inspect
import numbers
import re
import textwrap
import typing
from collections.abc import Callable, Mapping
from typing import Any

import optax

from vit_jax.config.fields import fields, key
from vit_jax.errors import UserError
from vit_jax.training.optim.outside import (
    DECAYS,
    DTYPES,
    RATES,
    OutsideConfig,
    one_of,
    parameters_of,
)
from vit_jax.training.optim.sharpness import OptimConfig

# Parameters without keys: the first two only print, "seed" is replaced by "key".
_LEFT_OUT = ("verbose", "print_win_rate_every_n_steps", "seed")
_MEAN = re.compile(r"(adam_)?(b[1-3]|betas|beta3)")  # Decay rates of running means.
_REFUSED = {
    "dpsgd": "it needs the gradient of each image, and a step computes only their mean",
    "lbfgs": "its line search evaluates the loss of one batch an unlimited number of "
    "times, and all devices would have to run every evaluation together",
}
# Optimisers that need code beyond their keys, with the base class of their dataclass.
_BASES = {
    "muon": "muon:MuonBase",
    "schedule_free_adamw": "schedule_free:ScheduleFreeAdamBase",
    "schedule_free_sgd": "schedule_free:ScheduleFreeBase",
}


def dataclass_of(name: str) -> type:
    """Returns the config dataclass of an optimiser of optax; it is created if needed.

    Raises:
      UserError: the function needs arguments that no key can set.
      KeyError: optax does not have this function.
    """
    if name in _REFUSED:
        raise UserError(f"optim.name={name!r}: {_REFUSED[name]}: choose another")
    function = _found(name)
    if function is None:
        raise KeyError(name)
    if wanting := _wanting(function):
        raise UserError(
            f"optim.name={name!r} needs {', '.join(wanting)}, which cannot be set by "
            "keys: choose another"
        )
    return _dataclass(name)


@functools.cache
def names() -> list[str]:
    """Returns the names of the optimisers of optax that a config can use."""
    names = sorted({*dir(optax), *dir(optax.contrib)} - _REFUSED.keys())
    return [name for name in names if (f := _found(name)) and not _wanting(f)]


def _found(name: str) -> Callable | None:
    """Returns the optimiser of optax with this name; None if optax has none."""
    if name.startswith(("_", "scale_by_")):
        return None
    for module in (optax, optax.contrib):
        function = vars(module).get(name)  # Without deprecated names.
        is_one = inspect.isfunction(function) or isinstance(function, functools.partial)
        if is_one and one_of(RATES, parameters_of(function)):
            return function
    return None


def _wanting(function: Callable) -> list[str]:
    """Returns the parameters without a default, except the learning rate."""
    return [
        name
        for name, parameter in parameters_of(function).items()
        if parameter.default is parameter.empty and name not in RATES
    ]


@functools.cache
def _dataclass(name: str) -> type:
    """Creates the config dataclass of a function of optax."""
    function, base = _found(name), OutsideConfig
    if name in _BASES:
        module, _, cls = _BASES[name].partition(":")
        base = getattr(importlib.import_module(f"{__package__}.{module}"), cls)
    parameters, doc = parameters_of(function), inspect.getdoc(function) or name
    meanings, keys = _meanings(doc), {"name": (str, key(name, ""))}
    for one, parameter in parameters.items():
        known = one in (*fields(base), *base.left_out, *_LEFT_OUT, *RATES)
        if not known and (field := _field(one, parameter, meanings.get(one, ""))):
            keys[one] = (type(parameter.default), field)
    rate, decay = _default(parameters, RATES), _default(parameters, DECAYS)
    if decay:
        meaning = fields(OptimConfig)["weight_decay"].help
        keys["weight_decay"] = (float, key(decay, meaning))
    module = "optax" if vars(optax).get(name) is function else "optax.contrib"
    about = f"{_plain(doc.partition(chr(10))[0]).rstrip('.')} ({module}.{name})"
    about += f"; learning_rate={rate:g} if no key sets it." if rate else "."
    return dataclasses.make_dataclass(
        f"{''.join(word.title() for word in name.split('_'))}Config",
        [(one, kind, field) for one, (kind, field) in keys.items()],
        bases=(base,),
        namespace={
            "__doc__": about,
            "__module__": __name__,
            "function": staticmethod(function),
            "default_rate": rate,
            "takes_mu_dtype": bool(one_of(DTYPES, parameters)),
        },
        frozen=True,
        kw_only=True,
    )


def _field(name: str, parameter: inspect.Parameter, meaning: str) -> Any:
    """Returns the field of a parameter, or None if a key cannot have its values."""
    default, kind = parameter.default, str(parameter.annotation)
    if name == "key":  # If it is not set, optax warns and uses 0.
        default = 0
    rules: dict[str, Any] = {"at_least": None, "optional": "None" in kind}
    if _MEAN.fullmatch(name):
        rules |= {"at_least": 0, "below": 1}
    elif name.startswith("eps"):
        rules["at_least"] = 0
    elif type(default) is int and default > 0:  # Such a parameter is a count.
        rules["at_least"] = 1
    if typing.get_origin(parameter.annotation) is typing.Literal:
        rules["choices"] = typing.get_args(parameter.annotation)
    several = isinstance(default, tuple) and all(map(_is_number, default))
    if default is None:
        types = [one for one in (float, int) if re.search(rf"\b{one.__name__}\b", kind)]
        if not types or re.search("Callable|Tree|Transformation", kind):
            return None
        rules |= {"optional": True, "like": types[0]()}
    elif not (several or _is_number(default) or isinstance(default, bool | str)):
        return None
    return key(default, meaning or f"Parameter `{name}` of optax.", **rules)


def _default(parameters: Mapping, names: tuple[str, ...]) -> float:
    """Returns the default of the parameter with one of the names; 0 if none exists."""
    default = getattr(parameters.get(one_of(names, parameters)), "default", None)
    return float(default) if _is_number(default) else 0.0


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _meanings(doc: str) -> dict[str, str]:
    """Returns the descriptions of parameters from the section "Args" of a docstring."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n|\n)+)", f"{doc}\n", re.MULTILINE)
    text = textwrap.dedent(section[1]) if section else ""
    entries = re.findall(
        r"^(\w+)(?: \(.*?\))?:((?:.*\n)(?:[ \t]+.*\n)*)", text, re.MULTILINE
    )
    return {name: _sentence(_plain(meaning)) for name, meaning in entries}


def _sentence(text: str) -> str:
    """Returns the first sentence of a text."""
    first = re.split(r"(?<=[^.]\.)\s+(?=[A-Z:])", text, maxsplit=1)[0].rstrip(" .:")
    return f"{first[:1].upper()}{first[1:]}."


def _plain(text: str) -> str:
    """Returns a text as one line, without the markup of reStructuredText."""
    text = re.sub(r":\w+:`~?([^`<]+?)(?: <[^`]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<]+?) <([^`>]*)>`_+", r"\1", text)
    return " ".join(text.replace("``", "`").split())
