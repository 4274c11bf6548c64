"""Exported files of this project: one .safetensors with the whole checkpoint.

The header has, as JSON under "vit_jax", the arguments of `models.create`, the
preprocessing of images, the class names or targets, the loss, and the calibration if
there is one. A text tower is stored under "task/", with its config and the address of its
tokenizer; such a file has format version 2.
"""

import dataclasses
import json
import os

from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.data.preprocess import Preprocess
from vit_jax.data.transforms import parse
from vit_jax.errors import UserError
from vit_jax.models import segmenter, text
from vit_jax.models.targets import Targets
from vit_jax.weights.calibration import Calibration
from vit_jax.weights.formats import tables
from vit_jax.weights.formats.files import Tensors, write_safetensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.pretrained import Pretrained

METADATA_KEY = "vit_jax"
_VERSION = 2
_TASK = "task/"


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    return METADATA_KEY in tensors.metadata


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads an exported file; `num_heads` is ignored.

    Raises:
      UserError: the header is damaged or has a newer version.
    """
    try:
        header = json.loads(
            tensors.metadata[METADATA_KEY], object_hook=_lists_to_tuples
        )
        version = header["format_version"]
        if version > _VERSION:
            raise UserError(
                f"{tensors.path} has format version {version}, and this vit_jax reads "
                f"versions up to {_VERSION}: update it"
            )
        preprocess = header["preprocess"] and Preprocess(**header["preprocess"])
        if preprocess and parse.names_custom(preprocess.transform):
            raise UserError(
                f"{tensors.path}: transform={preprocess.transform!r} needs a module, which "
                "is not imported when files of weights are read: give the run's workdir"
            )
        decisions = header.get("calibration")
        decisions = decisions and Calibration.of_json(decisions)
        params = {k: v for k, v in tensors.flat.items() if not k.startswith(_TASK)}
        return Pretrained(
            params=unflatten_dict(params, sep="/"),
            options=header["options"],
            format="vit_jax",
            source=tensors.path,
            preprocess=preprocess,
            class_names=header["class_names"],
            loss=header["loss"],
            task=header.get("task", {}),
            task_params=unflatten_dict(tables.below(tensors.flat, _TASK), sep="/"),
            tokenizer=header.get("tokenizer", ""),
            multi_label=header.get("multi_label", False),
            calibration=decisions,
            notes=(decisions.describe(),) if decisions else (),
            targets=header.get("targets") and Targets.of_json(header["targets"]),
        )
    except UserError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{tensors.path} has a damaged vit_jax header: {error!r}; export it again"
        ) from error


def write(pretrained: Pretrained, path: str | os.PathLike) -> list[str]:
    """Writes an exported file atomically; see `registry.Writer`.

    Of the parameters of a task, those of a text tower or a segmentation head are kept.

    Raises:
      UserError: the file cannot be written.
    """
    header = {
        "format_version": 1,
        "options": pretrained.options,
        "preprocess": pretrained.preprocess
        and dataclasses.asdict(pretrained.preprocess),
        "class_names": pretrained.class_names,
        "loss": pretrained.loss,
        "multi_label": pretrained.multi_label,
        "targets": pretrained.targets and dataclasses.asdict(pretrained.targets),
    }
    if pretrained.calibration:
        header["calibration"] = pretrained.calibration.to_json()
    parts = {"": pretrained.params}
    if pretrained.task_params.keys() & {text.TEXT, segmenter.PARAMS}:
        header |= {"task": pretrained.task, "tokenizer": pretrained.tokenizer}
        header["format_version"] = _VERSION
        parts[_TASK] = pretrained.task_params
    flat = {
        prefix + name: value
        for prefix, params in parts.items()
        for name, value in flatten_dict(params, sep="/").items()
    }
    write_safetensors(path, flat, {METADATA_KEY: json.dumps(header)})
    return []


def _lists_to_tuples(tree: dict) -> dict:
    """Converts JSON lists to tuples, which options and preprocessing use."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in tree.items()}


READERS["vit_jax"] = Reader(
    recognises, read, refines=("google", "big_vision", "BiT", "google Mixer")
)
WRITERS["safetensors"] = Writer(
    write, suffix=".safetensors", any_network=True, with_task=True
)
