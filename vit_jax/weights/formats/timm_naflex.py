"""timm's NaFlexVit, which reads images of any size as patches (models/patches.py).

It has the layers of timm's VisionTransformer, but other names for the embeddings: the
reader renames arrays and arguments to VisionTransformer's, and the writer renames them
back. Its prefix tokens have no positions. Letters: Y and X rows and columns of
positions, P side of a patch, C channels, D model width.
"""

import dataclasses
import os
import re
from collections.abc import Mapping

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.data.transforms.base import pair
from vit_jax.errors import UserError
from vit_jax.models import layers
from vit_jax.weights import rewriting
from vit_jax.weights.formats import tables, timm, timm_config, timm_networks
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.pretrained import POSITIONS, Pretrained

_FIRST = "embeds.proj"
_PATCHES = f"{_FIRST}.weight"
_TOKENS = ("cls_token", "reg_token", "pos_embed")
_NAMES = (
    r"naflexvit_(base|so150m2)_patch16_(reg1_)?((par_|parfac_)?gap|map)"
    r"|naflexvit_(base|so400m)_patch16_siglip"
    r"|naflexvit_(base|large|so400m|huge|giant)_patch16_radio_v[34]"
)
_FACTORS = {"row": "embeds.pos_embed_y", "column": "embeds.pos_embed_x"}
# Arguments whose values in functions of timm 1.0.31's naflexvit.py differ from
# NaFlexVitCfg.
_BY_NAME = (
    (r"\w+_gap", {"global_pool": "avg"}),
    (r"\w+_siglip", {"act_layer": "gelu_tanh", "pos_embed_interp_mode": "bilinear"}),
    (r"\w+_so150m2_\w+", {"num_heads": 13}),
    (r"\w+_(par|parfac)_gap|\w+_radio_v\d", {"pos_embed_ar_preserving": True}),
    (r"\w+_parfac_gap", {"pos_embed": "factorized"}),
    (r"\w+_radio_v\d", {"pos_embed_interp_mode": "bilinear"}),
    (r"\w+_radio_v\d", {"pos_embed_antialias": False, "final_norm": False}),
    (r"\w+_radio_v\d", {"global_pool": "token", "class_token": True}),
    (r"\w+_(base|huge)_\w+_radio_v3", {"pos_embed_align_corners": True}),
    (r"\w+_giant_\w+", {"num_heads": 24}),
)
# Resizing by `model.posemb_resize`: mode, antialiasing, align_corners, keeping the
# aspect.
_RESIZES = {
    f"{name}{'_square' * square}": (*resize, square)
    for square in (False, True)
    for name, resize in {
        "bicubic": ("bicubic", True, False),
        "bilinear": ("bilinear", True, False),
        "bicubic_plain": ("bicubic", False, False),
        "bilinear_plain": ("bilinear", False, False),
        "linear": ("bilinear", False, True),
    }.items()
}
_RESIZE = tuple(
    f"pos_embed_{name}"
    for name in ("interp_mode", "antialias", "align_corners", "ar_preserving")
)
# Arguments that VisionTransformer does not have, with their supported values.
_SUPPORTED = {
    "pos_embed_use_grid_sample": (False,),
    "rope_type": ("", "none"),
    "attn_type": ("standard",),
    "patchify_channels_last": (True, False),
    "use_naflex": (True, False),
    **dict.fromkeys(("attn_gated", "swiglu_mlp", "attn_only_layer_scale"), (False,)),
}
# Arguments that `timm` reads, that arrays show, or that do not affect outputs.
timm_networks.ARCHITECTURES[_NAMES] = (
    r"num_heads|init_values|act_layer|global_pool|pool_include_prefix|pre_norm|final_norm"
    r"|pos_embed|img_size|patch_size|in_chans|num_classes|embed_dim|depth|mlp_ratio|qk_norm"
    r"|\w+_bias|scale_\w+_norm|class_token|reg_tokens|fc_norm|pos_embed_grid_size|rope_\w+"
    r"|embed_proj_type|swiglu_align_to|qkv_fused|use_key_only_attn_mask|dynamic_img_pad"
    r"|fix_init|enable_patch_interpolator" + timm_networks.TRAINING
)
_HAS = {
    "pool": tuple(timm_config.POOLS.values()),
    "activation": tuple(layers.ACTIVATIONS),
    # Other kinds are not resized.
    "posemb": ("learned", "learned2d", "factorized", "none"),
    "posemb_resize": tuple(_RESIZES),
    "layer_norm_eps": (1e-6,),
    "num_register_tokens": range(1_000),
    **dict.fromkeys(("pre_norm", "final_norm", "qk_norm"), (False, True)),
    **dict.fromkeys(("attention_out_norm", "mlp_norm"), (False, True)),
}
# The architecture without LayerScale, which no argument can remove.
_WRITTEN = "naflexvit_base_patch16_siglip"


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    names = tensors.flat.keys()
    return _PATCHES in names and any(name.startswith("blocks.0.") for name in names)


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint; see `registry.Reader`.

    Raises:
      UserError: this project does not support the network, or it is not identified.
    """
    config, flat = tensors.config, tensors.flat
    if "architecture" not in config:
        raise UserError(
            f"{tensors.path}: {_PATCHES} belongs to a NaFlexVit of timm that parameters "
            f"do not identify: {timm_networks.ASK}"
        )
    values = _values(config)
    resize = _check(config, values)
    side = _patch_size(config, values, flat[_PATCHES], tensors.path)
    args = {k: v for k, v in values.items() if k not in {*_SUPPORTED, *_RESIZE}}
    factors = {key: flat[name][0] for key, name in _FACTORS.items() if name in flat}
    grid = [len(factor) for factor in factors.values()]
    if "embeds.pos_embed" in flat:
        grid = flat["embeds.pos_embed"].shape[1:3]
    if grid:
        args["img_size"] = [count * side for count in grid]
    if factors:
        args["pos_embed"] = "none"  # `timm.read` must not look for a position table.
    as_vit = config | {"model_args": args, timm_config.RESIZE_KEY: resize}
    pretrained = timm.read(
        dataclasses.replace(
            tensors,
            flat=_to_plain(flat, side, values.get("patchify_channels_last", True)),
            sidecars=tensors.sidecars | {"config.json": as_vit},
        ),
        num_heads,
    )
    if factors:
        pretrained = _add_factors(
            pretrained, factors, values["pos_embed_ar_preserving"]
        )
    if pretrained.preprocess is None:
        return pretrained
    # timm resizes images to this size, whatever the grid of positions is.
    images = config.get("pretrained_cfg") or config
    size = images.get("input_size", (3, *pretrained.preprocess.image_size))[1:]
    size = tuple(pixels // side * side for pixels in size)
    preprocess = dataclasses.replace(pretrained.preprocess, image_size=size, cut=(0, 0))
    return dataclasses.replace(pretrained, preprocess=preprocess)


def _add_factors(
    pretrained: Pretrained, factors: Mapping[str, np.ndarray], square: bool
) -> Pretrained:
    """Returns a checkpoint with factorized positions, (Y, D) and (X, D), added.

    Raises:
      UserError: the positions keep the aspect ratio, and Y and X differ.
    """
    if square and len({len(factor) for factor in factors.values()}) > 1:
        raise UserError(
            f"{pretrained.source}: pos_embed_ar_preserving=True with "
            f"{' and '.join(str(len(f)) for f in factors.values())} factorized positions, "
            "which timm resizes even at their own grid: give weights with a square grid"
        )
    flat = flatten_dict(pretrained.params, sep="/")
    for key, factor in factors.items():
        name = POSITIONS.replace("pos_emb", f"{key}_emb")
        flat[name] = factor.astype(np.float32, copy=False)
    resize = "bilinear_plain_square" if square else "bilinear_plain"
    more = {"posemb": "factorized", "posemb_resize": resize}
    return dataclasses.replace(
        pretrained,
        params=unflatten_dict(flat, sep="/"),
        options=pretrained.options | more,
    )


def _values(config: Mapping) -> dict:
    """Returns the arguments in config.json, and those set by the architecture's name."""
    name, args = timm_networks.architecture_of(config), config.get("model_args") or {}
    values = dict(zip(_RESIZE, _RESIZES["bicubic"], strict=True))
    if re.fullmatch(_NAMES, name):
        values["global_pool"] = "map"
        for pattern, more in _BY_NAME:
            values |= more if re.fullmatch(pattern, name) else {}
        values["global_pool"] = config.get("global_pool", values["global_pool"])
    return values | {key: value for key, value in args.items() if value is not None}


