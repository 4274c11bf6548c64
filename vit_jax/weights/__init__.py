"""Reads published checkpoints and fits them to models.

The formats are imported when one of these names is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vit_jax.data.preprocess import Preprocess
    from vit_jax.weights.open import Loaded, load, open_pretrained, open_weights
    from vit_jax.weights.preprocessing import preprocessing_of
    from vit_jax.weights.pretrained import Pretrained

_MODULES = {
    "Loaded": "weights.open",
    "Preprocess": "data.preprocess",
    "Pretrained": "weights.pretrained",
    "load": "weights.open",
    "open_pretrained": "weights.open",
    "open_weights": "weights.open",
    "preprocess_with": "weights.preprocessing",
    "preprocessing_of": "weights.preprocessing",
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
    return getattr(importlib.import_module(f"vit_jax.{_MODULES[name]}"), name)
