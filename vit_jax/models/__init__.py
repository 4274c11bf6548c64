"""The networks: `create(variant, ...)` gives a `Model`."""

from vit_jax.models.registry import Model, Params, create

__all__ = ["Model", "Params", "create"]
