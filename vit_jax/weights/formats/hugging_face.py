"""Hugging Face's format: ViT and DeiT, with and without a classifier.

Files have the names of transformers 4 (`vit.encoder.layer.0.attention...`), which
version 5 still writes. Its names in memory (`vit.layers.0.attention...`) are read too.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights import surgery
from vit_jax.weights.formats import hugging_face_processor, linen, torch_file
from vit_jax.weights.formats.files import Tensors, write_safetensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.formats.torch_file import (
    CONV,
    SAME,
    ArrayEntry,
    dense,
    from_heads,
    norm,
    to_heads,
)
from vit_jax.weights.pretrained import (
    POSITIONS,
    Preprocess,
    Pretrained,
    crop_sides,
)

_ANCHOR = "embeddings.patch_embeddings.projection.weight"
_PREFIXES = ("vit.", "deit.", "")  # Of models with a classifier, and without.

# Names in the memory of transformers 5, and in files; applied in this order.
_NAMES_IN_MEMORY = (
    (r"^layers\.", "encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
)
_UNUSED = {"embeddings.mask_token"}  # Replaces patches that training masks.

# Names of the two GELUs in transformers; the first one is written.
_ACTIVATIONS = {
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"),
    "quick_gelu": ("quick_gelu",),
}
# One network, trained in different ways; masking of patches is for training only.
_MODEL_TYPES = ("vit", "deit", "vit_msn", "vit_mae")
_SIGMOID = "multi_label_classification"
# Of config.json, with the value of `model.posemb_resize`; transformers ignores it.
RESIZE_KEY = "posemb_resize"


@dataclasses.dataclass(frozen=True)
class HuggingFaceConfig:
    """Content of a model's config; the defaults apply without one.

    Attributes:
      num_heads: attention heads; 0 if unknown.
      activation: "gelu_tanh" or "gelu".
      epsilon: of the LayerNorms.
      image_size: height and width, or None.
      class_names: in label order; empty if they are only numbered.
      loss: "softmax" or "sigmoid".
      pooler: activation after the pooler's dense layer.
      query_bias: whether query, key and value have biases.
      posemb_resize: how position embeddings were resized in training; "" if unknown.
      model_type: as "vit"; "" without a config.
    """

    num_heads: int = 0
    activation: str = "gelu"
    epsilon: float = 1e-12
    image_size: tuple[int, int] | None = None
    class_names: tuple[str, ...] = ()
    loss: str = "softmax"
    pooler: str = "tanh"
    query_bias: bool = True
    posemb_resize: str = ""
    model_type: str = ""


def recognises(tensors: Tensors) -> bool:
    """Returns whether a file is in this format."""
    return _find_prefix(tensors.flat.keys()) is not None


def read(tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint.

    Args:
      tensors: of the file or folder.
      num_heads: attention heads if config.json does not state them; 0 means those of
        the known sizes, or one per 64 features.

    Returns:
      The checkpoint under our names.

    Raises:
      UserError: this project has no such network.
    """
    facts = read_config(tensors.sidecars.get("config.json", {}))
    flat, notes = rename(tensors.flat), []
    classified = {"classifier.weight", "cls_classifier.weight"} & flat.keys()
    if classified and "pooler.dense.weight" in flat:
        flat = {k: v for k, v in flat.items() if not k.startswith("pooler.")}
        notes.append("pooler: dropped, because the classifier does not see it")
    _check_network(flat, facts, tensors.path)
    if not facts.query_bias:
        flat, more = add_qkv_biases(flat)
        notes += more
    distilled = "embeddings.distillation_token" in flat
    if distilled and "classifier.weight" in flat:
        flat = _split_classifier(flat, "classifier", "distillation_classifier")
        flat = {re.sub("^classifier", "cls_classifier", k): v for k, v in flat.items()}
        notes.append("classifier: of the class token alone, written as a pair")
    classifier = "cls_classifier.weight" if distilled else "classifier.weight"
    depth = len({n.split(".")[2] for n in flat if n.startswith("encoder.layer.")})
    width = len(flat["embeddings.patch_embeddings.projection.weight"])
    num_heads, more = torch_file.choose_num_heads(
        facts.num_heads, num_heads, width, depth
    )
    notes += more
    form = {
        "depth": depth,
        "num_heads": num_heads,
        "num_classes": len(flat.get(classifier, ())),
        "distillation": distilled,
        "representation_layer": "pooler.dense.weight" in flat,
    }
    if not tensors.sidecars.get("config.json"):
        notes.append("config.json: none, so exact GELU and epsilon 1e-12")
    table = encoder_table(form)
    _check_names(flat, {entry.theirs for entry in table}, facts, tensors.path)
    ours = torch_file.to_our_arrays(flat, table, tensors.path)
    names = facts.class_names
    options = _model_options(ours, form, facts, tensors.path)
    patch = ours["embedding/kernel"].shape[0]
    preprocess, more = hugging_face_processor.read(
        tensors.sidecars, options["image_size"], patch
    )
    if options["posemb_resize"] == "bicubic_dino" and not facts.posemb_resize:
        more = [*more, "neither classifier nor pooler: taken for a ViT of DINO"]
    return Pretrained(
        params=unflatten_dict(ours, sep="/"),
        options=options,
        format="hugging_face",
        source=tensors.path,
        preprocess=preprocess,
        class_names=names if len(names) == form["num_classes"] else (),
        loss=facts.loss,
        multi_label=facts.loss == "sigmoid",  # As the hub calls it.
        notes=(*notes, *more),
    )


