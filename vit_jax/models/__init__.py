"""The networks: `create(variant, ...)` gives a `Model`."""

from vit_jax.models.registry import EXECUTION, Model, Params, create

__all__ = ["EXECUTION", "Model", "Params", "create"]
