"""Adapts optimisers of optax: their arguments, stacked blocks, weight decay and loss."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.config.fields import defaults, fields
from vit_jax.errors import UserError
from vit_jax.models import stacking
from vit_jax.training.optim.sharpness import OptimConfig
from vit_jax.training.optim.transforms import Decay, add_decay, decayed
from vit_jax.training.schedules import Number, Schedule

# Names that optax's functions have for the keys that all optimisers share.
RATES = ("learning_rate", "max_learning_rate")
DECAYS = ("weight_decay", "weight_decay_rate")
MASKS = ("mask", "weight_decay_mask")
DTYPES = ("mu_dtype", "accumulator_dtype", "dtype_momentum")
# These choose their step size themselves, so weight decay cannot be multiplied by a
# learning rate, and they do not take a mask.
_DECAY_IN_GRADIENT = ("madgrad", "polyak_sgd")
# Its steps depend on all parameters, though its rate is not 1 by default.
_FINDS_STEP_SIZE = ("momo_adam",)
# Below what changes a parameter; at 0, as in the first step of a warmup, those that
# estimate their steps divide 0 by 0.
_LEAST_RATE = 1e-8


class OutsideState(NamedTuple):
    """Steps taken, and the state of optax's optimiser, with the blocks one by one."""

    count: jax.Array
    inner: optax.OptState


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutsideConfig(OptimConfig):
    """Base of the dataclasses that are made for functions of optax.

    Attributes:
      function: optax's function.
      left_out: names of its parameters that do not become keys.
    """

    function: ClassVar[Callable[..., optax.GradientTransformation]]
    left_out: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self):
        super().__post_init__()
        given = defaults(type(self))
        for name, value in self.arguments().items():
            default = given[name]
            if isinstance(default, tuple) and len(value) != len(default):
                raise UserError(
                    f"optim.{name}={value}: it takes {len(default)} numbers, as {default}"
                )

    def arguments(self) -> dict[str, object]:
        """Returns the arguments of the function that its own keys set."""
        shared = fields(OptimConfig)
        return {
            name: getattr(self, name)
            for name in fields(type(self))
            if name not in shared and name in parameters_of(self.function)
        }

    @property
    def _rate_is_factor(self) -> bool:
        """Whether the rate is by default 1, a factor of steps that it finds by itself."""
        parameters = parameters_of(self.function)
        return parameters[one_of(RATES, parameters)].default == 1.0

    @property
    def finds_step_size(self) -> bool:
        return self._rate_is_factor or self.name in _FINDS_STEP_SIZE

    def make(
        self, rate: Number, decay: Number | None = None, mask: dict | None = None
    ) -> optax.GradientTransformationExtraArgs:
        """Returns optax's optimiser for one step.

        Args:
          rate: learning rate of the step.
          decay: weight decay, by the optimiser itself, at the step; None: without.
          mask: parameters that it decays.
        """
        parameters = parameters_of(self.function)
        arguments = self.arguments() | {one_of(RATES, parameters): rate}
        if name := one_of(DTYPES, parameters):
            arguments[name] = jnp.dtype(self.mu_dtype)
        if name := one_of(DECAYS, parameters):
            nothing = None if parameters[name].default is None else 0.0
            arguments[name] = nothing if decay is None else decay
        if (name := one_of(MASKS, parameters)) and mask is not None:
            arguments[name] = mask
        return optax.with_extra_args_support(self.function(**arguments))

    def steps(
        self, params: dict, rate: Schedule, decay: Decay | None
    ) -> list[optax.GradientTransformation]:
        parameters = parameters_of(self.function)
        # One that finds its steps by itself decays the weights in proportion: by the
        # scheduled rate they would be gone.
        finds_rate = self._rate_is_factor
        if finds_rate:
            scheduled = rate
            rate = lambda step: jnp.maximum(scheduled(step), _LEAST_RATE)
        if decay and finds_rate and one_of(DECAYS, parameters):
            mask = decayed(stacking.separate(params), self)
            return [self._transformation(params, rate, _own_decay(self, decay, mask))]
        chain = [
            self._transformation(params, rate, lambda rate, count: self.make(rate))
        ]
        if decay and self.name in _DECAY_IN_GRADIENT:
            return [add_decay(decay), *chain]
        if decay:
            weight = lambda step: -rate(step) * decay.at(step)
            chain.append(add_decay(Decay(weight, decay.mask)))
        return chain

    def _transformation(
        self,
        params: dict,
        rate: Schedule,
        make: Callable[..., optax.GradientTransformationExtraArgs],
    ) -> optax.GradientTransformationExtraArgs:
        """Runs optax's optimiser on the blocks one by one.

        Args:
          params: model parameters, as arrays or shapes.
          rate: learning rate by the steps taken.
          make: function of a rate and the steps taken that returns an optimiser.
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
            return join(updates), OutsideState(count + 1, _without_empty(inner))

        return optax.GradientTransformationExtraArgs(init, update)


def _own_decay(
    config: OutsideConfig, decay: Decay, mask: dict
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """Returns a function like `make` whose optimisers decay the masked weights."""
    if one_of(MASKS, parameters_of(config.function)):
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
    """Returns the same function of a tree, with second derivatives by reverse mode only.

    optax takes them by forward mode, which functions with a custom derivative (kernels.py)
    do not support.
    """

    def dot(a, b):
        # optax.tree.vdot makes vectors: a split parameter would be gathered.
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


@functools.cache
def parameters_of(function: Callable) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function by name."""
    return inspect.signature(function).parameters


def one_of(names: tuple[str, ...], parameters: Mapping) -> str | None:
    """Returns the name that a function has for what several names mean."""
    return next((name for name in names if name in parameters), None)


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
