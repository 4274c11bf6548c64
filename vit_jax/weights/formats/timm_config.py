"""Reads and writes timm's `config.json`; timm_networks.py knows the names in it."""

import dataclasses
import math
import operator
import re
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.data.preprocess import Preprocess, per_channel
from vit_jax.data.transforms.base import pair
from vit_jax.data.transforms.host import PILLOW
from vit_jax.errors import UserError
from vit_jax.models import layers, positions
from vit_jax.weights import rewriting
from vit_jax.weights.formats import timm_networks
from vit_jax.weights.formats.timm_networks import Facts
from vit_jax.weights.pretrained import IMAGENET

_SIZE_NAMES = {
    192: ("tiny", (16,)),
    384: ("small", (8, 16, 32)),
    768: ("base", (8, 16, 32)),
    1024: ("large", (14, 16, 32)),
    1280: ("huge", (14,)),
    1408: ("giant", (14,)),
    1664: ("gigantic", (14,)),
}
# timm's hybrids by units per stage; the encoder may have any width.
_HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}

# Key of config.json for `model.posemb_resize`; timm ignores it.
RESIZE_KEY = "posemb_resize"

# Norms that timm's VisionTransformer can be given as an argument.
_NORMS = {
    "pre_norm": "pre_norm",
    "qk_norm": "qk_norm",
    "attention_out_norm": "scale_attn_norm",
    "mlp_norm": "scale_mlp_norm",
}
_MAYBE = (False, True)
_INNER_NORMS = dict.fromkeys(("qk_norm", "attention_out_norm", "mlp_norm"), _MAYBE)
# For each class in timm, its name in messages and supported values of further options.
_HAS = {
    "vit": (
        "timm",
        dict.fromkeys(("distillation", "pre_norm", "post_norm", "final_norm"), _MAYBE)
        | {"num_register_tokens": range(1_000), "stem_width": range(2**31)}
        | _INNER_NORMS,
    ),
    "eva": (
        "timm's Eva, which has rotary positions and norms in gated MLPs,",
        _INNER_NORMS
        | {
            "num_register_tokens": range(1_000),
            "rope": tuple(positions.ROTARY),
            "layer_norm_eps": (1e-6, 1e-5),
            "pool": ("token", "gap", "none"),
            "activation": ("gelu", "swiglu"),
        },
    ),
    "beit": (
        "timm's Beit, which has biases of attention by offset,",
        {
            "relative_bias": ("every", "shared"),
            "layer_norm_eps": (1e-6,),
            "pool": ("token", "gap", "none"),
            "activation": ("gelu",),
        },
    ),
}

# Values of `model.pool` by timm's global_pool.
POOLS = {"token": "token", "avg": "gap", "map": "map", "": "none"}

# Keys of the preprocessing; timm has a default for each of them.
_IMAGES = ("input_size", "crop_pct", "crop_mode", "interpolation", "mean", "std")


def read(config: Mapping) -> Facts:
    """Returns the facts in config.json, with timm's defaults for missing ones.

    Raises:
      UserError: the network has a feature that no model here supports.
    """
    if "architecture" not in config:
        note = (
            "config.json: not timm's, assumed a plain network, exact GELU, epsilon 1e-6"
        )
        return Facts(notes=(note,))
    timm_networks.check_config(config)
    name, args = timm_networks.architecture_of(config), config.get("model_args") or {}
    default = timm_networks.find(name)
    # Older files are not nested; in both forms, null means the default, as in timm.
    nested = config.get("pretrained_cfg")
    images = config if nested is None else nested
    images = {key: value for key, value in images.items() if value is not None}
    activation = args.get("act_layer") or default.activation
    if activation not in layers.ACTIVATIONS:
        raise UserError(
            f"act_layer={activation!r} in the config.json of {name} is not one of "
            f"{', '.join(layers.ACTIVATIONS)}, which models of this project support"
        )
    num_heads = args.get("num_heads")
    if not num_heads or isinstance(num_heads, list):  # Swin has one number per stage.
        num_heads = default.num_heads
    sides = re.findall(r"(?:_|to)(\d{3})(?=_|$)", name)
    size = (int(sides[-1]),) * 2 if sides else default.image_size or (0, 0)
    size = args.get("img_size") or images.get("input_size", (3, *size))[1:]
    size = pair(size) if np.all(size) else None
    preprocess, notes = None, []
    if nested is not None or images.keys() & _IMAGES:
        preprocess, notes = _preprocess(images, size or (224, 224))
    resize = default.posemb_resize
    if (images.get("tag") or config["architecture"].partition(".")[2]) == "dino":
        resize = "bicubic_dino"  # timm itself resizes them differently.
    return dataclasses.replace(
        default,
        layer_scale_init=float(args.get("init_values") or 1.0),
        posemb_resize=config.get(RESIZE_KEY, resize),  # Only this project writes it.
        num_heads=num_heads,
        activation=activation,
        pool=args.get("global_pool", config.get("global_pool", default.pool)),
        pools_prefix=bool(args.get("pool_include_prefix", default.pools_prefix)),
        positions=args.get("pos_embed", "learn") not in ("", "none")
        and bool(args.get("use_abs_pos_emb", default.positions)),
        rotary=timm_networks.read_rotary(args, default.rotary),
        post_norm=bool(args.get("use_post_norm", default.post_norm)),
        pre_norm=bool(args.get("pre_norm", default.pre_norm)),
        final_norm=bool(args.get("final_norm", default.final_norm)),
        image_size=size,
        preprocess=preprocess,
        class_names=_class_names(config, images),
        notes=tuple(notes),
    )


