"""Hugging Face's CLIP and SigLIP: the image tower, alone or beside the text tower.

OpenCLIP's published weights are there in this format too. `pre_logits` of the network are
what comes before the projection to the space of texts, which is in `task_params` together
with the text tower (hugging_face_text.py). Of networks that were fine-tuned as classifiers
(CLIPForImageClassification, SiglipForImageClassification) the classifier sees the mean of
the patches, without CLIP's last norm.
"""

import os
import re

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.data import tokenizer
from vit_jax.errors import UserError
from vit_jax.weights import surgery
from vit_jax.weights.formats import (
    hugging_face,
    hugging_face_processor,
    hugging_face_text,
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
    from_heads,
    norm,
    to_heads,
)
from vit_jax.weights.pretrained import POSITIONS, Preprocess, Pretrained

_ANCHOR = "embeddings.patch_embedding.weight"
_PREFIX = re.compile(r"vision_model\.")
# By the type: what config.json may leave out, as in transformers 5.23.
_DEFAULTS = {
    "clip": {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "patch_size": 32},
    "siglip": {
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "patch_size": 16,
    },
}
_KINDS = {"clip", "clip_vision_model", "siglip", "siglip_vision_model"}


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    return any(prefix + _ANCHOR in tensors.flat for prefix in ("", "vision_model."))


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
    config = tensors.sidecars.get("config.json", {})
    kind = config.get("model_type")
    if kind is not None and kind not in _KINDS:
        raise UserError(
            f"{tensors.path}: model_type={kind!r} in config.json is not one of "
            f"{', '.join(sorted(_KINDS))}, which models of this project compute"
        )
    inside = any(name.startswith("vision_model.") for name in tensors.flat)
    flat = {
        _PREFIX.sub("", name, count=1): value
        for name, value in tensors.flat.items()
        if name.startswith(("vision_model.", "classifier.")) or not inside
    }
    flat.pop("embeddings.position_ids", None)  # In files of transformers 4.
    clip = "embeddings.class_embedding" in flat
    notes = []
    task, task_params = {}, {}
    if hugging_face_text.ANCHOR in tensors.flat:
        defaults = _DEFAULTS["clip" if clip else "siglip"]
        task, task_params, notes = hugging_face_text.read(
            tensors.flat, config, defaults, tensors.path
        )
    elif "visual_projection.weight" in tensors.flat:
        notes.append("visual_projection: left out; features are those before it")
    facts, more = _read_config(config, clip)
    notes += more
    num_classes = len(flat.get("classifier.weight", ()))
    if num_classes:
        unused = ("head.", "post_layernorm.") if clip else ("head.",)
        flat = {k: v for k, v in flat.items() if not k.startswith(unused)}
    pool = "gap" if num_classes else "token"
    if not clip and not num_classes:
        pool = "map" if "head.probe" in flat else "gap"
    depth = len({n.split(".")[2] for n in flat if n.startswith("encoder.layers.")})
    width = len(flat[_ANCHOR])
    num_heads, more = torch_file.choose_num_heads(
        facts.num_heads, num_heads, width, depth
    )
    notes += more
    form = {
        "depth": depth,
        "num_heads": num_heads,
        "num_classes": num_classes,
        "pool": pool,
        "class_token": clip and pool != "token",
        "pre_norm": clip,
        "final_norm": "post_layernorm.weight" in flat,
    }
    if clip:
        flat["embeddings.patch_embedding.bias"] = np.zeros(width, np.float32)
    table = _table(form)
    network = "a CLIPVisionModel or SiglipVisionModel"
    torch_file.check_names(flat, table, tensors.path, network=network)
    ours = torch_file.to_our_arrays(flat, table, tensors.path)
    sizes = linen.transformer_options({k: v for k, v in ours.items() if k != POSITIONS})
    sizes["image_size"] = hugging_face.find_image_size(
        ours, facts, num_prefix_tokens=int(clip), source=tensors.path
    )
    patch = ours["embedding/kernel"].shape[0]
    preprocess, more = hugging_face_processor.read(
        tensors.sidecars, sizes["image_size"], patch
    )
    if preprocess is None:
        preprocess = _preprocess(sizes["image_size"], clip)
        more = [*more, f"preprocessing: not in the file, so {_name(clip)}'s"]
    names = facts.class_names
    return Pretrained(
        params=unflatten_dict(ours, sep="/"),
        options={
            **sizes,
            **{k: v for k, v in form.items() if k not in ("depth", "num_heads")},
            "activation": facts.activation,
            "posemb_resize": facts.posemb_resize or "bicubic",
            "layer_norm_eps": facts.epsilon,
        },
        format="hugging_face_clip",
        source=tensors.path,
        preprocess=preprocess,
        class_names=names if len(names) == num_classes else (),
        loss=facts.loss,
        multi_label=facts.loss == "sigmoid",  # As the hub calls it.
        notes=(*notes, *more),
        task=task,
        task_params=task_params,
        tokenizer=tensors.path if task else "",
    )


