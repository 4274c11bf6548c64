"""Weights in and out: `load` fits a published checkpoint to a model."""

from vit_jax.weights.load import Loaded, load, open_pretrained
from vit_jax.weights.pretrained import Preprocess, Pretrained

__all__ = ["Loaded", "Preprocess", "Pretrained", "load", "open_pretrained"]
