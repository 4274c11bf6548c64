"""Hugging Face's `config.json` and `preprocessor_config.json`."""

import dataclasses
from collections.abc import Mapping, Sequence

from vit_jax.errors import UserError
from vit_jax.weights.preprocess import broadcast, edges
from vit_jax.weights.pretrained import Preprocess

# Names that transformers gives to the two GELUs, the first one is written.
_ACTIVATIONS = {
    "erf": ("gelu", "gelu_python"),
    "tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"),
}
# Pillow's numbers (Image.Resampling).
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "area"}
# The same network, trained in other ways; what masks patches in training masks none here.
_KINDS = ("vit", "deit", "vit_msn", "vit_mae")
_SIGMOID = "multi_label_classification"
_WRITTEN = ("nearest", "lanczos", "bilinear", "bicubic")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a model's config says; the defaults are what holds without one.

    Attributes:
      heads: attention heads; 0 where nothing says so.
      gelu: "tanh" or "erf".
      epsilon: of the LayerNorms.
      image_size: height and width, or None.
      class_names: in label order; empty if they are only numbered.
      loss: "softmax" or "sigmoid".
      pooler: activation behind the pooler's dense layer.
      query_bias: whether query, key and value have biases.
    """

    heads: int = 0
    gelu: str = "erf"
    epsilon: float = 1e-12
    image_size: tuple[int, int] | None = None
    class_names: tuple[str, ...] = ()
    loss: str = "softmax"
    pooler: str = "tanh"
    query_bias: bool = True


def read(config: Mapping) -> Facts:
    """Reads a model's config.

    Args:
      config: content of config.json; empty if there is none.

    Raises:
      UserError: an activation or a kind of model that is not here.
    """
    if "model_type" not in config:
        return Facts()
    if config["model_type"] not in _KINDS:
        raise UserError(
            f"model_type={config['model_type']!r} in config.json is not one of "
            f"{', '.join(_KINDS)}, which models of this project compute"
        )
    activation = config.get("hidden_act", "gelu")
    gelu = [ours for ours, theirs in _ACTIVATIONS.items() if activation in theirs]
    if not gelu:
        known = ", ".join(name for names in _ACTIVATIONS.values() for name in names)
        raise UserError(
            f"hidden_act={activation!r} in config.json is not one of {known}, which "
            "models of this project have"
        )
    labels = config.get("id2label") or {}
    numbers = range(len(labels))
    names = tuple(labels.get(str(i), f"LABEL_{i}") for i in numbers)
    size = config.get("image_size", 224)
    return Facts(
        heads=config.get("num_attention_heads", 12),
        gelu=gelu[0],
        epsilon=float(config.get("layer_norm_eps", 1e-12)),
        image_size=(size, size) if isinstance(size, int) else tuple(size),
        class_names=() if names == tuple(f"LABEL_{i}" for i in numbers) else names,
        loss="sigmoid" if config.get("problem_type") == _SIGMOID else "softmax",
        pooler=config.get("pooler_act", "tanh"),
        query_bias=config.get("qkv_bias", True),
    )


def read_preprocess(config: Mapping) -> tuple[Preprocess | None, list[str]]:
    """Reads how images are prepared.

    Args:
      config: content of preprocessor_config.json; empty if there is none.

    Returns:
      It, or None where nothing says so, and a line for each thing that is not known.
    """
    if not config.get("do_resize", bool(config)):
        return None, []
    notes, size = [], config.get("size", 224)
    crop = config.get("crop_size") if config.get("do_center_crop") else None
    if config.get("do_rescale", True) and config.get("rescale_factor", 0) > 1 / 254:
        notes.append("rescale_factor: not 1/255, so ignored")
    resample = config.get("resample", 2)
    if resample not in _RESAMPLE:
        notes.append(f"resample={resample}: not known, so bicubic")
    mean, std = (0.0,) * 3, (1.0,) * 3
    if config.get("do_normalize", True):
        mean, std = (config.get(f"image_{n}", (0.5,) * 3) for n in ("mean", "std"))
    out, fraction, squash = _geometry(size, crop)
    return Preprocess(
        image_size=out,
        interpolation=_RESAMPLE.get(resample, "bicubic"),
        crop_fraction=fraction,
        squash=squash,
        short_side=not squash and out[0] != out[1],
        mean=tuple(mean),
        std=tuple(std),
    ), notes


def _geometry(
    size: int | Mapping, crop: int | Mapping | None
) -> tuple[tuple[int, int], float, bool]:
    """Returns the image size, the crop fraction and whether images are squashed."""
    out = _pair(crop if crop is not None else size)
    if isinstance(size, Mapping) and "shortest_edge" in size:
        return out, min(out) / size["shortest_edge"], False
    return out, out[0] / _pair(size)[0], True


def _pair(size: int | Mapping) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    edge = size.get("shortest_edge", 224)
    return size.get("height", edge), size.get("width", edge)


def write(options: Mapping, class_names: Sequence[str], loss: str) -> dict:
    """Writes a model's config.

    Args:
      options: all of them, as of `models.Model`.
      class_names: in label order; may be empty.
      loss: "softmax" or "sigmoid".

    Returns:
      Content of config.json.
    """
    kind = "DeiT" if options["distillation"] else "ViT"
    task = "ForImageClassification" if options["classes"] else "Model"
    if options["classes"] and options["distillation"]:
        task += "WithTeacher"
    height, width = options["image_size"]
    config = {
        "architectures": [kind + task],
        "model_type": kind.lower(),
        "hidden_size": options["width"],
        "num_hidden_layers": options["depth"],
        "num_attention_heads": options["heads"],
        "intermediate_size": options["mlp_dim"],
        "hidden_act": _ACTIVATIONS[options["gelu"]][0],
        "layer_norm_eps": options["epsilon"],
        "image_size": height if height == width else [height, width],
        "patch_size": options["patch"],
        "num_channels": options["channels"],
        "qkv_bias": True,
        "encoder_stride": options["patch"],
        "dtype": "float32",
    }
    if options["classes"]:
        names = class_names or [f"LABEL_{i}" for i in range(options["classes"])]
        config["id2label"] = {str(i): name for i, name in enumerate(names)}
        config["label2id"] = {name: i for i, name in enumerate(names)}
    if loss == "sigmoid":
        config["problem_type"] = _SIGMOID
    return config


def write_preprocess(preprocess: Preprocess, channels: int) -> dict:
    """Writes how images are prepared.

    Args:
      preprocess: ours.
      channels: of the model's input.

    Returns:
      Content of preprocessor_config.json.

    Raises:
      UserError: no image processor of transformers does that.
    """
    if preprocess.interpolation not in _WRITTEN:
        raise UserError(
            f"interpolation={preprocess.interpolation!r}: Hugging Face's image "
            f"processors have {', '.join(_WRITTEN)}: write it with --to=timm"
        )
    height, width = edges(preprocess)
    config = {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": channels == 3,
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": {v: k for k, v in _RESAMPLE.items()}[preprocess.interpolation],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": broadcast(preprocess.mean, channels),
        "image_std": broadcast(preprocess.std, channels),
    }
    if preprocess.squash and preprocess.image_size == (height, width):
        return config
    if not preprocess.squash:
        if height != width:
            raise UserError(
                f"a centre crop of {preprocess.image_size[0]}x{preprocess.image_size[1]}: "
                "Hugging Face's image processors resize the short side, whichever it "
                "is: write it with --to=timm"
            )
        config["size"] = {"shortest_edge": height}
    rows, columns = preprocess.image_size
    # The processor of BiT crops in every release of transformers, that of ViT did not.
    return config | {
        "image_processor_type": "BitImageProcessor",
        "do_center_crop": True,
        "crop_size": {"height": rows, "width": columns},
    }
