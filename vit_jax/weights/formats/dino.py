"""Files of facebookresearch/dino, dinov2 and dinov3.

Backbones have timm's names and are read like timm's. Training checkpoints have a
teacher, whose backbone is the network, and some have a student; the heads and the
student become `Pretrained.task_params`. Positions of DINO, and of DINOv2 without
registers, are resized by another method than in timm.
"""

import dataclasses
import os
import re

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.data.preprocess import Preprocess
from vit_jax.weights import rewriting
from vit_jax.weights.formats import dinov3, tables, timm, timm_networks, torch_file
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.formats.tables import LINEAR, ArrayEntry, dense, one_layout
from vit_jax.weights.pretrained import IMAGENET, Pretrained

_TEACHER = f"{torch_file.TEACHER}."
# Teacher or student, PyTorch's wrappers, and the part of the network.
_PART = re.compile(
    rf"(?:({torch_file.TEACHER}|{torch_file.STUDENT})\.)?"
    r"(?:(?:module|_orig_mod)\.)*(backbone|head|dino_head|ibot_head)\."
)
# Parts of the networks by the task of this project that trains them.
_HEADS = {
    "dino": {"head": "head"},
    "dinov2": {"dino_head": "head", "ibot_head": "patch_head"},
}
_CENTERS = {"dino_loss.center": "center", "ibot_patch_loss.center": "patch_center"}
# torch.nn.utils.parametrizations.weight_norm, the successor of weight_norm.
_PARAMETRIZED = (
    (r"parametrizations\.weight\.original0$", "weight_g"),
    (r"parametrizations\.weight\.original1$", "weight_v"),
)
_GAIN = one_layout(lambda a: a[:, 0], lambda a: a[:, None])
# Prefix of a backbone in a file that also has its head, with PyTorch's wrappers.
_INSIDE = re.compile(rf"({re.escape(_TEACHER)})?((module|_orig_mod)\.)*backbone\.")
_NAMES = (
    (r"^register_tokens$", "reg_token"),
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
    (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # Blocks in chunks, as during training.
)
_MASK_TOKEN = "mask_token"
# Parameters of a backbone that only pretraining uses.
_BESIDE = {_MASK_TOKEN: "mask token", dinov3.SMALL_NORM: "norm of small crops"}
_NORMS = {1e-6: "layernorm", 1e-5: "layernormbf16"}  # Names in dinov3 by epsilon.
# Classifier of the class token and the patch mean, in dinov2_vits14_lc and others.
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
    if dinov3.PERIODS in flat:
        return True
    if not {"cls_token", "pos_embed"} <= flat.keys():
        return False
    others = flat.keys() - {_MASK_TOKEN}
    plain = all(map(_PLAIN.match, others))
    return inside or (plain and (len(others) < len(flat) or _is_published(flat)))


def _is_published(flat: dict) -> bool:
    """Returns whether only these networks have such patches or registers in timm."""
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
    flat = tables.rename(inside or flat, _NAMES)
    return dinov3.to_timm(flat) if dinov3.PERIODS in flat else flat, bool(inside)


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint; see `registry.Reader`."""
    flat, inside = _backbone(tensors.flat)
    name, resize = "DINO", {"posemb_resize": "bicubic_dino"}
    if dinov3.PERIODS in flat:
        epsilon = dinov3.epsilon(tensors.flat)
        name = "DINOv3"
        resize = {"image_size": (224, 224), "layer_norm_eps": epsilon}
    elif "blocks.0.ls1.gamma" in flat:
        name = "DINOv2"
        resize = {"posemb_resize": "bicubic"} if "reg_token" in flat else resize
    known = inside or name == "DINOv3" or _MASK_TOKEN in flat
    notes = []
    if any(name.startswith(_TEACHER) for name in tensors.flat):
        notes.append("teacher: its backbone is read, not the student's")
    task, task_params = read_training(tensors, num_heads) if inside else ({}, {})
    beside = {n for n in tensors.flat if not _INSIDE.match(n)} - {*_CLASSIFIER}
    if inside and beside and not task:
        parts = sorted({name.partition(".")[0] for name in beside})
        notes.append(
            f"{', '.join(parts)}: left out; these are not heads of DINO or DINOv2 in "
            "their published form"
        )
    for part, what in _BESIDE.items():
        if any(name.startswith(part) for name in flat) and not task:
            notes.append(f"{what}: dropped, only used for pretraining")
    pretrained = _network(tensors, flat, num_heads)
    params, options, more = _classifier(tensors.flat, pretrained)
    notes += more
    if not known:
        notes.append(
            f"no classifier and no config.json: assumed to be a backbone of {name}; "
            f"positions are resized by {resize['posemb_resize']}, images normalised as "
            "for ImageNet"
        )
    if name == "DINOv3":
        notes += assumed(flat, epsilon)
    # timm's notes on a missing config.json do not apply.
    notes += [note for note in pretrained.notes if not note.startswith("config.json")]
    return dataclasses.replace(
        pretrained,
        params=params,
        options=options | resize,
        format=name.lower(),
        preprocess=preprocess((options | resize)["image_size"]),
        notes=tuple(notes),
        task=task,
        task_params=task_params,
    )


def assumed(flat: dict, epsilon: float) -> list[str]:
    """Returns notes on properties that files of DINOv3 do not record."""
    of = "the published ones" if epsilon == 1e-5 else "networks without mask_k_bias"
    other = 1e-6 if epsilon == 1e-5 else 1e-5
    norms = (
        f"epsilon: {epsilon:g}, assumed as in {of}; if this network "
        f"has another norm_layer than {_NORMS[epsilon]}, set layer_norm_eps={other:g}"
    )
    images = (
        "preprocessing: not in the file, assumed a resize to 224 pixels and ImageNet's "
        "normalisation"
    )
    small_norm = any(name.startswith(dinov3.SMALL_NORM) for name in flat)
    if small_norm and len(flat["patch_embed.proj.weight"]) == 1_024:
        images += (
            "; among the published networks of this width only that of SAT-493M has a "
            "norm of small crops: for it, set --mean=0.43,0.411,0.296 "
            "--std=0.213,0.156,0.143"
        )
    return [norms, images]


def _network(tensors: Tensors, flat: dict, num_heads: int) -> Pretrained:
    """Reads the output of `_backbone`, without parameters used only for pretraining."""
    sidecars, others = tensors.sidecars, (*_BESIDE, dinov3.PERIODS)
    if dinov3.PERIODS in flat:
        sidecars = {"config.json": dinov3.config(flat, tensors.path)}
    flat = {name: value for name, value in flat.items() if not name.startswith(others)}
    return timm.read(
        dataclasses.replace(tensors, flat=flat, sidecars=sidecars), num_heads
    )


def read_training(tensors: Tensors, num_heads: int) -> tuple[dict, dict]:
    """Returns `config.task` and its parameters, see `dino.Dino.with_task_params`.

    Both are empty without heads of the published form.

    Args:
      tensors: teacher and perhaps student, with a prefix for each of their parts.
      num_heads: number of attention heads; 0 if unknown.
    """
    parts: dict[str, dict[str, dict]] = {}
    for name, value in tensors.flat.items():
        if match := _PART.match(name):
            who = parts.setdefault(match[1] or torch_file.TEACHER, {})
            who.setdefault(match[2], {})[name[match.end() :]] = value
    teacher = parts[torch_file.TEACHER]
    kind = "dino" if "head" in teacher else "dinov2"
    heads = {
        who: {
            param: _read_head(arrays[stored], tensors.path)
            for stored, param in _HEADS[kind].items()
            if stored in arrays
        }
        for who, arrays in parts.items()
    }
    if not all(heads[who] and all(heads[who].values()) for who in parts):
        return {}, {}
    gains = [of.get("head", {}).get("gain") for of in heads.values()]
    if kind == "dino" and all(gain is not None and (gain == 1).all() for gain in gains):
        for of in heads.values():  # All ones: the gain was not trained.
            del of["head"]["gain"]
    of = {who: heads[who] | _beside(parts[who]["backbone"]) for who in parts}
    student = of.get(torch_file.STUDENT, {})
    if student:
        flat, _ = _backbone(parts[torch_file.STUDENT]["backbone"])
        student["network"] = _network(tensors, flat, num_heads).params
    centers = {
        param: tensors.flat[stored].reshape(-1)
        for stored, param in _CENTERS.items()
        if stored in tensors.flat
    }
    task_params = student | centers | {"teacher": of[torch_file.TEACHER]}
    return _task(kind, of[torch_file.TEACHER]), task_params


def _beside(backbone: dict) -> dict:
    """Returns a task's parameters that are stored among the arrays of a backbone."""
    token = backbone.get(_MASK_TOKEN)
    params = {} if token is None else {_MASK_TOKEN: token[None]}
    return params | dinov3.read_small_norm(backbone)


def _task(kind: str, teacher: dict) -> dict:
    """Returns the keys of `config.task` that follow from the heads."""

    def sizes(head):
        hidden, bottleneck = head["Dense_2"]["kernel"].shape
        return head["last_layer"].shape[1], hidden, bottleneck

    head = teacher["head"]
    names = "num_outputs", "hidden_dim", "bottleneck_dim"
    task = {"name": kind, **dict(zip(names, sizes(head), strict=True))}
    task["free_gain"] = "gain" in head
    if kind == "dinov2":
        separate = "patch_head" in teacher
        task |= {"separate_heads": separate, "weight_norm": "gain" in head}
        task |= {"small_norm": True} if "small_norm_scale" in teacher else {}
        if separate:
            of_patches = sizes(teacher["patch_head"])
            names = (f"patch_{name}" for name in names)
            task |= dict(zip(names, of_patches, strict=True))
    return task


def _head_table(normed: bool, gain: bool) -> list[ArrayEntry]:
    layers = [e for i in range(3) for e in dense(f"mlp.{2 * i}", f"Dense_{i}")]
    last = ArrayEntry(
        f"last_layer.weight{'_v' if normed else ''}", ("last_layer",), LINEAR
    )
    if not gain:
        return [*layers, last]
    return [*layers, last, ArrayEntry("last_layer.weight_g", ("gain",), _GAIN)]


def _read_head(flat: dict, source: str) -> dict:
    """Returns the parameters of a head; {} if it is not in the published form."""
    flat = tables.rename(flat, _PARAMETRIZED)
    table = _head_table("last_layer.weight_v" in flat, "last_layer.weight_g" in flat)
    if {entry.name for entry in table} != flat.keys():
        return {}
    params = tables.to_our_arrays(flat, table, source)
    return unflatten_dict(params, sep="/")


def _classifier(flat: dict, pretrained: Pretrained) -> tuple[dict, dict, list[str]]:
    """Returns DINOv2's linear classifier as parameters and options, and notes."""
    if not flat.keys() >= {*_CLASSIFIER}:
        return pretrained.params, pretrained.options, []
    weight, bias = (flat[name] for name in _CLASSIFIER)
    width = pretrained.params["cls"].shape[-1]
    if weight.shape[1] != 2 * width:
        note = "linear_head: left out, because it reads class tokens of several blocks"
        return (
            pretrained.params,
            pretrained.options,
            [f"{note} (layers=4): features only"],
        )
    options = {"num_classes": len(weight), "pool": "token_gap"}
    head = {"kernel": np.ascontiguousarray(weight.T), "bias": bias}
    return {**pretrained.params, "head": head}, pretrained.options | options, []


def preprocess(image_size: tuple[int, int]) -> Preprocess:
    """Returns the preprocessing of eval_linear.py and eval_knn.py of both projects."""
    return Preprocess(
        image_size, interpolation="bicubic", crop_fraction=224 / 256, **IMAGENET
    )


def write(pretrained: Pretrained, path: str | os.PathLike) -> list[str]:
    """Writes teacher and student for facebookresearch/dino, dinov2 or dinov3.

    Without parameters of their tasks, writes a teacher without heads.
    """
    model = models.create(**pretrained.options)
    options = {"stage_depths": (), "stem_width": 0, **model.options}
    has = {
        "pool": ("token",),
        "num_classes": (0,),
        "activation": ("gelu", "swiglu"),
        "num_register_tokens": range(1_000),
        "layer_norm_eps": (1e-6,),
    }
    if rotary := options.get("rope") == "centered":
        has |= {"rope": ("centered",), "layer_norm_eps": (1e-6, 1e-5)}
        has |= {"posemb": ("none",), "cls_norm": (False, True)}
    library = f"facebookresearch/{'dinov3' if rotary else 'dino, as dinov2,'}"
    # timm has one final norm for all tokens.
    more = {"to": "--to=safetensors"} if options.get("cls_norm") else {}
    rewriting.check_network(model.options, library, has, **more)
    kind, params = pretrained.objective.get("name"), pretrained.task_params
    notes, content = [], {}
    networks = {torch_file.TEACHER: {"network": pretrained.params}}
    if kind in _HEADS and params:
        networks[torch_file.TEACHER] |= {
            k: v for k, v in params["teacher"].items() if k != "network"
        }
        if "network" in params:
            networks[torch_file.STUDENT] = params
    for who, state in networks.items():
        flat = flatten_dict(state["network"], sep="/")
        backbone, notes = _write_backbone(flat, options, model.grid)
        if _MASK_TOKEN in state:
            backbone[_MASK_TOKEN] = state[_MASK_TOKEN][0]
        small_norm = dinov3.write_small_norm(state)
        backbone |= small_norm if rotary else {}
        arrays = {f"backbone.{k}": v for k, v in backbone.items()}
        for stored, param in _HEADS.get(kind, {}).items():
            head = _write_head(state.get(param), pretrained.objective)
            arrays |= {f"{stored}.{name}": value for name, value in head.items()}
        content[who] = arrays
    for stored, param in _CENTERS.items():
        if param in params:
            rank = 2 if param == "center" else 3
            center = params[param].reshape((1,) * (rank - 1) + (-1,))
            content[stored.partition(".")[0]] = {"center": center}
    torch_file.write(path, content)
    if "teacher" in params and torch_file.STUDENT not in content:
        notes = [*notes, "student: left out, the run does not have its whole network"]
    if small_norm and not rotary:
        notes = [*notes, f"norm of small crops: left out, not supported by {library}"]
    return notes


def _write_backbone(
    flat: dict, options: dict, grid: tuple[int, int]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the arrays of a backbone, and notes."""
    if options["rope"] == "centered":
        rotary = dinov3.rotary(options)
        flat = timm_networks.turn_features(flat, rotary, back=True)
        arrays = tables.to_their_arrays(flat, timm.transformer_table(options))
        norm = _NORMS[epsilon := options["layer_norm_eps"]]
        note = (
            f"norms and biases: build the network with norm_layer={norm!r}, "
            f"mask_k_bias={epsilon == 1e-5}"
        )
        return dinov3.from_timm(arrays, options), [note]
    others = "--to=timm or --to=safetensors"
    rewriting.check_square(grid, "the code of facebookresearch", others)
    used = dict(options)
    notes = rewriting.store_positions(flat, used, grid)
    arrays = tables.to_their_arrays(flat, timm.transformer_table(used))
    names = [(r"^reg_token$", "register_tokens")]
    if options["activation"] == "swiglu":
        names += [(r"\.mlp\.fc1\.", ".mlp.w12."), (r"\.mlp\.fc2\.", ".mlp.w3.")]
    return tables.rename(arrays, names), notes


def _write_head(head: dict | None, task: dict) -> dict[str, np.ndarray]:
    if head is None:
        return {}
    normed, flat = task.get("weight_norm", True), flatten_dict(head, sep="/")
    if normed and "gain" not in flat:
        flat["gain"] = np.ones(flat["last_layer"].shape[1], np.float32)
    return tables.to_their_arrays(flat, _head_table(normed, normed))


def _usage(pretrained: Pretrained, path: str, on_hub: bool) -> str:
    return (
        f'state = torch.load("{path}")["teacher"]  # And "student".\n'
        "# Names are those of facebookresearch: backbone.*, head.* or dino_head.*."
    )


READERS["DINO"] = Reader(recognises, read, refines=("timm",))
WRITERS["dino"] = Writer(write, suffix=".pth", usage=_usage, with_task=True)
