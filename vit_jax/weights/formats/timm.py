"""timm's format: Vision Transformers, DeiT, hybrids and BiT ResNets.

This module reads plain state dicts, and folders with `model.safetensors` and
`config.json`, which timm's models on the Hugging Face hub have.
"""

import collections
import math
import operator
import os
import re
from collections.abc import Sequence

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights import rewriting
from vit_jax.weights.formats import files, linen, tables, timm_config, timm_networks
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.formats.tables import (
    CONV,
    DEPTH_SECOND,
    POINTWISE,
    SAME,
    ArrayEntry,
    block,
    dense,
    name_entries,
    norm,
)
from vit_jax.weights.formats.timm_networks import Facts
from vit_jax.weights.pretrained import POSITIONS, Pretrained

_BACKBONE = "patch_embed.backbone"
_NEEDED = "patch_embed.proj", "blocks.0.attn.(qkv|q_proj)", r"blocks.0.mlp.fc1(_g)?"
_NAMES = {
    "embedding": "patch_embed.proj",
    "cls": ("cls_token", SAME),
    "dist": ("dist_token", SAME),
    "register_tokens": ("reg_token", SAME),
    POSITIONS: ("pos_embed", SAME),
    "Transformer/relative_bias": ("rel_pos_bias.relative_position_bias_table", SAME),
    "Transformer/pre_norm": "norm_pre",
    "Transformer/rope_frequencies": ("rope.freqs", DEPTH_SECOND),
    **block(
        "blocks",
        norm1="norm1",
        heads="attn.qkv",
        out="attn.proj",
        norm2="norm2",
        fc1="mlp.fc1",
        fc2="mlp.fc2",
        scale1="ls1.gamma",
        scale2="ls2.gamma",
        query_norm="attn.q_norm",
        key_norm="attn.k_norm",
        out_norm="attn.norm",
        hidden_norm="mlp.norm",
    ),
    "Transformer/relative_bias_#": (
        "blocks.#.attn.relative_position_bias_table",
        SAME,
    ),
    "fc_norm": "fc_norm",
    "Transformer/encoder_norm": "norm",
    "Transformer/cls_norm": "cls_norm",  # Only in facebookresearch/dinov3.
    "MAPHead_0/probe": ("attn_pool.latent", SAME),
    "MAPHead_0/MultiHeadDotProductAttention_0/query": "attn_pool.q",
    "MAPHead_0/MultiHeadDotProductAttention_0/key,value": "attn_pool.kv",
    "MAPHead_0/MultiHeadDotProductAttention_0/out": "attn_pool.proj",
    "MAPHead_0/LayerNorm_0": "attn_pool.norm",
    "MAPHead_0/MlpBlock_0/Dense_0": "attn_pool.mlp.fc1",
    "MAPHead_0/MlpBlock_0/Dense_1": "attn_pool.mlp.fc2",
    "pre_logits": "pre_logits.fc",  # Only in files of timm before 0.6.
    "head": "head",
    "head_dist": "head_dist",
}
_BIASES = {
    "every": "blocks.0.attn.relative_position_bias_table",
    "shared": _NAMES["Transformer/relative_bias"][0],
}
# Options that follow from the presence of an array.
_SHOWN = {
    "distillation": "dist_token",
    "representation_layer": "pre_logits.fc.weight",
    "fc_norm": "fc_norm.weight",
    "cls_norm": "cls_norm.weight",
    "pre_norm": "norm_pre.weight",
    "qk_norm": "blocks.0.attn.q_norm.weight",
    "attention_out_norm": "blocks.0.attn.norm.weight",
    "mlp_norm": "blocks.0.mlp.norm.weight",
}
# Layers of a block whose biases can be missing (qkv_bias, proj_bias).
_BIASED = {
    r"attn\.qkv": "query, key and value",
    r"attn\.proj": "the attention's output",
    r"mlp\.fc[12]": "the MLPs",
}
_STEM_NOTE = (
    "stem: timm uses epsilon 1e-5 in GroupNorm and adds 1e-8 to a kernel's variance, this "
    "project uses 1e-6 and adds 1e-5 to its standard deviation: logits differ from timm's "
    "by a relative 5e-5 to 1e-4"
)
_FEATURES_NOTE = "features: timm returns the mean of both tokens, vit_jax the first one"


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    names = tensors.flat.keys()
    encoder = ("patch_embed.", "blocks.0.")
    if all(any(name.startswith(part) for name in names) for part in encoder):
        return True
    return {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= set(names)


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint; see `registry.Reader`."""
    config = tensors.config
    timm_networks.check_parameters(tensors.flat, config, tensors.path)
    facts = timm_config.read(config)
    build = _read_resnet if "stem.conv.weight" in tensors.flat else _read_transformer
    return finish(tensors, facts, *build(tensors, facts, num_heads))


def finish(
    tensors: Tensors,
    facts: Facts,
    params: dict[str, np.ndarray],
    options: dict,
    notes: Sequence[str] = (),
    patch: int = 1,
) -> Pretrained:
    """Builds a checkpoint from parameters, options and the facts in config.json."""
    return Pretrained(
        params=unflatten_dict(params, sep="/"),
        options=options,
        format="timm",
        source=tensors.path,
        preprocess=timm_config.fit_patches(
            facts.preprocess, options["image_size"], patch
        ),
        class_names=facts.class_names,
        notes=(*facts.notes, *notes),
    )


def _read_resnet(tensors: Tensors, facts: Facts, num_heads: int):
    flat, source = tensors.flat, tensors.path
    blocks = _stage_depths(flat, "stages")
    num_classes = len(flat.get("head.fc.weight", ()))
    table = _resnet_table({"stage_depths": blocks, "num_classes": num_classes})
    timm_networks.check_names(flat, table, source)
    params = tables.to_our_arrays(flat, table, source)
    channels, stem_width = params["root_block/conv_root/kernel"].shape[2:]
    timm_networks.check_average(facts.pool, "a ResNet", source)
    image_size = facts.image_size or tensors.image_size
    if image_size is None:
        raise UserError(
            f"{source}: the image size of this ResNet is unknown: keep its "
            "config.json in the same folder, or give --resolution=PIXELS"
        )
    return params, {
        **linen.resnet_options(blocks, int(stem_width)),
        "num_classes": num_classes,
        "image_size": image_size,
        "channels": int(channels),
        "zero_pool": True,
    }


def _read_transformer(tensors: Tensors, facts: Facts, num_heads: int):
    flat, source, ask = tensors.flat, tensors.path, timm_networks.ASK
    _check_whole(flat, facts, source)
    timm_networks.check_sizes(flat, tensors.config, source)
    flat, notes = _add_biases(timm_networks.to_plain(flat))
    form = _form(flat, facts, source)
    heads = [name for name in ("head", "head_dist") if f"{name}.weight" in flat]
    if form["distillation"] and len(heads) == 1:
        form["num_classes"] = 0
        notes.append(
            f"classifier: left out, because {heads[0]} is one of two that are averaged"
        )
    shape, width = _shape(flat), len(flat["patch_embed.proj.weight"])
    shape["num_heads"], more = tables.choose_num_heads(
        facts.num_heads, num_heads, width, shape["depth"]
    )
    if more and not num_heads and (width % 64 or width < 128):
        raise UserError(
            f"{source}: the number of heads of this attention of width {width} is unknown: "
            f"set --num_heads, or {ask}"
        )
    notes += more
    table = transformer_table(form | shape)
    timm_networks.check_names(flat, table, source)
    if shape["stem_width"]:
        notes.append(_STEM_NOTE)
    if form["distillation"] and not form["num_classes"]:
        notes.append(_FEATURES_NOTE)
    params = tables.to_our_arrays(flat, table, source)
    if form["rope"] != "none":
        params = timm_networks.turn_features(params, facts.rotary)

    embedding = params.pop(POSITIONS, None)
    sizes = linen.transformer_options(params)
    if "layer_scale_init" in sizes:
        sizes["layer_scale_init"] = facts.layer_scale_init
    num_prefix_tokens = ("cls" in params) + ("dist" in params)
    rows = 0 if embedding is None else embedding.shape[1]
    sizes["image_size"], patches = _image_size(
        rows, num_prefix_tokens, sizes, facts, source
    )
    if embedding is not None:
        missing = num_prefix_tokens + patches - rows
        if missing < 0:  # Register tokens have positions too.
            of_registers = slice(num_prefix_tokens, num_prefix_tokens - missing)
            added = embedding[:, of_registers]
            params["register_tokens"] = params["register_tokens"] + added
            embedding = np.delete(embedding, of_registers, axis=1)
            if added.any():
                notes.append("positions of register tokens: added to the tokens")
        elif missing:
            notes.append(
                "position embeddings of extra tokens: not in the file, set to 0"
            )
            embedding = rewriting.prepend_zero_rows(embedding, missing)
        params[POSITIONS] = embedding
        form["posemb_resize"] = facts.posemb_resize
    return params, sizes | form, notes, len(params["embedding/kernel"])


def _check_whole(flat: dict[str, np.ndarray], facts: Facts, source: str) -> None:
    """Raises UserError unless a file has the arrays that every encoder has."""
    for pattern in _NEEDED:
        if not any(re.fullmatch(rf"{pattern}\.weight", name) for name in flat):
            name = re.sub(r"\(_g\)\?|\((\w+)\|\w+\)", r"\1", pattern)
            raise UserError(
                f"{source}: {name}.weight is missing: give the whole file of a Vision "
                "Transformer"
            )
    if facts.final_norm and not {"norm.weight", "fc_norm.weight"} & flat.keys():
        raise UserError(
            f"{source}: norm.weight is missing: give the whole file; if the network "
            f"has no final norm, {timm_networks.ASK}"
        )
    if facts.pre_norm and "norm_pre.weight" not in flat:
        raise UserError(
            f"{source}: norm_pre.weight is missing, although config.json says that the "
            "network has it: give the whole file"
        )
    positions = "pos_embed" in flat
    if positions and not facts.positions:
        raise UserError(
            f"{source}: pos_embed is in the file, but config.json says that the "
            "network has no position embeddings: keep the config.json of the file"
        )
    if facts.positions and not positions:
        raise UserError(
            f"{source}: pos_embed is missing, and no config.json says that the network "
            f"has none (as for BEiT, DINOv3, rotary networks): {timm_networks.ASK}"
        )


def _shape(flat: dict[str, np.ndarray]) -> dict:
    """Returns the sizes that a network's table depends on."""
    return {
        "depth": tables.count_blocks(flat, "blocks."),
        "stem_width": int(any(name.startswith(f"{_BACKBONE}.") for name in flat)),
        "stage_depths": _stage_depths(flat, f"{_BACKBONE}.stages"),
        "num_register_tokens": np.shape(flat.get("reg_token", ((),)))[1],
        "layer_scale_init": float("blocks.0.ls1.gamma" in flat),
    }


def _stage_depths(flat: dict[str, np.ndarray], stages: str) -> tuple[int, ...]:
    """Returns the number of units per stage of a ResNet."""
    pattern = re.compile(re.escape(stages) + r"\.(\d+)\.blocks\.(\d+)\.")
    units = {match.groups() for match in map(pattern.match, flat) if match}
    counts = collections.Counter(int(stage) for stage, _ in units)
    return tuple(counts[i] for i in range(len(counts)))


def _form(flat: dict[str, np.ndarray], facts: Facts, source: str) -> dict:
    """Returns the options that follow from array names and config.json."""
    token, gated = "cls_token" in flat, timm_networks.is_gated(flat)
    pools = timm_config.POOLS
    if facts.pool is not None and facts.pool not in pools:
        raise UserError(
            f"{source}: global_pool={facts.pool!r} in config.json is not one of "
            f"{', '.join(map(repr, pools))}, which models of this project support"
        )
    head = pools.get(facts.pool, "")
    if "attn_pool.latent" in flat:
        head = "map"
    elif head in ("", "token"):
        pooled = "fc_norm.weight" in flat and head == ""
        head = "token" if token and not pooled else "gap"
    beside = token and head != "token"
    prefix = beside or "reg_token" in flat
    what = ""
    # Models of this project also pool these tokens with "map", but not with "gap".
    if prefix and head in ("gap", "map") and facts.pools_prefix != (head == "map"):
        what = f"pooling {head} with pool_include_prefix={facts.pools_prefix} and "
        what += "a class token" if beside else "register tokens"
    elif "dist_token" in flat and {"fc_norm.weight", "reg_token"} & flat.keys():
        what = "a distillation token together with registers or fc_norm"
    elif head == "map" and gated:
        what = "pooling map with gated MLPs (SwiGLU)"
    if what:
        raise UserError(f"{source}: {what} is not supported by models of this project")
    return {
        "num_classes": len(flat.get("head.weight", ())),
        "pool": head,
        "class_token": beside,
        "activation": "swiglu" if gated else facts.activation,
        "layer_norm_eps": facts.layer_norm_eps,
        "posemb": "learned" if "pos_embed" in flat else "none",
        "relative_bias": next((k for k, v in _BIASES.items() if v in flat), "none"),
        "rope": facts.rotary.kind,
        "rope_temperature": facts.rotary.temperature,
        "rope_reference": facts.rotary.reference,
        "post_norm": facts.post_norm,
        "final_norm": bool({"norm.weight", "fc_norm.weight"} & flat.keys()),
        **{option: name in flat for option, name in _SHOWN.items()},
    }


def _image_size(
    rows: int, num_prefix_tokens: int, sizes: dict, facts: Facts, source: str
) -> tuple[tuple[int, int], int]:
    """Returns the image size for a number of position embeddings, and its patches."""
    patch = models.create(**sizes, num_classes=0).config.patch_size
    # timm's prefix tokens either have positions or not, and some registers have them
    # too.
    registers = num_prefix_tokens + sizes.get("num_register_tokens", 0)
    image_size = facts.image_size
    if image_size is not None:
        if "+" not in sizes["variant"]:  # The convolutions of hybrids pad instead.
            image_size = tuple(side // patch * patch for side in image_size)
        patches = math.prod(math.ceil(side / patch) for side in image_size)
        if not rows or rows - patches in (0, num_prefix_tokens, registers):
            return image_size, patches
    if not rows:
        return sizes["image_size"], 0
    for patches in (rows - num_prefix_tokens, rows, rows - registers):
        side = math.isqrt(patches)
        if side * side == patches:
            return (side * patch, side * patch), patches
    raise UserError(
        f"{source} has position embeddings of {rows - num_prefix_tokens} patches, "
        f"which are not a square grid: {timm_networks.ASK}"
    )


def _add_biases(
    flat: dict[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Adds missing biases as zeros, with a note for each kind of layer."""
    kernel = flat.get("patch_embed.proj.weight")
    if kernel is not None:  # Networks with a norm before the blocks lack this bias.
        flat = {"patch_embed.proj.bias": np.zeros(len(kernel), np.float32)} | flat
    notes = []
    for layer, what in _BIASED.items():
        names = [n for n in flat if re.fullmatch(rf"blocks\.\d+\.{layer}\.weight", n)]
        biases = {name: name.removesuffix("weight") + "bias" for name in names}
        if names and not flat.keys() & biases.values():
            flat |= {b: np.zeros(len(flat[n]), np.float32) for n, b in biases.items()}
            notes.append(f"biases of {what}: not in the file, set to zeros")
    return flat, notes


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `timm.create_model("local-dir:FOLDER")` loads."""
    model = models.create(**pretrained.options)
    flat = flatten_dict(pretrained.params, sep="/")
    options = {"stage_depths": (), "stem_width": 0, **model.options}
    if "depth" in options:
        notes = _prepare_transformer(flat, options, model)
        table = transformer_table
    else:
        table, notes = _resnet_table, []
        if not options["zero_pool"]:
            notes.append(
                "root pooling: timm pads with zeros, this model (zero_pool=False) does not "
                "pad, so logits depend on the images' borders and differ"
            )
    architecture = timm_config.choose_architecture(options)
    arrays = tables.to_their_arrays(flat, table(options))
    kind = timm_networks.find(architecture.name).kind
    if kind != "vit":
        split = options["activation"] == "swiglu"
        arrays = timm_networks.from_plain(arrays, kind, split_gates=split)
    elif options.get("pre_norm"):
        arrays.pop("patch_embed.proj.bias")
    return notes + write_folder(folder, arrays, architecture, options, pretrained)


def _prepare_transformer(
    flat: dict[str, np.ndarray], options: dict, model: models.Model
) -> list[str]:
    """Rewrites an encoder in place so that timm supports it; returns notes."""
    no_tanh = "timm has no tanh layer before the classifier"
    one_norm = "timm has a single final norm for all tokens"
    not_both = "timm's classifiers read either the class token or the mean"
    for name, wrong, other, to in (
        ("representation_layer", True, no_tanh, "google"),
        ("cls_norm", True, one_norm, "dino"),
        ("pool", "token_gap", not_both, "hf_dinov2"),
    ):
        if options[name] == wrong:
            raise UserError(
                f"{name}={wrong!r}: {other}: write it with --to={to} or --to=safetensors"
            )
    notes = rewriting.norm_every_token(flat, options)
    notes += rewriting.learn_positions(flat, options, model.grid)
    R = options["num_register_tokens"]
    P = model.num_prefix_tokens - R
    if options["pre_norm"]:
        notes += rewriting.fold_patch_bias(flat, options, num_prefix_tokens=P)
    notes += rewriting.note_resize(options, "timm")
    if R and options["posemb"] == "learned":  # Registers get zeros as positions.
        zeros = np.zeros_like(flat[POSITIONS], shape=(1, R, options["width"]))
        flat[POSITIONS] = np.insert(flat[POSITIONS], [P], zeros, axis=1)
    options["patch"] = flat["embedding/kernel"].shape[0]
    if 0 < options["layer_norm_eps"] < 1e-6:
        epsilon = f"{options['layer_norm_eps']:g}"
        notes.append(
            f"layer_norm_eps: {epsilon} replaced by 1e-6, the smallest in timm"
        )
        options["layer_norm_eps"] = 1e-6
    if options["stem_width"]:
        notes.append(
            "stem: timm's epsilons (1e-5 in GroupNorm, 1e-8 added to a kernel's variance) "
            "replace 1e-6 and 1e-5 added to its standard deviation: logits differ by a "
            "relative 1e-4"
        )
    if options["distillation"] and not options["num_classes"]:
        notes.append(_FEATURES_NOTE)
    if options["rope"] != "none":
        rotary = timm_networks.Rotary(options["rope"], pairs=options["rope"] == "mixed")
        flat |= timm_networks.turn_features(flat, rotary, back=True)
    return notes


def write_folder(
    folder: str | os.PathLike,
    arrays: dict[str, np.ndarray],
    architecture: timm_config.Architecture,
    options: dict,
    pretrained: Pretrained,
) -> list[str]:
    """Writes model.safetensors and config.json, and returns notes.

    The preprocessing, the class names and the loss of `pretrained` are written.

    Raises:
      UserError: timm does not support the preprocessing.
    """
    preprocess, notes = pretrained.preprocess, []
    if preprocess:
        preprocess, notes = rewriting.replace_filter(preprocess, "timm")
    if preprocess and any(preprocess.cut):  # timm's first layer drops these pixels.
        sides = tuple(map(operator.add, options["image_size"], preprocess.cut))
        options = {**options, "image_size": sides}
        architecture.args["img_size"] = list(sides)
    config = timm_config.write(
        architecture, options, preprocess, pretrained.class_names
    )
    if preprocess is None:
        notes.append("preprocessing: unknown, so timm's defaults apply")
    else:
        notes += rewriting.note_tokens(preprocess)
        notes += rewriting.note_crop(preprocess, "timm", down=False)
    if pretrained.loss == "sigmoid":
        notes.append(
            "loss: config.json does not record that it was sigmoid, not softmax"
        )
    files.write_folder(folder, arrays, {"config.json": config})
    return notes


def _usage(pretrained: Pretrained, path: str, on_hub: bool) -> str:
    source = "hf-hub" if on_hub else "local-dir"
    return f'import timm\nmodel = timm.create_model("{source}:{path}", pretrained=True)'


def transformer_table(options: dict) -> list[ArrayEntry]:
    """Returns the table of an encoder or hybrid; options may omit defaults."""
    names = dict(_NAMES)
    if options["activation"] == "swiglu":  # timm stores two layers as one.
        first = "Transformer/encoderblock_#/MlpBlock_3/"
        names[f"{first}gate,Dense_0"] = names.pop(f"{first}Dense_0")
    table = name_entries(names, options)
    return table + (
        _stem_table(options["stage_depths"]) if options["stem_width"] else []
    )


def _resnet_table(options: dict) -> list[ArrayEntry]:
    """Returns the table of a BiT ResNet."""
    table = [_conv("stem.conv", "root_block/conv_root")]
    table += _units_table("stages", options["stage_depths"], "unit{:02}")
    table += norm("norm", "norm-pre-head")
    if options["num_classes"]:
        table += dense("head.fc", "head", POINTWISE)
    return table


def _stem_table(blocks: tuple[int, ...]) -> list[ArrayEntry]:
    # Without stages, the root is the backbone itself.
    root = f"{_BACKBONE}.stem" if blocks else _BACKBONE
    table = [_conv(f"{root}.conv", "conv_root"), *norm(f"{root}.norm", "gn_root")]
    return table + _units_table(f"{_BACKBONE}.stages", blocks, "unit{}", "gn_proj")


def _units_table(
    stages: str, blocks: tuple[int, ...], unit_name: str, projection_norm: str = ""
) -> list[ArrayEntry]:
    """Returns the entries of the units of a ResNet, or of the stem of a hybrid."""
    table = []
    for stage, units in enumerate(blocks):
        for unit in range(units):
            name = f"{stages}.{stage}.blocks.{unit}"
            module = f"block{stage + 1}/{unit_name.format(unit + 1)}"
            for i in (1, 2, 3):
                table.append(_conv(f"{name}.conv{i}", f"{module}/conv{i}"))
                table += norm(f"{name}.norm{i}", f"{module}/gn{i}")
            if unit == 0:
                table.append(_conv(f"{name}.downsample.conv", f"{module}/conv_proj"))
            if unit == 0 and projection_norm:
                table += norm(f"{name}.downsample.norm", f"{module}/{projection_norm}")
    return table


def _conv(name: str, module: str) -> ArrayEntry:
    return ArrayEntry(f"{name}.weight", (f"{module}/kernel",), CONV)


READERS["timm"] = Reader(recognises, read)
WRITERS["timm"] = Writer(write, usage=_usage, library="timm")
