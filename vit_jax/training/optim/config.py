"""Keys that all optimisers have, and what the training step asks of one."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import optax
from jax.sharding import Mesh

from vit_jax.config.fields import choice, epochs, key
from vit_jax.config.lengths import RunLength
from vit_jax.distributed import mesh as meshes
from vit_jax.errors import UserError
from vit_jax.training.optim.transforms import (
    Decay,
    add_decay,
)
from vit_jax.training.schedules import (
    SCHEDULES,
    Number,
    Schedule,
    ScheduleConfig,
)

# (state, batch, key) -> (gradients, (metrics, statistics)), see training/step.py.
GradFn = Callable[[Any, dict, jax.Array], tuple[dict, Any]]
# (gradients, steps taken) -> gradients
Moving = Callable[[dict, jax.Array], dict]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainOptimConfig:
    """Keys of `config.optim` that every optimiser has.

    Attributes:
      default_rate: peak learning rate if no key states one; 0: one must.
      takes_mu_dtype: whether it keeps a first moment in `mu_dtype`.
      averages: whether its `evaluated` parameters are others than those it trains, so
        that a state has them as its `average` even without `ema.decay`.
    """

    default_rate: ClassVar[float] = 0.0
    takes_mu_dtype: ClassVar[bool] = True
    averages: ClassVar[bool] = False

    name: str = key(
        "adam",
        '"adam" or "adamw", the same; "sgd", "lars", "lamb"; or one of optax.',
    )
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
    warmup_learning_rate: float = key(0.0, "Learning rate at the start of the warmup.")
    schedule_by_epochs: bool = key(
        False,
        "Keep one learning rate in each epoch, that of the start of the epoch before it, "
        "as DeiT's code does: epochs 0 and 1 have the first one.",
    )
    weight_decay: float = key(0.0, "Decoupled from the loss, times the scheduled rate.")
    weight_decay_end: float = key(
        0.0, "Half a cosine leads from `weight_decay` to this; 0 is off."
    )
    weight_decay_steps: int = key(
        0, "Length of that half cosine in steps; all three 0: the whole run."
    )
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
    grad_clip_norm: float = key(
        0.0,
        "Largest gradient norm over all parameters that move in a step; 0 is off.",
    )
    grad_clip_norm_per_part: float = key(
        0.0,
        "Largest gradient norm of each part of a task by itself: its network, each of "
        "its heads; what `freeze_steps` keep frozen counts, as in DINOv2. 0 is off.",
    )
    grad_clip_norm_per_parameter: float = key(
        0.0, "Largest gradient norm of each parameter by itself; 0 is off."
    )
    grad_accum_steps: int = key(
        1,
        "Microbatches per step. A run whose loss compares images of a batch, or takes "
        "their statistics, depends on it and says so at the start.",
        at_least=1,
        changes_result=False,
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
        if self.mu_dtype != "float32" and not self.takes_mu_dtype:
            raise UserError(
                f"optim.mu_dtype={self.mu_dtype!r}: optim.name={self.name!r} keeps its "
                "state in float32 alone: leave the key out"
            )
        given = bool(self.learning_rate) + bool(self.base_learning_rate)
        if given == 2 or not (given or self.default_rate):
            raise UserError(
                f"optim.learning_rate={self.learning_rate} and "
                f"optim.base_learning_rate={self.base_learning_rate}: set exactly one of "
                "them above 0"
            )

    @property
    def finds_step_size(self) -> bool:
        """Whether its steps depend on norms or products over all parameters."""
        return False

    def peak_learning_rate(self, batch_size: int) -> float:
        """Returns the highest learning rate of a run."""
        given = self.learning_rate or self.base_learning_rate * batch_size / 256
        return given or self.default_rate

    @property
    def passes(self) -> int:
        """Forward and backward passes of a step."""
        return 1

    def splits(self, batch_size: int, mesh: Mesh) -> tuple[int, int]:
        """Returns the groups of a batch, each of which `wrap_gradients` gets alone, and
        the microbatches of a group. Each device has a part of every microbatch.

        Raises:
          UserError: the images cannot be split so.
        """
        meshes.check_batch(batch_size, self.grad_accum_steps, mesh)
        return 1, self.grad_accum_steps

    def splitting(self, parts: int) -> str:
        """Returns the key that splits the batch, if groups have so many microbatches."""
        return f"optim.grad_accum_steps={self.grad_accum_steps}"

    def wrap_gradients(
        self,
        gradients: GradFn,
        rate: Schedule,
        peak: Number,
        run: RunLength,
        moving: Moving,
    ) -> GradFn:
        """Returns the gradients that the optimiser gets.

        Args:
          gradients: gradients of the loss.
          rate: learning rate by the steps taken.
          peak: the highest rate.
          run: length of the run.
          moving: sets gradients to zero of parameters that do not move after so many
            steps.
        """
        return gradients

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

    def steps(
        self, params: dict, rate: Schedule, decay: Decay | None
    ) -> list[optax.GradientTransformation]:
        """Returns transformations from gradients to steps at the learning rate.

        Args:
          params: model parameters, as arrays or shapes.
          rate: learning rate by the steps taken.
          decay: weight decay, if any.
        """
        added = [add_decay(decay)] if decay else []
        return [*self.direction(params, added), optax.scale_by_learning_rate(rate)]

    def wrap(
        self, chain: list[optax.GradientTransformation], rate: Schedule
    ) -> list[optax.GradientTransformation]:
        """Returns the whole chain, of clipping, steps and the rest, in what wraps it."""
        return chain

    def note(self, params: dict) -> str:
        """Returns a warning about the parameters that a run begins with, or ""."""
        return ""

    def evaluated(self, opt_state: optax.OptState, params: dict) -> dict:
        """Returns the parameters that evaluations read, and that `ema` averages."""
        return params