def _name(clip: bool) -> str:
    return "CLIP" if clip else "SigLIP"


def clip_preprocess(image_size: tuple[int, int]) -> Preprocess:
    """Returns how images were prepared for CLIP."""
    return Preprocess(
        image_size, interpolation="bicubic", **hugging_face_processor.CLIP
    )


def _preprocess(image_size: tuple[int, int], clip: bool) -> Preprocess:
    """Returns how images were prepared in the pretraining."""
    if clip:
        return clip_preprocess(image_size)
    half = (0.5,) * 3
    return Preprocess(image_size, half, half, interpolation="bicubic", squash=True)


def _read_config(
    config: dict, clip: bool
) -> tuple[hugging_face.HuggingFaceConfig, list[str]]:
    """Returns what config.json says, whose keys are those of a ViT, and a note."""
    defaults = _DEFAULTS["clip" if clip else "siglip"]
    tower = config.get("vision_config") or config
    about = {k: config[k] for k in ("id2label", "problem_type") if k in config}
    facts = hugging_face.read_config(
        {**defaults, **tower, **about, "model_type": "vit"}
    )
    if not config:
        return facts, [f"config.json: none, so {_name(clip)}'s defaults"]
    return facts, []


def _table(options: dict) -> list[ArrayEntry]:
    """Returns the entries of a tower, without the prefix.

    Args:
      options: depth, num_heads, num_classes, pool, class_token, pre_norm and final_norm of
        `models.Model`.
    """
    embed = "embeddings"
    table = [
        *dense(f"{embed}.patch_embedding", "embedding", CONV),
        ArrayEntry(
            f"{embed}.position_embedding.weight", (POSITIONS,), hugging_face_text.ROWS
        ),
    ]
    if options["pool"] == "token" or options["class_token"]:
        table.append(ArrayEntry(f"{embed}.class_embedding", ("cls",), _TOKEN))
    if options["pre_norm"]:
        table += norm("pre_layrnorm", "Transformer/pre_norm")  # Their spelling.
    if options["final_norm"]:
        table += norm("post_layernorm", "Transformer/encoder_norm")
    for i in range(options["depth"]):
        theirs, ours = f"encoder.layers.{i}", f"Transformer/encoderblock_{i}"
        table += hugging_face_text.block_table(theirs, ours, options["num_heads"])
    if options["pool"] == "map":
        table += _pooling_table(options["num_heads"])
    if options["num_classes"]:
        table += dense("classifier", "head")
    return table


def _pooling_table(num_heads: int) -> list[ArrayEntry]:
    ours = "MAPHead_0"
    attention, mlp = f"{ours}/MultiHeadDotProductAttention_0", f"{ours}/MlpBlock_0"
    table = [ArrayEntry("head.probe", (f"{ours}/probe",), SAME)]
    for kind, leaf in (("weight", "kernel"), ("bias", "bias")):
        names = tuple(f"{attention}/{n}/{leaf}" for n in ("query", "key", "value"))
        layout = to_heads(num_heads, 3)
        table.append(ArrayEntry(f"head.attention.in_proj_{kind}", names, layout))
    out = from_heads(num_heads)
    table += dense("head.attention.out_proj", f"{attention}/out", out)
    table += norm("head.layernorm", f"{ours}/LayerNorm_0")
    table += dense("head.mlp.fc1", f"{mlp}/Dense_0")
    return table + dense("head.mlp.fc2", f"{mlp}/Dense_1")