def _check(config: Mapping, values: Mapping) -> str:
    """Returns `model.posemb_resize`; raises UserError if no model here is equal."""
    resize = {key: values[key] for key in _RESIZE}
    positions = ("learned", "learn", "factorized", "none", "")
    known = _SUPPORTED | {"pos_embed": positions}
    wrong = {k: v for k, v in values.items() if v not in known.get(k, (v,))}
    methods = [
        method for method, they in _RESIZES.items() if they == (*resize.values(),)
    ]
    if wrong or not methods:
        shown = (f"{key}={value!r}" for key, value in (wrong or resize).items())
        where = f"architecture={timm_networks.architecture_of(config)!r}"
        raise timm_networks.unsupported_error(where, f"{', '.join(shown)} is")
    return methods[0]


def _patch_size(
    config: Mapping, values: Mapping, weight: np.ndarray, source: str
) -> int:
    """Returns the side of a patch in pixels, which a dense layer does not determine."""
    named = re.search(r"_patch(\d+)", config["architecture"])
    side = values.get("patch_size") or (int(named[1]) if named else 16)
    down, across = pair(side) if weight.ndim == 2 else weight.shape[2:]
    if down != across or weight.shape[1] % (down * across if weight.ndim == 2 else 1):
        raise UserError(
            f"{source}: patch_size={side} in config.json, but {_PATCHES} has shape "
            f"{weight.shape}, which does not fit square patches with that side"
        )
    return down


