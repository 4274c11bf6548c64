"""Optimisers by name (`config.optim.name`): those of this package, and those of optax."""

from collections.abc import Iterator, Mapping

from vit_jax.training.optim.chain import (
    Optimizer,
    Thawing,
    build,
    layer_factors,
    learning_rate,
    optimizer,
    warmup_notes,
    weight_decay,
    without_frozen,
)
from vit_jax.training.optim.optimizers import (
    AdamConfig,
    LambConfig,
    LarsConfig,
    SgdConfig,
)
from vit_jax.training.optim.sharpness import OptimConfig
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
    "Optimizer",
    "SgdConfig",
    "Thawing",
    "always_frozen",
    "build",
    "clip_by_parameter_norm",
    "layer_factors",
    "learning_rate",
    "match",
    "optimizer",
    "parameter_norms",
    "scale_by_trust_ratio",
    "warmup_notes",
    "weight_decay",
    "without_frozen",
]

_PLAIN = {
    "adam": AdamConfig,
    "adamw": AdamConfig,  # Weight decay is decoupled in any case.
    "sgd": SgdConfig,
    "lars": LarsConfig,
    "lamb": LambConfig,
}


class _Optimizers(Mapping):
    """Names to config dataclasses: optimisers of this package, then those of optax."""

    def __getitem__(self, name: str) -> type:
        if name in _PLAIN:
            return _PLAIN[name]
        from vit_jax.training.optim import named

        return named.dataclass_of(name)

    def __iter__(self) -> Iterator[str]:
        from vit_jax.training.optim import named

        yield from _PLAIN
        yield from (name for name in named.names() if name not in _PLAIN)

    def __len__(self) -> int:
        return sum(1 for _ in self)


OPTIMIZERS = _Optimizers()
