"""Our exported files: one .safetensors with our names and all that a model needs.

The header carries, as JSON under "vit_jax": what `models.create` takes, how images
are prepared, the names of the classes, and the loss.
"""

import dataclasses
import json
import os
import pathlib

import numpy as np
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.errors import UserError
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.pretrained import Preprocess, Pretrained

METADATA_KEY = "vit_jax"
_VERSION = 1


def read(tensors: Tensors, heads: int = 0) -> Pretrained:
    """Reads an exported file.

    Args:
      tensors: of the file.
      heads: not needed; the header tells.

    Returns:
      What was exported.

    Raises:
      UserError: the header is damaged or of a newer version.
    """
    try:
        header = json.loads(tensors.metadata[METADATA_KEY], object_hook=_tuples)
        version = header["format_version"]
        if version > _VERSION:
            raise UserError(
                f"{tensors.path} is of format version {version}, and this vit_jax knows "
                f"those up to {_VERSION}: update it"
            )
        preprocess = header["preprocess"]
        return Pretrained(
            params=unflatten_dict(tensors.flat, sep="/"),
            options=header["options"],
            format="vit_jax",
            source=tensors.path,
            preprocess=Preprocess(**preprocess) if preprocess else None,
            class_names=header["class_names"],
            loss=header["loss"],
        )
    except UserError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{tensors.path} has a damaged vit_jax header: {error!r}; export it again"
        ) from error


def write(pretrained: Pretrained, path: str | os.PathLike) -> None:
    """Writes an exported file, whole or not at all.

    Args:
      pretrained: any checkpoint in our terms.
      path: of the file; its folder exists.

    Raises:
      UserError: the file cannot be written.
    """
    header = {
        "format_version": _VERSION,
        "options": pretrained.options,
        "preprocess": pretrained.preprocess
        and dataclasses.asdict(pretrained.preprocess),
        "class_names": pretrained.class_names,
        "loss": pretrained.loss,
    }
    # The library writes the memory as it lies, so transposed views would be mixed up.
    flat = {
        name: np.asarray(value, order="C")
        for name, value in flatten_dict(pretrained.params, sep="/").items()
    }
    path = pathlib.Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        safetensors.numpy.save_file(flat, part, {METADATA_KEY: json.dumps(header)})
        os.replace(part, path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def _tuples(tree: dict) -> dict:
    """Makes tuples of JSON's lists, as options and preprocessing have them."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in tree.items()}
