"""timm's `config.json`: what a network's arrays do not tell."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from vit_jax.errors import UserError
from vit_jax.weights.pretrained import Preprocess


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a config says; the defaults are what holds without one.

    Attributes:
      heads: attention heads; 0 where nothing says so.
      gelu: "tanh" or "erf".
      epsilon: of the LayerNorms.
      pool: timm's global_pool; None where nothing says so.
      pools_prefix: whether the class token is pooled with the patches.
      image_size: height and width, or None.
      preprocess: how images are prepared, or None.
      class_names: in label order.
      notes: what could not be taken over.
    """

    heads: int = 0
    gelu: str = "erf"
    epsilon: float = 1e-6
    pool: str | None = None
    pools_prefix: bool = False
    image_size: tuple[int, int] | None = None
    preprocess: Preprocess | None = None
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# Architectures whose numbers are in timm's code alone (timm 1.0.31): by the name.
_HEADS = (
    (r"^vit_base_patch16_gap_224", 16),
    (r"_(huge|giant|gigantic|giantopt|so400m)_", 16),
    (r"^test_vit", 2),
)
_TANH = (
    r"^vit_(base_patch32|so400m_patch16|giantopt_patch16)_siglip_"
    r"|^vit_large_patch16_siglip_(gap_)?512"
)
_EPSILON_5 = r"_clip_|^beit3_"
_ACTIVATIONS = {"gelu": "erf", "gelu_tanh": "tanh"}
_INTERPOLATIONS = {
    "nearest": "nearest",
    "bilinear": "bilinear",
    "bicubic": "bicubic",
    "lanczos": "lanczos",
    "box": "area",
}


def read(config: Mapping) -> Facts:
    """Reads a config.

    Args:
      config: content of config.json; empty if there is none.

    Raises:
      UserError: a feature that no model here has.
    """
    if "architecture" not in config:
        return Facts()
    name, args = config["architecture"], config.get("model_args") or {}
    # Older files have one level.
    images = config.get("pretrained_cfg") or config
    heads = (n for pattern, n in _HEADS if re.search(pattern, name))
    activation = args.get("act_layer") or (
        "gelu_tanh" if re.search(_TANH, name) else "gelu"
    )
    if activation not in _ACTIVATIONS:
        raise UserError(
            f"act_layer={activation!r} in the config.json of {name} is not one of "
            f"{', '.join(_ACTIVATIONS)}, which models of this project have"
        )
    notes = []
    size = images.get("input_size", (3, 224, 224))[1:]
    return Facts(
        heads=args.get("num_heads") or next(heads, 0),
        gelu=_ACTIVATIONS[activation],
        epsilon=1e-5 if re.search(_EPSILON_5, name) else 1e-6,
        pool=args.get("global_pool", config.get("global_pool")),
        pools_prefix=bool(args.get("pool_include_prefix")),
        image_size=_pair(args.get("img_size") or size),
        preprocess=_preprocess(images, _pair(size), notes),
        class_names=_class_names(config, images),
        notes=tuple(notes),
    )


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _preprocess(
    images: Mapping, size: tuple[int, int], notes: list
) -> Preprocess | None:
    if "mean" not in images:
        return None
    mode, crop = images.get("crop_mode", "center"), images.get("crop_pct", 0.875)
    if mode not in ("center", "squash") or (mode == "squash" and crop != 1):
        notes.append(
            f"crop_mode {mode} with crop_pct {crop}: not known, so approximate"
        )
    how = images.get("interpolation", "bicubic")
    if how not in _INTERPOLATIONS:
        notes.append(f"interpolation {how}: not known, so bicubic")
    return Preprocess(
        image_size=size,
        mean=tuple(images["mean"]),
        std=tuple(images["std"]),
        interpolation=_INTERPOLATIONS.get(how, "bicubic"),
        crop_fraction=1.0 if mode == "squash" else float(crop),
        squash=mode == "squash",
    )


def _class_names(config: Mapping, images: Mapping) -> tuple[str, ...]:
    both = {**images, **config}
    names = both.get("label_names") or both.get("labels") or ()
    if isinstance(names, Mapping):  # From label to name.
        if set(names) != set(map(str, range(len(names)))):
            return ()
        names = [names[str(i)] for i in range(len(names))]
    words = both.get("label_descriptions") or {}
    return tuple(words.get(name, name) for name in names)


