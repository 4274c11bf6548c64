"""Optimisers of optax by name: their keys are the parameters of their functions.

A config names any function of optax or optax.contrib that has a learning rate. Its plain
parameters (numbers, texts, bools, None) are keys with its defaults, and its docstring has
their meanings; the learning rate, the weight decay and the type of moments are the keys
that all optimisers share.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import numbers
import re
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.config.fields import defaults, fields, key
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.training.optim.config import OptimConfig
from vit_jax.training.optim.transforms import Decay, match
from vit_jax.training.schedules import Number, Schedule

# Names of parameters for what keys of all optimisers state.
_RATES = ("learning_rate", "max_learning_rate")
_DECAYS = ("weight_decay", "weight_decay_rate")
_MASKS = ("mask", "weight_decay_mask")
_DTYPES = ("mu_dtype", "accumulator_dtype", "dtype_momentum")
# Below what changes a parameter; at 0, as in the first step of a warmup, those that
# estimate their steps divide 0 by 0.
_LEAST_RATE = 1e-8
# No keys: the first two only print, and "key" has taken the place of "seed".
_LEFT_OUT = ("verbose", "print_win_rate_every_n_steps", "seed")
_MEAN = re.compile(r"(adam_)?(b[1-3]|betas|beta3)")  # Decays of running means.
_REFUSED = {
    "dpsgd": "it needs the gradient of each image by itself, and a step has their mean",
    "lbfgs": "it searches for the least loss of one batch, in evaluations without a limit "
    "on their number that all devices would take together",
}
# Those that need more than their signature says, with the dataclass they derive from.
_BASES = {
    "muon": "muon:MuonBase",
    "schedule_free_adamw": "schedule_free:ScheduleFreeAdamBase",
    "schedule_free_sgd": "schedule_free:ScheduleFreeBase",
}


class Optimizers(Mapping):
    """Names to the dataclasses of optimisers: ours, then those of optax.

    Dataclasses of optax's are made when they are asked for, and only then are their
    modules searched.
    """

    def __init__(self, ours: Mapping[str, type]):
        self._ours = ours

    def __getitem__(self, name: str) -> type:
        if name in self._ours:
            return self._ours[name]
        if name in _REFUSED:
            raise UserError(f"optim.name={name!r}: {_REFUSED[name]}: choose another")
        function = _found(name)
        if function is None:
            raise KeyError(name)
        if wanting := _wanting(function):
            raise UserError(
                f"optim.name={name!r} needs {', '.join(wanting)}, which no key can "
                "state: choose another"
            )
        return _dataclass(name)

    def __iter__(self) -> Iterator[str]:
        yield from self._ours
        yield from (name for name in _names() if name not in self._ours)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OutsideState(NamedTuple):
    """Steps taken, and the state of optax's optimiser, with the blocks one by one."""

    count: jax.Array
    inner: optax.OptState


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutsideConfig(OptimConfig):
    """Base of the dataclasses that are made for functions of optax.

    Attributes:
      function: optax's function.
      left_out: names of its parameters that are no keys.
    """

    function: ClassVar[Callable[..., optax.GradientTransformation]]
    left_out: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        super().__post_init__()
        for name, default in defaults(type(self)).items():
            value = getattr(self, name)
            pair = isinstance(default, tuple) and name in _parameters(self.function)
            if pair and len(value) != len(default):
                raise UserError(
                    f"optim.{name}={value}: it takes {len(default)} numbers, as {default}"
                )

    def arguments(self) -> dict[str, object]:
        """Returns the arguments of the function that keys of its own state."""
        shared = fields(OptimConfig)
        return {
            name: getattr(self, name)
            for name in fields(type(self))
            if name not in shared and name in _parameters(self.function)
        }

    def make(
        self, rate: Number, decay: Number | None = None, mask: dict | None = None
    ) -> optax.GradientTransformationExtraArgs:
        """Returns optax's optimiser for one step.

        Args:
          rate: learning rate of the step.
          decay: weight decay, by the optimiser itself, at the step; None: without.
          mask: parameters that it decays.
        """
        parameters = _parameters(self.function)
        arguments = self.arguments() | {_one_of(_RATES, parameters): rate}
        if name := _one_of(_DTYPES, parameters):
            arguments[name] = jnp.dtype(self.mu_dtype)
        if name := _one_of(_DECAYS, parameters):
            nothing = None if parameters[name].default is None else 0.0
            arguments[name] = nothing if decay is None else decay
        if (name := _one_of(_MASKS, parameters)) and mask is not None:
            arguments[name] = mask
        return optax.with_extra_args_support(self.function(**arguments))

    def steps(
        self, params: dict, rate: Schedule, decay: Decay | None
    ) -> list[optax.GradientTransformation]:
        parameters = _parameters(self.function)
        # Where the rate is by default 1, the optimiser finds its steps by itself, and
        # decays the weights in proportion: by the scheduled rate they would be gone.
        own = parameters[_one_of(_RATES, parameters)].default == 1.0
        if own:
            scheduled = rate
            rate = lambda step: jnp.maximum(scheduled(step), _LEAST_RATE)
        if decay and own and _one_of(_DECAYS, parameters):
            masked = stacking.separate(params), self.weight_decay_mask
            mask = match(*masked, "optim.weight_decay_mask")
            return [self._transformation(params, rate, _own_decay(self, decay, mask))]
        plain = lambda rate, count: self.make(rate)
        return [self._transformation(params, rate, plain, decay)]

    def _transformation(
        self,
        params: dict,
        rate: Schedule,
        make: Callable[..., optax.GradientTransformationExtraArgs],
        decay: Decay | None = None,
    ) -> optax.GradientTransformationExtraArgs:
        """Runs optax's optimiser on the blocks one by one, with our weight decay behind.

        Args:
          params: model parameters, as arrays or shapes.
          rate: learning rate by the steps taken.
          make: function of a rate and the steps taken that returns an optimiser.
          decay: decay that is added to its steps, times the rate.
        """
        join = functools.partial(stacking.join, like=params)

        def init(params):
            zero = jnp.zeros([], jnp.int32)
            with _one_line(self.name):
                inner = make(rate(zero), zero).init(stacking.separate(params))
            return OutsideState(zero, _without_empty(inner))

        def update(updates, state, params, *, value=None, value_fn=None, **extra):
            del extra
            count, now = state.count, rate(state.count)
            grads = stacking.separate(updates)
            loss = _reverse_mode(lambda params: value_fn(join(params)))
            # The names by which optimisers of optax ask for the loss.
            asked = {"value": value, "obj_fn": loss}
            with _one_line(self.name):
                tx = make(now, count)
                blocks = stacking.separate(params)
                inner = _with_empty(state.inner, jax.eval_shape(tx.init, blocks))
                updates, inner = tx.update(grads, inner, blocks, **asked)
            updates = join(updates)
            if decay:
                weight = now * decay.at(count)
                updates = jax.tree.map(
                    lambda u, p, m: u - weight * p * m if np.any(m) else u,
                    updates,
                    params,
                    decay.mask,
                )
            return updates, OutsideState(count + 1, _without_empty(inner))

        return optax.GradientTransformationExtraArgs(init, update)