# (D,) and (1, 1, D); (N, D) and (1, N, D).
_TOKEN = torch_file.one_layout(lambda a: a[None, None], lambda a: a[0, 0])


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `from_pretrained` of CLIP or SigLIP loads.

    With a text tower it is both towers and the files of the tokenizer, else the vision
    model alone.

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
    clip = _check_writable(options)
    if model.grid[0] != model.grid[1]:
        raise UserError(
            f"a grid of {model.grid[0]}x{model.grid[1]}: transformers takes that of "
            f"{_name(clip)} as a square: write it with --to=timm or --to=safetensors"
        )
    flat = flatten_dict(pretrained.params, sep="/")
    flat, options, notes = surgery.norm_every_token(flat, options)
    flat, options, more = surgery.store_positions(flat, options, model.grid)
    flat, options, folded = surgery.fold_layer_scale(flat, options)
    notes += more + folded + surgery.note_resize(options, "transformers")
    if clip:
        flat, more = surgery.fold_patch_bias(flat, options, num_prefix_tokens=1)
        notes += more
    arrays = torch_file.to_their_arrays(flat, _table(options))
    if clip:
        del arrays["embeddings.patch_embedding.bias"]
        if not options[
            "final_norm"
        ]:  # That network always has it, and ignores it here.
            width = options["width"]
            arrays["post_layernorm.weight"] = np.ones(width, np.float32)
            arrays["post_layernorm.bias"] = np.zeros(width, np.float32)
    text, more = _write_text(pretrained, options, clip)
    notes += more
    if clip or options["num_classes"] or text:
        arrays = {
            name if name.startswith("classifier.") else f"vision_model.{name}": value
            for name, value in arrays.items()
        }
    config = _config(options, model.patch_size, pretrained, clip)
    if text:
        arrays |= text[0]
        config = _whole_config(config, text[1], clip)
        notes += tokenizer.copy_files(pretrained.tokenizer, folder)
    preprocess, channels = pretrained.preprocess, options["channels"]
    return notes + hugging_face.write_folder(
        folder, arrays, config, preprocess, channels
    )


def _write_text(
    pretrained: Pretrained, options: dict, clip: bool
) -> tuple[tuple[dict, dict] | None, list[str]]:
    """Returns what `hugging_face_text.write` does; None, and why, if there is none."""
    if "text" not in pretrained.task_params or options["num_classes"]:
        return None, []
    try:
        return hugging_face_text.write(pretrained, clip=clip), []
    except UserError as error:
        return None, [f"text tower: left out ({error})"]


def _whole_config(vision: dict, text: dict, clip: bool) -> dict:
    """Returns the content of config.json for both towers."""
    vision = {k: v for k, v in vision.items() if k not in ("architectures", "dtype")}
    whole = {"vision_config": vision, "text_config": text, "dtype": "float32"}
    if not clip:
        return {"architectures": ["SiglipModel"], "model_type": "siglip"} | whole
    width = text["projection_dim"]
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": width,
        **whole,
    }


def _check_writable(options: dict) -> bool:
    """Returns whether a network is CLIP's, not SigLIP's.

    Raises:
      UserError: transformers has no such network.
    """
    clip = bool(options.get("pre_norm"))
    classified = bool(options.get("num_classes"))
    pools = ("token",) if clip else ("map", "gap")
    surgery.check_network(
        options,
        f"{_name(clip)}VisionModel of transformers",
        {
            "pre_norm": (clip,),
            "pool": ("gap",) if classified else pools,
            "class_token": (clip and classified,),
            "final_norm": (not (clip and classified),),
            "activation": ("gelu", "gelu_tanh", "quick_gelu"),
        },
    )
    return clip


def _config(options: dict, patch_size: int, pretrained: Pretrained, clip: bool) -> dict:
    """Returns the content of config.json."""
    whole = hugging_face.write_config(
        options | {"patch": patch_size}, pretrained.class_names, pretrained.loss
    )
    about = {k: whole.pop(k) for k in ("id2label", "label2id") if k in whole}
    about |= {k: whole.pop(k) for k in ("problem_type",) if k in whole}
    for name in ("encoder_stride", "qkv_bias", "architectures"):
        del whole[name]
    kind, name = ("clip", "CLIP") if clip else ("siglip", "Siglip")
    whole["model_type"] = f"{kind}_vision_model"
    if not clip:
        whole["vision_use_head"] = options["pool"] == "map"
    if not options["num_classes"]:
        return whole | {"architectures": [f"{name}VisionModel"]}
    return about | {
        "architectures": [f"{name}ForImageClassification"],
        "model_type": kind,
        "dtype": "float32",
        "vision_config": whole,
    }


def _usage(pretrained: Pretrained, path: str, on_hub: bool) -> str:
    """Returns Python lines that load a written checkpoint."""
    del on_hub
    options = models.create(**pretrained.options).options
    name = "CLIP" if options["pre_norm"] else "Siglip"
    whole = "text" in pretrained.task_params
    kind = "Model" if whole else "VisionModel"
    name += "ForImageClassification" if options["num_classes"] else kind
    return f'from transformers import {name}\nmodel = {name}.from_pretrained("{path}")'


READERS["Hugging Face CLIP and SigLIP"] = Reader(recognises, read)
WRITERS["hf_clip"] = Writer(
    write,
    usage=_usage,
    library="transformers",
    with_task=True,
    files=(
        *("config.json", "model.safetensors", "preprocessor_config.json"),
        *tokenizer.FILES,
    ),
)