def fit_patches(
    preprocess: Preprocess | None, image_size: tuple[int, int], patch: int
) -> Preprocess | None:
    """Returns a preprocessing for the image size of the parameters.

    The first layer drops the pixels at the end that do not fill a patch of side
    `patch`.
    """
    if preprocess is None:
        return None
    cut = tuple(map(operator.sub, preprocess.image_size, image_size))
    if not all(0 <= pixels < patch for pixels in cut):  # Meant for other parameters.
        cut = (0, 0)
    return dataclasses.replace(preprocess, image_size=image_size, cut=cut)


def _preprocess(images: Mapping, size: tuple[int, int]) -> tuple[Preprocess, list[str]]:
    notes = []
    mode, crop = images.get("crop_mode", "center"), images.get("crop_pct", 0.875)
    if mode not in ("center", "squash", "border"):
        notes.append(f"crop_mode {mode}: unknown, assumed center")
    how = images.get("interpolation", "bicubic")
    if how not in PILLOW:
        notes.append(f"interpolation {how}: unknown, assumed bicubic")
        how = "bicubic"
    mean, std = (tuple(images.get(name, IMAGENET[name])) for name in ("mean", "std"))
    preprocess = Preprocess(
        image_size=size,
        mean=mean,
        std=std,
        interpolation=how,
        crop_fraction=float(crop),
        squash=mode == "squash",
        fill=_fill(mean) if mode == "border" else (),
    )
    # timm rounds 224 / (224 / 232) down to 231; `resize_sides` does not.
    if preprocess.resize_sides != tuple(math.floor(side / crop) for side in size):
        preprocess = dataclasses.replace(preprocess, crop_fraction=crop * (1 + 2e-12))
    return preprocess, notes


def _fill(mean: Sequence) -> tuple[int, ...]:
    """Returns the colour of the border in timm's crop mode "border"."""
    return tuple(round(255 * value) for value in mean)


