"""Networks of transformers: one reader and one writer, to which a family is a table.

A `Family` names the arrays of a network in files, the keys of its config.json, and the
values that models of this project cannot have; `register` makes a format of it. Files have
the names of transformers 4 (`vit.encoder.layer.0.attention...`), which version 5 still
writes.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection, Mapping

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.errors import UserError
from vit_jax.weights import surgery
from vit_jax.weights.formats import hugging_face_processor, linen, tables
from vit_jax.weights.formats.files import Tensors, write_safetensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.formats.tables import ArrayEntry, Names, name_entries
from vit_jax.weights.pretrained import POSITIONS, Preprocess, Pretrained, crop_sides

# By activation of ours, its names in transformers; the first one is written.
ACTIVATIONS = {
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"),
    "quick_gelu": ("quick_gelu",),
}
# By key of config.json, the option of `models.Model`; "patch" is its side in pixels.
KEYS = {
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_dim",
    "layer_norm_eps": "layer_norm_eps",
    "patch_size": "patch",
    "num_channels": "channels",
}
# Of config.json, with the value of `model.posemb_resize`; transformers ignores it.
RESIZE_KEY = "posemb_resize"
MASK_TOKEN = "embeddings.mask_token"
_SIGMOID = "multi_label_classification"
_HEADS = re.compile(r"(\w+_)?classifier\.")

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Networks of transformers that are read and written by one table.

    Attributes:
      name: of the format, in messages.
      format: `Pretrained.format`.
      to: value of the flag --to.
      network: name of the class, without "Model" or "ForImageClassification".
      claims: returns whether arrays, by their names without a prefix, and the model_type
        of config.json (None if unknown) are of this family.
      options: returns the options that arrays and config.json tell beyond the sizes.
      has: returns, by option, the values that a network of theirs can have; `others` is
        what writes the others.
      names: by name of ours, that of theirs. Of these `more_names` returns the entries
        that no name states.
      renames: patterns in names of files and what replaces them; first the prefix.
      model_types: of config.json, the first for writing; others are refused unless
        `any_type`.
      keys: by key of config.json, the option of ours. Beyond these `config` returns what
        it has for a network.
      defaults: of config.json, where a key is missing.
      must: by key of config.json, the only value that is supported, and an array without
        which the key does not matter ("" if it always does).
      prepare, finish: change the arrays of a file, after reading and before writing, where
        they differ from the table; return notes.
      check: raises UserError unless the arrays are those of the table.
      usage: returns more arguments of `from_pretrained`, and a comment.
      optional: whether there are networks without positions, or without LayerScale.
      any_size: whether networks take images of every size.
      preprocess: returns the preprocessing for an image size where no file tells it.
    """

    name: str
    format: str
    to: str
    network: str
    model_types: tuple[str, ...]
    claims: Callable[[Arrays, str | None], bool]
    options: Callable[[Arrays, Mapping], dict] = lambda flat, config: {}
    has: Callable[[Mapping], dict[str, Collection]] = lambda options: {}
    others: str = "--to=timm or --to=safetensors"
    names: Names = dataclasses.field(default_factory=dict)
    more_names: Callable[[Mapping], list[ArrayEntry]] = lambda options: []
    renames: tuple[tuple[str, str], ...] = ()
    any_type: bool = False
    keys: Mapping[str, str] = dataclasses.field(default_factory=lambda: KEYS)
    config: Callable[[Mapping], dict] = lambda options: {}
    defaults: Mapping = dataclasses.field(default_factory=dict)
    must: Mapping[str, tuple[object, str]] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Arrays, Mapping], list[str]] = lambda flat, config: []
    finish: Callable[[Arrays, Mapping], list[str]] = lambda arrays, options: []
    check: Callable[[Arrays, list[ArrayEntry], Mapping, str], None] | None = None
    usage: Callable[[Mapping], tuple[str, str]] = lambda options: ("", "")
    optional: bool = False
    any_size: bool = False
    preprocess: Callable[[tuple[int, int]], Preprocess] | None = None


def register(family: Family, refines: tuple[str, ...] = ("Hugging Face",)) -> None:
    """Makes a format of a family."""
    READERS[family.name] = Reader(
        functools.partial(recognises, family), functools.partial(read, family), refines
    )
    WRITERS[family.to] = Writer(
        functools.partial(write, family),
        usage=functools.partial(_usage, family),
        library="transformers",
    )


def recognises(family: Family, tensors: Tensors) -> bool:
    """Returns whether a file is of a family."""
    kind = tensors.config.get("model_type")
    return family.claims(rename(family, tensors.flat), kind)