def write(
    options: Mapping, preprocess: Preprocess | None, class_names: Sequence[str]
) -> dict:
    """Writes the config of a network.

    Args:
      options: all of them, as of `models.Model`.
      preprocess: how images are prepared; timm's defaults if None.
      class_names: in label order; may be empty.

    Returns:
      Content of config.json.

    Raises:
      UserError: timm has no such network.
    """
    resnet = "depth" not in options
    name, args, traits = _resnet(options) if resnet else _transformer(options)
    features = options["stem_width"] * 32 if resnet else options["width"]
    size = [options["channels"], *options["image_size"]]
    images = {
        "tag": "vit_jax",
        "custom_load": False,
        "input_size": size,
        "num_classes": options["classes"],
        "pool_size": None,
        **traits,
    }
    if preprocess:
        names = {ours: theirs for theirs, ours in _INTERPOLATIONS.items()}
        images |= {
            "input_size": [size[0], *preprocess.image_size],
            "interpolation": names[preprocess.interpolation],
            "crop_pct": 1.0 if preprocess.squash else preprocess.crop_fraction,
            "crop_mode": "squash" if preprocess.squash else "center",
            "mean": list(preprocess.mean),
            "std": list(preprocess.std),
        }
    config = {
        "architecture": name,
        "num_classes": options["classes"],
        "num_features": features,
        "global_pool": "avg" if resnet else args["global_pool"],
        "model_args": args,
        "pretrained_cfg": images,
    }
    if class_names:
        config["label_names"] = list(class_names)
    return config


_POOLS = {"token": "token", "gap": "avg", "map": "map", "none": ""}
_SIZES = {
    192: ("tiny", (16,)),
    384: ("small", (8, 16, 32)),
    768: ("base", (8, 16, 32)),
    1024: ("large", (14, 16, 32)),
    1280: ("huge", (14,)),
    1408: ("giant", (14,)),
    1664: ("gigantic", (14,)),
}
# By the units of each stage; the width of their encoder can be any.
_HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}


def _transformer(options: Mapping) -> tuple[str, dict, dict]:
    name = _architecture(options)
    width, mlp_dim = options["width"], options["mlp_dim"]
    ratio = mlp_dim / width
    if int(width * ratio) != mlp_dim:  # timm cuts the product off.
        ratio = math.nextafter(ratio, math.inf)
    args = {
        "img_size": list(options["image_size"]),
        "patch_size": options["patch"],
        "in_chans": options["channels"],
        "embed_dim": width,
        "depth": options["depth"],
        "num_heads": options["heads"],
        "mlp_ratio": ratio,
        "global_pool": _POOLS[options["head"]],
        "class_token": options["head"] == "token" or options["class_token"],
        "fc_norm": options["pooled_norm"],
        "pos_embed": "none" if options["posemb"] == "none" else "learn",
        "act_layer": "gelu_tanh" if options["gelu"] == "tanh" else "gelu",
    }
    if options["head"] == "map":
        args["pool_include_prefix"] = True
    if options["epsilon"] == 1e-5:
        args["pre_norm"] = False
    first = "patch_embed.proj"
    if options["stem_width"]:
        stem = "stem." if options["blocks"] else ""
        first = f"patch_embed.backbone.{stem}conv"
    heads = ["head", "head_dist"] if options["distillation"] else "head"
    return (
        name,
        args,
        {"fixed_input_size": True, "first_conv": first, "classifier": heads},
    )


def _architecture(options: Mapping) -> str:
    """Returns the architecture whose arguments make the network."""
    size, patches = _SIZES.get(options["width"], ("", ()))
    odd = options["epsilon"] != 1e-6
    if options["stem_width"]:
        if options["blocks"] not in _HYBRIDS or options["stem_width"] != 64 or odd:
            raise UserError(
                f"timm has no hybrid with blocks={options['blocks']}, "
                f"stem_width={options['stem_width']} and epsilon={options['epsilon']}: "
                "write it with --to=google or --to=safetensors"
            )
        return _HYBRIDS[options["blocks"]]
    if odd and (options["epsilon"] != 1e-5 or options["distillation"]):
        raise UserError(
            f"epsilon={options['epsilon']} cannot be stated in timm's config.json "
            "(1e-6 can, and 1e-5 without distillation): write it with --to=hf"
        )
    if options["distillation"]:
        size = size if size in ("tiny", "small") else "base"
        return f"deit_{size}_distilled_patch16_224"
    if odd:  # The only plain encoders there with that epsilon, but for a first norm.
        return "vit_base_patch16_clip_224"
    if options["patch"] in patches:
        return f"vit_{size}_patch{options['patch']}_224"
    return "vit_base_patch16_224"


def _resnet(options: Mapping) -> tuple[str, dict, dict]:
    layers = {(3, 4, 6, 3): 50, (3, 4, 23, 3): 101, (3, 8, 36, 3): 152}
    blocks, stem_width = options["blocks"], options["stem_width"]
    if blocks not in layers:
        raise UserError(
            f"timm has no BiT ResNet with blocks={blocks}, only with "
            f"{', '.join(map(str, layers))}: write it with --to=google or "
            "--to=safetensors"
        )
    factor = 2 if layers[blocks] == 152 else 1
    args = {"in_chans": options["channels"]}
    if stem_width != 64 * factor:
        # Over the factor of the architecture, which cannot be replaced.
        args["stem_chs"] = stem_width // factor
        args["channels"] = [stem_width * 4 * 2**i // factor for i in range(4)]
    traits = {
        "fixed_input_size": False,
        "first_conv": "stem.conv",
        "classifier": "head.fc",
    }
    return f"resnetv2_{layers[blocks]}x{factor}_bit", args, traits
