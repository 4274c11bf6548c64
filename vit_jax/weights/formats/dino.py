"""Files of facebookresearch/dino and facebookresearch/dinov2.

Backbones have the names of timm, with which they are read, and whole checkpoints of
training a student and a teacher: the teacher's backbone is taken. Positions of DINO, and
of DINOv2 without registers, are resized in another way than timm does.
"""

import dataclasses
import re

import numpy as np

from vit_jax.weights.formats import tables, timm, torch_file
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, Reader
from vit_jax.weights.pretrained import IMAGENET, Preprocess, Pretrained

_TEACHER = f"{torch_file.TEACHER}."
# Before the names of a backbone beside its head; with wrappers of PyTorch's.
_INSIDE = re.compile(rf"({re.escape(_TEACHER)})?((module|_orig_mod)\.)*backbone\.")
_NAMES = (
    (r"^register_tokens$", "reg_token"),
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
    (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # Blocks in chunks, as in training.
)
_MASK_TOKEN = "mask_token"
# Of the class token and the mean of the patches, of a hub model such as dinov2_vits14_lc.
_CLASSIFIER = ("linear_head.weight", "linear_head.bias")
# What a backbone has; a network with a head or a distillation token has more.
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
    """Returns whether no network of timm's alone has these patches or registers."""
    if "blocks.0.ls1.gamma" in flat:
        return "reg_token" not in flat or flat["reg_token"].shape[1] == 4
    return flat["patch_embed.proj.weight"].shape[-1] not in (14, 32)


def _backbone(flat: dict) -> tuple[dict, bool]:
    """Returns the arrays of the backbone by timm's names, and whether it was inside."""
    found = {
        name[match.end() :]: value
        for name, value in flat.items()
        if (match := _INSIDE.match(name))
    }
    return tables.rename(found or flat, _NAMES), bool(found)


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint; see `registry.Reader`."""
    flat, inside = _backbone(tensors.flat)
    name = "DINOv2" if "blocks.0.ls1.gamma" in flat else "DINO"
    resize = "bicubic" if "reg_token" in flat else "bicubic_dino"
    told, notes = inside or _MASK_TOKEN in flat, []
    if any(name.startswith(_TEACHER) for name in tensors.flat):
        notes.append("teacher: its backbone is taken, and not the student's")
    if inside and len(flat) < len(tensors.flat):
        beside = {n for n in tensors.flat if not _INSIDE.match(n)} - {*_CLASSIFIER}
        if beside:
            notes.append("projection head: dropped, which only pretraining has")
    if flat.pop(_MASK_TOKEN, None) is not None:
        notes.append("mask token: dropped, which only pretraining has")
    found = timm.read(dataclasses.replace(tensors, flat=flat), num_heads)
    params, options, more = _classifier(tensors.flat, found)
    notes += more
    if not told:
        notes.append(
            f"no classifier and no config.json: taken for a backbone of {name}, whose "
            f"positions are resized by {resize} and images normalised as ImageNet's"
        )
    # Of timm's notes those on its config.json do not hold.
    notes += [note for note in found.notes if not note.startswith("config.json")]
    return dataclasses.replace(
        found,
        params=params,
        options=options | {"posemb_resize": resize},
        format=name.lower(),
        preprocess=preprocess(found.options["image_size"]),
        notes=tuple(notes),
    )


def _classifier(flat: dict, found: Pretrained) -> tuple[dict, dict, list[str]]:
    """Returns parameters and options with the classifier of DINOv2 `*_lc`, and notes."""
    if not flat.keys() >= {*_CLASSIFIER}:
        return found.params, found.options, []
    weight, bias = (flat[name] for name in _CLASSIFIER)
    width = found.params["cls"].shape[-1]
    if weight.shape[1] != 2 * width:
        note = "linear_head: left out, as it sees class tokens of several blocks"
        return found.params, found.options, [f"{note} (layers=4): features alone"]
    options = {"num_classes": len(weight), "pool": "token_gap"}
    head = {"kernel": np.ascontiguousarray(weight.T), "bias": bias}
    return {**found.params, "head": head}, found.options | options, []


def preprocess(image_size: tuple[int, int]) -> Preprocess:
    """Returns how eval_linear.py and eval_knn.py of both projects prepare images."""
    return Preprocess(
        image_size, interpolation="bicubic", crop_fraction=224 / 256, **IMAGENET
    )


READERS["DINO"] = Reader(recognises, read, refines=("timm",))