def _own_decay(
    config: OutsideConfig, decay: Decay, mask: dict
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """Returns a function like `make` whose optimisers decay the masked weights."""
    if _one_of(_MASKS, _parameters(config.function)):
        return lambda rate, count: config.make(rate, decay.at(count), mask)

    def make(rate, count):
        # It would decay all parameters: a twin without decay moves the others.
        decaying, twin = config.make(rate, decay.at(count)), config.make(rate)

        def update(updates, state, params, **asked):
            others, _ = twin.update(updates, state, params, **asked)
            decayed, state = decaying.update(updates, state, params, **asked)
            choose = lambda m, d, o: d if m else o
            return jax.tree.map(choose, mask, decayed, others), state

        return optax.GradientTransformationExtraArgs(decaying.init, update)

    return make


def _without_empty(state: optax.OptState) -> optax.OptState:
    """Returns a state without its arrays of no elements, which no checkpoint can hold."""
    return jax.tree.map(lambda x: x if x.size else None, state)


def _with_empty(state: optax.OptState, shapes: optax.OptState) -> optax.OptState:
    """Undoes `_without_empty`, for a state of these shapes."""
    fill = lambda s, x: x if s.size else jnp.zeros(s.shape, s.dtype)
    return jax.tree.map(fill, shapes, state)


def _reverse_mode(function: Callable[[dict], jax.Array]) -> Callable:
    """Returns the same function of a tree, with second derivatives by reverse mode alone.

    optax takes them by forward mode, which the functions of networks with a derivative of
    their own do not have.
    """

    def dot(
        a, b
    ):  # optax.tree.vdot makes vectors: a split parameter would be gathered.
        return optax.tree.sum(optax.tree.mul(a, b))

    gradient, value = jax.custom_jvp(jax.grad(function)), jax.custom_jvp(function)

    @gradient.defjvp
    def _(primals, tangents):
        along = lambda params: dot(jax.grad(function)(params), tangents[0])
        return gradient(*primals), jax.grad(along)(*primals)

    @value.defjvp
    def _(primals, tangents):
        return function(*primals), dot(gradient(*primals), tangents[0])

    return value


@contextlib.contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Converts what optax raises to one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # What optax raises, and what a network does inside it.
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"optim.name={name!r}: {type(error).__name__} in optax ({reason}): mend its "
            "keys, or choose another"
        ) from error