def rename(family: Family, flat: Mapping[str, np.ndarray]) -> Arrays:
    """Returns arrays under the names of files, without the prefix."""
    return {file_name(family, name): value for name, value in flat.items()}


def file_name(family: Family, name: str) -> str:
    """Returns the name of an array in files, without the prefix."""
    for pattern, new in family.renames:
        name = re.sub(pattern, new, name)
    return name


def entries(family: Family, options: Mapping) -> list[ArrayEntry]:
    """Returns the table of a network.

    Args:
      family: of the network.
      options: depth, num_heads, and the options of `models.Model` that are not plain.
    """
    return name_entries(family.names, options) + family.more_names(options)


def read(family: Family, tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint.

    Args:
      family: of its network.
      tensors: of the file or folder.
      num_heads: attention heads if config.json does not state them; 0 means those of
        the known sizes, or one per 64 features.

    Returns:
      The checkpoint under our names.

    Raises:
      UserError: this project has no such network.
    """
    config, source, names = tensors.config, tensors.path, family.names
    stated = {"hidden_act": "gelu", **family.defaults, **config}
    check_type(family, config, source)
    flat = rename(family, tensors.flat)
    notes = family.prepare(flat, config)
    check_config(family, flat, config, source)
    if not config.get("qkv_bias", True):
        notes += add_biases(flat, r"\.(query|key|value)$")
    blocks = names["Transformer/encoderblock_#/LayerNorm_0"].split("#")[0]
    numbered = (name.removeprefix(blocks) for name in flat if name.startswith(blocks))
    depth = len({name.split(".")[0] for name in numbered})
    width = len(flat[_patches(names)])
    num_heads, more = tables.choose_num_heads(
        stated.get("num_attention_heads", 12 if config else 0), num_heads, width, depth
    )
    notes += more
    if not config:
        shown = ", ".join(f"{key}={value}" for key, value in family.defaults.items())
        notes.append(f"config.json: none, so {shown}")
    form = {
        "num_classes": len(flat.get("classifier.weight", ())),
        **{
            family.keys[key]: float(config.get(key) or family.defaults[key])
            for key in family.keys.keys() - KEYS.keys()
        },
        **family.options(flat, config),
    }
    if "activation" not in form:
        form["activation"] = read_activation(stated)
    if POSITIONS in names:
        usual = form.get("posemb_resize", "bicubic")
        form["posemb_resize"] = config.get(RESIZE_KEY) or usual
    table = entries(family, form | {"depth": depth, "num_heads": num_heads})
    if family.check:
        family.check(flat, table, config, source)
    else:
        tables.check_names(flat, table, source, network=f"{family.network}Model")
    ours = tables.to_our_arrays(flat, table, source)
    if "embedding" not in names:
        ours["embedding/bias"] = np.zeros(width, np.float32)
    sizes = linen.transformer_options({k: v for k, v in ours.items() if k != POSITIONS})
    patch = ours["embedding/kernel"].shape[0]
    size = stated.get("image_size", 224 if config else None)
    image_size = _find_image_size(ours, size, source)
    preprocess, more = hugging_face_processor.read(
        tensors.sidecars, image_size, patch, any_size=family.any_size
    )
    if preprocess is None and family.preprocess:
        preprocess = family.preprocess(image_size)
    return Pretrained(
        params=unflatten_dict(ours, sep="/"),
        options={
            **sizes,
            **form,
            "image_size": image_size,
            "layer_norm_eps": float(stated["layer_norm_eps"]),
        },
        format=family.format,
        source=source,
        preprocess=preprocess,
        notes=(*notes, *more),
        **read_labels(config, form["num_classes"]),
    )


def _patches(names: Names) -> str:
    """Returns their name of the kernel of the patch embedding."""
    if "embedding" in names:
        return f"{names['embedding']}.weight"
    return names["embedding/kernel"][0]


def check_type(family: Family, config: Mapping, source: str) -> None:
    """Raises UserError unless config.json is of a family, or there is none."""
    kind = config.get("model_type")
    if kind not in (None, *family.model_types) and not family.any_type:
        raise UserError(
            f"{source}: model_type={kind!r} in config.json is not one of "
            f"{', '.join(family.model_types)}, which models of this project compute"
        )


def check_config(family: Family, flat: Arrays, config: Mapping, source: str) -> None:
    """Raises UserError if config.json has a value that no model here computes."""
    stated = {**family.defaults, **config}
    for key, (value, array) in family.must.items() if config else ():
        found = stated.get(key, value)
        if found != value and (not array or array in flat):
            raise UserError(
                f"{source}: {key}={found!r} in config.json is not supported: models of "
                f"this project have {value!r} there"
            )


def drop_mask_token(flat: Arrays) -> list[str]:
    """Removes the token for patches that pretraining hides; returns a note."""
    if flat.pop(MASK_TOKEN, None) is None:
        return []
    return ["mask token: dropped, which only pretraining has"]


def add_biases(flat: Arrays, pattern: str) -> list[str]:
    """Adds biases of zero to the layers of a pattern that have none; returns a note."""
    layers = [name.removesuffix(".weight") for name in flat if name.endswith(".weight")]
    missing = [
        layer
        for layer in layers
        if re.search(pattern, layer) and f"{layer}.bias" not in flat
    ]
    for layer in missing:
        flat[f"{layer}.bias"] = np.zeros(len(flat[f"{layer}.weight"]), np.float32)
    parts = ", ".join(sorted({layer.split(".")[-1] for layer in missing}))
    return [f"biases of {parts}: none in the file, so zeros"] if missing else []


def read_activation(config: Mapping) -> str:
    """Returns the activation that config.json states.

    Raises:
      UserError: no model here has it.
    """
    theirs = config["hidden_act"]
    for ours, names in ACTIVATIONS.items():
        if theirs in names:
            return ours
    known = ", ".join(name for names in ACTIVATIONS.values() for name in names)
    raise UserError(
        f"hidden_act={theirs!r} in config.json is not one of {known}, which models of "
        "this project have"
    )


def read_labels(config: Mapping, num_classes: int) -> dict:
    """Returns the fields of `Pretrained` that are about classes."""
    labels = config.get("id2label") or {}
    numbered = tuple(f"LABEL_{i}" for i in range(len(labels)))
    names = tuple(labels.get(str(i), name) for i, name in enumerate(numbered))
    if names == numbered or len(names) != num_classes:
        names = ()
    sigmoid = config.get("problem_type") == _SIGMOID
    return {
        "class_names": names,
        "loss": "sigmoid" if sigmoid else "softmax",
        "multi_label": sigmoid,  # As the hub calls it.
    }


def _find_image_size(
    ours: Arrays, stated: int | list[int] | None, source: str
) -> tuple[int, int]:
    """Returns the height and width that the parameters are for.

    What of images fills no patch is left out, as by the first layer of transformers.

    Args:
      ours: our arrays by name.
      stated: by config.json; None without one.
      source: for messages.

    Raises:
      UserError: positions or biases are of no square, and nothing tells their sides.
    """
    patch = ours["embedding/kernel"].shape[0]
    sides = (stated, stated) if isinstance(stated, int) else stated
    grid = sides and tuple(side // patch for side in sides)
    biases = [v for k, v in ours.items() if k.startswith("Transformer/relative_bias")]
    if POSITIONS in ours:
        count = ours[POSITIONS].shape[1] - len({"cls", "dist"} & ours.keys())
        what, side = f"position embeddings of {count} patches", math.isqrt(count)
    elif biases:
        count = len(biases[0]) - 3  # Three are of the class token.
        what, side = f"biases of {count} offsets", (math.isqrt(count) + 1) // 2
    else:
        grid = grid or (round(224 / patch),) * 2
        return grid[0] * patch, grid[1] * patch

    def size(rows, columns):
        if POSITIONS in ours:
            return rows * columns
        return (2 * rows - 1) * (2 * columns - 1)

    if grid is None or size(*grid) != count:
        grid = (side, side)
    if size(*grid) != count:
        raise UserError(
            f"{source} has {what}, which are no square grid: keep its config.json "
            "beside it"
        )
    return grid[0] * patch, grid[1] * patch


def write(
    family: Family, pretrained: Pretrained, folder: str | os.PathLike
) -> list[str]:
    """Writes a folder that `from_pretrained` of transformers loads.

    Args:
      family: to write a network of.
      pretrained: with parameters that fit its options.
      folder: existing; model.safetensors, config.json and, if the preprocessing is
        known, preprocessor_config.json are written to it.

    Returns:
      A line for each thing that was rewritten or left out.

    Raises:
      UserError: transformers has no such network or image processor.
    """
    options, arrays, notes = to_their_arrays(family, pretrained)
    config = write_config(family, options, pretrained)
    if options["num_classes"]:  # The models without a classifier have no prefix.
        arrays = add_prefix(arrays, f"{config['model_type']}.")
    return notes + write_folder(folder, arrays, config, pretrained)


def to_their_arrays(
    family: Family, pretrained: Pretrained
) -> tuple[dict, Arrays, list[str]]:
    """Returns the options of a network, its arrays for a family's file, and notes.

    The options have the side of a patch in pixels as "patch". Names have no prefix.

    Raises:
      UserError: transformers has no such network.
    """
    model = models.create(**pretrained.options)
    options, names = {**model.options, "patch": model.patch_size}, family.names
    surgery.check_network(
        options,
        f"{family.network}Model of transformers",
        {"activation": tuple(ACTIVATIONS), **family.has(options)},
        to=family.others,
    )
    flat = flatten_dict(pretrained.params, sep="/")
    flat, options, notes = surgery.norm_every_token(flat, options)
    if POSITIONS in names:
        place = surgery.learn_positions if family.optional else surgery.store_positions
        flat, options, more = place(flat, options, model.grid)
        notes += more + surgery.note_resize(options, "transformers")
    scales = [name for name in names if name.endswith("/gamma")]
    if not scales:
        flat, options, more = surgery.fold_layer_scale(flat, options)
        notes += more
    elif not options["layer_scale_init"] and not family.optional:
        options["layer_scale_init"] = 1.0
        ones = np.ones(options["width"], np.float32)
        for i in range(options["depth"]):
            flat |= {name.replace("#", str(i)): ones for name in scales}
        notes.append("LayerScale: none, written as ones")
    if "embedding" not in names:
        flat, more = surgery.fold_patch_bias(flat, options, num_prefix_tokens=1)
        notes += more
        del flat["embedding/bias"]
    arrays = tables.to_their_arrays(flat, entries(family, options))
    return options, arrays, notes + family.finish(arrays, options)


def add_prefix(arrays: Arrays, prefix: str) -> Arrays:
    """Returns arrays with a prefix before all names but those of classifiers."""
    return {k if _HEADS.match(k) else f"{prefix}{k}": v for k, v in arrays.items()}


def write_activation(name: str) -> str:
    """Returns `hidden_act`; that of a gated MLP is ignored."""
    return ACTIVATIONS.get(name, ACTIVATIONS["gelu"])[0]


def write_config(family: Family, options: Mapping, pretrained: Pretrained) -> dict:
    """Returns the content of config.json.

    Args:
      family: of the network.
      options: all options of `models.Model`, with "patch".
      pretrained: of which the names of the classes and the loss are taken.
    """
    task = "ForImageClassification" if options["num_classes"] else "Model"
    height, width = options["image_size"]
    config = {
        "architectures": [f"{family.network}{task}"],
        "model_type": family.model_types[0],
        **{key: options[option] for key, option in family.keys.items()},
        "hidden_act": write_activation(options["activation"]),
        "image_size": height if height == width else [height, width],
        "dtype": "float32",
    }
    if options.get("posemb") == "learned":
        config[RESIZE_KEY] = options["posemb_resize"]
    if num_classes := options["num_classes"]:
        names = pretrained.class_names or [f"LABEL_{i}" for i in range(num_classes)]
        config["id2label"] = {str(i): name for i, name in enumerate(names)}
        config["label2id"] = {name: i for i, name in enumerate(names)}
    if pretrained.loss == "sigmoid":
        config["problem_type"] = _SIGMOID
    return config | family.config(options)


def write_folder(
    folder: str | os.PathLike, arrays: Arrays, config: dict, pretrained: Pretrained
) -> list[str]:
    """Writes the files that `from_pretrained` of transformers loads.

    Args:
      folder: existing.
      arrays: by their names, for model.safetensors.
      config: content of config.json.
      pretrained: of which the preprocessing is taken, for preprocessor_config.json.

    Returns:
      A line for a file that is left out.

    Raises:
      UserError: transformers has no such image processor; nothing is written.
    """
    contents, notes = {"config.json": config}, []
    if preprocess := pretrained.preprocess:
        channels = config.get("vision_config", config)["num_channels"]
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


def _usage(family: Family, pretrained: Pretrained, path: str, on_hub: bool) -> str:
    """Returns Python lines that load a written checkpoint."""
    del on_hub
    options = models.create(**pretrained.options).options
    kind = "ModelForImageClassification" if options["num_classes"] else "Model"
    arguments, comment = family.usage(options)
    return (
        f"from transformers import Auto{kind}\n"
        f'model = Auto{kind}.from_pretrained("{path}"{arguments}){comment}'
    )
