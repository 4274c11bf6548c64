"""The Vision Transformer (arXiv:2010.11929) in JAX and Flax: train, fine-tune, evaluate.

`python -m vit_jax` lists the commands. The Python functions `list_models`,
`create_model`, `load_model`, `create_flax`, `load_flax`, `load_nnx`, `load_preprocess`,
`train`, `train_setup`, `pretrain`, `finetune`, `evaluate` and the class `Callback` are
attributes of this package, imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vit_jax.api.flax_networks import create_flax, load_flax
    from vit_jax.api.image_preprocess import load_preprocess
    from vit_jax.api.models import create_model, list_models
    from vit_jax.api.nnx_networks import load_nnx
    from vit_jax.api.pretrained_model import PretrainedModel, load_model
    from vit_jax.api.training import evaluate, finetune, pretrain, train, train_setup
    from vit_jax.errors import UserError
    from vit_jax.training.callbacks import Callback

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "PretrainedModel",
    "UserError",
    "create_flax",
    "create_model",
    "evaluate",
    "finetune",
    "list_models",
    "load_flax",
    "load_model",
    "load_nnx",
    "load_preprocess",
    "pretrain",
    "train",
    "train_setup",
]
_MODULES = {
    "vit_jax.api.flax_networks": ("create_flax", "load_flax"),
    "vit_jax.api.image_preprocess": ("load_preprocess",),
    "vit_jax.api.models": ("create_model", "list_models"),
    "vit_jax.api.nnx_networks": ("load_nnx",),
    "vit_jax.api.pretrained_model": ("PretrainedModel", "load_model"),
    "vit_jax.api.training": (
        "evaluate",
        "finetune",
        "pretrain",
        "train",
        "train_setup",
    ),
    "vit_jax.errors": ("UserError",),
    "vit_jax.training.callbacks": ("Callback",),
}


def __getattr__(name: str):
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