def _class_names(config: Mapping, images: Mapping) -> tuple[str, ...]:
    both = {**images, **config}
    names = both.get("label_names") or both.get("labels") or ()
    if isinstance(names, Mapping):  # From label to name.
        if set(names) != set(map(str, range(len(names)))):
            return ()
        names = [names[str(i)] for i in range(len(names))]
    descriptions = both.get("label_descriptions") or {}
    return tuple(descriptions.get(name, name) for name in names)


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A network as described by config.json.

    Attributes:
      name: timm's name of the architecture.
      args: arguments of the timm function with that name.
      num_features: width of the features before the classifier.
      first_conv: name of the first layer.
      classifier: name of the last layer, or a list of names.
      fixed_input_size: whether the parameters are for one image size only.
    """

    name: str
    args: dict
    num_features: int
    first_conv: str = "patch_embed.proj"
    classifier: str | list[str] = "head"
    fixed_input_size: bool = True


def write(
    architecture: Architecture,
    options: Mapping,
    preprocess: Preprocess | None,
    class_names: Sequence[str],
) -> dict:
    """Returns the content of config.json.

    Raises:
      UserError: timm does not support the preprocessing.
    """
    num_classes = options["num_classes"]
    size = [options["channels"], *options["image_size"]]
    images = {
        "tag": "vit_jax",
        "custom_load": False,
        "input_size": size,
        "num_classes": num_classes,
        "pool_size": None,
        "fixed_input_size": architecture.fixed_input_size,
        "first_conv": architecture.first_conv,
        "classifier": architecture.classifier,
    }
    if preprocess:
        if preprocess.fill not in ((), _fill(preprocess.mean)):
            raise UserError(
                f"fill={preprocess.fill}: timm's border has the mean colour, "
                f"{_fill(preprocess.mean)}; write it with --to=safetensors"
            )
        mode = "squash" if preprocess.squash else "center"
        images |= {
            "interpolation": preprocess.interpolation,
            "crop_pct": _crop(preprocess),
            "crop_mode": "border" if preprocess.fill else mode,
            "mean": per_channel(preprocess.mean, size[0]),
            "std": per_channel(preprocess.std, size[0]),
        }
    config = {
        "architecture": architecture.name,
        "num_classes": num_classes,
        "num_features": architecture.num_features,
        "global_pool": architecture.args.get("global_pool", "avg"),
        "model_args": architecture.args,
        "pretrained_cfg": images,
    }
    if class_names:
        config["label_names"] = list(class_names)
    if options.get("posemb") == "learned":
        config[RESIZE_KEY] = options["posemb_resize"]
    return config


def _crop(preprocess: Preprocess) -> float:
    """Returns a crop fraction, adjusted so that timm computes the same sizes."""
    fraction, sides = preprocess.crop_fraction, preprocess.crop_sides
    if preprocess.short_side and sides[0] != sides[1]:
        raise UserError(
            f"a centre crop of {sides[0]}x{sides[1]} of images resized by their "
            "short side: timm resizes to the aspect of the crop; "
            "write it with --to=hf or --to=safetensors"
        )
    resized = preprocess.resize_sides
    # timm rounds 224 / (224 / 232) down, which can give 231.
    while tuple(math.floor(side / fraction) for side in sides) != resized:
        fraction = math.nextafter(fraction, 0)
    return fraction


def choose_architecture(options: Mapping) -> Architecture:
    """Returns timm's architecture for a network's complete options, with "patch".

    Raises:
      UserError: timm does not have the architecture.
    """
    if "depth" not in options:
        return _choose_resnet(options)
    gated, kind = options["activation"] == "swiglu", "vit"
    if options["relative_bias"] != "none":
        kind = "beit"
    elif options["rope"] != "none" or (gated and options["mlp_norm"]):
        kind = "eva"
    rewriting.check_network(options, *_HAS[kind], to="--to=safetensors")
    choose = {"vit": _choose_vit, "eva": _choose_eva, "beit": _choose_beit}[kind]
    name, args = choose(options)
    first = "patch_embed.proj"
    if options["stem_width"]:
        stem = "stem." if options["stage_depths"] else ""
        first = f"patch_embed.backbone.{stem}conv"
    heads = ["head", "head_dist"] if options["distillation"] else "head"
    return Architecture(name, args, options["width"], first, heads)


def _choose_vit(options: Mapping) -> tuple[str, dict]:
    gated, name = options["activation"] == "swiglu", _vit_name(options)
    args = _sizes(options, options["mlp_dim"] * (1 + gated)) | {
        "class_token": options["pool"] == "token" or options["class_token"],
        "fc_norm": options["fc_norm"],
        "pos_embed": "none" if options["posemb"] == "none" else "learn",
    }
    args |= {arg: True for option, arg in _NORMS.items() if options[option]}
    if not options["final_norm"]:
        args["final_norm"] = False
    if not gated:
        args["act_layer"] = options["activation"]
    if options["layer_scale_init"] or name.endswith("dinov2"):
        args["init_values"] = options["layer_scale_init"] or None
    if options["num_register_tokens"]:
        # Registers get zeros as positions, which leaves the other positions unchanged.
        args |= {"reg_tokens": options["num_register_tokens"], "no_embed_class": False}
    if options["pool"] == "map":
        args["pool_include_prefix"] = True
    if options["layer_norm_eps"] == 1e-5:
        args["pre_norm"] = options["pre_norm"]
    return name, args


def mlp_ratio(hidden: int, width: int) -> float:
    """Returns the ratio that gives `hidden` units; timm truncates the product."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def _sizes(options: Mapping, mlp_dim: int) -> dict:
    """Returns the arguments that all of timm's classes have."""
    return {
        "img_size": list(options["image_size"]),
        "patch_size": options["patch"],
        "in_chans": options["channels"],
        "embed_dim": options["width"],
        "depth": options["depth"],
        "num_heads": options["num_heads"],
        "mlp_ratio": mlp_ratio(mlp_dim, options["width"]),
        "qkv_bias": True,
        "global_pool": next(k for k, pool in POOLS.items() if pool == options["pool"]),
    }