@functools.cache
def _names() -> list[str]:
    """Returns the names of the functions of optax that a config can state."""
    names = sorted({*dir(optax), *dir(optax.contrib)} - _REFUSED.keys())
    return [name for name in names if (f := _found(name)) and not _wanting(f)]


def _found(name: str) -> Callable | None:
    """Returns the optimiser of optax that has a name, if there is one."""
    if name.startswith(("_", "scale_by_")):
        return None
    for module in (optax, optax.contrib):
        function = vars(module).get(name)  # Deprecated names warn, and are not there.
        if inspect.isfunction(function) or isinstance(function, functools.partial):
            if _one_of(_RATES, _parameters(function)):
                return function
    return None


@functools.cache
def _parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _one_of(names: tuple[str, ...], parameters: Mapping) -> str | None:
    return next((name for name in names if name in parameters), None)


def _wanting(function: Callable) -> list[str]:
    """Returns the parameters that have no default, but for the learning rate."""
    return [
        name
        for name, parameter in _parameters(function).items()
        if parameter.default is parameter.empty and name not in _RATES
    ]


@functools.cache
def _dataclass(name: str) -> type:
    """Makes the dataclass of a function of optax."""
    function, base = _found(name), OutsideConfig
    if name in _BASES:
        module, _, cls = _BASES[name].partition(":")
        base = getattr(importlib.import_module(f"{__package__}.{module}"), cls)
    parameters, doc = _parameters(function), inspect.getdoc(function) or name
    meanings, own = _meanings(doc), {"name": (str, key(name, ""))}
    for one, parameter in parameters.items():
        if one not in (*fields(base), *base.left_out, *_LEFT_OUT, *_RATES):
            if field := _field(one, parameter, meanings.get(one, "")):
                own[one] = (type(parameter.default), field)
    for one, names in ("learning_rate", _RATES), ("weight_decay", _DECAYS):
        parameter = parameters.get(_one_of(names, parameters))
        if parameter and _is_number(parameter.default):
            old = fields(OptimConfig)[one]
            rules = {"in_step": old.in_step, "at_least": old.at_least}
            own[one] = (float, key(float(parameter.default), old.help, **rules))
    module = "optax" if vars(optax).get(name) is function else "optax.contrib"
    about = f"{_plain(doc.partition(chr(10))[0]).rstrip('.')} ({module}.{name})."
    return dataclasses.make_dataclass(
        f"{''.join(word.title() for word in name.split('_'))}Config",
        [(one, kind, field) for one, (kind, field) in own.items()],
        bases=(base,),
        namespace={
            "__doc__": about,
            "__module__": __name__,
            "function": staticmethod(function),
            "takes_mu_dtype": bool(_one_of(_DTYPES, parameters)),
        },
        frozen=True,
        kw_only=True,
    )


def _field(name: str, parameter: inspect.Parameter, meaning: str) -> Any:
    """Returns the field of a parameter, or None if no key can state its values."""
    default, kind = parameter.default, str(parameter.annotation)
    if name == "key":  # Without one optax warns and takes 0.
        default = 0
    rules: dict[str, Any] = {"at_least": None, "optional": "None" in kind}
    if _MEAN.fullmatch(name):
        rules |= {"at_least": 0, "below": 1}
    elif name.startswith("eps"):
        rules["at_least"] = 0
    elif type(default) is int and default > 0:  # A count.
        rules["at_least"] = 1
    if typing.get_origin(parameter.annotation) is typing.Literal:
        rules["choices"] = typing.get_args(parameter.annotation)
    if default is None:
        if re.search("Callable|Tree|Transformation", kind):
            return None
        like = re.search(r"\b(float|int)\b", kind)
        if not like:
            return None
        rules |= {"optional": True, "like": {"float": 0.0, "int": 0}[like[1]]}
    several = isinstance(default, tuple) and all(map(_is_number, default))
    if default is not None and not several and type(default) not in (bool, str):
        if not _is_number(default):
            return None
    return key(default, meaning or f"Parameter `{name}` of optax.", **rules)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _meanings(doc: str) -> dict[str, str]:
    """Returns the meanings of parameters by the section "Args" of a docstring."""
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
    """Returns a text in one line, without the marks of reStructuredText."""
    text = re.sub(r":\w+:`~?([^`<]+?)(?: <[^`]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<]+?) <([^`>]*)>`_+", r"\1", text)
    return " ".join(text.replace("``", "`").split())
