"""CLIP, SigLIP and Siglip2 of transformers: image tower, with or without text tower.

The hub has OpenCLIP's published weights in this format too. `pre_logits` of the network
are the features before the projection to the joint space. The projection is part of
`task_params` together with the text tower, under the names of models/text.py. The
classifiers (CLIPForImageClassification, SiglipForImageClassification) read the mean of
the patches, without CLIP's last norm.

Siglip2 has SigLIP's layers and reads images of any size as patches, which a dense layer
embeds (models/patches.py). transformers loads SigLIP 2 of a fixed size as Siglip.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping

import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax import models
from vit_jax.data import tokenizer
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.models import text
from vit_jax.weights import text_tower
from vit_jax.weights.formats import hugging_face, hugging_face_processor, tables
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.hugging_face import KEYS, Arrays, Family
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.pretrained import POSITIONS, Pretrained

_NUMBER = tables.one_layout(lambda a: a.reshape(1), lambda a: a)
# model_type of only an image tower, and of both towers or a classifier.
_CLIP_TYPES = ("clip_vision_model", "clip")
_SIGLIP_TYPES = ("siglip_vision_model", "siglip")
_SIGLIP2_TYPES = ("siglip2_vision_model", "siglip2")
_LABELS = ("id2label", "label2id", "problem_type")  # Top-level keys of config.json.
_PATCHES = "embeddings.patch_embedding.weight"
_BIAS = "embeddings.patch_embedding.bias"
_CLASS = "embeddings.class_embedding"
_POOLING = "MAPHead_0/MultiHeadDotProductAttention_0"
_TOWER = "vision_model."
_TEXT_ANCHOR = "text_model.embeddings.token_embedding.weight"
_TEXT_PARTS = ("text_model.", "text_projection.", "visual_projection.", "logit_")
# eos_token_id in old configs of CLIP; the actual token is the last one of the
# vocabulary.
_WRONG_END = 2
_BLOCK = {
    "norm1": "layer_norm1",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.out_proj",
    "norm2": "layer_norm2",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}
_NAMES = {
    "embedding": "embeddings.patch_embedding",
    POSITIONS: ("embeddings.position_embedding.weight", tables.ROWS),
    **tables.block("encoder.layers", **_BLOCK),
    "Transformer/encoder_norm": "post_layernorm",
    "head": "classifier",
}
_CLIP_NAMES = _NAMES | {
    "cls": (_CLASS, tables.TOKEN),
    "Transformer/pre_norm": "pre_layrnorm",  # The spelling in transformers.
}
_TEXT_NAMES = {
    "text/embedding": (_TEXT_ANCHOR, tables.SAME),
    "text/pos_embedding": (
        "text_model.embeddings.position_embedding.weight",
        tables.ROWS,
    ),
    "text/encoder_norm": "text_model.final_layer_norm",
    **tables.block("text_model.encoder.layers", modules="text/encoderblock", **_BLOCK),
    text.LOGIT_SCALE: (text.LOGIT_SCALE, _NUMBER),
}
_CLIP_TEXT_NAMES = _TEXT_NAMES | {
    "text/head/kernel": ("text_projection.weight", tables.LINEAR),
    f"{text.PROJECTION}/kernel": ("visual_projection.weight", tables.LINEAR),
}
_SIGLIP_TEXT_NAMES = _TEXT_NAMES | {
    "text/head": "text_model.head",
    text.LOGIT_BIAS: (text.LOGIT_BIAS, _NUMBER),
}


def _prepare(flat: Arrays, config: Mapping) -> list[str]:
    if _CLASS in flat:  # CLIP's patch embedding has no bias.
        flat[_BIAS] = np.zeros(len(flat[_PATCHES]), np.float32)
    unused = ["embeddings.position_ids"]  # Present in files of transformers 4.
    if "classifier.weight" in flat:
        unused += ["head.", "post_layernorm."] if _CLASS in flat else ["head."]
    for name in [name for name in flat if name.startswith(tuple(unused))]:
        del flat[name]
    return []


def _options(flat: Arrays, config: Mapping) -> dict:
    clip, classified = _CLASS in flat, "classifier.weight" in flat
    pool = "token" if clip else "map" if "head.probe" in flat else "gap"
    return {
        "pool": "gap" if classified else pool,
        "class_token": clip and classified,
        "pre_norm": clip,
        "final_norm": "post_layernorm.weight" in flat,
    }


def _finish_clip(arrays: Arrays, options: Mapping) -> list[str]:
    del arrays[_BIAS]
    if not options["final_norm"]:  # CLIP always has it; its classifier ignores it.
        width = options["width"]
        arrays["post_layernorm.weight"] = np.ones(width, np.float32)
        arrays["post_layernorm.bias"] = np.zeros(width, np.float32)
    return []


def _clip_has(options: Mapping) -> dict:
    classified = bool(options["num_classes"])
    return {
        "pre_norm": (True,),
        "pool": ("gap",) if classified else ("token",),
        "class_token": (classified,),
        "final_norm": (not classified,),
    }


def _prepare_siglip2(flat: Arrays, config: Mapping) -> list[str]:
    """Converts the dense layer to a convolution; its inputs are rows, columns, channels."""
    side = config.get("patch_size", SIGLIP2.defaults["patch_size"])
    weight = flat[_PATCHES]
    if weight.shape[1] % side**2:
        raise UserError(
            f"patch_size={side} in config.json, but patches have {weight.shape[1]} values: "
            "keep the config.json of the file"
        )
    flat[_PATCHES] = tables.dense_to_conv(weight, side)
    return _prepare(flat, config)


def _finish_siglip2(arrays: Arrays, options: Mapping) -> list[str]:
    arrays[_PATCHES] = tables.conv_to_dense(arrays[_PATCHES])
    return []


def _siglip2_config(options: Mapping) -> dict:
    rows, columns = (side // options["patch"] for side in options["image_size"])
    return {**SIGLIP.config(options), "num_patches": rows * columns}


def clip_preprocess(image_size: tuple[int, int]) -> Preprocess:
    """Returns CLIP's preprocessing."""
    return Preprocess(
        image_size, interpolation="bicubic", **hugging_face_processor.CLIP
    )


