"""timm's format, in and out: Vision Transformers, DeiT, hybrids and BiT ResNets.

Plain state dicts, with the folder layout of timm's models on the Hugging Face hub:
`model.safetensors` and `config.json`.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Collection

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights.formats import (
    bit,
    fold,
    linen,
    timm_config,
    timm_names,
    timm_supported,
    torch_layout,
)
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.pretrained import POSITIONS, Pretrained

_POOLS = {"token": "token", "avg": "gap", "map": "map", "": "none"}
_NEEDED = (
    "patch_embed.proj.weight",
    "blocks.0.attn.qkv.weight",
    "blocks.0.mlp.fc1.weight",
)
_STEM_NOTE = (
    "stem: timm's epsilons are 1e-5 in GroupNorm and 1e-8 beside a kernel's variance, "
    "ours 1e-6 and 1e-5 beside its deviation: logits differ from timm's by 5e-5 to 1e-4 "
    "of their size"
)


def recognises(names: Collection[str]) -> bool:
    """Tells whether these are the names of a file in this format."""
    encoder = ("patch_embed.", "blocks.0.")
    if all(any(name.startswith(part) for name in names) for part in encoder):
        return True
    return {"stem.conv.weight", "stages.0.blocks.0.conv1.weight"} <= set(names)


def read(tensors: Tensors, heads: int = 0) -> Pretrained:
    """Reads a checkpoint.

    Args:
      tensors: of the file or folder.
      heads: attention heads if config.json does not tell; 0 is those of the known
        sizes, or one for 64 features.

    Returns:
      The checkpoint in our terms.

    Raises:
      UserError: not a network that this project has.
    """
    timm_supported.check_parameters(tensors.flat, tensors.path)
    facts = timm_config.read(tensors.sidecars.get("config.json", {}))
    build = _read_resnet if "stem.conv.weight" in tensors.flat else _read_transformer
    ours, options, notes = build(tensors, facts, heads)
    return Pretrained(
        params=unflatten_dict(ours, sep="/"),
        options=options,
        format="timm",
        source=tensors.path,
        preprocess=facts.preprocess,
        class_names=facts.class_names,
        notes=(*facts.notes, *notes),
    )


def _read_resnet(tensors: Tensors, facts: timm_config.Facts, heads: int):
    flat, notes = tensors.flat, []
    units = {tuple(name.split(".")[1:4:2]) for name in flat if "stages." in name}
    stages = [int(stage) for stage, _ in units]
    blocks = tuple(stages.count(i) for i in range(len(set(stages))))
    classes = len(flat.get("head.fc.weight", ()))
    table = timm_names.resnet({"blocks": blocks, "classes": classes})
    timm_supported.check_names(flat, {e.theirs for e in table}, tensors.path)
    ours = torch_layout.read(flat, table, tensors.path)
    channels, stem_width = ours["root_block/conv_root/kernel"].shape[2:]
    if facts.image_size is None:
        notes.append("image size: not in the file, so 224x224")
    options = {
        **bit.variant_options(blocks, int(stem_width)),
        "classes": classes,
        "image_size": facts.image_size or (224, 224),
        "channels": int(channels),
        "zero_pool": True,
    }
    return ours, options, notes


def _read_transformer(tensors: Tensors, facts: timm_config.Facts, heads: int):
    if missing := [name for name in _NEEDED if name not in tensors.flat]:
        raise UserError(
            f"{tensors.path}: {missing[0]} is missing: give the whole file of a Vision "
            "Transformer"
        )
    if "pos_embed" not in tensors.flat and not facts.no_positions:
        raise UserError(
            f"{tensors.path}: pos_embed is missing, and no config.json says that the "
            "network has none (model_args, pos_embed): give weights of a network with "
            "learned position embeddings"
        )
    for name, value in tensors.flat.items():
        if name.startswith("blocks."):  # Before LayerScale makes floats of integers.
            torch_layout.check_floating(name, value, tensors.path)
    flat, notes = fold.layer_scale(dict(tensors.flat))
    flat, more = fold.query_bias(flat)
    notes += more
    form = _form(flat, facts, tensors.path)
    width = len(flat["patch_embed.proj.weight"])
    form["heads"], more = torch_layout.choose_heads(
        facts.heads, heads, width, form["depth"]
    )
    notes += more
    table = timm_names.transformer(form)
    timm_supported.check_names(flat, {e.theirs for e in table}, tensors.path)
    if form["stem_width"]:
        notes.append(_STEM_NOTE)
    ours = torch_layout.read(flat, table, tensors.path)

    embedding = ours.pop(POSITIONS, None)
    sizes = linen.transformer_options(ours)
    extra = ("cls" in ours) + ("dist" in ours)
    sizes["image_size"], rows = _image_size(
        embedding, extra, sizes, facts, tensors.path
    )
    if embedding is not None:
        missing = extra + rows - embedding.shape[1]
        if missing:
            notes.append("position embeddings of extra tokens: none in the file, so 0")
        ours[POSITIONS] = fold.place_tokens(embedding, missing)
    kept = ("head", "class_token", "distillation", "representation", "pooled_norm")
    options = {
        **sizes,
        "classes": form["classes"],
        **{name: form[name] for name in (*kept, "posemb")},
        "gelu": facts.gelu,
        "epsilon": facts.epsilon,
    }
    return ours, options, notes


def _form(flat: dict[str, np.ndarray], facts: timm_config.Facts, source: str) -> dict:
    """Returns the options that names and config tell."""
    stem = "patch_embed.backbone."
    stages = re.compile(re.escape(stem) + r"stages\.(\d+)\.blocks\.(\d+)\.")
    units = {m.groups() for name in flat if (m := stages.match(name))}
    counts = [int(stage) for stage, _ in units]
    token = "cls_token" in flat
    if facts.pool is not None and facts.pool not in _POOLS:
        raise UserError(
            f"{source}: global_pool={facts.pool!r} in config.json is not one of "
            f"{', '.join(map(repr, _POOLS))}, which models of this project have"
        )
    head = _POOLS[facts.pool] if facts.pool is not None else ""
    if "attn_pool.latent" in flat:
        head = "map"
    elif head in ("", "token"):
        pooled = "fc_norm.weight" in flat and head == ""
        head = "token" if token and not pooled else "gap"
    beside = token and head != "token"
    # The class token is among what is pooled here for "map", and is not for "gap".
    if beside and head in ("gap", "map") and facts.pools_prefix != (head == "map"):
        raise UserError(
            f"{source}: pooling {head} with pool_include_prefix={facts.pools_prefix} "
            "and a class token is not of a model of this project"
        )
    return {
        "depth": len({n.split(".")[1] for n in flat if n.startswith("blocks.")}),
        "stem_width": int(any(name.startswith(stem) for name in flat)),
        "blocks": tuple(counts.count(i) for i in range(len(set(counts)))),
        "classes": len(flat.get("head.weight", ())),
        "head": head,
        "class_token": beside,
        "distillation": "dist_token" in flat,
        "representation": "pre_logits.fc.weight" in flat,
        "pooled_norm": "fc_norm.weight" in flat,
        "posemb": "learned" if "pos_embed" in flat else "none",
    }


def _image_size(
    embedding: np.ndarray | None,
    extra: int,
    sizes: dict,
    facts: timm_config.Facts,
    source: str,
) -> tuple[tuple[int, int], int]:
    """Returns the image size that the positions are for, and the number of patches."""
    patch = models.create(**sizes, classes=0).patch
    if facts.image_size is not None:
        grid = tuple(math.ceil(side / patch) for side in facts.image_size)
        if embedding is None or embedding.shape[1] - math.prod(grid) in (0, extra):
            return facts.image_size, math.prod(grid)
    if embedding is None:
        return sizes["image_size"], 0
    for rows in (embedding.shape[1] - extra, embedding.shape[1]):
        side = math.isqrt(rows)
        if side * side == rows:
            return (side * patch, side * patch), rows
    raise UserError(
        f"{source} has position embeddings of {embedding.shape[1] - extra} patches, "
        "which are no square grid: keep its config.json beside it"
    )


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `timm.create_model("local-dir:FOLDER")` loads.

    Args:
      pretrained: with parameters that fit its options.
      folder: exists; gets model.safetensors and config.json.

    Returns:
      A line for each thing that was rewritten or left out.

    Raises:
      UserError: timm has no such network.
    """
    model = models.create(**pretrained.options)
    flat = flatten_dict(pretrained.params, sep="/")
    options = {"blocks": (), "stem_width": 0, **model.options}
    notes, table = [], timm_names.resnet
    if "depth" not in options and not options["zero_pool"]:
        notes.append(
            "root pooling: timm pads with zeros and this model (zero_pool=False) with "
            "nothing, so logits differ, by what the images have at their border"
        )
    if "depth" in options:
        table = timm_names.transformer
        if options["representation"]:
            raise UserError(
                "representation=True: timm has no tanh layer before the classifier: "
                "write it with --to=google or --to=safetensors"
            )
        flat, options, notes = fold.norm_each_token(flat, options)
        flat, options, more = fold.plain_positions(flat, options, model.grid)
        notes += more
        options["patch"] = flat["embedding/kernel"].shape[0]
        if 0 < options["epsilon"] < 1e-6:
            notes.append(
                f"epsilon: {options['epsilon']:g} became 1e-6, the least that timm has"
            )
            options["epsilon"] = 1e-6
        if options["stem_width"]:
            notes.append(
                "stem: timm's epsilons (1e-5 in GroupNorm, 1e-8 beside a kernel's "
                "variance) stand for 1e-6 and 1e-5 beside its deviation: logits differ "
                "by about 1e-4 of their size"
            )
        if options["distillation"] and not options["classes"]:
            notes.append("features: timm gives the mean of both tokens, we the first")
    config = timm_config.write(options, pretrained.preprocess, pretrained.class_names)
    if pretrained.preprocess is None:
        notes.append("preprocessing: nothing says how, so timm's own defaults hold")
    if pretrained.loss == "sigmoid":
        notes.append("loss: the config does not say that it was sigmoid, not softmax")
    folder = pathlib.Path(folder)
    arrays = torch_layout.write(flat, table(options))
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return notes
