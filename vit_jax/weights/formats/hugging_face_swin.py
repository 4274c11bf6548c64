"""Swin Transformers of transformers: SwinModel, Swinv2Model and their classifiers."""

import os
import re

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.errors import UserError
from vit_jax.models.swin import SwinConfig
from vit_jax.weights.formats import (
    hugging_face,
    hugging_face_processor,
    swin,
    torch_file,
)
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader
from vit_jax.weights.pretrained import Pretrained

_PREFIX = re.compile(r"swin(v2)?\.")
_BLOCK = "encoder.layers.0.blocks.0.attention.self"
_NAMES = swin.Names(
    embedding="embeddings.patch_embeddings.projection",
    embedding_norm="embeddings.norm",
    layers="encoder.layers",
    norm1="layernorm_before",
    norm2="layernorm_after",
    attention="attention.self",
    bias_network="continuous_position_bias_mlp",
    out="attention.output.dense",
    mlp=("intermediate.dense", "output.dense"),
    norm="layernorm",
    head="classifier",
)
_BUFFER = re.compile(r"relative_position_index|relative_coords_table|attn_mask")
_PARTS = ("query", "key", "value")


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    return f"{_BLOCK}.query.weight" in _rename(tensors.flat)


def _rename(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays without the prefix of models with a classifier."""
    return {_PREFIX.sub("", name, count=1): value for name, value in flat.items()}


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint.

    Args:
      tensors: of the file or folder.
      num_heads: ignored; the arrays show it.

    Returns:
      The checkpoint under our names.

    Raises:
      UserError: the file is no whole Swin Transformer, there is no config.json, or it
        has a feature that ours have not.
    """
    config = tensors.sidecars.get("config.json", {})
    if config.get("model_type") not in ("swin", "swinv2"):
        found = f"model_type={config['model_type']!r} in" if config else "no"
        raise UserError(
            f"{tensors.path}: {found} config.json, which has to be of swin or swinv2, whose "
            "windows it states: give the folder of such a network with both files"
        )
    for name, plain in (("use_absolute_embeddings", False), ("qkv_bias", True)):
        if config.get(name, plain) != plain:
            raise UserError(
                f"{tensors.path}: {name}={config[name]!r} in config.json is not supported, "
                f"only {plain!r}"
            )
    flat = _rename(tensors.flat)
    notes = [
        f"{name.split('.')[-1].replace('_', ' ')}: dropped, which only pretraining has"
        for name in list(flat)
        if name == "embeddings.mask_token" and flat.pop(name) is not None
    ]
    if any(
        flat.pop(name, None) is not None
        for name in ("decoder.0.weight", "decoder.0.bias")
    ):
        notes.append("decoder: dropped, which only pretraining has")
    flat = _merge_qkv({k: v for k, v in flat.items() if not _BUFFER.search(k)})
    found = swin.options_of(flat, _NAMES, tensors.path)
    table = swin.table(found, _NAMES)
    network = "a SwinModel or Swinv2Model"
    torch_file.check_names(flat, table, tensors.path, network=network)
    ours = torch_file.to_our_arrays(flat, table, tensors.path)
    as_vit = {
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        **config,
        "model_type": "vit",
    }
    facts = hugging_face.read_config({**as_vit, "num_attention_heads": 1})
    preprocess, more = hugging_face_processor.read(
        tensors.sidecars, facts.image_size or (224, 224)
    )
    grown = config.get("pretrained_window_sizes") or ()
    return Pretrained(
        params=unflatten_dict(ours, sep="/"),
        options={
            **found,
            "window_size": config.get("window_size", 7),
            "pretrained_window_sizes": tuple(grown) if any(grown) else (0,),
            "window_padding": "transformers",
            "bias_resize": "bicubic",
            "activation": facts.activation,
            "layer_norm_eps": facts.epsilon,
            "image_size": facts.image_size or (224, 224),
        },
        format="hf",
        source=tensors.path,
        preprocess=preprocess,
        class_names=facts.class_names,
        loss=facts.loss,
        multi_label=facts.loss == "sigmoid",  # As the hub calls it.
        notes=(*notes, *more),
    )


def _merge_qkv(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays with query, key and value in one; V2's biases stay apart."""
    merged = dict(flat)
    for name in flat:
        if not name.endswith(".self.query.weight"):
            continue
        theirs = name.removesuffix(".query.weight")
        kinds = ("weight", "bias") if f"{theirs}.key.bias" in flat else ("weight",)
        for kind in kinds:
            parts = [merged.pop(f"{theirs}.{part}.{kind}", None) for part in _PARTS]
            if all(part is not None for part in parts):
                merged[f"{theirs}.qkv.{kind}"] = np.concatenate(parts)
        if len(kinds) == 1:
            for short, part in (("q", "query"), ("v", "value")):
                if (bias := merged.pop(f"{theirs}.{part}.bias", None)) is not None:
                    merged[f"{theirs}.{short}_bias"] = bias
    return merged


def _split_qkv(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Undoes `_merge_qkv`."""
    split = {}
    for name, value in flat.items():
        theirs, _, last = name.partition(".self.")
        if last.startswith("qkv."):
            kind = last.removeprefix("qkv.")
            for part, array in zip(_PARTS, np.split(value, 3), strict=True):
                split[f"{theirs}.self.{part}.{kind}"] = array
        elif last in ("q_bias", "v_bias"):
            split[f"{theirs}.self.{'query' if last[0] == 'q' else 'value'}.bias"] = (
                value
            )
        else:
            split[name] = value
    return split


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `from_pretrained` of transformers loads.

    Args:
      pretrained: a Swin Transformer whose parameters fit its options.
      folder: existing; model.safetensors, config.json and, if the preprocessing is
        known, preprocessor_config.json are written to it.

    Returns:
      A line for each thing that was rewritten or left out.

    Raises:
      UserError: transformers has no such image processor.
    """
    config, options = swin.complete(pretrained)
    notes = swin.check_writable(config, "transformers")
    flat = flatten_dict(pretrained.params, sep="/")
    arrays = _split_qkv(torch_file.to_their_arrays(flat, swin.table(options, _NAMES)))
    kind = "swinv2" if config.v2 else "swin"
    if options["num_classes"]:
        arrays = {
            name if name.startswith("classifier.") else f"{kind}.{name}": value
            for name, value in arrays.items()
        }
    depths = options["stage_depths"]
    as_vit = options | {
        "distillation": False,
        "depth": len(depths),
        "mlp_dim": 0,
        "patch": options["patch_size"],
        "posemb": "none",
    }
    content = hugging_face.write_config(as_vit, pretrained.class_names, pretrained.loss)
    for name in ("num_hidden_layers", "num_attention_heads", "intermediate_size"):
        del content[name]
    name = "ForImageClassification" if options["num_classes"] else "Model"
    content |= {
        "architectures": [f"{'Swinv2' if config.v2 else 'Swin'}{name}"],
        "model_type": kind,
        "hidden_size": options["width"] * 2 ** (len(depths) - 1),
        "embed_dim": options["width"],
        "depths": list(depths),
        "num_heads": list(options["num_heads"]),
        "window_size": options["window_size"],
        "mlp_ratio": options["mlp_ratio"],
        "encoder_stride": options["patch_size"] * 2 ** (len(depths) - 1),
        "use_absolute_embeddings": False,
    }
    if config.v2:
        content["pretrained_window_sizes"] = list(swin.pretrained_windows(config))
    return notes + hugging_face.write_folder(
        folder, arrays, content, pretrained.preprocess, options["channels"]
    )


READERS["Hugging Face Swin"] = Reader(recognises, read, refines=("Hugging Face",))
WRITERS["hf"].networks[SwinConfig] = write
