"""Weights in and out: `load` fits a published checkpoint to a model.

The formats are imported with the first of these that is used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vit_jax.weights.open import Loaded, load, open_pretrained, open_weights
    from vit_jax.weights.pretrained import Preprocess, Pretrained, preprocessing_of

__all__ = [
    "Loaded",
    "Preprocess",
    "Pretrained",
    "load",
    "open_pretrained",
    "open_weights",
    "preprocessing_of",
]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "pretrained" if name.lower().startswith("pre") else "open"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
