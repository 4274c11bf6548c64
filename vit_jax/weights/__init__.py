"""Weights in and out: `load` fits a published checkpoint to a model.

The formats are imported with the first of these that is used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vit_jax.weights.open import Loaded, load, open_pretrained
    from vit_jax.weights.pretrained import Preprocess, Pretrained

__all__ = ["Loaded", "Preprocess", "Pretrained", "load", "open_pretrained"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "pretrained" if name.startswith("Pre") else "open"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
