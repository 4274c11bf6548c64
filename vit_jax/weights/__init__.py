"""Reads published checkpoints and fits them to models.

The formats are imported when one of these names is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vit_jax.weights.open import Loaded, load, open_pretrained, open_weights
    from vit_jax.weights.pretrained import Preprocess, Pretrained, preprocessing_of

_MODULES = {
    "Loaded": "open",
    "Preprocess": "pretrained",
    "Pretrained": "pretrained",
    "load": "open",
    "open_pretrained": "open",
    "open_weights": "open",
    "preprocess_with": "open",
    "preprocessing_of": "pretrained",
}
__all__ = [
    "Loaded",
    "Preprocess",
    "Pretrained",
    "load",
    "open_pretrained",
    "open_weights",
    "preprocess_with",
    "preprocessing_of",
]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
