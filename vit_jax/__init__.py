"""The Vision Transformer (arXiv:2010.11929) in JAX and Flax: train, fine-tune, check.

`python -m vit_jax` lists the commands. In Python, `list_models`, `create_model`,
`load_model`, `train`, `train_setup`, `finetune`, `evaluate` and `Callback` are attributes of this
package, imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vit_jax.api import (
        PretrainedModel,
        create_model,
        evaluate,
        finetune,
        list_models,
        load_model,
        train,
        train_setup,
    )
    from vit_jax.errors import UserError
    from vit_jax.training.callbacks import Callback

__version__ = "0.1.0"

_MODULES = {
    "Callback": "vit_jax.training.callbacks",
    "PretrainedModel": "vit_jax.api",
    "UserError": "vit_jax.errors",
    "create_model": "vit_jax.api",
    "list_models": "vit_jax.api",
    "load_model": "vit_jax.api",
    "train_setup": "vit_jax.api",
}
# Modules of commands, which are called as the function of api.py of their name.
_COMMANDS = ("evaluate", "finetune", "train")
__all__ = [
    "Callback",
    "PretrainedModel",
    "UserError",
    "create_model",
    "evaluate",
    "finetune",
    "list_models",
    "load_model",
    "train",
    "train_setup",
]


def __getattr__(name: str):
    if name in _COMMANDS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
