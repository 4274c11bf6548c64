"""Learning rate schedules from the end of the warmup to the end of the run."""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from vit_jax.config.fields import epochs, key
from vit_jax.config.lengths import RunLength, length_in_steps, length_key
from vit_jax.errors import UserError

Number = jax.Array | float | int
Schedule = Callable[[jax.Array | int], Number]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Base of all schedules."""

    name: str = key(
        "cosine",
        'Name of the schedule, or "my_module:MyConfig" for a schedule in your code.',
    )

    def build(self, peak: Number, warmup: int, run: RunLength) -> Schedule:
        """Returns the learning rate as a function of the steps after the warmup.

        Args:
          peak: learning rate at the end of the warmup; it may be traced.
          warmup: length of the warmup in steps, at most the length of the run.
          run: length of the run, including the warmup.

        Raises:
          UserError: a key does not fit the length of the run.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantConfig(ScheduleConfig):
    """A constant learning rate: the peak."""

    name: str = key("constant", "")

    def build(self, peak: Number, warmup: int, run: RunLength) -> Schedule:
        return optax.constant_schedule(peak)


# Functions from the remaining fraction of a cooldown, 1 to 0, to a factor of the
# learning rate.
COOLDOWN_SHAPES = {
    "linear": lambda left: left,
    "cosine": lambda left: (1 - jnp.cos(jnp.pi * left)) / 2,
    "1-sqrt": lambda left: 1 - jnp.sqrt(1 - left),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CooldownConfig(ScheduleConfig):
    """Base of schedules that can end with a cooldown."""

    cooldown_steps: int = key(
        0,
        "Length of the cooldown at the end of the run in steps; set at most one of "
        "cooldown_steps, cooldown_epochs and cooldown_fraction.",
        reason="WSD (arXiv:2404.06395) and reciprocal square roots (arXiv:2106.04560)",
    )
    cooldown_epochs: float = epochs(
        "Length of the cooldown at the end of the run in epochs.",
        reason="WSD and reciprocal square roots in runs that are counted in epochs",
    )
    cooldown_fraction: float = key(
        0.0,
        "Length of the cooldown at the end of the run as a fraction of the run.",
        reason="WSD and reciprocal square roots in runs of any length",
    )

    def cooldown(
        self, warmup: int, run: RunLength
    ) -> tuple[int, Callable[[jax.Array | int], Number]]:
        """Returns the length of the cooldown and its remaining fraction over time.

        Args:
          warmup, run: see `build`.

        Returns:
          Length in steps, and a function from the number of steps after the warmup to
          the remaining fraction of the cooldown, which is 1 before the cooldown.

        Raises:
          UserError: the cooldown is longer than the run after the warmup.
        """
        steps = run.total_steps - warmup
        length = length_in_steps(self, "cooldown", run)
        if length > steps:
            raise UserError(
                f"warmup ({warmup} steps) and cooldown ({length} steps) are longer than "
                f"the run ({run.total_steps} steps): lower optim.schedule."
                f"{length_key(self, 'cooldown')} or raise {run.key}"
            )
        return length, lambda step: jnp.clip((steps - step) / max(1, length), 0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineConfig(CooldownConfig):
    """Half a cosine from the peak to the end (arXiv:1608.03983), then a linear cooldown."""

    end_learning_rate: float = key(
        0.0,
        "Learning rate at the end of the cosine: one step after the last step or, with "
        "a cooldown, at the start of the cooldown to 0.",
    )
    includes_warmup: bool = key(
        False,
        "Start the cosine at the start of the run instead of after the warmup, which "
        "then replaces its first part, as timm does without `warmup_prefix`.",
    )

    def build(self, peak: Number, warmup: int, run: RunLength) -> Schedule:
        cooldown, left = self.cooldown(warmup, run)
        first = warmup if self.includes_warmup else 0
        steps = max(1, run.total_steps - warmup - cooldown + first)
        decay = optax.cosine_decay_schedule(
            peak, steps, alpha=self.end_learning_rate / peak
        )
        cosine = lambda step: decay(step + first)
        if not cooldown:
            return cosine
        if not self.end_learning_rate:
            raise UserError(
                f"optim.schedule.{length_key(self, 'cooldown')} with "
                "optim.schedule.end_learning_rate=0.0: the cosine reaches 0 before the "
                "cooldown begins; set end_learning_rate above 0"
            )
        return lambda step: cosine(step) * left(step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(ScheduleConfig):
    """A linear decay from the peak to the end of the run."""

    name: str = key("linear", "")
    end_learning_rate: float = key(0.0, "Learning rate one step after the last step.")

    def build(self, peak: Number, warmup: int, run: RunLength) -> Schedule:
        steps = max(1, run.total_steps - warmup)
        return optax.linear_schedule(peak, self.end_learning_rate, steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RsqrtConfig(CooldownConfig):
    """Reciprocal square root, then a linear cooldown to 0 (arXiv:2106.04560)."""

    name: str = key("rsqrt", "")
    timescale: int = key(
        10_000,
        "Timescale in steps: the learning rate is peak / sqrt(1 + steps after the "
        "warmup / timescale).",
        reason="Scaling Vision Transformers (arXiv:2106.04560)",
        at_least=1,
    )

    def build(self, peak: Number, warmup: int, run: RunLength) -> Schedule:
        cooldown, left = self.cooldown(warmup, run)

        def learning_rate(step):
            rate = peak / jnp.sqrt(1 + step / self.timescale)
            return rate * left(step) if cooldown else rate

        return learning_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class WsdConfig(CooldownConfig):
    """Warmup, stable, decay (WSD, arXiv:2404.06395): constant, then a cooldown."""

    name: str = key("wsd", "")
    cooldown_shape: str = key(
        "linear",
        'Shape of the cooldown of the learning rate: "linear", "cosine" or "1-sqrt".',
        reason="a comparison of shapes (arXiv:2405.18392)",
        choices=tuple(COOLDOWN_SHAPES),
    )
    end_learning_rate: float = key(0.0, "Learning rate one step after the last step.")

    def build(self, peak: Number, warmup: int, run: RunLength) -> Schedule:
        cooldown, left = self.cooldown(warmup, run)
        if not cooldown:
            raise UserError(
                "optim.schedule.name='wsd' needs a cooldown: set "
                "optim.schedule.cooldown_fraction, for example to 0.2, or choose "
                "'constant'"
            )
        end, shape = self.end_learning_rate, COOLDOWN_SHAPES[self.cooldown_shape]
        return lambda step: end + (peak - end) * shape(left(step))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig(ScheduleConfig):
    """A piecewise constant learning rate, multiplied by a factor at each boundary."""

    name: str = key("step", "")
    boundaries: tuple[int, ...] = key(
        (0,),
        "Steps of the run at which the learning rate is multiplied by `decay_rate`, in "
        "ascending order; set this or `boundary_epochs`.",
    )
    boundary_epochs: tuple[float, ...] = key(
        (0.0,),
        "Epochs of the run at which the learning rate is multiplied by `decay_rate`, "
        "in ascending order; set this or `boundaries`.",
    )
    decay_rate: float = key(0.1, "Factor of the learning rate at each boundary.")

    def build(self, peak: Number, warmup: int, run: RunLength) -> Schedule:
        steps, epochs = self.boundaries, self.boundary_epochs
        where = f"optim.schedule.boundaries={steps}"
        if any(epochs):
            if any(steps):
                raise UserError(
                    f"{where} and optim.schedule.boundary_epochs={epochs}: keep one of "
                    "them, and set the other to (0,)"
                )
            steps = tuple(round(n * run.steps_per_epoch) for n in epochs)
            where = f"optim.schedule.boundary_epochs={epochs}, which are steps {steps},"
        if not all(
            a < b for a, b in itertools.pairwise((warmup, *steps, run.total_steps))
        ):
            raise UserError(
                f"{where} must ascend between the end of the warmup (step {warmup}) and the "
                f"end of the run (step {run.total_steps}): change the boundaries, or the "
                "length of the run"
            )
        return optax.piecewise_constant_schedule(
            peak, {step - warmup: self.decay_rate for step in steps}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExponentialConfig(ScheduleConfig):
    """An exponential increase to the peak, for range tests (arXiv:1506.01186)."""

    name: str = key("exponential", "")
    start_fraction: float = key(
        1e-5,
        "First learning rate, as a fraction of the peak.",
        reason="range tests (arXiv:1506.01186), as `finetune --find_rate` runs them",
        above=0,
        at_most=1,
    )

    def build(self, peak: Number, warmup: int, run: RunLength) -> Schedule:
        steps = max(1, run.total_steps - warmup - 1)
        return optax.exponential_decay(
            peak * self.start_fraction, steps, 1 / self.start_fraction
        )


SCHEDULES = {
    "cosine": CosineConfig,
    "linear": LinearConfig,
    "rsqrt": RsqrtConfig,
    "wsd": WsdConfig,
    "step": StepConfig,
    "constant": ConstantConfig,
    "exponential": ExponentialConfig,
}
