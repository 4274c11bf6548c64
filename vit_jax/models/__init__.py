"""Networks: `create(variant, ...)` builds a `Model`.

What is listed here is imported when it is first used: a file of this package brings only
what it needs itself.
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
