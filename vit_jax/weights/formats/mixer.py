"""MLP-Mixers in the npz files of google-research/vision_transformer and big_vision.

Both have one set of names, the first published files another, which big_vision reads too.
"""

import os
import pathlib
import re

import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax.errors import UserError
from vit_jax.models.mixer import MixerConfig
from vit_jax.weights.formats import google, linen
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader
from vit_jax.weights.pretrained import Preprocess, Pretrained

_ANCHOR = "MixerBlock_0/token_mixing/Dense_0/kernel"
_OLD_ANCHOR = "Mixer/encoderblock_0/token_mixing_phase_0/kernel1"
_OLD_NAMES = (
    (r"^Mixer/encoder_norm/", "pre_head_layer_norm/"),
    (r"^Mixer/encoderblock_(\d+)/", r"MixerBlock_\1/"),
    (r"_mixing_phase_\d+/(kernel|bias)1$", r"_mixing/Dense_0/\1"),
    (r"_mixing_phase_\d+/(kernel|bias)2$", r"_mixing/Dense_1/\1"),
)
_STEM = "stem/"  # Ours is "embedding/", as in the old files.


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    return any(
        linen.find_prefix(tensors.flat.keys(), anchor) is not None
        for anchor in (_ANCHOR, _OLD_ANCHOR)
    )


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint; see `registry.Reader`."""
    is_old = linen.find_prefix(tensors.flat, _ANCHOR) is None
    flat, notes = linen.strip(tensors.flat, _OLD_ANCHOR if is_old else _ANCHOR)
    flat = {_our_name(name): value for name, value in flat.items()}
    missing = {"embedding/kernel", "MixerBlock_0/channel_mixing/Dense_0/kernel"}
    if missing := sorted(missing - flat.keys()):
        raise UserError(f"{tensors.path}: {missing[0]} is missing: give the whole file")
    patch, _, channels, width = flat["embedding/kernel"].shape
    patches, tokens_mlp_dim = flat[_ANCHOR].shape
    side = round(patches**0.5)
    if side * side != patches:
        raise UserError(
            f"{tensors.path} is of {patches} patches, which are no square grid: no such "
            "Mixer was published"
        )
    blocks = {name.split("/")[0] for name in flat if name.startswith("MixerBlock_")}
    options = {
        "variant": f"Mixer-B/{patch}",
        "width": width,
        "depth": len(blocks),
        "tokens_mlp_dim": tokens_mlp_dim,
        "channels_mlp_dim": flat["MixerBlock_0/channel_mixing/Dense_0/bias"].size,
        "activation": "gelu_tanh",
        "image_size": (side * patch, side * patch),
        "channels": channels,
    }
    preprocess = Preprocess(options["image_size"], squash=True)  # As of their ViTs.
    return linen.finish(tensors, flat, options, "google", preprocess, notes)


def _our_name(name: str) -> str:
    if name.startswith(_STEM):
        return name.replace(_STEM, "embedding/", 1)
    for old, new in _OLD_NAMES:
        name = re.sub(old, new, name)
    return name


def write(pretrained: Pretrained, path: str | os.PathLike) -> list[str]:
    """Writes an .npz file that both projects load; see `registry.Writer`."""
    notes = ["class names, preprocessing, loss: the format has no place for them"]
    notes += google.note_preprocess(pretrained.preprocess)
    if pretrained.options["activation"] != "gelu_tanh":
        notes.append(google.ACTIVATION_NOTE)
    flat = flatten_dict(pretrained.params, sep="/")
    with pathlib.Path(path).open("wb") as stream:
        np.savez(stream, **{k.replace("embedding/", _STEM): v for k, v in flat.items()})
    return notes


READERS["google Mixer"] = Reader(recognises, read)
WRITERS["google"].networks[MixerConfig] = write
