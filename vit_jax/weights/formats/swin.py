"""Swin Transformers in the formats of Microsoft and timm; see models/swin.py.

Both have the same names, but Microsoft's networks merge patches at the end of a stage,
timm's at the beginning of the next one, and the classifiers differ.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.models.swin import SIZES, SwinConfig
from vit_jax.weights.formats import tables, timm, timm_config, timm_networks, torch_file
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.formats.tables import (
    CONV,
    LINEAR,
    SAME,
    ArrayEntry,
    ArrayLayout,
    dense,
    norm,
)
from vit_jax.weights.pretrained import IMAGENET, Pretrained


@dataclasses.dataclass(frozen=True)
class Names:
    """Names of a network's layers in a library.

    Attributes:
      attention: attention of a block, the module that contains "qkv".
      bias_network: V2's network for position biases, inside the attention.
      out: output projection of the attention.
      mlp: both layers of a block's MLP.
      merges_first: whether the merging after a stage is at the beginning of the next
        one.
    """

    embedding: str = "patch_embed.proj"
    embedding_norm: str = "patch_embed.norm"
    layers: str = "layers"
    norm1: str = "norm1"
    norm2: str = "norm2"
    attention: str = "attn"
    bias_network: str = "cpb_mlp"
    out: str = "attn.proj"
    mlp: tuple[str, str] = ("mlp.fc1", "mlp.fc2")
    norm: str = "norm"
    head: str = "head"
    merges_first: bool = False


MICROSOFT = Names()
TIMM = Names(head="head.fc", merges_first=True)

_NEEDED = ("patch_embed.proj.weight", "layers.0.blocks.0.attn.qkv.weight")
# Buffers, which can be computed from the other arrays and the image size.
_BUFFER = re.compile(r"relative_position_index|relative_coords_table|attn_mask")
_COORDINATES = "attn.relative_coords_table"
_FACTOR_HEADS = ArrayLayout(  # From (H, 1, 1) to (H,).
    lambda a: [a.reshape(-1)], lambda arrays: arrays[0].reshape(-1, 1, 1)
)
_NETWORK = "a Swin Transformer without absolute positions"
_DYNAMIC_NOTE = (
    "strict_img_size=False: at another image size, windows are those of "
    "timm.create_model(..., img_size=SIZE); they are not those of this timm network when "
    "it is given other images, where the last stages never shift, nor those after "
    "set_input_size, which scales the windows"
)

timm_networks.ARCHITECTURES[
    r"swin_(tiny|small|base|large)_patch4_window(7|12)_(224|384)(_in22k)?"
    r"|swinv2_(tiny|small|base|large)_window\d+(to\d+)?_\d+(to\d+)?(_22k|_22kft1k)?"
] = (
    r"img_size|patch_size|in_chans|num_classes|global_pool|embed_dim|depths|num_heads"
    r"|window_size|pretrained_window_sizes|mlp_ratio|qkv_bias|strict_img_size"
    r"|dynamic_img_size" + timm_networks.TRAINING
)
_TIMM_SIZES = {"T": "tiny", "S": "small", "B": "base", "L": "large"}


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in one of the two formats."""
    return set(_NEEDED) <= _backbone(tensors.flat).keys()


