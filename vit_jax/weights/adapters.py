"""Merges LoRA adapters saved by PEFT into the weights that they were trained on.

A folder has adapter_config.json and adapter_model.safetensors (or .bin). Its arrays are
named `base_model.model.<layer>.lora_A.weight`, or `base_model.model.<layer>.weight` for
layers that were trained as a whole, such as a new classifier.
"""

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights.formats import files, hugging_face
from vit_jax.weights.formats.files import ADAPTER, Tensors
from vit_jax.weights.formats.hugging_face import Arrays, Family
from vit_jax.weights.formats.hugging_face_beit import BEIT
from vit_jax.weights.formats.hugging_face_clip import CLIP, SIGLIP
from vit_jax.weights.formats.hugging_face_dino import DINOV2, DINOV3
from vit_jax.weights.formats.hugging_face_vit import IJEPA, VIT
from vit_jax.weights.formats.registry import WRITERS
from vit_jax.weights.pretrained import Pretrained

_WHOLE = re.compile(r"base_model\.model\.(.*)")
_FACTOR = re.compile(r"(.*)\.lora_([AB])(?:\.default)?\.weight")
# Values of init_lora_weights that do not change the base weights.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
# Keys of config.json about the classes of the base weights.
_CLASSES = ("id2label", "label2id", "label_names", "label_descriptions", "labels")
# Prefixes of networks within classifiers of transformers, in files and in memory.
_NETWORKS = r"^(vit|deit|ijepa|beit|dinov2|dinov2_with_registers|vision_model|model)\."
_FAMILIES = (VIT, IJEPA, DINOV2, DINOV3, BEIT, CLIP, SIGLIP)


class OfTransformers(NamedTuple):
    """A network in the format of transformers, see `hugging_face.to_their_arrays`."""

    family: Family
    options: dict
    arrays: Arrays
    notes: list[str]


def as_transformers(pretrained: Pretrained) -> OfTransformers:
    """Converts a network to the format of transformers that has all its layers.

    Raises:
      UserError: no network of transformers is equal to it.
    """
    scaled = bool(models.create(**pretrained.options).options.get("layer_scale_init"))
    reasons = []
    for family in _FAMILIES:
        scales = any(name.endswith("/gamma") for name in family.names)
        if scales != scaled and not family.optional:  # LayerScale would be folded.
            continue
        try:
            return OfTransformers(
                family, *hugging_face.to_their_arrays(family, pretrained)
            )
        except UserError as error:
            reasons.append(str(error))
    raise UserError(
        f"{pretrained.source}: no network of transformers with adapters is equal to it "
        f"({reasons[0]})"
    )


def tensors_of(pretrained: Pretrained) -> Tensors:
    """Returns weights of any format as a file in the format of transformers."""
    family = as_transformers(pretrained).family
    with tempfile.TemporaryDirectory() as folder:
        WRITERS[family.to].write(pretrained, pathlib.Path(folder))
        tensors = files.read(folder)
    return dataclasses.replace(tensors, path=pretrained.source, notes=pretrained.notes)


def fits(adapter: Tensors, base: Tensors) -> bool:
    """Returns whether weights have the layers of an adapter under the same names."""
    names = {_file_name(name) for name in base.flat}
    layers = (_FACTOR.fullmatch(_layer_name(name)) for name in adapter.flat)
    return all(_file_name(f"{m[1]}.weight") in names for m in layers if m)


def _file_name(name: str) -> str:
    """Returns a name that is equal in files and in memory, without prefix."""
    return hugging_face.file_name(VIT, re.sub(_NETWORKS, "", name))


def _layer_name(stored: str) -> str:
    name = match[1] if (match := _WHOLE.fullmatch(stored)) else stored
    return re.sub(r"\.(base_layer|modules_to_save)\.", ".", name)


