"""timm's `config.json`: what a network's arrays do not tell."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from vit_jax.errors import UserError
from vit_jax.weights.formats import timm_architecture, timm_supported
from vit_jax.weights.preprocess import broadcast, edges
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
      no_positions: whether it has no position embeddings.
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
    no_positions: bool = False
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
_EPSILON_5 = r"_clip_"  # Of these only what this project wrote is read.
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
        note = "config.json: none of timm, so a plain network, exact GELU, epsilon 1e-6"
        return Facts(notes=(note,))
    timm_supported.check_config(config)
    name, args = timm_supported.architecture(config), config.get("model_args") or {}
    # Older files have one level.
    images = config.get("pretrained_cfg") or config
    # As in timm, null is the default.
    images = {key: value for key, value in images.items() if value is not None}
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
        no_positions=args.get("pos_embed", "learn") in ("", "none"),
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
    if not {"mean", "std"} <= images.keys():
        return None
    mode, crop = images.get("crop_mode", "center"), images.get("crop_pct", 0.875)
    if mode not in ("center", "squash"):
        notes.append(f"crop_mode {mode}: not known, so center")
    how = images.get("interpolation", "bicubic")
    if how not in _INTERPOLATIONS:
        notes.append(f"interpolation {how}: not known, so bicubic")
    return Preprocess(
        image_size=size,
        mean=tuple(images["mean"]),
        std=tuple(images["std"]),
        interpolation=_INTERPOLATIONS.get(how, "bicubic"),
        crop_fraction=float(crop),
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
    name, args, traits = timm_architecture.choose(options)
    resnet = "depth" not in options
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
            "crop_pct": _crop(preprocess),
            "crop_mode": "squash" if preprocess.squash else "center",
            "mean": broadcast(preprocess.mean, size[0]),
            "std": broadcast(preprocess.std, size[0]),
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


def _crop(preprocess: Preprocess) -> float:
    """Returns the crop fraction, in its last digit such that timm's sizes are ours.

    Raises:
      UserError: timm has no such crop.
    """
    fraction, sides = preprocess.crop_fraction, preprocess.image_size
    if preprocess.short_side and sides[0] != sides[1]:
        raise UserError(
            f"a centre crop of {sides[0]}x{sides[1]} of images resized by their "
            "short side: timm resizes to the crop's shape; "
            "write it with --to=hf or --to=safetensors"
        )
    # timm rounds 224 / (224 / 232) down, which can be 231.
    while tuple(math.floor(side / fraction) for side in sides) != edges(preprocess):
        fraction = math.nextafter(fraction, 0)
    return fraction