def _choose_eva(options: Mapping) -> tuple[str, dict]:
    gated = options["activation"] == "swiglu"
    # Gates are a separate layer; the norm is applied to the product.
    args = _sizes(options, options["mlp_dim"]) | {
        "attn_type": "rope",
        "qkv_fused": True,
        "class_token": options["pool"] == "token" or options["class_token"],
        "use_fc_norm": options["fc_norm"],
        "use_abs_pos_emb": options["posemb"] != "none",
        "num_reg_tokens": options["num_register_tokens"],
        "init_values": options["layer_scale_init"] or None,
        "swiglu_mlp": gated,
        "scale_mlp": options["mlp_norm"],
        "scale_attn_inner": options["attention_out_norm"],
        "qk_norm": options["qk_norm"],
        "use_rot_pos_emb": options["rope"] != "none",
    }
    if gated and not options["mlp_norm"]:
        args["swiglu_align_to"] = 1  # Allows any number of units.
    if options["rope"] != "none":
        names = {
            rope: rope_type for rope_type, rope in timm_networks.ROPE_TYPES.items()
        }
        reference = options["rope_reference"] or None
        args |= {
            "rope_type": names[options["rope"]],
            "rope_temperature": options["rope_temperature"],
            "rope_rotate_half": options["rope"] != "mixed",
            "rope_grid_indexing": "ij",
            "ref_feat_shape": reference and [reference] * 2,
        }
    odd = options["layer_norm_eps"] == 1e-5
    return "vit_base_patch16_dinov3" if odd else "eva02_base_patch14_224", args


def _choose_beit(options: Mapping) -> tuple[str, dict]:
    if options["pool"] != "token" and not options["class_token"]:
        raise UserError(
            "class_token=False: timm's Beit always has a class token: write it with "
            "--to=safetensors"
        )
    return "beit_base_patch16_224", _sizes(options, options["mlp_dim"]) | {
        "use_fc_norm": options["fc_norm"],
        "use_abs_pos_emb": options["posemb"] != "none",
        "init_values": options["layer_scale_init"] or None,
        "use_rel_pos_bias": options["relative_bias"] == "every",
        "use_shared_rel_pos_bias": options["relative_bias"] == "shared",
    }


def _vit_name(options: Mapping) -> str:
    """Returns timm's name of an encoder or hybrid."""
    size, patches = _SIZE_NAMES.get(options["width"], ("", ()))
    epsilon, patch = options["layer_norm_eps"], options["patch"]
    stem, depths = options["stem_width"], options["stage_depths"]
    odd, distilled = epsilon != 1e-6, options["distillation"]
    gated = options["activation"] == "swiglu"
    other = "write it with --to=safetensors"
    if gated and (odd or stem or distilled):
        raise UserError(
            "activation='swiglu': timm has gated MLPs only in plain encoders with "
            f"layer_norm_eps=1e-6: {other}"
        )
    if distilled and options["num_register_tokens"]:
        raise UserError(
            "distillation=True: timm has no networks with both a distillation token and "
            f"register tokens: {other}"
        )
    if stem and (depths not in _HYBRIDS or stem != 64 or odd):
        raise UserError(
            f"timm has no hybrid with stage_depths={depths}, stem_width={stem} and "
            f"layer_norm_eps={epsilon}: write it with --to=google or --to=safetensors"
        )
    if stem:
        return _HYBRIDS[depths]
    if odd and (epsilon != 1e-5 or distilled):
        raise UserError(
            f"layer_norm_eps={epsilon}: timm's config.json has only 1e-6, and 1e-5 "
            "without distillation: write it with --to=hf"
        )
    if distilled:
        size = size if size in ("tiny", "small") else "base"
        return f"deit_{size}_distilled_patch16_224"
    if gated:  # timm's only plain encoder with gated MLPs.
        return "vit_giant_patch14_dinov2"
    if options["post_norm"] and (odd or options["layer_scale_init"]):
        raise UserError(
            "post_norm=True: timm has it only with layer_norm_eps=1e-6, without "
            f"LayerScale and without distillation: {other}"
        )
    if options["post_norm"]:
        return "vit_base_patch16_rpn_224"
    if odd:  # An argument can switch off its first norm.
        return "vit_base_patch16_clip_224"
    if patch in patches:
        return f"vit_{size}_patch{patch}_224"
    return "vit_base_patch16_224"


def _choose_resnet(options: Mapping) -> Architecture:
    layers = {(3, 4, 6, 3): 50, (3, 4, 23, 3): 101, (3, 8, 36, 3): 152}
    blocks, stem_width = options["stage_depths"], options["stem_width"]
    if blocks not in layers:
        raise UserError(
            f"timm has no BiT ResNet with stage_depths={blocks}, only with "
            f"{', '.join(map(str, layers))}: write it with --to=google or "
            "--to=safetensors"
        )
    factor = 2 if layers[blocks] == 152 else 1
    args = {"in_chans": options["channels"]}
    if stem_width != 64 * factor:
        # timm multiplies by the factor in the architecture's name.
        args["stem_chs"] = stem_width // factor
        args["channels"] = [stem_width * 4 * 2**i // factor for i in range(4)]
    name = f"resnetv2_{layers[blocks]}x{factor}_bit"
    return Architecture(name, args, stem_width * 32, "stem.conv", "head.fc", False)
