"""Hugging Face's DINOv3: a Vision Transformer with rotary positions and registers.

Source of the network: arXiv:2508.10104.
"""

import os

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights import surgery
from vit_jax.weights.formats import (
    dino,
    hugging_face,
    hugging_face_processor,
    linen,
    torch_file,
)
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.hugging_face_text import attention_table
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.formats.torch_file import CONV, SAME, ArrayEntry, dense, norm
from vit_jax.weights.pretrained import Pretrained

_TYPE = "dinov3_vit"
_MASK_TOKEN = "embeddings.mask_token"
_REGISTERS = "embeddings.register_tokens"
_DEFAULTS = {"layer_norm_eps": 1e-5, "hidden_act": "gelu"}


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    names = {"embeddings.patch_embeddings.weight", "layer.0.layer_scale1.lambda1"}
    return names <= tensors.flat.keys()


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
    if config.get("model_type", _TYPE) != _TYPE:
        raise UserError(
            f"{tensors.path}: model_type={config['model_type']!r} in config.json is not "
            f"{_TYPE}, whose names its arrays have: keep the config.json of the file"
        )
    gated = "layer.0.mlp.gate_proj.weight" in tensors.flat
    asked = config.get("hidden_act", "gelu")
    if gated and config and asked != "silu":
        raise UserError(
            f"{tensors.path}: hidden_act={asked!r} in a gated MLP is not supported: "
            "models of this project have silu there"
        )
    plain = {"hidden_act": "gelu"} if gated else {}
    facts = hugging_face.read_config(
        {**_DEFAULTS, **config, "model_type": "vit", **plain}
    )
    if not config:
        facts = hugging_face.HuggingFaceConfig(epsilon=1e-5)
        notes.append("config.json: none, so rope_theta 100 and epsilon 1e-5")
    flat = dict(tensors.flat)
    if flat.pop(_MASK_TOKEN, None) is not None:
        notes.append("mask token: dropped, which only pretraining has")
    registers = flat.get(_REGISTERS, np.zeros((1, 0, 1))).shape[1]
    if not registers:  # An array without numbers, if any.
        flat.pop(_REGISTERS, None)
    flat, more = _add_biases(flat)
    notes += more
    depth = len({n.split(".")[1] for n in flat if n.startswith("layer.")})
    width = len(flat["embeddings.patch_embeddings.weight"])
    num_heads, more = torch_file.choose_num_heads(
        facts.num_heads, num_heads, width, depth
    )
    notes += more
    form = {
        "depth": depth,
        "num_heads": num_heads,
        "activation": "swiglu" if gated else facts.activation,
        "num_register_tokens": registers,
    }
    table = _table(form)
    torch_file.check_names(flat, table, tensors.path, network="a DINOv3ViTModel")
    ours = torch_file.to_our_arrays(flat, table, tensors.path)
    sizes = linen.transformer_options(ours)
    patch = ours["embedding/kernel"].shape[0]
    side = round(224 / patch) * patch
    sizes["image_size"] = hugging_face.fill_patches(facts.image_size, patch) or (
        side,
        side,
    )
    preprocess, more = hugging_face_processor.read(
        tensors.sidecars, sizes["image_size"], patch, any_size=True
    )
    return Pretrained(
        params=unflatten_dict(ours, sep="/"),
        options={
            **sizes,
            "num_classes": 0,
            "pool": "token",
            "posemb": "none",
            "rope": "centered",
            "rope_temperature": float(config.get("rope_theta") or 100.0),
            "activation": form["activation"],
            "layer_scale_init": float(config.get("layerscale_value") or 1.0),
            "layer_norm_eps": facts.epsilon,
        },
        format="dinov3",
        source=tensors.path,
        preprocess=preprocess or dino.preprocess(sizes["image_size"]),
        notes=(*notes, *more),
    )


