"""Networks: `create(variant, ...)` builds a `Model`."""

from vit_jax.models.model import VARIANTS, Model, Params, create, names, side_multiple
from vit_jax.models.network import STATE, NetworkConfig

__all__ = [
    "STATE",
    "VARIANTS",
    "Model",
    "NetworkConfig",
    "Params",
    "create",
    "names",
    "side_multiple",
]
