"""Image processors of transformers: preprocessor_config.json and processor_config.json.

Files may omit values that are the default of their class, so the class, or else the
network in config.json, must be known. Defaults are those of transformers 5.23.
"""

import math
from collections.abc import Mapping

from vit_jax.data.preprocess import Preprocess, per_channel
from vit_jax.errors import UserError
from vit_jax.weights import rewriting
from vit_jax.weights.pretrained import IMAGENET

# `Preprocess.interpolation` by Pillow's number (Image.Resampling).
_RESAMPLE = dict(
    enumerate(("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"))
)
_WRITABLE = ("nearest", "lanczos", "bilinear", "bicubic")

CLIP = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
MAX_TOKENS = 256  # Patches per image, unless Siglip2's file has another number.
_HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


def _defaults(size, resample, statistics=_HALF, **more) -> dict:
    pixels = {f"image_{name}": value for name, value in statistics.items()}
    return {"size": size, "resample": resample, **pixels, **more}


_SQUARE = {"height": 224, "width": 224}
_OF_CLIP = _defaults(
    {"shortest_edge": 224}, 3, CLIP, do_center_crop=True, crop_size=224
)
# Defaults by class, without "ImageProcessor".
_PROCESSORS = {
    "ViT": _defaults(_SQUARE, 2),
    "DeiT": _defaults(256, 3, do_center_crop=True, crop_size=224),
    "Beit": _defaults(_SQUARE, 3, crop_size=224),
    "CLIP": _OF_CLIP,
    "Bit": _OF_CLIP,
    "Siglip": _defaults(_SQUARE, 3),
    "Siglip2": _defaults(None, 2, max_num_patches=MAX_TOKENS, patch_size=16),
    "ConvNext": _defaults({"shortest_edge": 384}, 3, crop_pct=224 / 256),
    "DINOv3ViT": _defaults(_SQUARE, 2, IMAGENET),
}
# Classes in which a single number is the short side, not both sides.
_BY_SHORT_SIDE = ("CLIP", "Bit", "Siglip", "ConvNext")
# Class by the first word of model_type in config.json, for files that name no class.
_OF_NETWORK = {
    "deit": "DeiT",
    "beit": "Beit",
    "clip": "CLIP",
    "siglip": "Siglip",
    "siglip2": "Siglip2",
    "dinov2": "Bit",
    "dinov3": "DINOv3ViT",
}
_SQUASHED_FROM = 384  # Pixels; ConvNext's processor crops only smaller images.