def _add_biases(
    flat: dict[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Adds biases of zero to the layers without: keys, and in some networks more."""
    missing = {
        name.removesuffix("weight") + "bias": np.zeros(len(value), np.float32)
        for name, value in flat.items()
        if name.startswith("layer.") and value.ndim == 2
    }
    missing = {name: zeros for name, zeros in missing.items() if name not in flat}
    layers = sorted({name.split(".")[-2] for name in missing})
    notes = [f"biases of {', '.join(layers)}: none in the file, so zeros"]
    return flat | missing, notes if missing else []


def _table(options: dict) -> list[ArrayEntry]:
    """Returns the entries of an encoder.

    Args:
      options: depth, num_heads, activation and num_register_tokens of `models.Model`.
    """
    embed = "embeddings"
    table = [
        *dense(f"{embed}.patch_embeddings", "embedding", CONV),
        ArrayEntry(f"{embed}.cls_token", ("cls",), SAME),
        *norm("norm", "Transformer/encoder_norm"),
    ]
    if options["num_register_tokens"]:
        table.append(ArrayEntry(_REGISTERS, ("register_tokens",), SAME))
    for i in range(options["depth"]):
        theirs, ours = f"layer.{i}", f"Transformer/encoderblock_{i}"
        attention = f"{ours}/MultiHeadDotProductAttention_1"
        table += attention_table(
            f"{theirs}.attention", attention, options["num_heads"], "o_proj"
        )
        for number, norm_place, scale_place in ((1, 0, 1), (2, 2, 3)):
            table += norm(f"{theirs}.norm{number}", f"{ours}/LayerNorm_{norm_place}")
            scale = f"{ours}/LayerScale_{scale_place}/gamma"
            name = f"{theirs}.layer_scale{number}.lambda1"
            table.append(ArrayEntry(name, (scale,), SAME))
        layers = [("up_proj", "Dense_0"), ("down_proj", "Dense_1")]
        layers += [("gate_proj", "gate")] if options["activation"] == "swiglu" else []
        for name, layer in layers:
            table += dense(f"{theirs}.mlp.{name}", f"{ours}/MlpBlock_3/{layer}")
    return table


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `AutoModel.from_pretrained` loads.

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
    table = _table(options)
    if not options["layer_scale_init"]:
        scales = [e.ours[0] for e in table if e.ours[0].endswith("/gamma")]
        flat |= {name: np.ones(options["width"], np.float32) for name in scales}
        notes.append("LayerScale: none, written as ones")
    arrays = torch_file.to_their_arrays(flat, table)
    if not options["num_register_tokens"]:
        arrays[_REGISTERS] = np.zeros((1, 0, options["width"]), np.float32)
    arrays[_MASK_TOKEN] = np.zeros((1, 1, options["width"]), np.float32)
    config = _config(options, model.patch_size)
    preprocess, channels = pretrained.preprocess, options["channels"]
    return notes + hugging_face.write_folder(
        folder, arrays, config, preprocess, channels
    )


def _check_writable(options: dict) -> None:
    """Raises UserError unless transformers has such a network."""
    surgery.check_network(
        options,
        "DINOv3ViTModel of transformers",
        {
            "num_register_tokens": range(1_000),
            "num_classes": (0,),
            "pool": ("token",),
            "rope": ("centered",),
            "posemb": ("none",),
        },
    )


def _config(options: dict, patch_size: int) -> dict:
    """Returns the content of config.json."""
    gated = options["activation"] == "swiglu"
    plain = options | {
        "activation": "gelu" if gated else options["activation"],
        "patch": patch_size,
    }
    config = hugging_face.write_config(plain, (), "softmax")
    for name in ("encoder_stride", "qkv_bias"):
        del config[name]
    return config | {
        "architectures": ["DINOv3ViTModel"],
        "model_type": _TYPE,
        "hidden_act": "silu" if gated else config["hidden_act"],
        "use_gated_mlp": gated,
        "rope_theta": options["rope_temperature"],
        "num_register_tokens": options["num_register_tokens"],
        "layerscale_value": options["layer_scale_init"] or 1.0,
        **{f"{name}_bias": True for name in ("query", "key", "value", "proj", "mlp")},
    }


def _usage(pretrained: Pretrained, path: str, on_hub: bool) -> str:
    """Returns Python lines that load a written checkpoint."""
    del pretrained, on_hub
    return (
        "from transformers import AutoModel\n"
        f'model = AutoModel.from_pretrained("{path}")  # .pooler_output: the features'
    )


READERS["Hugging Face DINOv3"] = Reader(recognises, read)
WRITERS["hf_dinov3"] = Writer(write, usage=_usage, library="transformers")
