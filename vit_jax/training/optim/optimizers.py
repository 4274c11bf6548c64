"""The optimisers of this package: Adam, SGD, LARS and LAMB."""

import dataclasses

import optax

from vit_jax.config.fields import key
from vit_jax.training.optim.sharpness import OptimConfig
from vit_jax.training.optim.transforms import match, scale_by_trust_ratio, trust_note


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamConfig(OptimConfig):
    """Adam (arXiv:1412.6980)."""

    b1: float = key(
        0.9, "Adam's beta1: decay of the running mean of the gradient.", below=1
    )
    b2: float = key(
        0.999,
        "Adam's beta2: decay of the running mean of the squared gradient.",
        below=1,
    )
    eps: float = key(
        1e-8,
        "Adam's epsilon, which is added to the root of the mean squared gradient.",
    )

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
        0.9,
        "Momentum: decay of the running sum of gradients; 0 is SGD without momentum.",
        below=1,
    )
    nesterov: bool = key(
        False, "Use Nesterov momentum.", reason="recipes of SGD in timm"
    )

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
    """LARS (arXiv:1708.03888), as in MAE's linear probe.

    Parameters that `weight_decay_mask` matches have weight decay and a trust ratio,
    both applied before the momentum. Other parameters are trained by SGD with momentum.
    """

    name: str = key("lars", "")
    momentum: float = key(0.9, "Momentum: decay of the running sum of steps.", below=1)
    trust_coefficient: float = key(
        0.001,
        "Trust coefficient: norm of the update of a parameter before learning rate and "
        "momentum, as a multiple of the norm of the parameter.",
        above=0,
    )

    def moments(self) -> list[optax.GradientTransformation]:
        # Unlike optax.lars, which multiplies by the learning rate before the momentum.
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
    """LAMB (arXiv:1904.00962), as in timm, which was used to train DeiT III.

    Parameters with weight decay have a trust ratio; other parameters are trained by
    Adam. timm also clips the gradients, as `grad_clip_norm=1.0` does.
    """

    name: str = key("lamb", "")
    eps: float = key(
        1e-6,
        "Adam's epsilon, which is added to the root of the mean squared gradient.",
    )

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
