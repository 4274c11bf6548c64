"""A user's own data set: data.name="my_module:open_source"."""

import importlib
import re

import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import arrays
from vit_jax.errors import UserError

# TFDS names have a colon too, before their version: "eurosat/rgb:2.0.0".
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MEMBERS = ("class_names", "images", "labels", "describe", "record_id")


def is_own(name: str) -> bool:
    """Returns whether data.name names a function of a module."""
    return _OWN.fullmatch(name) is not None


def open_own(data: ConfigDict, split: str):
    """Calls the user's function with `config.data` and the split expression.

    Returns:
      The `Source` that it returns.

    Raises:
      UserError: no such module or function, or what it returns is no source, or its
        images in memory are not uint8 (N, H, W, C), each with a label.
    """
    module_name, function_name = data.name.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):
            raise  # The module is there, but not what it imports itself.
        raise UserError(
            f"data.name={data.name!r}: no module {module_name!r}: it must lie in the "
            "current folder, on PYTHONPATH, or be installed"
        ) from error
    open_source = getattr(module, function_name, None)
    if not callable(open_source):
        raise UserError(
            f"data.name={data.name!r}: {module.__file__} has no function "
            f"{function_name!r}"
        )
    source = open_source(data, split)
    missing = [name for name in _MEMBERS if not hasattr(source, name)]
    missing += [
        name for name in ("__len__", "__getitem__") if not hasattr(type(source), name)
    ]
    if missing:
        raise UserError(
            f"data.name={data.name!r} returned {type(source).__name__}, which lacks "
            f"{', '.join(missing)}: see Source in vit_jax/data/sources.py"
        )
    _check_arrays(data.name, source)
    return source


def _check_arrays(name: str, source) -> None:
    """Raises UserError for images in memory that cannot be gathered as they are."""
    images, labels = source.images, source.labels
    if images is None:
        return
    if images.dtype != np.uint8 or images.ndim != 4:
        raise UserError(
            f"data.name={name!r} returned images={arrays.describe(images)}: not uint8 "
            "(N, H, W, C); convert them, or let vit_jax.data.arrays.open_arrays do it"
        )
    if not len(images) == len(labels) == len(source):
        raise UserError(
            f"data.name={name!r} returned {len(images)} images, {len(labels)} labels "
            f"and a length of {len(source)}; make them equal"
        )