def _check_network(
    flat: dict[str, np.ndarray], facts: HuggingFaceConfig, source: str
) -> None:
    """Raises UserError for a network that no model here computes."""
    block = "encoder.layer.0"
    needed = [
        "embeddings.cls_token",
        "embeddings.position_embeddings",
        f"{block}.attention.attention.query.weight",
        f"{block}.intermediate.dense.weight",
    ]
    if "classifier.weight" in flat:
        needed.append("classifier.bias")
    for name in needed:
        if name not in flat:
            raise UserError(f"{source}: {name} is missing: {_remedy(facts)}")
    rows, columns = flat[f"{block}.attention.attention.query.weight"].shape
    if rows != columns:
        raise UserError(
            f"{source}: heads of {rows} features in all beside a width of {columns} are "
            "not supported: models of this project have as many of both"
        )
    pooler = flat.get("pooler.dense.weight")
    if pooler is None:
        return
    if facts.pooler != "tanh":
        raise UserError(
            f"{source}: pooler_act={facts.pooler!r} in config.json is not supported: "
            "models of this project have tanh there"
        )
    if pooler.shape[0] != pooler.shape[1]:
        raise UserError(
            f"{source}: a pooler of {pooler.shape[0]} features (pooler_output_size) is "
            f"not supported: models of this project keep the width, {pooler.shape[1]}"
        )


def _remedy(facts: HuggingFaceConfig) -> str:
    """Returns what to do about arrays that are not those of a ViT."""
    if not facts.model_type:
        return "keep its config.json beside it, which names the network"
    return "give the whole file of a plain ViT or DeiT"


def _check_names(
    flat: dict[str, np.ndarray], known: set[str], facts: HuggingFaceConfig, source: str
) -> None:
    """Raises UserError if the encoder has an array without an entry."""
    for name in sorted(flat.keys() - known - _UNUSED):
        if name.startswith(("embeddings.", "encoder.", "layernorm.", "pooler.")):
            raise UserError(
                f"{source}: {name} is not supported: no model here computes the same; "
                f"{_remedy(facts)}"
            )


