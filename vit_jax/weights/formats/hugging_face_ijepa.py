"""Hugging Face's I-JEPA: a Vision Transformer without a class token, whose patches are averaged.

Source of the network: arXiv:2301.08243.
"""

import os
import re

from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.weights import surgery
from vit_jax.weights.formats import (
    hugging_face,
    hugging_face_processor,
    linen,
    torch_file,
)
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.formats.torch_file import ArrayEntry
from vit_jax.weights.pretrained import POSITIONS, Pretrained

_TYPE = "ijepa"


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    config = tensors.sidecars.get("config.json", {})
    flat = _rename(tensors.flat)
    return (
        config.get("model_type") == _TYPE
        and "embeddings.patch_embeddings.projection.weight" in flat
    )


def _rename(flat: dict) -> dict:
    """Returns the arrays as in files, without the prefix."""
    return hugging_face.rename(
        {re.sub(r"^ijepa\.", "", name): value for name, value in flat.items()}
    )


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint.

    Args:
      tensors: of the folder, with config.json.
      num_heads: ignored; config.json states them.

    Returns:
      The checkpoint under our names.

    Raises:
      UserError: this project has no such network.
    """
    del num_heads
    config, notes = tensors.sidecars["config.json"], []
    facts = hugging_face.read_config({**config, "model_type": "vit"})
    flat = _rename(tensors.flat)
    for unused in ("pooler.dense.weight", "pooler.dense.bias", "embeddings.mask_token"):
        if flat.pop(unused, None) is not None:
            notes.append(f"{unused}: dropped")
    if not facts.query_bias:
        flat, more = hugging_face.add_qkv_biases(flat)
        notes += more
    form = {
        "depth": len({n.split(".")[2] for n in flat if n.startswith("encoder.layer.")}),
        "num_heads": facts.num_heads,
        "num_classes": len(flat.get("classifier.weight", ())),
    }
    table = _table(form)
    torch_file.check_names(flat, table, tensors.path, network="an IJepaModel")
    ours = torch_file.to_our_arrays(flat, table, tensors.path)
    sizes = linen.transformer_options({k: v for k, v in ours.items() if k != POSITIONS})
    sizes["image_size"] = hugging_face.find_image_size(
        ours, facts, num_prefix_tokens=0, source=tensors.path
    )
    patch = ours["embedding/kernel"].shape[0]
    preprocess, more = hugging_face_processor.read(
        tensors.sidecars, sizes["image_size"], patch
    )
    names = facts.class_names
    return Pretrained(
        params=unflatten_dict(ours, sep="/"),
        options={
            **sizes,
            "num_classes": form["num_classes"],
            "pool": "gap",
            "activation": facts.activation,
            "posemb_resize": facts.posemb_resize or "bicubic",
            "layer_norm_eps": facts.epsilon,
        },
        format="ijepa",
        source=tensors.path,
        preprocess=preprocess,
        class_names=names if len(names) == form["num_classes"] else (),
        loss=facts.loss,
        multi_label=facts.loss == "sigmoid",  # As the hub calls it.
        notes=(*notes, *more),
    )


def _table(options: dict) -> list[ArrayEntry]:
    """Returns the entries of a ViT without those of the class token.

    Args:
      options: depth, num_heads and num_classes of `models.Model`.
    """
    form = options | {"distillation": False, "representation_layer": False}
    table = hugging_face.encoder_table(form)
    return [entry for entry in table if entry.ours != ("cls",)]


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `from_pretrained` of IJepaModel loads.

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
    flat, options, notes = surgery.norm_every_token(flat, options)
    flat, options, more = surgery.store_positions(flat, options, model.grid)
    flat, options, folded = surgery.fold_layer_scale(flat, options)
    notes += more + folded + surgery.note_resize(options, "transformers")
    arrays = torch_file.to_their_arrays(flat, _table(options))
    config = hugging_face.write_config(
        options | {"patch": model.patch_size}, pretrained.class_names, pretrained.loss
    )
    task = "ForImageClassification" if options["num_classes"] else "Model"
    if options["num_classes"]:
        arrays = {
            name if name.startswith("classifier.") else f"ijepa.{name}": value
            for name, value in arrays.items()
        }
    config |= {"architectures": [f"IJepa{task}"], "model_type": _TYPE}
    preprocess, channels = pretrained.preprocess, options["channels"]
    return notes + hugging_face.write_folder(
        folder, arrays, config, preprocess, channels
    )


def _check_writable(options: dict) -> None:
    """Raises UserError unless transformers has such a network."""
    surgery.check_network(
        options,
        "IJepaModel of transformers",
        {
            "pool": ("gap",),
            "class_token": (False,),
            "activation": ("gelu", "gelu_tanh", "quick_gelu"),
        },
    )


def _usage(pretrained: Pretrained, path: str, on_hub: bool) -> str:
    """Returns Python lines that load a written checkpoint."""
    del on_hub
    classes = pretrained.options["num_classes"]
    name = "IJepaForImageClassification" if classes else "IJepaModel"
    return f'from transformers import {name}\nmodel = {name}.from_pretrained("{path}")'


READERS["Hugging Face I-JEPA"] = Reader(recognises, read, refines=("Hugging Face",))
WRITERS["hf_ijepa"] = Writer(write, usage=_usage, library="transformers")
