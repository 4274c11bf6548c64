"""Learning rate schedules: a linear warmup, then one of these to the end of the run."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.config import fields
from vit_jax.config.fields import epochs, key
from vit_jax.errors import UserError

Number = jax.Array | float
Schedule = Callable[[jax.Array | int], Number]


class RunLength(NamedTuple):
    """The length of a run.

    Attributes:
      total_steps: optimiser steps.
      steps_per_epoch: training examples by batch size.
      key: config key that states the length, for messages.
    """

    total_steps: int
    steps_per_epoch: float
    key: str = "total_steps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Base of all schedules."""

    name: str = key("cosine", "Name of the schedule, or module:Name of one's own.")

    def build(self, peak: Number, warmup: int, run: RunLength) -> Schedule:
        """Returns the learning rate as a function of the steps after the warmup.

        Args:
          peak: learning rate at the end of the warmup; it may be traced.
          warmup: its length in steps, at most that of the run.
          run: length of the run, with the warmup.

        Raises:
          UserError: a key does not fit the length of the run.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantConfig(ScheduleConfig):
    """The peak."""

    name: str = key("constant", "")

    def build(self, peak: Number, warmup: int, run: RunLength) -> Schedule:
        return optax.constant_schedule(peak)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineConfig(ScheduleConfig):
    """Half a cosine from the peak to the end (arXiv:1608.03983)."""

    end_learning_rate: float = key(
        0.0, "Learning rate one step after the last.", formerly="optim.end_rate"
    )

    def build(self, peak: Number, warmup: int, run: RunLength) -> Schedule:
        steps = max(1, run.total_steps - warmup)
        return optax.cosine_decay_schedule(
            peak, steps, alpha=self.end_learning_rate / peak
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(ScheduleConfig):
    """A straight line from the peak to the end."""

    name: str = key("linear", "")
    end_learning_rate: float = key(
        0.0, "Learning rate one step after the last.", formerly="optim.end_rate"
    )

    def build(self, peak: Number, warmup: int, run: RunLength) -> Schedule:
        steps = max(1, run.total_steps - warmup)
        return optax.linear_schedule(peak, self.end_learning_rate, steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RsqrtConfig(ScheduleConfig):
    """Reciprocal square root, then a linear cooldown to 0 (arXiv:2106.04560)."""

    name: str = key("rsqrt", "")
    timescale: int = key(
        10_000,
        "In steps: peak / sqrt(1 + steps after warmup / timescale).",
        at_least=1,
        formerly="optim.timescale",
    )
    cooldown_steps: int = key(
        0,
        "Length of the cooldown in steps, or else ...",
        formerly="optim.cooldown_steps",
    )
    cooldown_epochs: float = epochs(
        "... in epochs, or else ...", formerly="optim.cooldown_epochs"
    )
    cooldown_fraction: float = key(
        0.0, "... as a fraction of the run.", formerly="optim.cooldown_fraction"
    )

    def build(self, peak: Number, warmup: int, run: RunLength) -> Schedule:
        steps = run.total_steps - warmup
        cooldown = length_in_steps(self, "cooldown", run)
        if cooldown > steps:
            stated = length_key(self, "cooldown")
            raise UserError(
                f"warmup ({warmup} steps) and cooldown ({cooldown}) are longer than the "
                f"run ({run.total_steps}): lower optim.schedule.{stated} or raise "
                f"{run.key}"
            )

        def learning_rate(step):
            rate = peak / jnp.sqrt(1 + step / self.timescale)
            left = (steps - step) / max(1, cooldown)
            return rate * jnp.clip(left, 0, 1) if cooldown else rate

        return learning_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig(ScheduleConfig):
    """Constant, multiplied by `decay_rate` at each boundary."""

    name: str = key("step", "")
    boundaries: tuple[int, ...] = key(
        (0,), "Steps of the run, in ascending order.", formerly="optim.boundaries"
    )
    decay_rate: float = key(
        0.1, "Factor of the learning rate at each boundary.", formerly="optim.factor"
    )

    def build(self, peak: Number, warmup: int, run: RunLength) -> Schedule:
        steps = [warmup, *self.boundaries, run.total_steps]
        if any(a >= b for a, b in itertools.pairwise(steps)):
            raise UserError(
                f"optim.schedule.boundaries={self.boundaries} must ascend between the "
                f"end of the warmup ({warmup}) and that of the run ({run.total_steps})"
            )
        return optax.piecewise_constant_schedule(
            peak, {step - warmup: self.decay_rate for step in self.boundaries}
        )


SCHEDULES = {
    "cosine": CosineConfig,
    "linear": LinearConfig,
    "rsqrt": RsqrtConfig,
    "step": StepConfig,
    "constant": ConstantConfig,
}


def length_in_steps(section: object, name: str, run: RunLength) -> int:
    """Returns a length in steps that is stated as steps, epochs or a fraction.

    Args:
      section: of a config, with `{name}_steps`, `{name}_epochs`, `{name}_fraction`.
      name: of the length, as "warmup".
      run: length of the run.

    Raises:
      UserError: more than one of them is set.
    """
    units = dict(zip(_units(name), (1, run.steps_per_epoch, run.total_steps)))
    given = {unit: getattr(section, unit) for unit in units if getattr(section, unit)}
    if len(given) > 1:
        stated = " and ".join(f"{unit}={value}" for unit, value in given.items())
        raise UserError(
            f"config states {stated}: keep one of them, set the others to 0"
        )
    return sum(max(1, round(value * units[unit])) for unit, value in given.items())


def length_key(section: object, name: str) -> str | None:
    """Returns the key that states a length, or None if it is 0."""
    return next((unit for unit in _units(name) if getattr(section, unit)), None)


def depends_on_epochs(section: object) -> bool:
    """Returns whether a length in a section of a config is stated in epochs."""
    stated = fields.flatten(fields.to_dict(section)).items()
    return any(value for name, value in stated if name.endswith("_epochs"))


def _units(name: str) -> tuple[str, str, str]:
    return f"{name}_steps", f"{name}_epochs", f"{name}_fraction"