def add_qkv_biases(
    flat: dict[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Adds biases of zero to queries, keys and values without biases."""
    weights = [n for n in flat if re.search(r"\.(query|key|value)\.weight$", n)]
    zeros = {
        f"{name.removesuffix('weight')}bias": np.zeros(len(flat[name]), np.float32)
        for name in weights
    }
    return zeros | flat, ["biases of query, key and value: none in the file, so zeros"]


def _split_classifier(
    flat: dict[str, np.ndarray], name: str, other: str
) -> dict[str, np.ndarray]:
    """Replaces a classifier by a pair of classifiers whose mean it is.

    DeiTForImageClassification has a distillation token but no classifier for it. Twice
    the classifier and a classifier of zeros have the same mean without rounding.

    Args:
      flat: their arrays by name.
      name: of the classifier.
      other: of the classifier to add.

    Returns:
      The arrays with both classifiers.
    """
    twice = {
        f"{name}.{leaf}": 2 * flat[f"{name}.{leaf}"] for leaf in ("weight", "bias")
    }
    zero = {k.replace(name, other): np.zeros_like(v) for k, v in twice.items()}
    return flat | twice | zero


def _model_options(
    ours: dict[str, np.ndarray], form: dict, facts: HuggingFaceConfig, source: str
) -> dict:
    rest = {name: value for name, value in ours.items() if name != POSITIONS}
    sizes = linen.transformer_options(rest)
    # ViTs of DINO are the only published ones that have neither.
    plain = not form["num_classes"] and not form["representation_layer"]
    resize = "bicubic_dino" if plain and facts.model_type == "vit" else "bicubic"
    return {
        **sizes,
        "image_size": find_image_size(
            ours, facts, num_prefix_tokens=1 + form["distillation"], source=source
        ),
        "num_classes": form["num_classes"],
        "pool": "token",
        "distillation": form["distillation"],
        "representation_layer": form["representation_layer"],
        "activation": facts.activation,
        "posemb_resize": facts.posemb_resize or resize,
        "layer_norm_eps": facts.epsilon,
    }


def find_image_size(
    ours: dict[str, np.ndarray],
    facts: HuggingFaceConfig,
    *,
    num_prefix_tokens: int,
    source: str,
) -> tuple[int, int]:
    """Returns the height and width that position embeddings are of.

    What of images fills no patch is left out, as by the first layer of transformers.

    Args:
      ours: our arrays by name.
      facts: of config.json.
      num_prefix_tokens: rows of the embeddings before those of the patches.
      source: for messages.

    Raises:
      UserError: they are of no square, and config.json does not tell their sides.
    """
    patch = ours["embedding/kernel"].shape[0]
    patches = ours[POSITIONS].shape[1] - num_prefix_tokens
    size = fill_patches(facts.image_size, patch)
    if size is not None and math.prod(size) == patches * patch**2:
        return size
    side = math.isqrt(patches)
    if side * side != patches:
        raise UserError(
            f"{source} has position embeddings of {patches} patches, which are no "
            "square grid: keep its config.json beside it"
        )
    return side * patch, side * patch


def fill_patches(size: tuple[int, int] | None, patch: int) -> tuple[int, int] | None:
    """Returns a height and width in pixels without what fills no patch."""
    return size and tuple(side // patch * patch for side in size)


def write(pretrained: Pretrained, folder: str | os.PathLike) -> list[str]:
    """Writes a folder that `AutoModelForImageClassification.from_pretrained` loads.

    Args:
      pretrained: with parameters that fit its options.
      folder: existing; model.safetensors, config.json and, if the preprocessing is
        known, preprocessor_config.json are written to it.

    Returns:
      A line for each thing that was rewritten or left out.

    Raises:
      UserError: transformers has no such network or image processor.
    """
    model = models.create(**pretrained.options)
    flat, options = flatten_dict(pretrained.params, sep="/"), dict(model.options)
    _check_writable(options)
    flat, options, notes = surgery.norm_every_token(flat, options)
    flat, options, more = surgery.store_positions(flat, options, model.grid)
    flat, options, folded = surgery.fold_layer_scale(flat, options)
    notes += more + folded + surgery.note_resize(options, "transformers")
    options["patch"] = model.patch_size
    config = write_config(options, pretrained.class_names, pretrained.loss)
    arrays = torch_file.to_their_arrays(flat, encoder_table(options))
    prefix = config["model_type"] + "."
    heads = ("classifier.", "cls_classifier.", "distillation_classifier.")
    if options["num_classes"]:  # The models without a classifier have no prefix.
        arrays = {
            k if k.startswith(heads) else prefix + k: v for k, v in arrays.items()
        }
    preprocess, channels = pretrained.preprocess, options["channels"]
    return notes + write_folder(folder, arrays, config, preprocess, channels)


def write_folder(
    folder: str | os.PathLike,
    arrays: dict[str, np.ndarray],
    config: dict,
    preprocess: Preprocess | None,
    channels: int,
) -> list[str]:
    """Writes the files that `from_pretrained` of transformers loads.

    Args:
      folder: existing.
      arrays: by their names, for model.safetensors.
      config: content of config.json.
      preprocess: for preprocessor_config.json, or None if it is not known.
      channels: of the images.

    Returns:
      A line for a file that is left out.

    Raises:
      UserError: transformers has no such image processor; nothing is written.
    """
    contents, notes = {"config.json": config}, []
    if preprocess:
        content = hugging_face_processor.write(preprocess, channels)
        if any(preprocess.cut):  # Which the first layer of transformers cuts.
            height, width = crop_sides(preprocess)
            size = height if height == width else [height, width]
            config.get("vision_config", config)["image_size"] = size
        contents["preprocessor_config.json"] = content
    else:
        notes.append("preprocessing: nothing says how, so no preprocessor_config.json")
    folder = pathlib.Path(folder)
    write_safetensors(folder / "model.safetensors", arrays, {"format": "pt"})
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return notes


def _check_writable(options: dict) -> None:
    """Raises UserError unless transformers has such a network."""
    if "depth" not in options or "stem_width" in options:
        raise UserError(
            f"variant={options['variant']!r}: Hugging Face's ViT has no ResNet: write it "
            "with --to=timm or --to=google"
        )
    surgery.check_network(
        options,
        "Hugging Face's ViT",
        {
            "distillation": (False, True),
            "representation_layer": (False, True),
            "num_register_tokens": (options["num_register_tokens"],),  # See below.
        },
    )
    for name, plain in (("num_register_tokens", 0), ("activation", "gelu")):
        if options[name] in (plain, "gelu_tanh", "quick_gelu"):
            continue
        raise UserError(
            f"{name}={options[name]!r}: Hugging Face's ViT has none: write it with "
            "--to=hf_dinov2 or --to=timm"
        )
    if options["pool"] != "token":
        raise UserError(
            f"pool={options['pool']!r}: Hugging Face's ViT classifies the class token "
            "only: write it with --to=timm"
        )
    if options["representation_layer"] and (
        options["num_classes"] or options["distillation"]
    ):
        raise UserError(
            "representation_layer=True: Hugging Face's ViTForImageClassification has no tanh "
            "layer before the classifier: write it with --to=google or --to=safetensors"
        )


def _usage(pretrained: Pretrained, path: str, on_hub: bool) -> str:
    """Returns Python lines that load a written checkpoint."""
    options = models.create(**pretrained.options).options
    name, more = "AutoModelForImageClassification", ""
    if not options["num_classes"]:
        name = "AutoModel"
        more = "" if options["representation_layer"] else ", add_pooling_layer=False"
    return (
        f"from transformers import {name}\n"
        f'model = {name}.from_pretrained("{path}"{more})'
    )


def _find_prefix(names: Collection[str]) -> str | None:
    """Returns the prefix of the encoder's names, or None if they are absent."""
    return next((p for p in _PREFIXES if p + _ANCHOR in names), None)


def rename(flat: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames arrays as in files, without the prefix."""
    prefix = _find_prefix(flat) or ""
    return {file_name(k.removeprefix(prefix)): value for k, value in flat.items()}


def file_name(name: str) -> str:
    """Returns the name in files of an array in memory, without the model's prefix."""
    for new, old in _NAMES_IN_MEMORY:
        name = re.sub(new, old, name)
    return name


def encoder_table(options: dict) -> list[ArrayEntry]:
    """Returns the entries of an encoder, without the prefix.

    Args:
      options: depth, num_heads, num_classes, distillation and representation_layer of
        `models.Model`.
    """
    num_heads, embed = options["num_heads"], "embeddings"
    table = [
        *dense(f"{embed}.patch_embeddings.projection", "embedding", CONV),
        ArrayEntry(f"{embed}.cls_token", ("cls",), SAME),
        ArrayEntry(f"{embed}.position_embeddings", (POSITIONS,), SAME),
        *norm("layernorm", "Transformer/encoder_norm"),
    ]
    for i in range(options["depth"]):
        theirs, ours = f"encoder.layer.{i}", f"Transformer/encoderblock_{i}"
        table += norm(f"{theirs}.layernorm_before", f"{ours}/LayerNorm_0")
        table += attention_table(theirs, ours, num_heads)
        table += norm(f"{theirs}.layernorm_after", f"{ours}/LayerNorm_2")
        table += dense(f"{theirs}.intermediate.dense", f"{ours}/MlpBlock_3/Dense_0")
        table += dense(f"{theirs}.output.dense", f"{ours}/MlpBlock_3/Dense_1")
    if options["representation_layer"]:
        table += dense("pooler.dense", "pre_logits")
    if options["distillation"]:
        table.append(ArrayEntry(f"{embed}.distillation_token", ("dist",), SAME))
    if options["num_classes"] and options["distillation"]:
        table += dense("cls_classifier", "head")
        table += dense("distillation_classifier", "head_dist")
    elif options["num_classes"]:
        table += dense("classifier", "head")
    return table


def attention_table(theirs: str, ours: str, num_heads: int) -> list[ArrayEntry]:
    """Returns the entries of the attention of a block.

    Args:
      theirs, ours: name of the block.
      num_heads: of the attention.
    """
    attention = f"{ours}/MultiHeadDotProductAttention_1"
    table = [
        ArrayEntry(
            f"{theirs}.attention.attention.{name}.{kind}",
            (f"{attention}/{name}/{leaf}",),
            to_heads(num_heads),
        )
        for name in ("query", "key", "value")
        for kind, leaf in (("weight", "kernel"), ("bias", "bias"))
    ]
    theirs = f"{theirs}.attention.output.dense"
    return table + dense(theirs, f"{attention}/out", from_heads(num_heads))


def read_config(config: Mapping) -> HuggingFaceConfig:
    """Reads a model's config.

    Args:
      config: content of config.json; empty if there is none.

    Raises:
      UserError: no model here has its activation or its type.
    """
    if "model_type" not in config:
        return HuggingFaceConfig()
    if config["model_type"] not in _MODEL_TYPES:
        raise UserError(
            f"model_type={config['model_type']!r} in config.json is not one of "
            f"{', '.join(_MODEL_TYPES)}, which models of this project compute"
        )
    theirs = config.get("hidden_act", "gelu")
    activation = next((k for k, v in _ACTIVATIONS.items() if theirs in v), None)
    if activation is None:
        known = ", ".join(name for names in _ACTIVATIONS.values() for name in names)
        raise UserError(
            f"hidden_act={theirs!r} in config.json is not one of {known}, which "
            "models of this project have"
        )
    labels = config.get("id2label") or {}
    numbers = range(len(labels))
    names = tuple(labels.get(str(i), f"LABEL_{i}") for i in numbers)
    size = config.get("image_size", 224)
    return HuggingFaceConfig(
        num_heads=config.get("num_attention_heads", 12),
        activation=activation,
        epsilon=float(config.get("layer_norm_eps", 1e-12)),
        image_size=(size, size) if isinstance(size, int) else tuple(size),
        class_names=() if names == tuple(f"LABEL_{i}" for i in numbers) else names,
        loss="sigmoid" if config.get("problem_type") == _SIGMOID else "softmax",
        pooler=config.get("pooler_act", "tanh"),
        query_bias=config.get("qkv_bias", True),
        posemb_resize=config.get(RESIZE_KEY, ""),
        model_type=config["model_type"],
    )


def write_activation(name: str) -> str:
    """Returns what `hidden_act` is for `model.activation`."""
    return _ACTIVATIONS[name][0]


def write_config(options: Mapping, class_names: Sequence[str], loss: str) -> dict:
    """Returns a model's config.

    Args:
      options: all options of `models.Model`.
      class_names: in label order; may be empty.
      loss: "softmax" or "sigmoid".

    Returns:
      Content of config.json.
    """
    kind = "DeiT" if options["distillation"] else "ViT"
    task = "ForImageClassification" if options["num_classes"] else "Model"
    if options["num_classes"] and options["distillation"]:
        task += "WithTeacher"
    height, width = options["image_size"]
    config = {
        "architectures": [kind + task],
        "model_type": kind.lower(),
        "hidden_size": options["width"],
        "num_hidden_layers": options["depth"],
        "num_attention_heads": options["num_heads"],
        "intermediate_size": options["mlp_dim"],
        "hidden_act": write_activation(options["activation"]),
        "layer_norm_eps": options["layer_norm_eps"],
        "image_size": height if height == width else [height, width],
        "patch_size": options["patch"],
        "num_channels": options["channels"],
        "qkv_bias": True,
        "encoder_stride": options["patch"],
        "dtype": "float32",
    }
    if options["posemb"] == "learned":
        config[RESIZE_KEY] = options["posemb_resize"]
    if options["num_classes"]:
        names = class_names or [f"LABEL_{i}" for i in range(options["num_classes"])]
        config["id2label"] = {str(i): name for i, name in enumerate(names)}
        config["label2id"] = {name: i for i, name in enumerate(names)}
    if loss == "sigmoid":
        config["problem_type"] = _SIGMOID
    return config


READERS["Hugging Face"] = Reader(recognises, read)
WRITERS["hf"] = Writer(write, usage=_usage, library="transformers")
