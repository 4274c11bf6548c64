"""Analyses of trained models: arrays from weights and images, and their figures."""

import importlib

_MODULES = ("attention", "charts", "embeddings", "loaded_model", "overlay")
_MODULES += ("representations",)


# `visualize --help` names the figures, which name these modules: they are imported, and
# JAX with them, only when a figure is drawn.
def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