def _siglip_preprocess(image_size: tuple[int, int]) -> Preprocess:
    return Preprocess(image_size, interpolation="bicubic", squash=True)


def _siglip2_preprocess(image_size: tuple[int, int]) -> Preprocess:
    return Preprocess(
        image_size, squash=True, max_tokens=hugging_face_processor.MAX_TOKENS
    )


CLIP = Family(
    name="Hugging Face CLIP and SigLIP",
    format="hugging_face_clip",
    to="hf_clip",
    network="CLIPVision",
    model_types=(*_CLIP_TYPES, *_SIGLIP_TYPES),
    claims=lambda flat, kind: _PATCHES in flat,
    names=_CLIP_NAMES,
    defaults={
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
        "num_attention_heads": 12,
        "image_size": 224,
    },
    prepare=_prepare,
    finish=_finish_clip,
    options=_options,
    has=_clip_has,
    patch_bias=False,
    square=True,
    preprocess=clip_preprocess,
)
SIGLIP = dataclasses.replace(
    CLIP,
    network="SiglipVision",
    model_types=(*_SIGLIP_TYPES, *_CLIP_TYPES),
    names=_NAMES
    | {
        "MAPHead_0/probe": ("head.probe", tables.SAME),
        f"{_POOLING}/query,key,value": "head.attention.in_proj_",
        f"{_POOLING}/out": "head.attention.out_proj",
        "MAPHead_0/LayerNorm_0": "head.layernorm",
        "MAPHead_0/MlpBlock_0/Dense_0": "head.mlp.fc1",
        "MAPHead_0/MlpBlock_0/Dense_1": "head.mlp.fc2",
    },
    defaults=CLIP.defaults
    | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    finish=lambda arrays, options: [],
    has=lambda options: {
        "pool": ("gap",) if options["num_classes"] else ("map", "gap"),
        "class_token": (False,),
    },
    config=lambda options: {"vision_use_head": options["pool"] == "map"},
    patch_bias=True,
    preprocess=_siglip_preprocess,
)
SIGLIP2 = dataclasses.replace(
    SIGLIP,
    to="hf_siglip2",
    network="Siglip2Vision",
    model_types=_SIGLIP2_TYPES,
    defaults=SIGLIP.defaults | {"patch_size": 16},
    fixed={"posemb_resize": "bilinear"},
    has=lambda options: {
        **SIGLIP.has(options),
        # Other kinds are not resized.
        "posemb": ("learned", "learned2d", "factorized", "none"),
    },
    config=_siglip2_config,
    prepare=_prepare_siglip2,
    finish=_finish_siglip2,
    preprocess=_siglip2_preprocess,
)


