"""The npz format of google-research/vision_transformer: original, AugReg, SAM, hybrids.

This project uses the parameter names of this format, except for the numbers of the
layers of a block. big_vision reads the written files too, and supports the MAP head and
the BiT ResNets, which vision_transformer lacks.
"""

import dataclasses
import os

import numpy as np
from flax.traverse_util import flatten_dict

from vit_jax import models
from vit_jax.data.preprocess import Preprocess
from vit_jax.weights import rewriting
from vit_jax.weights.formats import linen
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.pretrained import POSITIONS, Pretrained

ACTIVATION_NOTE = (
    "activation: gelu replaced by gelu_tanh, Google's: logits differ in the third digit"
)


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    names = tensors.flat.keys()
    return (
        linen.find_prefix(names, POSITIONS) in ("", "opt/target/")
        and linen.find_prefix(names, "embedding/kernel") is not None
        and linen.find_prefix(names, "MAPHead_0/probe") is None
    )


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint; see `registry.Reader`."""
    flat, notes = linen.strip(tensors.flat, POSITIONS)
    flat = linen.flatten_norms(linen.rename_blocks(flat))
    options = linen.google_options(flat, tensors.image_size)
    options["pool"] = "token" if "cls" in flat else "gap"
    preprocess = linen.whole_image(options["image_size"])
    return linen.finish(tensors, flat, options, "google", preprocess, notes)


def write(pretrained: Pretrained, path: str | os.PathLike) -> list[str]:
    """Writes an .npz file; see `registry.Writer`."""
    model = models.create(**pretrained.options)
    flat, options = flatten_dict(pretrained.params, sep="/"), dict(model.options)
    notes = ["class names, preprocessing, loss: the format has no place for them"]
    notes += note_preprocess(pretrained.preprocess)
    if "depth" in options:
        _check_network(options)
        notes += rewriting.norm_every_token(flat, options)
        notes += rewriting.learn_positions(flat, options, model.grid)
        notes += rewriting.fold_layer_scale(flat, options)
        if options["activation"] != "gelu_tanh":
            notes.append(ACTIVATION_NOTE)
        if options["layer_norm_eps"] != 1e-6:
            notes.append(
                f"layer_norm_eps: {options['layer_norm_eps']:g} replaced by 1e-6, Google's"
            )
        if options["posemb"] == "learned":
            others = "--to=timm or --to=safetensors"
            rewriting.check_square(model.grid, "a reader of Google's npz", others)
    else:
        if options["zero_pool"]:
            notes.append("root pooling: big_vision does not support zero_pool=True")
        norms = ("gn1", "gn2", "gn3", "norm-pre-head")
        flat = {
            name: np.reshape(value, (1, 1, 1, -1))
            if name.split("/")[-2] in norms
            else value
            for name, value in flat.items()
        }
    np.savez(path, **flat)
    return notes


def note_preprocess(given: Preprocess | None) -> list[str]:
    """Returns a note if readers of npz files would assume another preprocessing."""
    if given is None:
        return []
    half = {name: (0.5,) * len(getattr(given, name)) for name in ("mean", "std")}
    usual = dataclasses.replace(linen.whole_image(given.image_size), **half)
    if given == usual:
        return []
    note = (
        f"images: readers of the format assume {usual.describe()}; predictions "
        f"differ unless they are given {given.describe()}"
    )
    return [note]


def _check_network(options: dict) -> None:
    """Raises UserError unless Google's code supports the network."""
    rewriting.check_network(
        options,
        "Google's code",
        {
            "stem_width": (options.get("stem_width", 0),),
            "representation_layer": (False, True),
            "pool": ("token", "gap", "map"),
            "class_token": (options["pool"] == "token", False),
            "fc_norm": (options["pool"] == "token", False),
            "activation": ("gelu_tanh", "gelu"),
            "posemb": ("learned", "learned2d", "sincos2d"),
        },
        to="--to=timm, --to=hf or --to=safetensors",
    )


# Files of big_vision have these names and more, and another preprocessing.
READERS["google"] = Reader(recognises, read, refines=("big_vision",))
WRITERS["google"] = Writer(write, suffix=".npz")
