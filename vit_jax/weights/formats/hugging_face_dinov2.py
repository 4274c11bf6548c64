"""Hugging Face's DINOv2: Dinov2Model and Dinov2WithRegistersModel of transformers.

Files have the names of transformers 4, which version 5 still writes.
"""

import os
import re

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
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.formats.torch_file import (
    CONV,
    SAME,
    ArrayEntry,
    dense,
    gated,
    norm,
)
from vit_jax.weights.pretrained import POSITIONS, Pretrained

_PREFIX = re.compile(r"(dinov2|dinov2_with_registers)\.")
_BLOCK = "encoder.layer.0"
_MASK_TOKEN = "embeddings.mask_token"
_MODEL_TYPES = ("dinov2", "dinov2_with_registers")
_DEFAULT_EPS = 1e-6


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    config = tensors.sidecars.get("config.json", {})
    if config.get("model_type") not in (None, *_MODEL_TYPES):
        return False
    flat = _rename(tensors.flat)
    return {
        "embeddings.patch_embeddings.projection.weight",
        f"{_BLOCK}.layer_scale1.lambda1",
    } <= flat.keys()


def _rename(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays without the prefix of models with a classifier."""
    return {_PREFIX.sub("", name, count=1): value for name, value in flat.items()}


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
    flat, notes = _rename(tensors.flat), []
    config = tensors.sidecars.get("config.json", {})
    facts, more = _read_config(config)
    notes += more
    if flat.pop(_MASK_TOKEN, None) is not None:
        notes.append("mask token: dropped, which only pretraining has")
    if not facts.query_bias:
        flat, more = hugging_face.add_qkv_biases(flat)
        notes += more
    depth = len({n.split(".")[2] for n in flat if n.startswith("encoder.layer.")})
    width = len(flat["embeddings.patch_embeddings.projection.weight"])
    num_heads, more = torch_file.choose_num_heads(
        facts.num_heads, num_heads, width, depth
    )
    notes += more
    swiglu = f"{_BLOCK}.mlp.weights_in.weight" in flat
    registers = flat.get("embeddings.register_tokens")
    num_classes = len(flat.get("classifier.weight", ()))
    form = {
        "num_classes": num_classes,
        "depth": depth,
        "num_heads": num_heads,
        "activation": "swiglu" if swiglu else facts.activation,
        "num_register_tokens": 0 if registers is None else registers.shape[1],
    }
    table = _table(form)
    network = "a Dinov2Model or Dinov2WithRegistersModel"
    torch_file.check_names(flat, table, tensors.path, network=network)
    ours = torch_file.to_our_arrays(flat, table, tensors.path)
    rest = {name: value for name, value in ours.items() if name != POSITIONS}
    sizes = linen.transformer_options(rest)
    sizes["image_size"] = hugging_face.find_image_size(
        ours, facts, num_prefix_tokens=1, source=tensors.path
    )
    patch = ours["embedding/kernel"].shape[0]
    preprocess, more = hugging_face_processor.read(
        tensors.sidecars, sizes["image_size"], patch, any_size=True
    )
    names = facts.class_names
    resize = "bicubic" if form["num_register_tokens"] else "bicubic_dino"
    return Pretrained(
        params=unflatten_dict(ours, sep="/"),
        options={
            **sizes,
            "num_classes": num_classes,
            "pool": "token_gap" if num_classes else "token",
            "activation": form["activation"],
            "layer_scale_init": float(config.get("layerscale_value") or 1.0),
            "posemb_resize": facts.posemb_resize or resize,
            "layer_norm_eps": facts.epsilon,
        },
        format="dinov2",
        source=tensors.path,
        preprocess=preprocess or dino.preprocess(sizes["image_size"]),
        class_names=names if len(names) == num_classes else (),
        loss=facts.loss,
        multi_label=facts.loss == "sigmoid",  # As the hub calls it.
        notes=(*notes, *more),
    )


def _read_config(config: dict) -> tuple[hugging_face.HuggingFaceConfig, list[str]]:
    """Returns what config.json says, whose keys are those of a ViT, and a note."""
    if not config:
        facts = hugging_face.HuggingFaceConfig(epsilon=_DEFAULT_EPS)
        return facts, ["config.json: none, so exact GELU and epsilon 1e-6"]
    as_vit = {"layer_norm_eps": _DEFAULT_EPS, **config, "model_type": "vit"}
    return hugging_face.read_config(as_vit), []


def _table(options: dict) -> list[ArrayEntry]:
    """Returns the entries of an encoder, without the prefix.

    Args:
      options: depth, num_heads, num_classes, activation and num_register_tokens of
        `models.Model`.
    """
    embed = "embeddings"
    table = [
        *dense(f"{embed}.patch_embeddings.projection", "embedding", CONV),
        ArrayEntry(f"{embed}.cls_token", ("cls",), SAME),
        ArrayEntry(f"{embed}.position_embeddings", (POSITIONS,), SAME),
        *norm("layernorm", "Transformer/encoder_norm"),
    ]
    if options["num_register_tokens"]:
        table.append(ArrayEntry(f"{embed}.register_tokens", ("register_tokens",), SAME))
    for i in range(options["depth"]):
        theirs, ours = f"encoder.layer.{i}", f"Transformer/encoderblock_{i}"
        mlp = f"{ours}/MlpBlock_3"
        table += hugging_face.attention_table(theirs, ours, options["num_heads"])
        for number, norm_place, scale_place in ((1, 0, 1), (2, 2, 3)):
            table += norm(f"{theirs}.norm{number}", f"{ours}/LayerNorm_{norm_place}")
            scale = f"{ours}/LayerScale_{scale_place}/gamma"
            name = f"{theirs}.layer_scale{number}.lambda1"
            table.append(ArrayEntry(name, (scale,), SAME))
        if options["activation"] == "swiglu":
            table += gated(f"{theirs}.mlp.weights_in", mlp)
            table += dense(f"{theirs}.mlp.weights_out", f"{mlp}/Dense_1")
        else:
            table += dense(f"{theirs}.mlp.fc1", f"{mlp}/Dense_0")
            table += dense(f"{theirs}.mlp.fc2", f"{mlp}/Dense_1")
    if options["num_classes"]:
        table += dense("classifier", "head")
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
    flat, options, more = surgery.store_positions(flat, options, model.grid)
    notes += more + surgery.note_resize(options, "transformers")
    table = _table(options)
    if not options["layer_scale_init"]:
        scales = [e.ours[0] for e in table if e.ours[0].endswith("/gamma")]
        flat |= {name: np.ones(options["width"], np.float32) for name in scales}
        notes.append("LayerScale: none, written as ones")
    arrays = torch_file.to_their_arrays(flat, table)
    registers = options["num_register_tokens"]
    if registers:  # That network always has one.
        arrays[_MASK_TOKEN] = np.zeros((1, options["width"]), np.float32)
    config = _config(options, model.patch_size, pretrained)
    if options["num_classes"]:
        arrays = {
            k if k.startswith("classifier.") else f"{config['model_type']}.{k}": v
            for k, v in arrays.items()
        }
    preprocess, channels = pretrained.preprocess, options["channels"]
    return notes + hugging_face.write_folder(
        folder, arrays, config, preprocess, channels
    )


def _check_writable(options: dict) -> None:
    """Raises UserError unless transformers has such a network."""
    surgery.check_network(
        options,
        "Dinov2Model of transformers",
        {
            "pool": ("token_gap",) if options["num_classes"] else ("token",),
            "num_register_tokens": range(1_000),
        },
        to="--to=timm, --to=hf or --to=safetensors",
    )


def _config(options: dict, patch_size: int, pretrained: Pretrained) -> dict:
    """Returns the content of config.json.

    Raises:
      UserError: it cannot state the hidden units of the MLP.
    """
    width, mlp_dim = options["width"], options["mlp_dim"]
    swiglu, registers = (
        options["activation"] == "swiglu",
        options["num_register_tokens"],
    )

    def hidden(ratio):
        # Two thirds, up to a multiple of 8, for a gated one (DINOv2's code).
        return (width * ratio * 2 // 3 + 7) // 8 * 8 if swiglu else width * ratio

    ratio = next((r for r in range(1, 65) if hidden(r) == mlp_dim), None)
    if ratio is None:
        raise UserError(
            f"mlp_dim={mlp_dim}: Dinov2Model of transformers has {hidden(4)} and what "
            f"follows from other whole ratios to the width, {width}: write it with --to=timm"
        )
    activation = "gelu" if swiglu else options["activation"]
    config = hugging_face.write_config(
        options | {"activation": activation, "patch": patch_size},
        pretrained.class_names,
        pretrained.loss,
    )
    task = "ForImageClassification" if options["num_classes"] else "Model"
    for name in ("encoder_stride", "intermediate_size"):
        del config[name]
    config |= {
        "architectures": [f"Dinov2{task}"],
        "model_type": "dinov2",
        "mlp_ratio": ratio,
        "use_swiglu_ffn": swiglu,
        "layerscale_value": options["layer_scale_init"] or 1.0,
    }
    if not registers:
        return config | {"use_mask_token": False}
    return config | {
        "architectures": [f"Dinov2WithRegisters{task}"],
        "model_type": "dinov2_with_registers",
        "num_register_tokens": registers,
    }


def _usage(pretrained: Pretrained, path: str, on_hub: bool) -> str:
    """Returns Python lines that load a written checkpoint."""
    del on_hub
    name, output = "AutoModel", "pooler_output: the features"
    if pretrained.options.get("num_classes"):
        name, output = "AutoModelForImageClassification", "logits"
    return (
        f"from transformers import {name}\n"
        f'model = {name}.from_pretrained("{path}")  # .{output}'
    )


READERS["Hugging Face DINOv2"] = Reader(recognises, read, refines=("Hugging Face",))
WRITERS["hf_dinov2"] = Writer(write, usage=_usage, library="transformers")
