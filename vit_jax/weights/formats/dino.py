"""Files of facebookresearch/dino and facebookresearch/dinov2.

Backbones have timm's names and are read as timm's. Checkpoints of the training have a
student and a teacher, whose backbone is read. Positions of DINO, and of DINOv2 without
registers, are resized in another way than in timm.
"""

import dataclasses
import re

import numpy as np

from vit_jax.weights.formats import tables, timm, torch_file
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, Reader
from vit_jax.weights.pretrained import IMAGENET, Preprocess, Pretrained

_TEACHER = f"{torch_file.TEACHER}."
# Prefix of a backbone that has a head beside it, with PyTorch's wrappers.
_INSIDE = re.compile(rf"({re.escape(_TEACHER)})?((module|_orig_mod)\.)*backbone\.")
_NAMES = (
    (r"^register_tokens$", "reg_token"),
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
    (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # Blocks in chunks, as in training.
)
_MASK_TOKEN = "mask_token"
# Classifier of the class token and the mean of the patches, in dinov2_vits14_lc and such.
_CLASSIFIER = ("linear_head.weight", "linear_head.bias")
# Arrays of a backbone; a network with a head or a distillation token has more.
_PLAIN = re.compile(
    r"(cls_token|reg_token|pos_embed)$|(patch_embed\.proj|norm)\.(weight|bias)$"
    r"|blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.fc[12])\.(weight|bias)$"
    r"|blocks\.\d+\.ls[12]\.gamma$"
)


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    if "config.json" in tensors.sidecars:
        return False
    flat, inside = _backbone(tensors.flat)
    if not timm.recognises(dataclasses.replace(tensors, flat=flat)):
        return False
    if not {"cls_token", "pos_embed"} <= flat.keys():
        return False
    others = flat.keys() - {_MASK_TOKEN}
    plain = all(map(_PLAIN.match, others))
    return inside or (plain and (len(others) < len(flat) or _is_published(flat)))


def _is_published(flat: dict) -> bool:
    """Returns whether no other network of timm has these patches or registers."""
    if "blocks.0.ls1.gamma" in flat:
        return "reg_token" not in flat or flat["reg_token"].shape[1] == 4
    return flat["patch_embed.proj.weight"].shape[-1] not in (14, 32)


def _backbone(flat: dict) -> tuple[dict, bool]:
    """Returns the backbone's arrays by timm's names, and whether they had a prefix."""
    inside = {
        name[match.end() :]: value
        for name, value in flat.items()
        if (match := _INSIDE.match(name))
    }
    return tables.rename(inside or flat, _NAMES), bool(inside)


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint; see `registry.Reader`."""
    flat, inside = _backbone(tensors.flat)
    name = "DINOv2" if "blocks.0.ls1.gamma" in flat else "DINO"
    resize = "bicubic" if "reg_token" in flat else "bicubic_dino"
    known, notes = inside or _MASK_TOKEN in flat, []
    if any(name.startswith(_TEACHER) for name in tensors.flat):
        notes.append("teacher: its backbone is read, and not the student's")
    if inside and len(flat) < len(tensors.flat):
        beside = {n for n in tensors.flat if not _INSIDE.match(n)} - {*_CLASSIFIER}
        if beside:
            notes.append("projection head: dropped, which only pretraining has")
    if flat.pop(_MASK_TOKEN, None) is not None:
        notes.append("mask token: dropped, which only pretraining has")
    pretrained = timm.read(dataclasses.replace(tensors, flat=flat), num_heads)
    params, options, more = _classifier(tensors.flat, pretrained)
    notes += more
    if not known:
        notes.append(
            f"no classifier and no config.json: taken for a backbone of {name}, whose "
            f"positions are resized by {resize} and images normalised as ImageNet's"
        )
    # timm's notes on a missing config.json do not apply.
    notes += [note for note in pretrained.notes if not note.startswith("config.json")]
    return dataclasses.replace(
        pretrained,
        params=params,
        options=options | {"posemb_resize": resize},
        format=name.lower(),
        preprocess=preprocess(pretrained.options["image_size"]),
        notes=tuple(notes),
    )


def _classifier(flat: dict, pretrained: Pretrained) -> tuple[dict, dict, list[str]]:
    """Returns parameters and options with DINOv2's linear classifier, and notes."""
    if not flat.keys() >= {*_CLASSIFIER}:
        return pretrained.params, pretrained.options, []
    weight, bias = (flat[name] for name in _CLASSIFIER)
    width = pretrained.params["cls"].shape[-1]
    if weight.shape[1] != 2 * width:
        note = "linear_head: left out, as it sees class tokens of several blocks"
        return (
            pretrained.params,
            pretrained.options,
            [f"{note} (layers=4): features alone"],
        )
    options = {"num_classes": len(weight), "pool": "token_gap"}
    head = {"kernel": np.ascontiguousarray(weight.T), "bias": bias}
    return {**pretrained.params, "head": head}, pretrained.options | options, []


def preprocess(image_size: tuple[int, int]) -> Preprocess:
    """Returns the preprocessing of eval_linear.py and eval_knn.py of both projects."""
    return Preprocess(
        image_size, interpolation="bicubic", crop_fraction=224 / 256, **IMAGENET
    )


READERS["DINO"] = Reader(recognises, read, refines=("timm",))
