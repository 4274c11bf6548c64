"""Networks: `create(variant, ...)` builds a `Model`.

The names listed here are imported when they are first used, so importing one module of
this package imports only what that module needs.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vit_jax.models.model import (
        VARIANTS,
        Model,
        Params,
        build,
        create,
        names,
        side_multiple,
    )
    from vit_jax.models.network import STATE, NetworkConfig

__all__ = [
    "STATE",
    "VARIANTS",
    "Model",
    "NetworkConfig",
    "Params",
    "build",
    "create",
    "names",
    "side_multiple",
]
_OF_NETWORK = ("STATE", "NetworkConfig")


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "network" if name in _OF_NETWORK else "model"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
