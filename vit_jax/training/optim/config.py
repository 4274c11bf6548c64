"""Keys that all optimisers have, and their interface to the training step."""

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
      default_rate: peak learning rate if no key sets it; 0 if a key must set it.
      takes_mu_dtype: whether the optimiser keeps a first moment in `mu_dtype`.
      has_average: whether evaluation uses different parameters than training
        (schedule-free). The state then stores them as its `average`, even if
        `ema.decay` is 0.
    """

    default_rate: ClassVar[float] = 0.0
    takes_mu_dtype: ClassVar[bool] = True
    has_average: ClassVar[bool] = False

    name: str = key(
        "adam",
        'Name of the optimiser: "adam" or "adamw", which are the same, "sgd", "lars", '
        '"lamb", or an optimiser of optax.',
    )
    learning_rate: float = key(
        0.0,
        "Peak learning rate; set either this or `optim.base_learning_rate`.",
        in_step=False,
    )
    base_learning_rate: float = key(
        0.0,
        "Peak learning rate for batches of 256 images, which is multiplied by "
        "batch_size / 256; set either this or `optim.learning_rate`.",
        in_step=False,
    )
    schedule: ScheduleConfig = choice(SCHEDULES, "cosine")
    warmup_steps: int = key(
        0,
        "Length of the linear warmup in steps; set at most one of warmup_steps, "
        "warmup_epochs and warmup_fraction.",
    )
    warmup_epochs: float = epochs("Length of the linear warmup in epochs.")
    warmup_fraction: float = key(
        0.0, "Length of the linear warmup as a fraction of the run."
    )
    warmup_ends_at_peak: bool = key(
        False,
        "Reach the peak learning rate in the last step of the warmup, as DINO's code "
        "does, instead of in the step after it.",
    )
    warmup_learning_rate: float = key(0.0, "Learning rate at the start of the warmup.")
    schedule_by_epochs: bool = key(
        False,
        "Keep the learning rate constant within an epoch, at its value at the start of "
        "the previous epoch, as DeiT's code does; epochs 0 and 1 have the first value.",
    )
    weight_decay: float = key(
        0.0,
        "Weight decay, which is decoupled from the loss and multiplied by the "
        "scheduled learning rate.",
    )
    weight_decay_end: float = key(
        0.0,
        "Weight decay at the end of its schedule, a half cosine that starts at "
        "`optim.weight_decay`; 0 keeps the weight decay constant.",
    )
    weight_decay_steps: int = key(
        0,
        "Number of steps in which the weight decay changes to "
        "`optim.weight_decay_end`; 0 is the whole run.",
        reason="stopping a run before the end of its schedules",
    )
    weight_decay_mask: tuple[str, ...] = key(
        (r"/kernel$",),
        "Regular expressions for the paths of the parameters that have weight decay.",
    )
    layer_decay: float = key(
        0.0,
        "Layer-wise decay: the learning rate of each layer is this factor times the "
        "learning rate of the layer above it; 0 is off.",
        at_most=1,
    )
    learning_rate_factors: tuple[str, ...] = key(
        (),
        "Factors of the learning rate for parameters whose paths match regular "
        'expressions, such as "network/embedding/ -> 0.2".',
    )
    grad_clip_norm: float = key(
        0.0,
        "Clip the gradients of each step to this norm over all trained parameters; 0 "
        "is off.",
    )
    grad_clip_norm_per_part: float = key(
        0.0,
        "Clip the gradients of each part of a task, its network and each of its heads, "
        "to this norm separately. As in DINOv2, the norms include parameters that are "
        "frozen by `optim.freeze_steps`. 0 is off.",
    )
    grad_clip_norm_per_parameter: float = key(
        0.0, "Clip the gradient of each parameter separately to this norm; 0 is off."
    )
    grad_accum_steps: int = key(
        1,
        "Number of microbatches per step (gradient accumulation). A loss that compares "
        "the images of a batch, or uses their statistics, depends on this number; such "
        "a run logs a line about it at the start.",
        reason="batches that do not fit into the memory of the devices",
        at_least=1,
        changes_result=False,
    )
    mu_dtype: str = key(
        "float32",
        'Dtype of Adam\'s first moment or SGD\'s momentum: "float32" or "bfloat16".',
        choices=("float32", "bfloat16"),
    )
    freeze: tuple[str, ...] = key(
        (),
        "Regular expressions for the paths of the parameters that are frozen, for the "
        "whole run unless freeze_steps, freeze_epochs or freeze_fraction is set.",
    )
    freeze_steps: int = key(
        0,
        "Number of steps for which the parameters of `optim.freeze` are frozen; set at "
        "most one of freeze_steps, freeze_epochs and freeze_fraction.",
    )
    freeze_epochs: float = epochs(
        "Number of epochs for which the parameters of `optim.freeze` are frozen."
    )
    freeze_fraction: float = key(
        0.0,
        "Fraction of the run for which the parameters of `optim.freeze` are frozen.",
        reason="the mode `head_then_all` of the command `transfer`",
    )

    def __post_init__(self):
        if self.mu_dtype != "float32" and not self.takes_mu_dtype:
            raise UserError(
                f"optim.mu_dtype={self.mu_dtype!r}: optim.name={self.name!r} supports "
                "only float32 for its state: leave the key out"
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
        """Whether steps depend on norms or products over all parameters."""
        return False

    def peak_learning_rate(self, batch_size: int) -> float:
        """Returns the highest learning rate of a run."""
        given = self.learning_rate or self.base_learning_rate * batch_size / 256
        return given or self.default_rate

    @property
    def passes(self) -> int:
        """Number of forward and backward passes per step."""
        return 1

    def microbatches(self, batch_size: int, mesh: Mesh) -> tuple[int, int]:
        """Returns the number of groups per batch, and of microbatches per group.

        The gradients of `wrap_gradients` are computed for one group at a time. Every
        device holds a part of every microbatch.

        Raises:
          UserError: the batch cannot be split into microbatches for these devices.
        """
        meshes.check_batch(batch_size, self.grad_accum_steps, mesh)
        return 1, self.grad_accum_steps

    def microbatch_key(self, parts: int) -> str:
        """Returns the key, with its value, that splits a batch into microbatches.

        Args:
          parts: number of microbatches per group.
        """
        return f"optim.grad_accum_steps={self.grad_accum_steps}"

    def wrap_gradients(
        self,
        gradients: GradFn,
        rate: Schedule,
        peak: Number,
        run: RunLength,
        moving: Moving,
    ) -> GradFn:
        """Returns the gradient function for the optimiser.

        Args:
          gradients: gradient function of the loss.
          rate: learning rate as a function of the number of steps taken.
          peak: highest learning rate.
          run: length of the run.
          moving: function of gradients and the number of steps taken that sets the
            gradients of parameters that are still frozen to zero.
        """
        return gradients

    def moments(self) -> list[optax.GradientTransformation]:
        """Returns transformations from gradients to a step without weight decay."""
        raise NotImplementedError

    def direction(
        self, params: dict, decay: list[optax.GradientTransformation]
    ) -> list[optax.GradientTransformation]:
        """Returns transformations from gradients to a step at a learning rate of 1.

        Args:
          params: model parameters, arrays or shapes.
          decay: transformations that add the weight decay; empty without weight decay.
        """
        return [*self.moments(), *decay]

    def steps(
        self, params: dict, rate: Schedule, decay: Decay | None
    ) -> list[optax.GradientTransformation]:
        """Returns transformations from gradients to steps.

        Args:
          params: model parameters, arrays or shapes.
          rate: learning rate as a function of the number of steps taken.
          decay: weight decay, or None.
        """
        added = [add_decay(decay)] if decay else []
        return [*self.direction(params, added), optax.scale_by_learning_rate(rate)]

    def wrap(
        self, chain: list[optax.GradientTransformation], rate: Schedule
    ) -> list[optax.GradientTransformation]:
        """Wraps the complete chain; schedule-free optimisers replace it by another.

        Args:
          chain: transformations from clipping to freezing.
          rate: learning rate as a function of the number of steps taken.
        """
        return chain

    def note(self, params: dict) -> str:
        """Returns a warning about the initial parameters of a run, or ""."""
        return ""

    def evaluated(self, opt_state: optax.OptState, params: dict) -> dict:
        """Returns the parameters that evaluations use and that `ema` averages."""
        return params
