"""timm's MLP-Mixers, as files and as folders with a config.json; see timm.py."""

import math
import os

import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax.errors import UserError
from vit_jax.models.mixer import MixerConfig
from vit_jax.weights.formats import timm, timm_config, torch_file
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader
from vit_jax.weights.formats.torch_file import CONV, ArrayEntry, dense, norm
from vit_jax.weights.pretrained import Pretrained

_NEEDED = (
    "stem.proj.weight",
    "blocks.0.mlp_tokens.fc1.weight",
    "blocks.0.mlp_channels.fc1.weight",
)
_OLD = r"(_in21k|_miil|_miil_in21k)?"
timm_config.ARCHITECTURES[rf"mixer_[sbl](16|32)_224{_OLD}"] = (
    r"img_size|in_chans|num_classes|mlp_ratio|nlhb|global_pool" + timm_config.TRAINING
)
# By width and depth, which timm's functions do not take as arguments.
_SIZES = {(512, 8): "s", (768, 12): "b", (1024, 24): "l"}


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    return _NEEDED[0] in tensors.flat and _NEEDED[1] in tensors.flat


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint; see `registry.Reader`."""
    flat = tensors.flat
    facts = timm_config.read(tensors.sidecars.get("config.json", {}))
    if missing := sorted(set(_NEEDED) - flat.keys()):
        raise UserError(f"{tensors.path}: {missing[0]} is missing: give the whole file")
    timm_config.check_average(facts.pool, "an MLP-Mixer", tensors.path)
    width, channels, patch, _ = flat["stem.proj.weight"].shape
    tokens_mlp_dim, patches = flat["blocks.0.mlp_tokens.fc1.weight"].shape
    side = math.isqrt(patches) * patch
    image_size = (side, side)
    if facts.image_size and math.prod(x // patch for x in facts.image_size) == patches:
        image_size = tuple(x // patch * patch for x in facts.image_size)
    elif side * side != patches * patch**2:
        raise UserError(
            f"{tensors.path} is of {patches} patches, which are no square grid, and no "
            "config.json states img_size"
        )
    num_classes = len(flat.get("head.weight", ()))
    depth = len({name.split(".")[1] for name in flat if name.startswith("blocks.")})
    table = _table(depth, num_classes)
    timm_config.check_names(flat, {e.theirs for e in table}, tensors.path)
    ours = torch_file.to_our_arrays(flat, table, tensors.path)
    options = {
        "variant": f"Mixer-B/{patch}",
        "width": width,
        "depth": depth,
        "tokens_mlp_dim": tokens_mlp_dim,
        "channels_mlp_dim": len(flat["blocks.0.mlp_channels.fc1.weight"]),
        "activation": "gelu",
        "num_classes": num_classes,
        "image_size": image_size,
        "channels": channels,
    }
    return timm.finish(tensors, facts, ours, options, patch=patch)


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `timm.create_model("local-dir:FOLDER")` loads."""
    options, notes = pretrained.options, []
    flat = flatten_dict(pretrained.params, sep="/")
    patch, _, _, width = flat["embedding/kernel"].shape
    tokens, channels = (
        flat[f"MixerBlock_0/{name}_mixing/Dense_0/bias"].size
        for name in ("token", "channel")
    )
    depth = len({name.split("/")[0] for name in flat if name.startswith("MixerBlock_")})
    if options["activation"] != "gelu":
        notes.append(
            "activation: gelu_tanh became gelu, which timm's config.json cannot state "
            "otherwise: logits differ by about 1e-4 of their size"
        )
    size = _SIZES.get((width, depth))
    if size is None or patch not in (16, 32):
        raise UserError(
            f"timm has no MLP-Mixer with patch {patch}, width={width} and depth={depth}, "
            "only S, B and L with patch 16 or 32: write it with --to=google or "
            "--to=safetensors"
        )
    architecture = timm_config.Architecture(
        name=f"mixer_{size}{patch}_224",
        args={
            "img_size": list(options["image_size"]),
            "in_chans": options["channels"],
            "mlp_ratio": [_ratio(tokens, width), _ratio(channels, width)],
        },
        num_features=width,
        first_conv="stem.proj",
    )
    table = _table(depth, options["num_classes"])
    arrays = torch_file.to_their_arrays(flat, table)
    return notes + timm.write_folder(folder, arrays, architecture, options, pretrained)


def _ratio(hidden: int, width: int) -> float:
    """Returns the ratio whose product with the width timm truncates to `hidden`."""
    ratio = hidden / width
    return ratio if int(ratio * width) == hidden else float(np.nextafter(ratio, np.inf))


def _table(depth: int, num_classes: int) -> list[ArrayEntry]:
    table = dense("stem.proj", "embedding", CONV)
    for i in range(depth):
        theirs, ours = f"blocks.{i}", f"MixerBlock_{i}"
        for j, name in enumerate(("token", "channel")):
            table += norm(f"{theirs}.norm{j + 1}", f"{ours}/LayerNorm_{j}")
            for layer in (0, 1):
                table += dense(
                    f"{theirs}.mlp_{name}s.fc{layer + 1}",
                    f"{ours}/{name}_mixing/Dense_{layer}",
                )
    table += norm("norm", "pre_head_layer_norm")
    return table + (dense("head", "head") if num_classes else [])


READERS["timm Mixer"] = Reader(recognises, read)
WRITERS["timm"].networks[MixerConfig] = write
