"""timm's format: Vision Transformers, DeiT, hybrids and BiT ResNets.

Plain state dicts are read, and folders as timm's models have them on the Hugging Face
hub: `model.safetensors` and `config.json`.
"""

import json
import math
import operator
import os
import pathlib
import re

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights import surgery
from vit_jax.weights.formats import linen, timm_config, timm_networks, torch_file
from vit_jax.weights.formats.files import Tensors, write_safetensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.formats.torch_file import (
    CONV,
    DEPTH_SECOND,
    POINTWISE,
    SAME,
    ArrayEntry,
    dense,
    from_heads,
    gated,
    norm,
    to_heads,
)
from vit_jax.weights.pretrained import POSITIONS, Pretrained

_BACKBONE = "patch_embed.backbone"
_NEEDED = "patch_embed.proj", "blocks.0.attn.(qkv|q_proj)", r"blocks.0.mlp.fc1(_g)?"
_NORMS = ("pre_norm", "post_norm", "qk_norm", "attention_out_norm", "mlp_norm")
_NORMS += ("final_norm",)
_BIASES = {
    "every": "blocks.0.attn.relative_position_bias_table",
    "shared": "rel_pos_bias.relative_position_bias_table",
}
# Layers of a block that may have no biases (qkv_bias, proj_bias).
_BIASED = {
    r"attn\.qkv": "query, key and value",
    r"attn\.proj": "attention's results",
    r"mlp\.fc[12]": "the MLPs",
}
_STEM_NOTE = (
    "stem: timm's epsilons are 1e-5 in GroupNorm and 1e-8 beside a kernel's variance, "
    "ours 1e-6 and 1e-5 beside its deviation: logits differ from timm's by 5e-5 to 1e-4 "
    "of their size"
)


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    names = tensors.flat.keys()
    encoder = ("patch_embed.", "blocks.0.")
    if all(any(name.startswith(part) for name in names) for part in encoder):
        return True
    return {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= set(names)


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
    timm_config.check_parameters(tensors.flat, config, tensors.path)
    facts = timm_config.read(config)
    build = _read_resnet if "stem.conv.weight" in tensors.flat else _read_transformer
    ours, options, notes = build(tensors, facts, num_heads)
    return Pretrained(
        params=unflatten_dict(ours, sep="/"),
        options=options,
        format="timm",
        source=tensors.path,
        preprocess=timm_config.fit_patches(
            facts.preprocess,
            options["image_size"],
            len(ours.get("embedding/kernel", (0,))),
        ),
        class_names=facts.class_names,
        notes=(*facts.notes, *notes),
    )


def _read_resnet(tensors: Tensors, facts: timm_config.TimmConfig, num_heads: int):
    flat, notes = tensors.flat, []
    units = {tuple(name.split(".")[1:4:2]) for name in flat if "stages." in name}
    stages = [int(stage) for stage, _ in units]
    blocks = tuple(stages.count(i) for i in range(len(set(stages))))
    num_classes = len(flat.get("head.fc.weight", ()))
    table = _resnet_table({"stage_depths": blocks, "num_classes": num_classes})
    timm_config.check_names(flat, {e.theirs for e in table}, tensors.path)
    ours = torch_file.to_our_arrays(flat, table, tensors.path)
    channels, stem_width = ours["root_block/conv_root/kernel"].shape[2:]
    if facts.pool not in (None, "avg"):
        raise UserError(
            f"{tensors.path}: global_pool={facts.pool!r} of a ResNet is not supported, "
            "only 'avg'"
        )
    image_size = facts.image_size or tensors.image_size
    if image_size is None:
        raise UserError(
            f"{tensors.path}: nothing says for which image size this ResNet is: keep its "
            "config.json beside it, or state --resolution=PIXELS (image_size in Python)"
        )
    options = {
        **linen.resnet_options(blocks, int(stem_width)),
        "num_classes": num_classes,
        "image_size": image_size,
        "channels": int(channels),
        "zero_pool": True,
    }
    return ours, options, notes


def _read_transformer(tensors: Tensors, facts: timm_config.TimmConfig, num_heads: int):
    def there(name):
        return any(re.fullmatch(rf"{name}\.weight", known) for known in tensors.flat)

    if missing := [name for name in _NEEDED if not there(name)]:
        name = re.sub(r"\(_g\)\?|\((\w+)\|\w+\)", r"\1", missing[0])
        raise UserError(
            f"{tensors.path}: {name}.weight is missing: give the whole file of a Vision "
            "Transformer"
        )
    norms = {"norm.weight", "fc_norm.weight"}
    if facts.final_norm and not norms & tensors.flat.keys():
        raise UserError(
            f"{tensors.path}: norm.weight is missing: give the whole file; if the network "
            f"has no final norm, {timm_config.ASK}"
        )
    if facts.pre_norm and "norm_pre.weight" not in tensors.flat:
        raise UserError(
            f"{tensors.path}: norm_pre.weight is missing, which config.json says that the "
            "network has: give the whole file"
        )
    if "pos_embed" in tensors.flat and facts.no_positions:
        raise UserError(
            f"{tensors.path}: pos_embed is in the file, and config.json says that the "
            "network has no position embeddings: keep the config.json of the file"
        )
    if "pos_embed" not in tensors.flat and not facts.no_positions:
        raise UserError(
            f"{tensors.path}: pos_embed is missing, and no config.json says that the "
            f"network has none, as BEiT, DINOv3 and rotary networks: {timm_config.ASK}"
        )
    flat, notes = _add_biases(timm_networks.to_plain(tensors.flat))
    form = _form(flat, facts, tensors.path)
    heads = [name for name in ("head", "head_dist") if f"{name}.weight" in flat]
    if form["distillation"] and len(heads) == 1:
        form["num_classes"] = 0
        notes.append(
            f"classifier: left out, because {heads[0]} is one of two, whose mean it takes"
        )
    width = len(flat["patch_embed.proj.weight"])
    form["num_heads"], more = torch_file.choose_num_heads(
        facts.num_heads, num_heads, width, form["depth"]
    )
    if more and not num_heads and (width % 64 or width < 128):
        raise UserError(
            f"{tensors.path}: nothing says how many heads attention of width {width} has: "
            f"state --num_heads, or {timm_config.ASK}"
        )
    notes += more
    table = transformer_table(form)
    timm_config.check_names(flat, {e.theirs for e in table}, tensors.path)
    if form["stem_width"]:
        notes.append(_STEM_NOTE)
    if form["distillation"] and not form["num_classes"]:
        notes.append("features: timm gives the mean of both tokens, we the first")
    ours = torch_file.to_our_arrays(flat, table, tensors.path)
    if form["rope"] != "none":
        ours = timm_networks.turn_features(ours, facts.rotary)

    embedding = ours.pop(POSITIONS, None)
    sizes = linen.transformer_options(ours)
    if "layer_scale_init" in sizes:
        sizes["layer_scale_init"] = facts.layer_scale_init
    num_prefix_tokens = ("cls" in ours) + ("dist" in ours)
    sizes["image_size"], rows = _image_size(
        embedding, num_prefix_tokens, sizes, facts, tensors.path
    )
    if embedding is not None:
        missing = num_prefix_tokens + rows - embedding.shape[1]
        if missing < 0:  # Register tokens have positions too.
            of_registers = slice(num_prefix_tokens, num_prefix_tokens - missing)
            added = embedding[:, of_registers]
            ours["register_tokens"] = ours["register_tokens"] + added
            embedding = np.delete(embedding, of_registers, axis=1)
            if added.any():
                notes.append("positions of register tokens: added to the tokens")
        elif missing:
            notes.append("position embeddings of extra tokens: none in the file, so 0")
            embedding = surgery.prepend_zero_rows(embedding, missing)
        ours[POSITIONS] = embedding
    kept = ("pool", "class_token", "distillation", "representation_layer", "fc_norm")
    kept += (*_NORMS, "relative_bias", "rope", "rope_temperature", "rope_reference")
    options = {
        **sizes,
        "num_classes": form["num_classes"],
        **{name: form[name] for name in (*kept, "posemb")},
        "activation": form["activation"],
        "layer_norm_eps": facts.epsilon,
    }
    if embedding is not None:
        options["posemb_resize"] = facts.posemb_resize
    return ours, options, notes


def _form(
    flat: dict[str, np.ndarray], facts: timm_config.TimmConfig, source: str
) -> dict:
    """Returns the options that the names and the config determine."""
    stem = f"{_BACKBONE}."
    stages = re.compile(re.escape(stem) + r"stages\.(\d+)\.blocks\.(\d+)\.")
    units = {m.groups() for name in flat if (m := stages.match(name))}
    counts = [int(stage) for stage, _ in units]
    token = "cls_token" in flat
    if facts.pool is not None and facts.pool not in timm_config.POOLS:
        raise UserError(
            f"{source}: global_pool={facts.pool!r} in config.json is not one of "
            f"{', '.join(map(repr, timm_config.POOLS))}, which models of this project have"
        )
    head = timm_config.POOLS[facts.pool] if facts.pool is not None else ""
    if "attn_pool.latent" in flat:
        head = "map"
    elif head in ("", "token"):
        pooled = "fc_norm.weight" in flat and head == ""
        head = "token" if token and not pooled else "gap"
    beside = token and head != "token"
    prefix = beside or "reg_token" in flat
    # These tokens are among what is pooled here for "map", and are not for "gap".
    if prefix and head in ("gap", "map") and facts.pools_prefix != (head == "map"):
        raise UserError(
            f"{source}: pooling {head} with pool_include_prefix={facts.pools_prefix} "
            f"and {'a class token' if beside else 'register tokens'} is not of a model "
            "of this project"
        )
    if "dist_token" in flat and {"fc_norm.weight", "reg_token"} & flat.keys():
        raise UserError(
            f"{source}: a distillation token beside registers or fc_norm is not of a "
            "model of this project"
        )
    if head == "map" and timm_config.is_gated(flat):
        raise UserError(
            f"{source}: pooling map with gated MLPs (SwiGLU) is not of a model of this "
            "project"
        )
    return {
        "depth": len({n.split(".")[1] for n in flat if n.startswith("blocks.")}),
        "stem_width": int(any(name.startswith(stem) for name in flat)),
        "stage_depths": tuple(counts.count(i) for i in range(len(set(counts)))),
        "num_classes": len(flat.get("head.weight", ())),
        "pool": head,
        "class_token": beside,
        "distillation": "dist_token" in flat,
        "num_register_tokens": np.shape(flat.get("reg_token", ((),)))[1],
        "layer_scale_init": float("blocks.0.ls1.gamma" in flat),
        "activation": "swiglu" if timm_config.is_gated(flat) else facts.activation,
        "representation_layer": "pre_logits.fc.weight" in flat,
        "fc_norm": "fc_norm.weight" in flat,
        "posemb": "learned" if "pos_embed" in flat else "none",
        "relative_bias": next((k for k, v in _BIASES.items() if v in flat), "none"),
        "rope": facts.rotary.kind,
        "rope_temperature": facts.rotary.temperature,
        "rope_reference": facts.rotary.reference,
        "pre_norm": "norm_pre.weight" in flat,
        "post_norm": facts.post_norm,
        "qk_norm": "blocks.0.attn.q_norm.weight" in flat,
        "attention_out_norm": "blocks.0.attn.norm.weight" in flat,
        "mlp_norm": "blocks.0.mlp.norm.weight" in flat,
        "final_norm": bool({"norm.weight", "fc_norm.weight"} & flat.keys()),
    }


def _image_size(
    embedding: np.ndarray | None,
    num_prefix_tokens: int,
    sizes: dict,
    facts: timm_config.TimmConfig,
    source: str,
) -> tuple[tuple[int, int], int]:
    """Returns the image size of the position embeddings, and the number of patches."""
    patch = models.create(**sizes, num_classes=0).patch_size
    with_registers = num_prefix_tokens + sizes.get("num_register_tokens", 0)
    if facts.image_size is not None:
        stated = facts.image_size
        if "+" not in sizes["variant"]:  # Convolutions of hybrids pad instead.
            stated = tuple(side // patch * patch for side in stated)
        grid = tuple(math.ceil(side / patch) for side in stated)
        if embedding is None or embedding.shape[1] - math.prod(grid) in (
            0,
            num_prefix_tokens,
            with_registers,
        ):
            return stated, math.prod(grid)
    if embedding is None:
        return sizes["image_size"], 0
    for prefix in (num_prefix_tokens, 0, with_registers):
        rows = embedding.shape[1] - prefix
        side = math.isqrt(rows)
        if side * side == rows:
            return (side * patch, side * patch), rows
    raise UserError(
        f"{source} has position embeddings of {embedding.shape[1] - num_prefix_tokens} patches, "
        f"which are no square grid: {timm_config.ASK}"
    )


def _add_biases(
    flat: dict[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Adds biases of zero to attention, MLPs and patches without biases.

    Args:
      flat: under timm's names.

    Returns:
      The arrays with `qkv.bias` everywhere, and a note for each kind of layer.
    """
    kernel = flat.get("patch_embed.proj.weight")
    if kernel is not None:  # Networks with a norm before the blocks have none.
        flat = {"patch_embed.proj.bias": np.zeros(len(kernel), np.float32)} | flat
    notes = []
    for layer, what in _BIASED.items():
        names = [n for n in flat if re.fullmatch(rf"blocks\.\d+\.{layer}\.weight", n)]
        biases = {name: name.removesuffix("weight") + "bias" for name in names}
        if names and not flat.keys() & biases.values():
            flat |= {b: np.zeros(len(flat[n]), np.float32) for n, b in biases.items()}
            notes.append(f"biases of {what}: none in the file, so zeros")
    return flat, notes


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `timm.create_model("local-dir:FOLDER")` loads.

    Args:
      pretrained: with parameters that fit its options.
      folder: existing; model.safetensors and config.json are written to it.

    Returns:
      A line for each thing that was rewritten or left out.

    Raises:
      UserError: timm has no such network.
    """
    model = models.create(**pretrained.options)
    flat = flatten_dict(pretrained.params, sep="/")
    options = {"stage_depths": (), "stem_width": 0, **model.options}
    notes, table = [], _resnet_table
    if "depth" not in options and not options["zero_pool"]:
        notes.append(
            "root pooling: timm pads with zeros and this model (zero_pool=False) with "
            "nothing, so logits differ, by what the images have at their border"
        )
    if "depth" in options:
        table = transformer_table
        if options["representation_layer"]:
            raise UserError(
                "representation_layer=True: timm has no tanh layer before the classifier: "
                "write it with --to=google or --to=safetensors"
            )
        if options["pool"] == "token_gap":
            raise UserError(
                "pool='token_gap': timm's classifiers see the class token or the mean: write "
                "it with --to=hf_dinov2 or --to=safetensors"
            )
        flat, options, notes = surgery.norm_every_token(flat, options)
        flat, options, more = surgery.learn_positions(flat, options, model.grid)
        if options["pre_norm"]:
            P = model.num_prefix_tokens - options["num_register_tokens"]
            flat, folded = surgery.fold_patch_bias(flat, options, num_prefix_tokens=P)
            more = [*more, *folded]
        notes += more + surgery.note_resize(options, "timm")
        if options["num_register_tokens"] and options["posemb"] == "learned":
            flat[POSITIONS] = _with_registers(flat[POSITIONS], options, model)
        options["patch"] = flat["embedding/kernel"].shape[0]
        if 0 < options["layer_norm_eps"] < 1e-6:
            notes.append(
                f"layer_norm_eps: {options['layer_norm_eps']:g} became 1e-6, the least that timm has"
            )
            options["layer_norm_eps"] = 1e-6
        if options["stem_width"]:
            notes.append(
                "stem: timm's epsilons (1e-5 in GroupNorm, 1e-8 beside a kernel's "
                "variance) stand for 1e-6 and 1e-5 beside its deviation: logits differ "
                "by about 1e-4 of their size"
            )
        if options["distillation"] and not options["num_classes"]:
            notes.append("features: timm gives the mean of both tokens, we the first")
    architecture = timm_config.choose_architecture(options)
    own = timm_networks.find(architecture.name)
    if options.get("rope", "none") != "none":
        rotary = timm_networks.Rotary(options["rope"], pairs=options["rope"] == "mixed")
        flat = timm_networks.turn_features(flat, rotary, back=True)
    arrays = torch_file.to_their_arrays(flat, table(options))
    if own is not None and own.kind != "vit":
        split = options["activation"] == "swiglu"
        arrays = timm_networks.from_plain(arrays, own.kind, split_gates=split)
    elif options.get("pre_norm"):
        arrays.pop("patch_embed.proj.bias")
    return notes + write_folder(folder, arrays, architecture, options, pretrained)


def write_folder(
    folder: str | os.PathLike,
    arrays: dict[str, np.ndarray],
    architecture: timm_config.Architecture,
    options: dict,
    pretrained: Pretrained,
) -> list[str]:
    """Writes model.safetensors and config.json.

    Args:
      folder: existing.
      arrays: by timm's names.
      architecture: that they are for.
      options: all options of `models.Model`.
      pretrained: has the preprocessing, the class names and the loss.

    Returns:
      A line for each thing that the folder cannot say.

    Raises:
      UserError: timm cannot prepare images so.
    """
    preprocess, notes = pretrained.preprocess, []
    if preprocess and any(preprocess.cut):  # Which timm's first layer drops.
        sides = tuple(map(operator.add, options["image_size"], preprocess.cut))
        options = {**options, "image_size": sides}
        architecture.args["img_size"] = list(sides)
    config = timm_config.write(
        architecture, options, preprocess, pretrained.class_names
    )
    if preprocess is None:
        notes.append("preprocessing: nothing says how, so timm's own defaults hold")
    if pretrained.loss == "sigmoid":
        notes.append("loss: the config does not say that it was sigmoid, not softmax")
    folder = pathlib.Path(folder)
    write_safetensors(folder / "model.safetensors", arrays, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return notes


def _with_registers(
    embedding: np.ndarray, options: dict, model: models.Model
) -> np.ndarray:
    """Adds zeros to position embeddings as those of register tokens."""
    R = options["num_register_tokens"]
    zeros = np.zeros((1, R, embedding.shape[2]), embedding.dtype)
    return np.insert(embedding, [model.num_prefix_tokens - R], zeros, axis=1)


def _usage(pretrained: Pretrained, path: str, on_hub: bool) -> str:
    """Returns Python lines that load a written checkpoint."""
    source = "hf-hub" if on_hub else "local-dir"
    return f'import timm\nmodel = timm.create_model("{source}:{path}", pretrained=True)'


def transformer_table(options: dict) -> list[ArrayEntry]:
    """Returns the entries of an encoder or hybrid.

    Args:
      options: depth, num_heads, stem_width, stage_depths, num_classes, pool, class_token,
        distillation, num_register_tokens, representation_layer, fc_norm, posemb,
        activation, layer_scale_init and, unless they are without effect, relative_bias,
        rope and the norms of `models.Model`.
    """
    table = dense("patch_embed.proj", "embedding", CONV)
    if options["stem_width"]:
        table += _stem_table(options["stage_depths"])
    if options["pool"] == "token" or options["class_token"]:
        table.append(ArrayEntry("cls_token", ("cls",), SAME))
    if options["distillation"]:
        table.append(ArrayEntry("dist_token", ("dist",), SAME))
    if options["num_register_tokens"]:
        table.append(ArrayEntry("reg_token", ("register_tokens",), SAME))
    if options["posemb"] != "none":
        table.append(ArrayEntry("pos_embed", (POSITIONS,), SAME))
    if options.get("pre_norm"):
        table += norm("norm_pre", "Transformer/pre_norm")
    if options.get("rope") == "mixed":
        name = "Transformer/rope_frequencies"
        table.append(ArrayEntry("rope.freqs", (name,), DEPTH_SECOND))
    if options.get("relative_bias") == "shared":
        table.append(
            ArrayEntry(_BIASES["shared"], ("Transformer/relative_bias",), SAME)
        )
    for i in range(options["depth"]):
        table += _block_table(i, options)
    if options["fc_norm"]:
        table += norm("fc_norm", "fc_norm")
    elif options.get("final_norm", True):
        table += norm("norm", "Transformer/encoder_norm")
    if options["pool"] == "map":
        table += _map_head_table(options["num_heads"])
    if options["representation_layer"]:  # In files of timm before 0.6 only.
        table += dense("pre_logits.fc", "pre_logits")
    if options["num_classes"]:
        table += dense("head", "head")
        table += dense("head_dist", "head_dist") if options["distillation"] else []
    return table


def _resnet_table(options: dict) -> list[ArrayEntry]:
    """Returns the entries of a BiT ResNet.

    Args:
      options: stage_depths and num_classes of `models.Model`.
    """
    table = [_conv("stem.conv", "root_block/conv_root")]
    for stage, units in enumerate(options["stage_depths"]):
        for unit in range(units):
            theirs = f"stages.{stage}.blocks.{unit}"
            ours = f"block{stage + 1}/unit{unit + 1:02}"
            for i in (1, 2, 3):
                table += norm(f"{theirs}.norm{i}", f"{ours}/gn{i}")
                table.append(_conv(f"{theirs}.conv{i}", f"{ours}/conv{i}"))
            if unit == 0:
                table.append(_conv(f"{theirs}.downsample.conv", f"{ours}/conv_proj"))
    table += norm("norm", "norm-pre-head")
    if options["num_classes"]:
        table += dense("head.fc", "head", POINTWISE)
    return table


def _stem_table(blocks: tuple[int, ...]) -> list[ArrayEntry]:
    # Without stages the root is the backbone itself.
    root = f"{_BACKBONE}.stem" if blocks else _BACKBONE
    table = [_conv(f"{root}.conv", "conv_root"), *norm(f"{root}.norm", "gn_root")]
    for stage, units in enumerate(blocks):
        for unit in range(units):
            theirs = f"{_BACKBONE}.stages.{stage}.blocks.{unit}"
            ours = f"block{stage + 1}/unit{unit + 1}"
            for i in (1, 2, 3):
                table.append(_conv(f"{theirs}.conv{i}", f"{ours}/conv{i}"))
                table += norm(f"{theirs}.norm{i}", f"{ours}/gn{i}")
            if unit == 0:
                table.append(_conv(f"{theirs}.downsample.conv", f"{ours}/conv_proj"))
                table += norm(f"{theirs}.downsample.norm", f"{ours}/gn_proj")
    return table


def _block_table(i: int, options: dict) -> list[ArrayEntry]:
    theirs, ours = f"blocks.{i}", f"Transformer/encoderblock_{i}"
    attention, mlp = f"{ours}/MultiHeadDotProductAttention_1", f"{ours}/MlpBlock_3"
    num_heads = options["num_heads"]
    first = dense(f"{theirs}.mlp.fc1", f"{mlp}/Dense_0")
    if options["activation"] == "swiglu":
        first = gated(f"{theirs}.mlp.fc1", mlp)
    scales = [
        ArrayEntry(f"{theirs}.ls{i}.gamma", (f"{ours}/LayerScale_{place}/gamma",), SAME)
        for i, place in ((1, 1), (2, 3))
        if options["layer_scale_init"]
    ]
    if options.get("relative_bias") == "every":
        name = f"{theirs}.attn.relative_position_bias_table"
        scales.append(ArrayEntry(name, (f"Transformer/relative_bias_{i}",), SAME))
    norms = {
        "qk_norm": (
            ("attn.q_norm", attention, "query"),
            ("attn.k_norm", attention, "key"),
        ),
        "attention_out_norm": (("attn.norm", attention, "out"),),
        "mlp_norm": (("mlp.norm", mlp, "hidden"),),
    }
    for option, places in norms.items():
        for name, layer, of in places if options.get(option) else ():
            scales += norm(f"{theirs}.{name}", f"{layer}/LayerNorm_{of}")
    return [
        *norm(f"{theirs}.norm1", f"{ours}/LayerNorm_0"),
        *_heads_table(
            f"{theirs}.attn.qkv", attention, ("query", "key", "value"), num_heads
        ),
        *dense(f"{theirs}.attn.proj", f"{attention}/out", from_heads(num_heads)),
        *norm(f"{theirs}.norm2", f"{ours}/LayerNorm_2"),
        *first,
        *dense(f"{theirs}.mlp.fc2", f"{mlp}/Dense_1"),
        *scales,
    ]


def _map_head_table(num_heads: int) -> list[ArrayEntry]:
    theirs, ours = "attn_pool", "MAPHead_0"
    attention = f"{ours}/MultiHeadDotProductAttention_0"
    return [
        ArrayEntry(f"{theirs}.latent", (f"{ours}/probe",), SAME),
        *_heads_table(f"{theirs}.q", attention, ("query",), num_heads),
        *_heads_table(f"{theirs}.kv", attention, ("key", "value"), num_heads),
        *dense(f"{theirs}.proj", f"{attention}/out", from_heads(num_heads)),
        *norm(f"{theirs}.norm", f"{ours}/LayerNorm_0"),
        *dense(f"{theirs}.mlp.fc1", f"{ours}/MlpBlock_0/Dense_0"),
        *dense(f"{theirs}.mlp.fc2", f"{ours}/MlpBlock_0/Dense_1"),
    ]


def _heads_table(
    theirs: str, ours: str, names: tuple[str, ...], num_heads: int
) -> list[ArrayEntry]:
    """Returns the entries of projections to heads that are one layer in timm."""
    layout = to_heads(num_heads, len(names))
    return [
        ArrayEntry(
            f"{theirs}.{kind}", tuple(f"{ours}/{n}/{leaf}" for n in names), layout
        )
        for kind, leaf in (("weight", "kernel"), ("bias", "bias"))
    ]


def _conv(theirs: str, ours: str) -> ArrayEntry:
    return ArrayEntry(f"{theirs}.weight", (f"{ours}/kernel",), CONV)


READERS["timm"] = Reader(recognises, read)
WRITERS["timm"] = Writer(write, usage=_usage, library="timm")