def base_of(adapter: Tensors) -> str:
    """Returns the path, or the name on the hub, of an adapter's base weights.

    Raises:
      UserError: the adapter is not plain LoRA, or its config does not name base
        weights.
    """
    config = adapter.sidecars[ADAPTER]
    wrong = [
        key for key in ("use_dora", "fan_in_fan_out", "lora_bias") if config.get(key)
    ]
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        wrong.append("init_lora_weights")
    if config.get("peft_type") != "LORA":
        wrong.append("peft_type")
    if wrong:
        raise UserError(
            f"{adapter.path}: {wrong[0]}={config[wrong[0]]!r} in {ADAPTER} is not "
            "supported, only plain LoRA is: merge it with PEFT's merge_and_unload, and "
            "save that model"
        )
    if not (base := config.get("base_model_name_or_path")):
        raise UserError(
            f"{adapter.path}: base_model_name_or_path is not in {ADAPTER}: set it to the "
            "path or the hub's name of the weights that the adapter was trained on"
        )
    return base


def merge(adapter: Tensors, base: Tensors) -> Tensors:
    """Returns the base weights of an adapter with its changes applied.

    Raises:
      UserError: the adapter belongs to other weights, or changes what cannot be merged.
    """
    config, flat = adapter.sidecars[ADAPTER], dict(base.flat)
    places = {_file_name(name): name for name in flat}
    factors: dict[str, dict[str, np.ndarray]] = {}
    replaced = []
    for stored, value in adapter.flat.items():
        name = _layer_name(stored)
        if ".original_module." in name:  # A module that modules_to_save replaced.
            continue
        if factor := _FACTOR.fullmatch(name):
            factors.setdefault(factor[1], {})[factor[2]] = value
        elif "lora_" in name:
            raise UserError(
                f"{adapter.path}: {stored} is not supported, only LoRA of linear layers "
                "and convolutions"
            )
        else:
            flat[places.get(_file_name(name), name)] = value
            replaced.append(name)
    for layer, pair in factors.items():
        place = places.get(_file_name(f"{layer}.weight"))
        if place is None or pair.keys() != {"A", "B"}:
            raise UserError(
                f"{adapter.path}: {layer} has no counterpart in {base.path}: give the "
                f"weights that it was trained on as base_model_name_or_path in {ADAPTER}"
            )
        change = _change(pair["A"], pair["B"], _scale(config, layer, len(pair["A"])))
        if change.size != flat[place].size:
            raise UserError(
                f"{adapter.path}: {layer} has another shape in {base.path}, "
                f"{flat[place].shape}: give the weights that it was trained on"
            )
        flat[place] = flat[place] + change.reshape(flat[place].shape)
    sidecars = {
        k: v for k, v in (base.sidecars | adapter.sidecars).items() if k != ADAPTER
    }
    if any("classifier" in name or "head" in name for name in replaced):
        for name, content in sidecars.items():
            sidecars[name] = {k: v for k, v in content.items() if k not in _CLASSES}
    notes = [*base.notes, *adapter.notes]
    notes.append(f"LoRA of {len(factors)} layers: merged into {base.path}")
    if replaced:
        notes.append(f"trained whole: {len(replaced)} arrays, such as {min(replaced)}")
    return dataclasses.replace(
        adapter,
        flat=flat,
        metadata=base.metadata,
        sidecars=sidecars,
        notes=tuple(notes),
    )


def _change(down: np.ndarray, up: np.ndarray, scale: float) -> np.ndarray:
    """Returns the product of both factors, (out, in), with flattened convolutions."""
    rank = len(down)
    return (scale * (up.reshape(-1, rank) @ down.reshape(rank, -1))).astype(np.float32)


def _scale(config: Mapping, layer: str, rank: int) -> float:
    """Returns the scale that PEFT applies to a layer's change."""
    alphas = config.get("alpha_pattern") or {}
    matching = (a for key, a in alphas.items() if re.match(rf"(.*\.)?({key})$", layer))
    alpha = next(matching, config.get("lora_alpha", 8))
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
