"""Writes the low-rank updates of a run as an adapter of PEFT, which adapters.py reads.

The folder has adapter_config.json and adapter_model.safetensors, documented at
https://huggingface.co/docs/peft/developer_guides/checkpoint. Names are those of the
network's modules in transformers 5. Letters: R rank.
"""

import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping

import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax.command_line.printing import masked
from vit_jax.errors import UserError
from vit_jax.weights import adapters, rewriting
from vit_jax.weights.formats import files, hugging_face, hugging_face_processor, tables
from vit_jax.weights.formats.hugging_face import Arrays, Family
from vit_jax.weights.formats.hugging_face_clip import CLIP
from vit_jax.weights.formats.registry import WRITERS, Writer
from vit_jax.weights.formats.tables import ArrayEntry
from vit_jax.weights.pretrained import Pretrained

_PREFIX = "base_model.model."
_WEIGHTS = "adapter_model.safetensors"
_BASE = "base"  # Folder of a base that is written for transformers.
_TOLERANCE = 1e-5  # Of a kernel, relative to its largest number.


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `PeftModel.from_pretrained` loads; see `registry.Writer`.

    Raises:
      UserError: the run has no low-rank updates or started from random parameters, or
        transformers does not support the network or an update of it.
    """
    factors = pretrained.task_params.get("lora")
    if not factors:
        raise UserError(
            f"--to=peft: {pretrained.source} has no low-rank updates: train with "
            "task.name='lora' or 'adapters', or write the network with --to=safetensors"
        )
    if not pretrained.start:
        raise UserError(
            f"--to=peft: {pretrained.source} started from random parameters, which no "
            "checkpoint holds: write the network with --to=safetensors"
        )
    family, options, arrays, notes = adapters.as_transformers(pretrained)
    config = hugging_face.write_config(family, options, pretrained)
    prefix = _prefix(family, config) if options["num_classes"] else ""
    table = {
        name: e for e in hugging_face.entries(family, options) for name in e.params
    }
    params, factors = (flatten_dict(x, sep="/") for x in (pretrained.params, factors))
    paths, pairs = sorted({name.rpartition("/")[0] for name in factors}), {}
    for path in paths:
        layer, pair = _pair(table, path, factors, params[f"{path}/kernel"])
        pairs[prefix + _in_memory(family, layer)] = pair
    tensors = {
        f"{_PREFIX}{layer}.lora_{which}.weight": factor
        for layer, pair in pairs.items()
        for which, factor in zip("AB", pair, strict=True)
    }
    whole = _classifiers(arrays)  # The task `lora` trains them, no other has one.
    for layer in whole:
        for kind in ("weight", "bias"):
            tensors[f"{_PREFIX}{layer}.{kind}"] = arrays[f"{layer}.{kind}"]
    modules = {
        prefix + _in_memory(family, name.removesuffix(".weight")) for name in arrays
    }
    contents = {files.ADAPTER: _config(pretrained, _targets(pairs, modules), whole)}
    notes += _add_preprocess(contents, pretrained, options["channels"])
    if pretrained.class_names and options["num_classes"]:
        notes.append("class names: left out, PEFT's format has no place for them")
    files.write_folder(folder, tensors, contents, _WEIGHTS)
    return [*notes, *_compare(pretrained, folder, paths)]


def _pair(
    table: Mapping[str, ArrayEntry],
    path: str,
    factors: Mapping[str, np.ndarray],
    kernel: np.ndarray,
) -> tuple[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the layer of a kernel in transformers, and its factors A and B there."""
    entry = table.get(f"{path}/kernel")
    if entry is None or len(entry.params) > 1 or not entry.name.endswith(".weight"):
        where = entry.name if entry else "no array"
        raise UserError(
            f"--to=peft: {path} is a part of {where} in the format of transformers, which "
            "cannot have an update by itself: write the network with --to=safetensors, "
            "or train with other task.projections"
        )
    a, b = factors[f"{path}/a"], factors[f"{path}/b"]
    down, up = a.T, b.T
    if entry.layout is tables.CONV:  # (R, in, Y, X) and (out, R, 1, 1).
        down = tables.CONV.from_params([a.reshape(*kernel.shape[:-1], -1)])
        up = up[..., None, None]
    product = up.reshape(len(up), -1) @ down.reshape(len(down), -1)
    expected = entry.layout.from_params([(a @ b).reshape(kernel.shape)])
    if not _are_close(product, expected.reshape(product.shape)):
        raise UserError(
            f"--to=peft: the numbers of {entry.name} are in another order in the format of "
            f"transformers than in {path}: write the network with --to=safetensors"
        )
    return entry.name.removesuffix(".weight"), (down, up)


def _are_close(values: np.ndarray, expected: np.ndarray) -> bool:
    most = np.abs(expected).max(initial=0)
    return values.shape == expected.shape and np.allclose(
        values, expected, rtol=0, atol=_TOLERANCE * most
    )


def _prefix(family: Family, config: Mapping) -> str:
    """Returns the name of the network without its classifier, with a dot."""
    return f"{'vision_model' if family.to == CLIP.to else config['model_type']}."