def _backbone(flat: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of the network, without the decoder in files of SimMIM."""
    if f"encoder.{_NEEDED[0]}" not in flat:
        return dict(flat)
    return tables.below(flat, "encoder.")


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint; see `registry.Reader`."""
    flat, notes, source = _backbone(tensors.flat), [], tensors.path
    if len(flat) < len(tensors.flat):
        notes.append("decoder: dropped, only used for pretraining")
    if flat.pop("mask_token", None) is not None:
        notes.append("mask token: dropped, only used for pretraining")
    config = tensors.config
    named = "architecture" in config
    in_timm = named or "layers.0.downsample.norm.weight" not in flat
    names = TIMM if in_timm else MICROSOFT
    facts = timm_config.read(config) if named else timm_networks.Facts()
    timm_networks.check_average(facts.pool, "a Swin Transformer", source)
    args = config.get("model_args") or {}
    window = _one_window(args.get("window_size"), source)
    if args.get("dynamic_img_size") or not args.get("strict_img_size", True):
        notes.append(_DYNAMIC_NOTE)
    buffers = {name: flat.pop(name) for name in list(flat) if _BUFFER.search(name)}
    options = options_of(flat, names, source)
    entries = table(options, names)
    tables.check_names(flat, entries, source, network=_NETWORK)
    params = tables.to_our_arrays(flat, entries, source)
    biases = (v for name, v in params.items() if name.endswith("attn/bias_table"))
    windows = {_window(bias) for bias in biases}
    shown = windows in ({7}, {12}) or any(n.endswith(_COORDINATES) for n in buffers)
    if in_timm and not named and not shown:
        raise UserError(
            f"{source}: the window sizes of the stages of this Swin Transformer are "
            f"unknown: {timm_networks.ASK}"
        )
    stages, grown = len(options["stage_depths"]), (0,)
    if options["window_size"]:
        last = _window(params[f"stage_{stages - 1}/block_0/attn/bias_table"])
    else:
        options["window_size"], last, grown, more = _v2_windows(
            buffers, config, stages, window
        )
        notes += more
    patch = options["patch_size"]
    image_size = facts.image_size or (_side(options, buffers, last) * patch,) * 2
    image_size = tuple(side // patch * patch for side in image_size)
    preprocess = timm_config.fit_patches(facts.preprocess, image_size, patch)
    if not in_timm:
        # The value of Microsoft's `config.TEST.CROP`.
        crop = 224 / 256 if max(image_size) < 384 else 1.0
        how = {"interpolation": "bicubic", "crop_fraction": crop}
        preprocess = Preprocess(image_size, **IMAGENET, **how)
    return Pretrained(
        params=unflatten_dict(params, sep="/"),
        options={
            **options,
            "pretrained_window_sizes": grown,
            "window_padding": "timm" if in_timm else "microsoft",
            "bias_resize": "geometric" if in_timm else "bicubic",
            "image_size": image_size,
        },
        format="timm" if in_timm else "microsoft",
        source=source,
        preprocess=preprocess,
        class_names=facts.class_names,
        notes=(*notes, *facts.notes),
    )


def _side(options: Mapping, buffers: Mapping[str, np.ndarray], last: int) -> int:
    """Returns the side of the grid in patches, from masks or the last window."""
    mask = buffers.get("layers.0.blocks.1.attn_mask")  # It has one row per window.
    if mask is not None:
        return options["window_size"] * math.isqrt(len(mask))
    return last * 2 ** (len(options["stage_depths"]) - 1)


def _window(table: np.ndarray) -> int:
    """Returns the side of the windows for a table with one bias per offset."""
    return (math.isqrt(len(table)) + 1) // 2


def options_of(flat: Mapping[str, np.ndarray], names: Names, source: str) -> dict:
    """Returns the options that follow from the shapes; window_size is 0 for V2.

    Raises:
      UserError: an array is missing.
    """

    def find(name):
        if name not in flat:
            raise UserError(
                f"{source}: {name} is missing: give the whole file of {_NETWORK}"
            )
        return flat[name]

    blocks = re.compile(rf"{names.layers}\.(\d+)\.blocks\.(\d+)\.")
    places = [(int(m[1]), int(m[2])) for m in map(blocks.match, flat) if m]
    depths = []
    while inside := [j for i, j in places if i == len(depths)]:
        depths.append(1 + max(inside))
    first = [f"{names.layers}.{i}.blocks.0" for i in range(len(depths))]
    v2 = f"{first[0]}.{names.attention}.logit_scale" in flat
    which = "logit_scale" if v2 else "relative_position_bias_table"
    biases = [find(f"{block}.{names.attention}.{which}") for block in first]
    width, channels, *patch = find(f"{names.embedding}.weight").shape
    mlps = [find(f"{block}.{names.mlp[0]}.weight").shape for block in first]
    ratios = {hidden / features for hidden, features in mlps}
    if len(ratios) > 1 or patch[0] != patch[1]:
        what = f"mlp_ratio={sorted(ratios)}" if len(ratios) > 1 else f"patch {patch}"
        raise UserError(
            f"{source}: {what} is not supported: models of this project have square "
            "patches, and the same MLP ratio in all stages"
        )
    published = (
        size
        for size, numbers in SIZES.items()
        if (numbers.width, numbers.stage_depths) == (width, tuple(depths))
    )
    return {
        "variant": f"Swin{'V2' if v2 else ''}-{next(published, 'T')}",
        "patch_size": patch[0],
        "width": width,
        "stage_depths": tuple(depths),
        "num_heads": tuple(x.shape[0 if v2 else 1] for x in biases),
        "mlp_ratio": ratios.pop(),
        "window_size": 0 if v2 else _window(biases[0]),
        "num_classes": len(flat.get(f"{names.head}.weight", ())),
        "channels": channels,
    }


def _one_window(window_size: int | list | None, source: str) -> int:
    """Returns the side of all windows in config.json; 0 if it has none."""
    sides = set(np.ravel(window_size).tolist()) if window_size is not None else {0}
    if len(sides) > 1:
        raise UserError(
            f"{source}: window_size={window_size!r} in model_args of config.json is not "
            "supported: only square windows of the same size in all stages are"
        )
    return sides.pop()


def _v2_windows(
    buffers: Mapping[str, np.ndarray], config: Mapping, stages: int, window: int
) -> tuple[int, int, tuple[int, ...], list[str]]:
    """Returns V2's first and last window, the windows of pretraining, and notes.

    They follow from the coordinates in Microsoft's files, or from timm's config.json.
    """
    names = (f"layers.{i}.blocks.0.{_COORDINATES}" for i in range(stages))
    coordinates = [buffers.get(name) for name in names]
    if all(table is not None for table in coordinates):
        windows = [(table.shape[1] + 1) // 2 for table in coordinates]
        # The largest coordinate is log8(1 + 8 (window - 1) / (pretrained window - 1)).
        largest = (float(table.max()) for table in coordinates)
        pretrained = tuple(
            round(8 * (w - 1) / (8**x - 1)) + 1 if w > 1 else 0
            for w, x in zip(windows, largest, strict=True)
        )
        grown = (0,) if list(pretrained) == windows else pretrained
        return windows[0], windows[-1], grown, []
    args, name = config.get("model_args") or {}, config.get("architecture", "")
    match = re.search(r"_window(\d+)(?:to(\d+))?_", name)
    notes = []
    if not window and match:
        window = int(match[2] or match[1])
    elif not window:
        window, notes = 8, ["windows: size unknown, assumed 8 patches"]
    # timm's code has these values for windows that were enlarged after pretraining.
    usual = (12, 12, 12, 6) if match and match[2] else (0,)
    pretrained = args.get("pretrained_window_sizes", usual)
    grown = tuple(pretrained) if np.any(pretrained) else (0,)
    return window, window, grown, notes


def table(options: Mapping, names: Names) -> list[ArrayEntry]:
    """Returns the table of a network with these options, in one library's names."""
    v2 = options["variant"].startswith("SwinV2")
    entries = dense(names.embedding, "embedding", CONV)
    entries += norm(names.embedding_norm, "embedding_norm") + norm(names.norm, "norm")
    depths = options["stage_depths"]
    for i, depth in enumerate(depths):
        for j in range(depth):
            name, module = f"{names.layers}.{i}.blocks.{j}", f"stage_{i}/block_{j}"
            entries += norm(f"{name}.{names.norm1}", f"{module}/norm1")
            entries += norm(f"{name}.{names.norm2}", f"{module}/norm2")
            entries += dense(f"{name}.{names.mlp[0]}", f"{module}/mlp/Dense_0")
            entries += dense(f"{name}.{names.mlp[1]}", f"{module}/mlp/Dense_1")
            entries += dense(f"{name}.{names.out}", f"{module}/attn/proj")
            name, module = f"{name}.{names.attention}", f"{module}/attn"
            entries += _v2(name, module, names) if v2 else _v1(name, module)
        if i + 1 < len(depths):
            name = f"{names.layers}.{i + names.merges_first}.downsample"
            reduction = f"{name}.reduction.weight"
            entries.append(ArrayEntry(reduction, (f"stage_{i}/merge/kernel",), LINEAR))
            entries += norm(f"{name}.norm", f"stage_{i}/merge_norm")
    return entries + (dense(names.head, "head") if options["num_classes"] else [])


def _v1(name: str, module: str) -> list[ArrayEntry]:
    """Returns the entries of a V1 attention."""
    table = f"{name}.relative_position_bias_table"
    bias = ArrayEntry(table, (f"{module}/bias_table",), SAME)
    return [bias, *dense(f"{name}.qkv", f"{module}/qkv")]


def _v2(name: str, module: str, names: Names) -> list[ArrayEntry]:
    """Returns the entries of a V2 attention."""
    network = f"{name}.{names.bias_network}"
    return [
        ArrayEntry(f"{name}.logit_scale", (f"{module}/logit_scale",), _FACTOR_HEADS),
        ArrayEntry(f"{name}.qkv.weight", (f"{module}/qkv/kernel",), LINEAR),
        ArrayEntry(f"{name}.q_bias", (f"{module}/q_bias",), SAME),
        ArrayEntry(f"{name}.v_bias", (f"{module}/v_bias",), SAME),
        *dense(f"{network}.0", f"{module}/bias_in"),
        ArrayEntry(f"{network}.2.weight", (f"{module}/bias_out/kernel",), LINEAR),
    ]


def complete(pretrained: Pretrained) -> tuple[SwinConfig, dict]:
    """Returns a network's config, and its options completed from its variant."""
    model = models.create(**pretrained.options)
    config = model.config
    size = config.size
    numbers = {
        "width": size.width,
        "stage_depths": size.stage_depths,
        "num_heads": size.num_heads,
        "window_size": config.window,
    }
    return config, model.options | numbers


def write_timm(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `timm.create_model("local-dir:FOLDER")` loads."""
    config, options = complete(pretrained)
    notes = check_writable(config, "timm")
    sizes = {(s.width, s.stage_depths): _TIMM_SIZES[n] for n, s in SIZES.items()}
    size = sizes.get((options["width"], options["stage_depths"]), "tiny")
    args = {
        "img_size": list(options["image_size"]),
        "patch_size": options["patch_size"],
        "in_chans": options["channels"],
        "window_size": options["window_size"],
        "embed_dim": options["width"],
        "depths": list(options["stage_depths"]),
        "num_heads": list(options["num_heads"]),
        "mlp_ratio": options["mlp_ratio"],
    }
    name = f"swin_{size}_patch4_window7_224"
    if config.v2:
        sizes = pretrained_windows(config)
        args["pretrained_window_sizes"] = list(sizes)
        name = "swinv2_tiny_window8_256"
        if size != "tiny":
            name = f"swinv2_{'base' if size == 'large' else size}_window8_256"
    architecture = timm_config.Architecture(
        name=name,
        args=args,
        num_features=options["width"] * 2 ** (len(options["stage_depths"]) - 1),
        classifier="head.fc",
    )
    arrays = _to_their_arrays(pretrained, options, TIMM)
    return notes + timm.write_folder(folder, arrays, architecture, options, pretrained)


def write_microsoft(pretrained: Pretrained, path: str | os.PathLike) -> list[str]:
    """Writes a file that microsoft/Swin-Transformer loads, with the arrays in "model"."""
    if not pretrained.options["variant"].startswith("Swin"):
        raise UserError(
            f"variant={pretrained.options['variant']!r}: Microsoft's files are for Swin "
            "Transformers only: write it with --to=timm or --to=safetensors"
        )
    config, options = complete(pretrained)
    notes = check_writable(config, "microsoft")
    notes.append(
        "class names, preprocessing, loss: the format has no place for them, nor for "
        "image size and windows, which the configs of microsoft/Swin-Transformer set"
    )
    torch_file.write(path, {"model": _to_their_arrays(pretrained, options, MICROSOFT)})
    return notes


def _to_their_arrays(
    pretrained: Pretrained, options: Mapping, names: Names
) -> dict[str, np.ndarray]:
    flat = flatten_dict(pretrained.params, sep="/")
    return tables.to_their_arrays(flat, table(options, names))


def pretrained_windows(config: SwinConfig) -> tuple[int, ...]:
    """Returns V2's windows during pretraining, one for each stage."""
    sizes = config.pretrained_window_sizes
    return sizes * len(config.size.stage_depths) if len(sizes) == 1 else sizes


def check_writable(config: SwinConfig, library: str) -> list[str]:
    """Returns notes on differences between a network and a library's version of it.

    Raises:
      UserError: the library has no network with this activation or epsilon.
    """
    values = {
        "layer_norm_eps": (config.layer_norm_eps, 1e-5, "--to=hf or --to=safetensors"),
        "activation": (config.activation, "gelu", "--to=hf or --to=safetensors"),
        "patch_norm_eps": (config.epsilon_of_patches, 1e-5, "--to=safetensors"),
    }
    for name, (value, supported, others) in values.items():
        if value != supported and (
            library != "transformers" or name == "patch_norm_eps"
        ):
            raise UserError(
                f"model.{name}={value!r}: Swin Transformers of {library} have "
                f"{supported!r}: write it with {others}"
            )
    if config.window_padding == library:
        return []
    note = (
        f"window_padding: {config.window_padding} replaced by {library}; logits differ if "
        "windows do not divide the grid, or if the grid is not larger than a window"
    )
    return [note]


READERS["Swin"] = Reader(recognises, read)
WRITERS["timm"].networks[SwinConfig] = write_timm
WRITERS["microsoft"] = Writer(
    write_microsoft, suffix=".pth", networks={SwinConfig: write_microsoft}
)
