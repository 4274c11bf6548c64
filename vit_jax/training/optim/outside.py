"""Adapts optimisers of optax to configs, to blocks in a scan, and to weight decay."""

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

# Parameters of optax's functions that are set by the keys that all optimisers share.
RATES = ("learning_rate", "max_learning_rate")
DECAYS = ("weight_decay", "weight_decay_rate")
MASKS = ("mask", "weight_decay_mask")
DTYPES = ("mu_dtype", "accumulator_dtype", "dtype_momentum")
# These choose their step size themselves, so weight decay cannot be multiplied by a
# learning rate, and they do not take a mask.
_DECAY_IN_GRADIENT = ("madgrad", "polyak_sgd")
# These choose their step size too, though their default learning rate is not 1.
_FINDS_STEP_SIZE = ("momo_adam",)
# Optimisers that estimate their step size divide 0 by 0 at a learning rate of 0, as in
# the first step of a warmup. This rate is too small to change a parameter.
_LEAST_RATE = 1e-8


class OutsideState(NamedTuple):
    """Number of steps taken, and the state of optax's optimiser for separate blocks."""

    count: jax.Array
    inner: optax.OptState


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutsideConfig(OptimConfig):
    """Base of the dataclasses that are created for optimisers of optax.

    Attributes:
      function: function of optax.
      left_out: names of parameters of the function that do not become keys.
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
                    f"optim.{name}={value}: it must have {len(default)} numbers, such as "
                    f"{default}"
                )

    def arguments(self) -> dict[str, object]:
        """Returns the arguments of the function that no key of all optimisers sets."""
        shared = fields(OptimConfig)
        return {
            name: getattr(self, name)
            for name in fields(type(self))
            if name not in shared and name in parameters_of(self.function)
        }

    @property
    def _rate_is_factor(self) -> bool:
        """Whether the learning rate is a factor of steps, 1 by default."""
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
          decay: weight decay of the step that the optimiser itself applies, or None.
          mask: parameters with weight decay.
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
        # An optimiser that chooses its step size must apply the weight decay itself, in
        # proportion to its steps: multiplied by the scheduled rate, about 1, it would
        # erase the weights.
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
        """Returns a transformation that runs optax's optimiser on separate blocks.

        Args:
          params: model parameters, arrays or shapes.
          rate: learning rate as a function of the number of steps taken.
          make: function of a learning rate and the number of steps taken that returns
            an optimiser.
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
            # Optimisers of optax have different names for the loss.
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
    """Returns a function like `make` for optimisers that apply the weight decay."""
    if one_of(MASKS, parameters_of(config.function)):
        return lambda rate, count: config.make(rate, decay.at(count), mask)

    def make(rate, count):
        # The optimiser would decay all parameters, so parameters outside the mask have
        # the updates of a second one without decay.
        decaying, twin = config.make(rate, decay.at(count)), config.make(rate)

        def update(updates, state, params, **asked):
            others, _ = twin.update(updates, state, params, **asked)
            decayed, state = decaying.update(updates, state, params, **asked)
            choose = lambda m, d, o: d if m else o
            return jax.tree.map(choose, mask, decayed, others), state

        return optax.GradientTransformationExtraArgs(decaying.init, update)

    return make


def _without_empty(state: optax.OptState) -> optax.OptState:
    """Replaces arrays without elements by None, since checkpoints cannot store them."""
    return jax.tree.map(lambda x: x if x.size else None, state)


def _with_empty(state: optax.OptState, shapes: optax.OptState) -> optax.OptState:
    """Reverses `_without_empty` for a state with the given shapes."""
    fill = lambda s, x: x if s.size else jnp.zeros(s.shape, s.dtype)
    return jax.tree.map(fill, shapes, state)


def _reverse_mode(function: Callable[[dict], jax.Array]) -> Callable:
    """Returns the same function, with second derivatives by reverse mode only.

    optax computes second derivatives by forward mode, which functions with a custom
    derivative (kernels.py) do not support.
    """

    def dot(a, b):
        # optax.tree.vdot flattens parameters, which gathers split ones on each device.
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
    """Returns the first of several names that is a parameter; None if none is."""
    return next((name for name in names if name in parameters), None)


@contextlib.contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Converts errors in optax to a UserError with one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Raised by optax, or by the network in its loss.
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"optim.name={name!r}: {type(error).__name__} in optax ({reason}): change the "
            "keys of optim, or choose another optimiser"
        ) from error
