"""Optimisers, one of which `config.optim.name` chooses: ours, and those of optax."""

from vit_jax.training.optim.chain import (
    Thawing,
    layer_factors,
    learning_rate,
    optimizer,
    stop_frozen_gradients,
    weight_decay,
)
from vit_jax.training.optim.config import (
    AdamConfig,
    LambConfig,
    LarsConfig,
    OptimConfig,
    SgdConfig,
)
from vit_jax.training.optim.named import Optimizers
from vit_jax.training.optim.transforms import (
    always_frozen,
    clip_by_parameter_norm,
    match,
    parameter_norms,
    scale_by_trust_ratio,
)

__all__ = [
    "OPTIMIZERS",
    "AdamConfig",
    "LambConfig",
    "LarsConfig",
    "OptimConfig",
    "SgdConfig",
    "Thawing",
    "always_frozen",
    "clip_by_parameter_norm",
    "layer_factors",
    "learning_rate",
    "match",
    "optimizer",
    "parameter_norms",
    "scale_by_trust_ratio",
    "stop_frozen_gradients",
    "weight_decay",
]

OPTIMIZERS = Optimizers(
    {
        "adam": AdamConfig,
        "adamw": AdamConfig,  # Weight decay is decoupled in any case.
        "sgd": SgdConfig,
        "lars": LarsConfig,
        "lamb": LambConfig,
    }
)
