"""MLP-Mixers in npz files of Google's JAX code, and in timm's format.

Google's vision_transformer and big_vision use the same names. The first published files
have other names, which big_vision reads too.
"""

import math
import os
from collections.abc import Mapping

import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.models.mixer import MixerConfig
from vit_jax.weights import rewriting
from vit_jax.weights.formats import (
    google,
    linen,
    tables,
    timm,
    timm_config,
    timm_networks,
)
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader
from vit_jax.weights.formats.tables import ArrayEntry, name_entries
from vit_jax.weights.pretrained import Pretrained

_ANCHOR = "MixerBlock_0/token_mixing/Dense_0/kernel"
_CHANNELS = "MixerBlock_0/channel_mixing/Dense_0/kernel"
_OLD_ANCHOR = "Mixer/encoderblock_0/token_mixing_phase_0/kernel1"
# Patterns in the names of Google's files, and their replacements.
_NAMES = (
    (r"^stem/", "embedding/"),
    (r"^Mixer/encoder_norm/", "pre_head_layer_norm/"),
    (r"^Mixer/encoderblock_(\d+)/", r"MixerBlock_\1/"),
    (r"_mixing_phase_\d+/(kernel|bias)1$", r"_mixing/Dense_0/\1"),
    (r"_mixing_phase_\d+/(kernel|bias)2$", r"_mixing/Dense_1/\1"),
)
_TIMM_NAMES = {
    "embedding": "stem.proj",
    "MixerBlock_#/LayerNorm_0": "blocks.#.norm1",
    "MixerBlock_#/token_mixing/Dense_0": "blocks.#.mlp_tokens.fc1",
    "MixerBlock_#/token_mixing/Dense_1": "blocks.#.mlp_tokens.fc2",
    "MixerBlock_#/LayerNorm_1": "blocks.#.norm2",
    "MixerBlock_#/channel_mixing/Dense_0": "blocks.#.mlp_channels.fc1",
    "MixerBlock_#/channel_mixing/Dense_1": "blocks.#.mlp_channels.fc2",
    "pre_head_layer_norm": "norm",
    "head": "head",
}
_NEEDED = (
    "stem.proj.weight",
    "blocks.0.mlp_tokens.fc1.weight",
    "blocks.0.mlp_channels.fc1.weight",
)
timm_networks.ARCHITECTURES[r"mixer_[sbl](16|32)_224(_in21k|_miil|_miil_in21k)?"] = (
    r"img_size|in_chans|num_classes|mlp_ratio|nlhb|global_pool" + timm_networks.TRAINING
)
# timm's size by width and depth, which are not arguments of timm's functions.
_SIZES = {(512, 8): "s", (768, 12): "b", (1024, 24): "l"}


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file was written by Google's code."""
    return any(
        linen.find_prefix(tensors.flat.keys(), anchor) is not None
        for anchor in (_ANCHOR, _OLD_ANCHOR)
    )


def recognises_timm(tensors: Tensors) -> bool:
    """Returns whether a file was written by timm."""
    return set(_NEEDED[:2]) <= tensors.flat.keys()


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint of Google's code; see `registry.Reader`."""
    is_old = linen.find_prefix(tensors.flat, _ANCHOR) is None
    given, notes = linen.strip(tensors.flat, _OLD_ANCHOR if is_old else _ANCHOR)
    flat = tables.rename(given, _NAMES)
    if missing := sorted({"embedding/kernel", _CHANNELS} - flat.keys()):
        raise UserError(f"{tensors.path}: {missing[0]} is missing: give the whole file")
    patches = len(flat[_ANCHOR])
    side = math.isqrt(patches) * len(flat["embedding/kernel"])
    if math.isqrt(patches) ** 2 != patches:
        raise UserError(
            f"{tensors.path} has {patches} patches, which are not a square grid: no such "
            "Mixer was published"
        )
    options = _options(flat) | {"activation": "gelu_tanh", "image_size": (side, side)}
    preprocess = linen.whole_image((side, side))
    return linen.finish(tensors, flat, options, "google", preprocess, notes)


