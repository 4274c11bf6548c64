"""Keys of the optimisers: Adam, SGD, LARS and LAMB, and what all have."""

import dataclasses
from typing import ClassVar

import optax

from vit_jax.config.fields import choice, epochs, key
from vit_jax.errors import UserError
from vit_jax.training.optim.transforms import (
    Decay,
    add_decay,
    match,
    scale_by_trust_ratio,
    trust_note,
)
from vit_jax.training.schedules import SCHEDULES, Schedule, ScheduleConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
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
    weight_decay_epochs: float = epochs("The same in epochs, or else ...")
    weight_decay_fraction: float = key(0.0, "... as a fraction of the run.")
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
    sam_rho: float = key(
        0.0,
        "SAM (arXiv:2010.01412): distance uphill at which the gradient is taken, in two "
        "passes per step; 0 is off.",
    )
    sam_rho_end: float = key(
        0.0,
        "GSAM: `sam_rho` falls with the learning rate to this at the last rate; 0: it "
        "stays.",
    )
    sam_adaptive: str = key(
        "none",
        'Uphill in units of the parameters: "asam" (arXiv:2102.11600), "scaled" (of '
        "big_vision).",
        choices=("none", "asam", "scaled"),
    )
    sam_batch_size: int = key(
        0,
        "Images that go uphill together (the m of m-sharpness), on any number of "
        "devices; 0: the batch.",
    )
    gsam_alpha: float = key(
        0.0, "GSAM (arXiv:2203.08065): weight of what turns the gradient; 0 is off."
    )
    gsam_minimize: str = key(
        "robust",
        'Loss that GSAM\'s turn leaves alone: the one uphill, or "clean", the one here.',
        choices=("robust", "clean"),
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamConfig(OptimConfig):
    """Adam (arXiv:1412.6980)."""

    b1: float = key(0.9, "Adam's beta1, the decay of the mean gradient.", below=1)
    b2: float = key(0.999, "Adam's beta2, that of the mean square.", below=1)
    eps: float = key(1e-8, "Adam's epsilon, added to the root of the mean square.")

    def moments(self) -> list[optax.GradientTransformation]:
        return [
            optax.scale_by_adam(
                b1=self.b1, b2=self.b2, eps=self.eps, mu_dtype=self.mu_dtype
            )
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgdConfig(OptimConfig):
    """SGD with momentum."""

    name: str = key("sgd", "")
    momentum: float = key(
        0.9, "Decay of the sum of gradients per step; 0 is plain SGD.", below=1
    )
    nesterov: bool = key(False, "Nesterov momentum.")

    def moments(self) -> list[optax.GradientTransformation]:
        if not self.momentum:
            return []
        return [
            optax.trace(
                decay=self.momentum,
                nesterov=self.nesterov,
                accumulator_dtype=self.mu_dtype,
            )
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LarsConfig(OptimConfig):
    """LARS (arXiv:1708.03888), in the form of MAE's linear probe.

    Parameters that `weight_decay_mask` matches have weight decay and a trust ratio, both
    before the momentum; for the rest it is SGD with momentum.
    """

    name: str = key("lars", "")
    momentum: float = key(0.9, "Decay of the sum of steps.", below=1)
    trust_coefficient: float = key(
        0.001, "Norm of a step by that of its parameter.", above=0
    )

    def moments(self) -> list[optax.GradientTransformation]:
        # Not optax.lars, which multiplies by the rate before the momentum.
        return [optax.trace(decay=self.momentum, accumulator_dtype=self.mu_dtype)]

    def direction(
        self, params: dict, decay: list[optax.GradientTransformation]
    ) -> list[optax.GradientTransformation]:
        mask = match(params, self.weight_decay_mask, "optim.weight_decay_mask")
        trust = scale_by_trust_ratio(mask, self.trust_coefficient)
        return [*decay, trust, *self.moments()]

    def note(self, params: dict) -> str:
        return trust_note(self, params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LambConfig(AdamConfig):
    """LAMB (arXiv:1904.00962), in the form of timm, which DeiT III trains with.

    Parameters with weight decay have a trust ratio; for the rest it is Adam. timm also
    clips the gradient: `grad_clip_norm=1.0`.
    """

    name: str = key("lamb", "")
    eps: float = key(1e-6, "Adam's epsilon, added to the root of the mean square.")

    def direction(
        self, params: dict, decay: list[optax.GradientTransformation]
    ) -> list[optax.GradientTransformation]:
        if not decay:
            return self.moments()
        mask = match(params, self.weight_decay_mask, "optim.weight_decay_mask")
        return [*self.moments(), *decay, scale_by_trust_ratio(mask)]

    def note(self, params: dict) -> str:
        decays = self.weight_decay or self.weight_decay_end
        return trust_note(self, params) if decays else ""
