"""Swin Transformers of transformers: SwinModel, Swinv2Model and their classifiers."""

import functools
import os
import re
from collections.abc import Mapping

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax.data.transforms.base import pair
from vit_jax.errors import UserError
from vit_jax.models.swin import SwinConfig
from vit_jax.weights.formats import (
    hugging_face,
    hugging_face_processor,
    hugging_face_vit,
    swin,
    tables,
)
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.hugging_face import Arrays, Family
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader
from vit_jax.weights.pretrained import Pretrained

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
_UNUSED = re.compile(r"relative_position_index|relative_coords_table|attn_mask")
_PARTS = ("query", "key", "value")
_PATCH_NORM_EPS = 1e-5  # Independent of layer_norm_eps.


def _config(options: Mapping) -> dict:
    v2 = options["variant"].startswith("SwinV2")
    times = 2 ** (len(options["stage_depths"]) - 1)
    return {
        "architectures": [
            hugging_face.architecture("Swinv2" if v2 else "Swin", options)
        ],
        "model_type": "swinv2" if v2 else "swin",
        "hidden_size": options["width"] * times,
        "encoder_stride": options["patch_size"] * times,
        "qkv_bias": True,
        "use_absolute_embeddings": False,
    }


# Read and written below, because `Names` tables do not support stages and windows.
SWIN = Family(
    name="Hugging Face Swin",
    format="hf",
    to="hf",
    network="Swin",
    model_types=("swin", "swinv2"),
    claims=lambda flat, kind: (
        "encoder.layers.0.blocks.0.attention.self.query.weight" in flat
    ),
    renames=((r"^swin(v2)?\.", ""),),
    defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-5, "image_size": 224},
    keys={
        "embed_dim": "width",
        "depths": "stage_depths",
        "num_heads": "num_heads",
        "window_size": "window_size",
        "mlp_ratio": "mlp_ratio",
        "patch_size": "patch_size",
        "num_channels": "channels",
        "layer_norm_eps": "layer_norm_eps",
    },
    config=_config,
    must={"use_absolute_embeddings": (False, ""), "qkv_bias": (True, "")},
)


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a Swin Transformer; see `registry.Reader`.

    Raises:
      UserError: arrays are missing, there is no config.json with the window sizes, or
        the network has a feature that no model of this project supports.
    """
    config, source = tensors.config, tensors.path
    if config.get("model_type") not in SWIN.model_types:
        kind = f"model_type={config['model_type']!r} in" if config else "no"
        raise UserError(
            f"{source}: {kind} config.json; one of swin or swinv2 is needed for the "
            "window sizes: give the folder of such a network with both files"
        )
    values = SWIN.defaults | config
    flat = hugging_face.rename(SWIN, tensors.flat)
    hugging_face.check_config(SWIN, flat, config, source)
    notes = hugging_face.drop_pretraining(flat)
    flat = _merge_qkv({k: v for k, v in flat.items() if not _UNUSED.search(k)})
    options = swin.options_of(flat, _NAMES, source)
    table = swin.table(options, _NAMES)
    tables.check_names(flat, table, source, network="SwinModel or Swinv2Model")
    params = tables.to_our_arrays(flat, table, source)
    image_size = pair(values["image_size"])
    preprocess, more = hugging_face_processor.read(tensors.sidecars, image_size)
    grown = config.get("pretrained_window_sizes") or ()
    return Pretrained(
        params=unflatten_dict(params, sep="/"),
        options={
            **options,
            "window_size": config.get("window_size", 7),
            "pretrained_window_sizes": tuple(grown) if any(grown) else (0,),
            "window_padding": "transformers",
            "bias_resize": "bicubic",
            "activation": hugging_face.read_activation(values),
            "layer_norm_eps": float(values["layer_norm_eps"]),
            "patch_norm_eps": _PATCH_NORM_EPS,
            "image_size": image_size,
        },
        format=SWIN.format,
        source=source,
        preprocess=preprocess,
        notes=(*notes, *more),
        **hugging_face.read_labels(config, options["num_classes"]),
    )


def _merge_qkv(flat: Arrays) -> Arrays:
    """Concatenates query, key and value; the biases of V2 stay separate."""
    merged = {}
    for name, value in flat.items():
        start, _, kind = name.rpartition(".")
        start, _, part = start.rpartition(".")
        parts = [flat.get(f"{start}.{one}.{kind}") for one in _PARTS]
        if part not in _PARTS:
            merged[name] = value
        elif all(one is not None for one in parts):
            merged[f"{start}.qkv.{kind}"] = np.concatenate(parts)
        else:
            merged[f"{start}.{part[0]}_{kind}"] = value
    return merged


def _split_qkv(flat: Arrays) -> Arrays:
    """Undoes `_merge_qkv`."""
    split = {}
    for name, value in flat.items():
        if ".qkv." in name:
            for part, array in zip(_PARTS, np.split(value, 3), strict=True):
                split[name.replace(".qkv.", f".{part}.")] = array
        else:
            name = name.replace(".q_bias", ".query.bias")
            split[name.replace(".v_bias", ".value.bias")] = value
    return split


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a Swin Transformer; see `hugging_face.write`."""
    config, options = swin.complete(pretrained)
    notes = swin.check_writable(config, "transformers")
    flat = flatten_dict(pretrained.params, sep="/")
    arrays = _split_qkv(tables.to_their_arrays(flat, swin.table(options, _NAMES)))
    content = hugging_face.write_config(SWIN, options, pretrained)
    if config.v2:
        content["pretrained_window_sizes"] = list(swin.pretrained_windows(config))
    if options["num_classes"]:
        arrays = hugging_face.add_prefix(arrays, f"{content['model_type']}.")
    return notes + hugging_face.write_folder(folder, arrays, content, pretrained)


READERS[SWIN.name] = Reader(
    functools.partial(hugging_face.recognises, SWIN), read, refines=("Hugging Face",)
)
WRITERS[hugging_face_vit.VIT.to].networks[SwinConfig] = write