def read(
    sidecars: Mapping[str, Mapping],
    image_size: tuple[int, int],
    patch: int = 1,
    *,
    any_size: bool = False,
) -> tuple[Preprocess | None, list[str]]:
    """Reads the preprocessing of images.

    Args:
      sidecars: content of the JSON files beside the weights, by file name.
      image_size: height and width of the network, in pixels.
      patch: side of a patch in pixels; pixels at the end that do not fill one are cut
        off.
      any_size: whether transformers' network accepts images of every size. If so, the
        image size is the processor's, otherwise the network's.

    Returns:
      The preprocessing, or None if unknown; and a line for each difference.
    """
    config = sidecars.get("processor_config.json", {}).get("image_processor")
    config = config or sidecars.get("preprocessor_config.json")
    if not config:
        return None, []
    network = str(sidecars.get("config.json", {}).get("model_type"))
    config, name, notes = _with_defaults(config, network)
    resample = config["resample"]
    if resample not in _RESAMPLE:
        notes.append(f"resample={resample}: unknown, assumed bicubic")
    out, fraction, squash = image_size, 1.0, True
    max_tokens = config["max_num_patches"] if name == "Siglip2" else 0
    if max_tokens and config["patch_size"] != patch:
        notes.append(
            f"patch_size={config['patch_size']} in the image processor's config: ignored, "
            f"patches have the network's {patch} pixels"
        )
    if not config.get("do_resize", True):
        notes.append(
            f"do_resize=False: images of other sizes than {out[0]}x{out[1]} are resized"
        )
    elif not max_tokens:
        out, fraction, squash, more = _geometry(config, name)
        notes += more
    whole = tuple(side // patch * patch for side in out)
    cut = tuple(a - b for a, b in zip(out, whole, strict=True))
    if not any_size and whole != tuple(image_size):
        notes.append(
            f"images of {out[0]}x{out[1]} in the image processor's config: ignored, they "
            f"have {image_size[0]}x{image_size[1]}, the size of the network"
        )
        whole, cut = tuple(image_size), (0, 0)
    mean, std = _statistics(config)
    return Preprocess(
        image_size=whole,
        interpolation=_RESAMPLE.get(resample, "bicubic"),
        crop_fraction=fraction,
        squash=squash,
        short_side=not squash and out[0] != out[1],
        mean=mean,
        std=std,
        crop_down=not squash or fraction < 1,
        cut=cut,
        max_tokens=max_tokens,
    ), notes


def _with_defaults(config: Mapping, network: str) -> tuple[dict, str, list[str]]:
    """Returns all values, the class without "ImageProcessor", and notes."""
    name = config.get("image_processor_type") or config.get("feature_extractor_type")
    name, notes = name or _OF_NETWORK.get(network.split("_")[0], "ViT"), []
    for suffix in ("Fast", "Pil", "ImageProcessor", "FeatureExtractor"):
        name = name.removesuffix(suffix)
    if name not in _PROCESSORS:
        notes.append(f"{name}ImageProcessor: unknown, read like ViTImageProcessor")
    given = {key: value for key, value in config.items() if value is not None}
    return _PROCESSORS.get(name, _PROCESSORS["ViT"]) | given, name, notes


def _geometry(
    config: Mapping, name: str
) -> tuple[tuple[int, int], float, bool, list[str]]:
    """Returns image size, crop fraction, whether images are squashed, and notes."""
    size = config["size"]
    if isinstance(size, int) and name in _BY_SHORT_SIDE:
        size = {"shortest_edge": size}
    short = size.get("shortest_edge") if isinstance(size, Mapping) else None
    if name == "ConvNext" and short:
        if short >= _SQUASHED_FROM:
            return (short, short), 1.0, True, []
        return (short, short), short / int(short / config["crop_pct"]), False, []
    crop = config["crop_size"] if config.get("do_center_crop") else None
    out = _pair(size if crop is None else crop)
    if short is None:
        return out, out[0] / _pair(size)[0], True, []
    notes = [] if crop else ["do_center_crop=False: images are cropped to a square"]
    return out, min(out) / short, False, notes


def _pair(size: int | Mapping) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    edge = size.get("shortest_edge", 224)
    return size.get("height", edge), size.get("width", edge)


def _statistics(config: Mapping) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the mean and standard deviation of pixels divided by 255."""
    mean, std = (0.0,) * 3, (1.0,) * 3
    if config.get("do_normalize", True):
        mean, std = config["image_mean"], config["image_std"]
    white = 255.0  # The value of white before mean and std are applied.
    if config.get("do_rescale", True):
        white *= config.get("rescale_factor", 1 / 255)
    if math.isclose(white, 1.0):
        return tuple(mean), tuple(std)
    return tuple(x / white for x in mean), tuple(x / white for x in std)


def write(preprocess: Preprocess, channels: int, patch: int = 0) -> dict:
    """Returns the content of preprocessor_config.json.

    Args:
      preprocess: preprocessing of images.
      channels: number of channels of the network.
      patch: side of a patch in pixels if the network is Siglip2, which reads images of
        any size as patches; 0 for other networks.

    Raises:
      UserError: transformers does not support the preprocessing.
    """
    if preprocess.interpolation not in _WRITABLE:
        raise UserError(
            f"interpolation={preprocess.interpolation!r}: Hugging Face's image "
            f"processors support {', '.join(_WRITABLE)}: write it with --to=timm"
        )
    if preprocess.fill:
        raise UserError(
            f"fill={preprocess.fill}: Hugging Face's image processors add no border; "
            "write it with --to=timm or --to=safetensors"
        )
    height, width = preprocess.resize_sides
    config = {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": channels == 3,
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": {v: k for k, v in _RESAMPLE.items()}[preprocess.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": per_channel(preprocess.mean, channels),
        "image_std": per_channel(preprocess.std, channels),
    }
    if patch:
        del config["size"]
        return config | {
            "image_processor_type": "Siglip2ImageProcessor",
            "patch_size": patch,
            "max_num_patches": preprocess.max_tokens or _num_patches(preprocess, patch),
        }
    if preprocess.squash and preprocess.crop_sides == (height, width):
        return config
    if not preprocess.squash:
        if height != width:
            raise UserError(
                f"a centre crop of {preprocess.image_size[0]}x{preprocess.image_size[1]}: "
                "Hugging Face's image processors resize the short side: write it with "
                "--to=timm"
            )
        config["size"] = {"shortest_edge": height}
    rows, columns = preprocess.crop_sides
    # BiT's processor crops in every release of transformers; ViT's did not always.
    return config | {
        "image_processor_type": "BitImageProcessor",
        "do_center_crop": True,
        "crop_size": {"height": rows, "width": columns},
    }


def note_tokens(preprocess: Preprocess, patch: int) -> list[str]:
    """Returns a note if `write` changes whether images keep their size or aspect."""
    if bool(patch) == bool(preprocess.max_tokens):
        return []
    if patch:
        most = _num_patches(preprocess, patch)
        return [f"preprocessing: images keep their aspect, with at most {most} patches"]
    return rewriting.note_tokens(preprocess)


def _num_patches(preprocess: Preprocess, patch: int) -> int:
    return math.prod(side // patch for side in preprocess.image_size)