def _in_memory(family: Family, layer: str) -> str:
    for pattern, new in family.in_memory:
        layer = re.sub(pattern, new, layer)
    return layer


def _classifiers(arrays: Arrays) -> list[str]:
    return [
        name.removesuffix(".weight")
        for name in arrays
        if re.fullmatch(r"(\w+_)?classifier\.weight", name)
    ]


def _targets(pairs: Mapping[str, object], modules: set[str]) -> list[str]:
    """Returns the shortest names that stand for exactly the layers with updates."""
    last = lambda layer: layer.rpartition(".")[2]
    short = {last(layer) for layer in pairs}
    meant = {layer for layer in modules if last(layer) in short}
    return sorted(short if meant == pairs.keys() else pairs)


def _config(pretrained: Pretrained, targets: list[str], whole: list[str]) -> dict:
    """Returns adapter_config.json."""
    alpha = pretrained.task["alpha"]
    return {
        "peft_type": "LORA",
        "task_type": None,
        # Folders of adapters are shared: without passwords of addresses.
        "base_model_name_or_path": masked(_base_name(pretrained.start)),
        "r": pretrained.task["rank"],
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "modules_to_save": whole or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
    }


def _base_name(start: str) -> str:
    """Returns a checkpoint as PEFT names it: owner/name of the hub without hf://."""
    match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)", start)
    return match[1] if match else start


def _add_preprocess(contents: dict, pretrained: Pretrained, channels: int) -> list[str]:
    """Adds preprocessor_config.json; returns a note if a part of it is left out."""
    if not pretrained.preprocess:
        return []
    how, notes = rewriting.replace_filter(pretrained.preprocess, "transformers")
    content = hugging_face_processor.write(how, channels)
    contents["preprocessor_config.json"] = content
    return notes


def _compare(
    pretrained: Pretrained, folder: str | os.PathLike, paths: Iterable[str]
) -> list[str]:
    """Reads the adapter with its base; returns notes on what differs from the run.

    Raises:
      UserError: the updated kernels differ, because the base is not the one that the run
        started from.
    """
    # Imported here because opening weights reads adapters.
    from vit_jax.weights.open import open_pretrained

    try:
        again = open_pretrained(folder)
    except UserError as error:
        return [f"not compared with the run's network: {error}"]
    adapted = flatten_dict(again.params, sep="/")
    wanted = flatten_dict(pretrained.params, sep="/")
    updated = {f"{path}/kernel" for path in paths}
    same = lambda name: name in adapted and _are_close(adapted[name], wanted[name])
    differ = sorted(name for name in wanted if not same(name))
    if wrong := [name for name in differ if name in updated]:
        raise UserError(
            f"--to=peft: config.init.checkpoint={pretrained.start!r} with the updates is not "
            f"the network of {pretrained.source}: {wrong[0]} differs: put the weights back "
            "that the run started from, or write the network with --to=safetensors"
        )
    if not differ:
        return ["with its base, equal to the network of the run"]
    first = adapted.get(differ[0])
    shape = "" if first is None else f", {first.shape} in the base"
    more = f", and {len(differ) - 1} others" if differ[1:] else ""
    note = f"not in the adapter, but different in the base: {differ[0]}{shape}{more}"
    return [f"{note}; write a base that fits with {_command(pretrained)}"]


def _command(pretrained: Pretrained) -> str:
    """Returns the command that writes the base in the format of transformers."""
    height, width = pretrained.options["image_size"]
    size = height if height == width else f"{height}x{width}"
    family = adapters.as_transformers(pretrained).family
    return (
        f"python -m vit_jax.convert --model={masked(pretrained.start)} --to={family.to} "
        f"--resolution={size} --out={_BASE}"
    )


def _is_of_transformers(start: str) -> bool:
    """Returns whether transformers loads a checkpoint as it is."""
    config = pathlib.Path(start) / "config.json"
    if config.exists():
        return "model_type" in json.loads(config.read_text())
    return _base_name(start) != start and not start.startswith("hf://timm/")


def _usage(pretrained: Pretrained, place: str, on_hub: bool) -> str:
    """Returns Python code that loads a written adapter with its base."""
    family, options, *_ = adapters.as_transformers(pretrained)
    num_classes, lines = options["num_classes"], []
    kind = "ModelForImageClassification" if num_classes else "Model"
    arguments, _ = family.usage(options)
    if num_classes:
        arguments = f", num_labels={num_classes}, ignore_mismatched_sizes=True"
    base = _base_name(pretrained.start)
    if not _is_of_transformers(pretrained.start):
        base, lines = _BASE, [f"# The base, once: {_command(pretrained)}"]
    return "\n".join(
        [
            *lines,
            "from peft import PeftModel",
            f"from transformers import Auto{kind}",
            f'base = Auto{kind}.from_pretrained("{base}"{arguments})',
            f'model = PeftModel.from_pretrained(base, "{place}")',
        ]
    )


WRITERS["peft"] = Writer(
    write,
    usage=_usage,
    library="peft",
    files=(files.ADAPTER, _WEIGHTS, "preprocessor_config.json"),
)
