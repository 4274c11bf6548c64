"""Merges LoRA adapters saved by PEFT into the weights that they were trained on.

A folder has adapter_config.json and adapter_model.safetensors (or .bin). Its arrays are
named `base_model.model.<layer>.lora_A.weight`, or `base_model.model.<layer>.weight` for
layers that were trained as a whole, such as a new classifier.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping

import numpy as np

from vit_jax.errors import UserError
from vit_jax.weights.formats import hugging_face
from vit_jax.weights.formats.files import ADAPTER, Tensors
from vit_jax.weights.formats.hugging_face_vit import VIT

_WHOLE = re.compile(r"base_model\.model\.(.*)")
_FACTOR = re.compile(r"(.*)\.lora_([AB])(?:\.default)?\.weight")
# Values of init_lora_weights that do not change the base weights.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
# Keys of config.json about the classes of the base weights.
_CLASSES = ("id2label", "label2id", "label_names", "label_descriptions", "labels")
_file_name = functools.partial(hugging_face.file_name, VIT)


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
        name = match[1] if (match := _WHOLE.fullmatch(stored)) else stored
        name = re.sub(r"\.(base_layer|modules_to_save)\.", ".", name)
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