def _to_plain(
    flat: Mapping[str, np.ndarray], side: int, channels_last: bool
) -> dict[str, np.ndarray]:
    """Renames the arrays to those of VisionTransformer."""
    plain = {}
    for name, value in flat.items():
        if name in _FACTORS.values():
            continue
        if name == _PATCHES and value.ndim == 2 and channels_last:
            value = tables.dense_to_conv(value, side)
        elif name == _PATCHES:
            value = value.reshape(len(value), -1, side, side)
        elif name == "embeds.pos_embed":
            value = value.reshape(1, -1, value.shape[-1])
        name = re.sub(rf"^embeds\.({'|'.join(_TOKENS)})$", r"\1", name)
        plain[re.sub(r"^embeds\.", "patch_embed.", name)] = value
    return plain


def _from_plain(
    arrays: Mapping[str, np.ndarray], grid: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Renames the arrays of VisionTransformer to NaFlexVit's."""
    renamed = {}
    for name, value in arrays.items():
        if name == "patch_embed.proj.weight":
            value = tables.conv_to_dense(value)
        elif name == "pos_embed":
            value = value.reshape(1, *grid, -1)
        name = name.replace("patch_embed.", "embeds.")
        name = f"embeds.{name}" if name in _TOKENS else name
        renamed[name] = value
    return renamed


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `timm.create_model("local-dir:FOLDER")` loads as a NaFlexVit.

    Raises:
      UserError: timm does not have the network.
    """
    model = models.create(**pretrained.options)
    options = {"stage_depths": (), "stem_width": 0, **model.options}
    options["patch"] = model.config.patch_size
    rewriting.check_network(options, "the writer of timm's NaFlexVit", _HAS)
    flat = flatten_dict(pretrained.params, sep="/")
    notes = rewriting.norm_every_token(flat, options)
    notes += rewriting.learn_positions(flat, options, model.grid)
    if POSITIONS in flat and "cls" in flat:
        token, flat[POSITIONS] = np.split(np.asarray(flat[POSITIONS]), [1], axis=1)
        flat["cls"] = flat["cls"] + token
        notes.append("position of the class token: added to the token")
    if options["pre_norm"]:
        notes += rewriting.fold_patch_bias(flat, options, num_prefix_tokens=0)
    arrays = tables.to_their_arrays(flat, timm.transformer_table(options))
    if options["pre_norm"]:
        del arrays["patch_embed.proj.bias"]
    architecture = timm_config.Architecture(
        _WRITTEN,
        _arguments(options, model.grid),
        options["width"],
        _FIRST,
        "head",
        False,
    )
    if pretrained.preprocess:
        options["image_size"] = pretrained.preprocess.image_size
    arrays = _from_plain(arrays, model.grid)
    return notes + timm.write_folder(folder, arrays, architecture, options, pretrained)


def _arguments(options: Mapping, grid: tuple[int, int]) -> dict:
    """Returns the arguments of timm's function."""
    pools = {pool: timm_pool for timm_pool, pool in timm_config.POOLS.items()}
    return {
        "patch_size": options["patch"],
        "in_chans": options["channels"],
        "embed_dim": options["width"],
        "depth": options["depth"],
        "num_heads": options["num_heads"],
        "mlp_ratio": timm_config.mlp_ratio(options["mlp_dim"], options["width"]),
        "act_layer": options["activation"],
        "init_values": options["layer_scale_init"] or None,
        "class_token": options["pool"] == "token" or options["class_token"],
        "reg_tokens": options["num_register_tokens"],
        "pos_embed": options["posemb"],
        "pos_embed_grid_size": list(grid),
        **dict(zip(_RESIZE, _RESIZES[options["posemb_resize"]], strict=True)),
        "pre_norm": options["pre_norm"],
        "final_norm": options["final_norm"],
        "fc_norm": options["fc_norm"],
        "qk_norm": options["qk_norm"],
        "scale_attn_inner_norm": options["attention_out_norm"],
        "scale_mlp_norm": options["mlp_norm"],
        "global_pool": pools[options["pool"]],
        # This project pools all tokens with "map", and the patches with "gap".
        "pool_include_prefix": options["pool"] == "map",
    }


READERS["timm NaFlexVit"] = Reader(recognises, read)
WRITERS["timm_naflex"] = Writer(write, usage=WRITERS["timm"].usage, library="timm")
