"""Hugging Face's BEiT and BEiT v2: biases of attention by offset, LayerScale.

Source of the network: arXiv:2106.08254.
"""

import os
import re

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights import surgery
from vit_jax.weights.formats import (
    hugging_face,
    hugging_face_processor,
    linen,
    torch_file,
)
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.formats.torch_file import CONV, SAME, ArrayEntry, dense, norm
from vit_jax.weights.pretrained import POSITIONS, Pretrained

_BIAS = "attention.attention.relative_position_bias.relative_position_bias_table"
_SHARED = "encoder.relative_position_bias.relative_position_bias_table"
_TYPE = "beit"


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    flat = _rename(tensors.flat)
    return {
        "embeddings.patch_embeddings.projection.weight",
        "encoder.layer.0.attention.attention.query.weight",
    } <= flat.keys() and (
        tensors.sidecars.get("config.json", {}).get("model_type") == _TYPE
        or bool({f"encoder.layer.0.{_BIAS}", _SHARED} & flat.keys())
    )


def _rename(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays without the prefix of models with a classifier."""
    return {re.sub(r"^beit\.", "", name): value for name, value in flat.items()}


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint.

    Args:
      tensors: of the file or folder.
      num_heads: attention heads if config.json does not state them; 0 means those of
        the known sizes, or one per 64 features.

    Returns:
      The checkpoint under our names.

    Raises:
      UserError: this project has no such network.
    """
    config, notes = tensors.sidecars.get("config.json", {}), []
    facts = hugging_face.read_config(
        {"layer_norm_eps": 1e-12, **config, "model_type": "vit"}
    )
    if not config:
        facts = hugging_face.HuggingFaceConfig()
        notes.append("config.json: none, so exact GELU and epsilon 1e-12")
    flat = {
        name: value
        for name, value in _rename(tensors.flat).items()
        if not name.endswith("relative_position_index")
        and not name.startswith("lm_head.")
    }
    if flat.pop("embeddings.mask_token", None) is not None:
        notes.append("mask token: dropped, which only pretraining has")
    flat = hugging_face.add_qkv_biases(flat)[0]
    depth = len({n.split(".")[2] for n in flat if n.startswith("encoder.layer.")})
    width = len(flat["embeddings.patch_embeddings.projection.weight"])
    num_heads, more = torch_file.choose_num_heads(
        facts.num_heads, num_heads, width, depth
    )
    notes += more
    mean = "pooler.layernorm.weight" in flat
    every, shared = f"encoder.layer.0.{_BIAS}" in flat, _SHARED in flat
    if every and shared:
        raise UserError(
            f"{tensors.path}: biases of each layer beside shared ones are not supported: "
            "give weights that have one of them"
        )
    form = {
        "depth": depth,
        "num_heads": num_heads,
        "num_classes": len(flat.get("classifier.weight", ())),
        "fc_norm": mean,
        "final_norm": mean or "layernorm.weight" in flat,
        "posemb": "learned" if "embeddings.position_embeddings" in flat else "none",
        "relative_bias": "every" if every else "shared" if shared else "none",
        "layer_scale_init": float("encoder.layer.0.lambda_1" in flat),
    }
    table = _table(form)
    torch_file.check_names(flat, table, tensors.path, network="a BeitModel")
    ours = torch_file.to_our_arrays(flat, table, tensors.path)
    sizes = linen.transformer_options({k: v for k, v in ours.items() if k != POSITIONS})
    sizes["image_size"] = _image_size(ours, facts, tensors.path)
    patch = ours["embedding/kernel"].shape[0]
    preprocess, more = hugging_face_processor.read(
        tensors.sidecars, sizes["image_size"], patch, any_size=True
    )
    names = facts.class_names
    if form["layer_scale_init"]:
        form["layer_scale_init"] = float(config.get("layer_scale_init_value") or 1.0)
    return Pretrained(
        params=unflatten_dict(ours, sep="/"),
        options={
            **sizes,
            **{k: v for k, v in form.items() if k not in ("depth", "num_heads")},
            "pool": "gap" if mean else "token",
            "class_token": mean,
            "activation": facts.activation,
            "posemb_resize": facts.posemb_resize or "bicubic",
            "layer_norm_eps": facts.epsilon,
        },
        format="beit",
        source=tensors.path,
        preprocess=preprocess,
        class_names=names if len(names) == form["num_classes"] else (),
        loss=facts.loss,
        multi_label=facts.loss == "sigmoid",  # As the hub calls it.
        notes=(*notes, *more),
    )


def _image_size(
    ours: dict[str, np.ndarray], facts: hugging_face.HuggingFaceConfig, source: str
) -> tuple[int, int]:
    """Returns the height and width that the parameters are for."""
    if POSITIONS in ours:
        return hugging_face.find_image_size(
            ours, facts, num_prefix_tokens=1, source=source
        )
    tables = [v for k, v in ours.items() if k.startswith("Transformer/relative_bias")]
    patch = ours["embedding/kernel"].shape[0]
    stated = hugging_face.fill_patches(facts.image_size, patch)
    offsets = len(tables[0]) - 3 if tables else 0
    if stated and offsets in (0, np.prod([2 * (s // patch) - 1 for s in stated])):
        return stated
    side = (round(offsets**0.5) + 1) // 2 if offsets else round(224 / patch)
    if offsets and (2 * side - 1) ** 2 != offsets:
        raise UserError(
            f"{source} has biases of {offsets} offsets, which are no square grid: keep "
            "its config.json beside it"
        )
    return side * patch, side * patch


def _table(options: dict) -> list[ArrayEntry]:
    """Returns the entries of a network, without the prefix.

    Args:
      options: depth, num_heads, num_classes, fc_norm, final_norm, posemb, relative_bias and
        layer_scale_init of `models.Model`.
    """
    embed = "embeddings"
    table = [
        *dense(f"{embed}.patch_embeddings.projection", "embedding", CONV),
        ArrayEntry(f"{embed}.cls_token", ("cls",), SAME),
    ]
    if options["posemb"] != "none":
        name = f"{embed}.position_embeddings"
        table.append(ArrayEntry(name, (POSITIONS,), SAME))
    if options["relative_bias"] == "shared":
        table.append(ArrayEntry(_SHARED, ("Transformer/relative_bias",), SAME))
    for i in range(options["depth"]):
        theirs, ours = f"encoder.layer.{i}", f"Transformer/encoderblock_{i}"
        table += norm(f"{theirs}.layernorm_before", f"{ours}/LayerNorm_0")
        table += hugging_face.attention_table(theirs, ours, options["num_heads"])
        table += norm(f"{theirs}.layernorm_after", f"{ours}/LayerNorm_2")
        table += dense(f"{theirs}.intermediate.dense", f"{ours}/MlpBlock_3/Dense_0")
        table += dense(f"{theirs}.output.dense", f"{ours}/MlpBlock_3/Dense_1")
        for number, place in ((1, 1), (2, 3)) if options["layer_scale_init"] else ():
            gamma = f"{ours}/LayerScale_{place}/gamma"
            table.append(ArrayEntry(f"{theirs}.lambda_{number}", (gamma,), SAME))
        if options["relative_bias"] == "every":
            name = f"Transformer/relative_bias_{i}"
            table.append(ArrayEntry(f"{theirs}.{_BIAS}", (name,), SAME))
    if options["fc_norm"]:
        table += norm("pooler.layernorm", "fc_norm")
    elif options["final_norm"]:
        table += norm("layernorm", "Transformer/encoder_norm")
    if options["num_classes"]:
        table += dense("classifier", "head")
    return table


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `from_pretrained` of BeitModel loads.

    Args:
      pretrained: with parameters that fit its options.
      folder: existing; model.safetensors, config.json and, if the preprocessing is
        known, preprocessor_config.json are written to it.

    Returns:
      A line for each thing that was rewritten or left out.

    Raises:
      UserError: transformers has no such network or image processor.
    """
    model = models.create(**pretrained.options)
    options = dict(model.options)
    _check_writable(options)
    flat = flatten_dict(pretrained.params, sep="/")
    flat, options, notes = surgery.learn_positions(flat, options, model.grid)
    notes += surgery.note_resize(options, "transformers")
    arrays = torch_file.to_their_arrays(flat, _table(options))
    keys = [name for name in arrays if name.endswith(".key.bias")]
    if any(arrays[name].any() for name in keys):
        notes.append("biases of keys: left out; they change no attention weights")
    arrays = {name: value for name, value in arrays.items() if name not in keys}
    if options["num_classes"]:
        arrays = {
            name if name.startswith("classifier.") else f"beit.{name}": value
            for name, value in arrays.items()
        }
    whole = hugging_face.write_config(
        options | {"patch": model.patch_size}, pretrained.class_names, pretrained.loss
    )
    for name in ("encoder_stride", "qkv_bias"):
        del whole[name]
    task = "ForImageClassification" if options["num_classes"] else "Model"
    config = whole | {
        "architectures": [f"Beit{task}"],
        "model_type": _TYPE,
        "use_mean_pooling": options["fc_norm"],
        "use_relative_position_bias": options["relative_bias"] == "every",
        "use_shared_relative_position_bias": options["relative_bias"] == "shared",
        "use_absolute_position_embeddings": options["posemb"] != "none",
        "layer_scale_init_value": options["layer_scale_init"],
    }
    preprocess, channels = pretrained.preprocess, options["channels"]
    return notes + hugging_face.write_folder(
        folder, arrays, config, preprocess, channels
    )


def _check_writable(options: dict) -> None:
    """Raises UserError unless transformers has such a network."""
    mean = bool(options.get("fc_norm"))
    surgery.check_network(
        options,
        "BeitModel of transformers",
        {
            "relative_bias": ("none", "every", "shared"),
            "pool": ("gap",) if mean else ("token",),
            "class_token": (mean,),
            "activation": ("gelu", "gelu_tanh", "quick_gelu"),
        },
    )


def _usage(pretrained: Pretrained, path: str, on_hub: bool) -> str:
    """Returns Python lines that load a written checkpoint."""
    del on_hub
    classes = pretrained.options["num_classes"]
    name = "BeitForImageClassification" if classes else "BeitModel"
    return f'from transformers import {name}\nmodel = {name}.from_pretrained("{path}")'


READERS["Hugging Face BEiT"] = Reader(recognises, read, refines=("Hugging Face",))
WRITERS["hf_beit"] = Writer(write, usage=_usage, library="transformers")