def _options(flat: Mapping[str, np.ndarray]) -> dict:
    """Returns the options that follow from the shapes of parameters."""
    patch, _, channels, width = flat["embedding/kernel"].shape
    blocks = {name.split("/")[0] for name in flat if name.startswith("MixerBlock_")}
    return {
        "variant": f"Mixer-B/{patch}",
        "width": width,
        "depth": len(blocks),
        "tokens_mlp_dim": flat[_ANCHOR].shape[1],
        "channels_mlp_dim": flat[_CHANNELS].shape[1],
        "channels": channels,
    }


def read_timm(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint of timm; see `registry.Reader`."""
    flat, source = tensors.flat, tensors.path
    facts = timm_config.read(tensors.config)
    if missing := sorted(set(_NEEDED) - flat.keys()):
        raise UserError(f"{source}: {missing[0]} is missing: give the whole file")
    timm_networks.check_average(facts.pool, "an MLP-Mixer", source)
    patch, patches = flat[_NEEDED[0]].shape[2], flat[_NEEDED[1]].shape[1]
    side = math.isqrt(patches) * patch
    image_size = (side, side)
    if facts.image_size and math.prod(x // patch for x in facts.image_size) == patches:
        image_size = tuple(x // patch * patch for x in facts.image_size)
    elif side * side != patches * patch**2:
        raise UserError(
            f"{source} has {patches} patches, which are not a square grid, and no "
            "config.json has img_size"
        )
    num_classes = len(flat.get("head.weight", ()))
    depth = tables.count_blocks(flat, "blocks.")
    table = _table(depth, num_classes)
    timm_networks.check_names(flat, table, source)
    params = tables.to_our_arrays(flat, table, source)
    options = _options(params) | {"activation": "gelu", "image_size": image_size}
    options["num_classes"] = num_classes
    return timm.finish(tensors, facts, params, options, patch=patch)


def write(pretrained: Pretrained, path: str | os.PathLike) -> list[str]:
    """Writes an .npz file that Google's two projects load; see `registry.Writer`."""
    notes = ["class names, preprocessing, loss: the format has no place for them"]
    notes += google.note_preprocess(pretrained.preprocess)
    if pretrained.options["activation"] != "gelu_tanh":
        notes.append(google.ACTIVATION_NOTE)
    grid = models.create(**pretrained.options).grid
    others = "--to=timm or --to=safetensors"
    rewriting.check_square(grid, "a reader of Google's npz", others)
    flat = flatten_dict(pretrained.params, sep="/")
    flat = {name.replace("embedding/", "stem/"): v for name, v in flat.items()}
    np.savez(path, **flat)
    return notes


def write_timm(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `timm.create_model("local-dir:FOLDER")` loads."""
    options, notes = pretrained.options, []
    flat = flatten_dict(pretrained.params, sep="/")
    shown, patch = _options(flat), len(flat["embedding/kernel"])
    width, depth = shown["width"], shown["depth"]
    if options["activation"] != "gelu":
        notes.append(
            "activation: gelu_tanh replaced by gelu, the only one in timm's config.json: "
            "relative differences of logits are about 1e-4"
        )
    size = _SIZES.get((width, depth))
    if size is None or patch not in (16, 32):
        raise UserError(
            f"timm has no MLP-Mixer with patch {patch}, width={width} and depth={depth}, "
            "only S, B and L with patch 16 or 32: write it with --to=google or "
            "--to=safetensors"
        )
    hidden = shown["tokens_mlp_dim"], shown["channels_mlp_dim"]
    architecture = timm_config.Architecture(
        name=f"mixer_{size}{patch}_224",
        args={
            "img_size": list(options["image_size"]),
            "in_chans": options["channels"],
            "mlp_ratio": [timm_config.mlp_ratio(units, width) for units in hidden],
        },
        num_features=width,
        first_conv="stem.proj",
    )
    arrays = tables.to_their_arrays(flat, _table(depth, options["num_classes"]))
    return notes + timm.write_folder(folder, arrays, architecture, options, pretrained)


def _table(depth: int, num_classes: int) -> list[ArrayEntry]:
    options = {"depth": depth, "num_heads": 1, "num_classes": num_classes}
    return name_entries(_TIMM_NAMES, options)


READERS["google Mixer"] = Reader(recognises, read)
READERS["timm Mixer"] = Reader(recognises_timm, read_timm)
WRITERS["google"].networks[MixerConfig] = write
WRITERS["timm"].networks[MixerConfig] = write_timm