def _image_tower(flat: Mapping[str, np.ndarray]) -> Arrays:
    """Returns the arrays of the image tower and of a classifier."""
    if not any(name.startswith(_TOWER) for name in flat):
        return dict(flat)
    kept = (name for name in flat if name.startswith((_TOWER, "classifier.")))
    return {name.removeprefix(_TOWER): flat[name] for name in kept}


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    return _PATCHES in _image_tower(tensors.flat)


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint; see `hugging_face.read`."""
    config, flat = tensors.config, _image_tower(tensors.flat)
    family = SIGLIP2 if flat[_PATCHES].ndim == 2 else SIGLIP
    family = CLIP if _CLASS in flat else family
    whole = {k: config[k] for k in ("model_type", *_LABELS) if k in config}
    tower = (config.get("vision_config") or config) | whole
    sidecars = tensors.sidecars | ({"config.json": tower} if config else {})
    inner = dataclasses.replace(tensors, flat=flat, sidecars=sidecars)
    pretrained, notes = hugging_face.read(family, inner, num_heads), []
    if not {"preprocessor_config.json", "processor_config.json"} & sidecars.keys():
        notes.append(f"preprocessing: not in the file, assumed as for {_name(family)}")
    if _TEXT_ANCHOR in tensors.flat:
        task, params, more = _read_text(tensors.flat, config, family, tensors.path)
        notes += more
        pretrained = dataclasses.replace(
            pretrained, task=task, task_params=params, tokenizer=tensors.path
        )
    elif "visual_projection.weight" in tensors.flat:
        notes.append("visual_projection: left out; features are taken before it")
    return dataclasses.replace(pretrained, notes=(*pretrained.notes, *notes))


def _read_text(
    flat: Mapping[str, np.ndarray], config: Mapping, family: Family, source: str
) -> tuple[dict, dict, list[str]]:
    """Returns `Pretrained.task`, `Pretrained.task_params`, and notes."""
    flat = {k: v for k, v in flat.items() if k.startswith(_TEXT_PARTS)}
    flat.pop("text_model.embeddings.position_ids", None)  # In files of transformers 4.
    clip, notes = family is CLIP, []
    configured = config.get("text_config") or {}
    values = {**family.defaults, **configured}
    vocab_size, width = flat[_TEXT_ANCHOR].shape
    num_heads = configured.get("num_attention_heads", 8 if clip else 12)
    if not config:
        num_heads = max(1, width // 64)
        notes = [f"heads of the text tower: assumed {num_heads} with 64 features each"]
    if width % num_heads:
        raise UserError(
            f"{source}: {num_heads} heads do not divide the text tower's width {width}"
        )
    depth = tables.count_blocks(flat, "text_model.encoder.layers.")
    table = _text_table(clip, depth, num_heads)
    part, network = " of the text tower", f"{_name(family)}Model"
    tables.check_names(flat, table, source, part=part, network=network)
    params = tables.to_our_arrays(flat, table, source)
    about = _text_form(clip)
    if clip:
        end = configured.get("eos_token_id", vocab_size - 1)
        about["eos_id"] = vocab_size - 1 if end == _WRONG_END else end
    about["activation"] = hugging_face.read_activation(values)
    about["layer_norm_eps"] = float(values["layer_norm_eps"])
    return *text_tower.read(params, **about), notes


def _text_table(clip: bool, depth: int, num_heads: int) -> list[tables.ArrayEntry]:
    names = _CLIP_TEXT_NAMES if clip else _SIGLIP_TEXT_NAMES
    return tables.name_entries(names, {"depth": depth, "num_heads": num_heads})


def _text_form(clip: bool) -> dict:
    """Returns the options that are the same in all text towers of a family."""
    return {
        "causal": clip,
        "pool": "eos" if clip else "last",
        "projection": "plain" if clip else "bias",
    }


def write(
    choose: Callable[[Pretrained], Family],
    pretrained: Pretrained,
    folder: str | os.PathLike,
) -> list[str]:
    """Writes a folder that `from_pretrained` of the chosen family loads.

    With a text tower, it has both towers and the files of the tokenizer; otherwise only
    the vision model. See `hugging_face.write`.
    """
    family = choose(pretrained)
    options, arrays, notes = hugging_face.to_their_arrays(family, pretrained)
    config = hugging_face.write_config(family, options, pretrained)
    labels = {key: config.pop(key) for key in _LABELS if key in config}
    whole, text_arrays = labels if options["num_classes"] else {}, {}
    if "text" in pretrained.task_params and not options["num_classes"]:
        if why := _no_text(pretrained, family):
            notes.append(f"text tower: left out ({why})")
        else:
            text_arrays, whole, more = _write_text(pretrained, family)
            del config["dtype"]
            notes += more + tokenizer.copy_files(pretrained.tokenizer, folder)
    if family is CLIP or whole:
        arrays = hugging_face.add_prefix(arrays, _TOWER)
    if whole:
        name = hugging_face.architecture(_name(family), options)
        del config["architectures"]
        config = {
            "architectures": [name],
            "model_type": family.model_types[1],
            "vision_config": config,
            "dtype": "float32",
            **whole,
        }
    return notes + hugging_face.write_folder(
        folder, arrays | text_arrays, config, pretrained
    )


def _clip_or_siglip(pretrained: Pretrained) -> Family:
    options = models.create(**pretrained.options).options
    return CLIP if options.get("pre_norm") else SIGLIP


def _name(family: Family) -> str:
    """Returns "CLIP", "Siglip" or "Siglip2"."""
    return family.network.removesuffix("Vision")


def _no_text(pretrained: Pretrained, family: Family) -> str:
    """Returns why transformers cannot store a text tower; "" if it can."""
    tower, params = text_tower.config_of(pretrained), pretrained.task_params
    clip, name = family is CLIP, _name(family)
    for key, value in _text_form(clip).items():
        if getattr(tower, key) != value:
            return (
                f"task.text.{key}={getattr(tower, key)!r}: the text tower of {name} in "
                f"transformers has {value!r}: write it with --to=safetensors"
            )
    if (text.PROJECTION in params) != clip or "bias" in params.get(text.PROJECTION, {}):
        return (
            f"{name} of transformers has {'a' if clip else 'no'} projection of the image's "
            "features, without a bias: write it with --to=safetensors"
        )
    return ""


def _write_text(
    pretrained: Pretrained, family: Family
) -> tuple[Arrays, dict, list[str]]:
    """Returns the arrays of a text tower and the projections, their configs, and notes."""
    tower, params = text_tower.config_of(pretrained), pretrained.task_params
    clip, name, notes = family is CLIP, _name(family), []
    flat = flatten_dict(params, sep="/")
    if clip and (bias := flat.pop(text.LOGIT_BIAS, None)) is not None:
        notes.append(
            f"bias of the similarities, {float(bias[0]):g}: left out, CLIP has none; all "
            "logits change by this value, and keep their order"
        )
    elif not clip:  # SigLIP always has a bias.
        flat.setdefault(text.LOGIT_BIAS, np.zeros(1, np.float32))
    table = _text_table(clip, tower.depth, tower.num_heads)
    arrays = tables.to_their_arrays(flat, table)
    for number in {text.LOGIT_SCALE, text.LOGIT_BIAS} & arrays.keys():
        arrays[number] = arrays[number].reshape(() if clip else 1)
    sizes = dataclasses.asdict(tower) | {"mlp_dim": tower.mlp_dim or 4 * tower.width}
    shared = sizes.keys() & set(KEYS.values())
    config = {
        "model_type": f"{name.lower()}_text_model",
        "vocab_size": tower.vocab_size,
        **{key: sizes[option] for key, option in KEYS.items() if option in shared},
        "max_position_embeddings": flat["text/pos_embedding"].shape[1],
        "hidden_act": hugging_face.ACTIVATIONS[tower.activation][0],
    }
    embed_dim = flat["text/head/kernel"].shape[1]
    if not clip:
        whole = {"text_config": config | {"projection_size": embed_dim}}
        return arrays, whole, notes
    config |= {
        "projection_dim": embed_dim,
        "eos_token_id": tower.eos_id,
        "pad_token_id": tower.eos_id,
        "bos_token_id": max(tower.eos_id - 1, 0),
    }
    return arrays, {"text_config": config, "projection_dim": embed_dim}, notes


def _usage(
    choose: Callable[[Pretrained], Family],
    pretrained: Pretrained,
    path: str,
    on_hub: bool,
) -> str:
    """Returns Python lines that load a written checkpoint."""
    family, kind = choose(pretrained), "VisionModel"
    if pretrained.options["num_classes"]:
        kind = "ForImageClassification"
    elif "text" in pretrained.task_params and not _no_text(pretrained, family):
        kind = "Model"
    name = _name(family) + kind
    return f'from transformers import {name}\nmodel = {name}.from_pretrained("{path}")'


READERS[CLIP.name] = Reader(recognises, read)
for _to, _choose in (
    (CLIP.to, _clip_or_siglip),
    (SIGLIP2.to, lambda pretrained: SIGLIP2),
):
    WRITERS[_to] = Writer(
        functools.partial(write, _choose),
        usage=functools.partial(_usage, _choose),
        library="transformers",
        with_task=True,
        files=(
            *("config.json", "model.safetensors", "preprocessor_config.json"),
            *tokenizer.FILES,
        ),
    )
