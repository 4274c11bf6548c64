"""The networks: `create(variant, ...)` gives a `Model`."""

from vit_jax.models import axial, mixer, swin
from vit_jax.models.model import Model, Params
from vit_jax.models.network import STATE, NetworkConfig
from vit_jax.models.registry import VARIANTS, create, names, side_multiple

__all__ = [
    "STATE",
    "VARIANTS",
    "Model",
    "NetworkConfig",
    "Params",
    "axial",
    "create",
    "mixer",
    "names",
    "side_multiple",
    "swin",
]
