"""Reads and writes the networks of Hugging Face's transformers, each by one table.

A `Family` has a network's table of arrays, the keys of its config.json, and the values
that models of this project do not support; `register` turns it into a format. Files
have the names of transformers 4 (`vit.encoder.layer.0.attention...`), which version 5
writes too.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Collection, Mapping

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from vit_jax import models
from vit_jax.data.preprocess import Preprocess
from vit_jax.errors import UserError
from vit_jax.weights import rewriting
from vit_jax.weights.formats import files, hugging_face_processor, linen, tables
from vit_jax.weights.formats.files import Tensors
from vit_jax.weights.formats.registry import READERS, WRITERS, Reader, Writer
from vit_jax.weights.formats.tables import ArrayEntry, Names, name_entries
from vit_jax.weights.pretrained import POSITIONS, Pretrained

# Names of `model.activation` in transformers; the first one is written.
ACTIVATIONS = {
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"),
    "quick_gelu": ("quick_gelu",),
}
# Option of `models.Model` by key of config.json; "patch" is the side of a patch.
KEYS = {
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_dim",
    "layer_norm_eps": "layer_norm_eps",
    "patch_size": "patch",
    "num_channels": "channels",
}
# Key of config.json for `model.posemb_resize`; transformers ignores it.
RESIZE_KEY = "posemb_resize"
MASK_TOKEN = "embeddings.mask_token"
_DECODER = {"decoder.0.weight", "decoder.0.bias"}  # Of ForMaskedImageModeling classes.
_SIGMOID = "multi_label_classification"
_HEADS = re.compile(r"(\w+_)?classifier\.")

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Networks of transformers that are read and written by one table.

    Functions receive arrays without their prefix, the content of config.json, or all
    options of `models.Model` with the side of a patch in pixels as "patch".

    Attributes:
      name: name of the format in messages.
      format: value of `Pretrained.format`.
      to: value of the flag --to.
      network: name of the class, without "Model" or "ForImageClassification".
      model_types: values of model_type in config.json; the first is written.
      claims: function that returns whether arrays, and the model_type if known, belong
        to this family.
      renames: patterns in names and their replacements, for prefixes and old names.
      in_memory: patterns in names of layers, without prefix, and their replacements,
        for the names of the modules in transformers 5.
      names: names of the layers, see `tables.Names`.
      more_names: function that returns the entries that `names` cannot express.
      fixed: options that are the same in all networks.
      options: function that returns the options determined by arrays and config.json.
      has: function that returns the supported values of options, where more than the
        default is supported.
      others: formats that can write other networks, for messages.
      keys: option by key of config.json.
      defaults: values of missing keys of config.json.
      must: key of config.json to its only supported value, and to the array whose
        presence makes the key matter; "" if it always matters.
      config: function that returns further content of config.json.
      prepare: function that converts arrays of a file to those of the table in place,
        and returns notes.
      finish: function that undoes `prepare` in place before writing, and returns notes.
      check: function that raises UserError unless arrays are those of the table;
        `check_names` if None.
      patch_bias: whether the patch embedding has a bias.
      square: whether transformers assumes a square grid of positions and biases.
      optional: whether networks may lack positions or LayerScale.
      any_size: whether networks accept images of every size.
      preprocess: function that returns the preprocessing to assume for an image size.
      usage: function that returns further arguments of `from_pretrained`, and a comment
        to put after it.
    """

    name: str
    format: str
    to: str
    network: str
    model_types: tuple[str, ...]
    claims: Callable[[Arrays, str | None], bool]
    renames: tuple[tuple[str, str], ...] = ()
    in_memory: tuple[tuple[str, str], ...] = ()
    names: Names = dataclasses.field(default_factory=dict)
    more_names: Callable[[Mapping], list[ArrayEntry]] = lambda options: []
    fixed: Mapping[str, object] = dataclasses.field(default_factory=dict)
    options: Callable[[Arrays, Mapping], dict] = lambda flat, config: {}
    has: Callable[[Mapping], dict[str, Collection]] = lambda options: {}
    others: str = "--to=timm or --to=safetensors"
    keys: Mapping[str, str] = dataclasses.field(default_factory=lambda: KEYS)
    defaults: Mapping = dataclasses.field(default_factory=dict)
    must: Mapping[str, tuple[object, str]] = dataclasses.field(default_factory=dict)
    config: Callable[[Mapping], dict] = lambda options: {}
    prepare: Callable[[Arrays, Mapping], list[str]] = lambda flat, config: []
    finish: Callable[[Arrays, Mapping], list[str]] = lambda arrays, options: []
    check: Callable[[Arrays, list[ArrayEntry], Mapping, str], None] | None = None
    patch_bias: bool = True
    square: bool = False
    optional: bool = False
    any_size: bool = False
    preprocess: Callable[[tuple[int, int]], Preprocess] | None = None
    usage: Callable[[Mapping], tuple[str, str]] = lambda options: ("", "")


def register(family: Family, refines: tuple[str, ...] = ("Hugging Face",)) -> None:
    """Registers the reader and the writer of a family."""
    READERS[family.name] = Reader(
        functools.partial(recognises, family), functools.partial(read, family), refines
    )
    WRITERS[family.to] = Writer(
        functools.partial(write, family),
        usage=functools.partial(_usage, family),
        library="transformers",
    )


def recognises(family: Family, tensors: Tensors) -> bool:
    """Returns whether a file belongs to a family."""
    kind = tensors.config.get("model_type")
    return family.claims(rename(family, tensors.flat), kind)


def rename(family: Family, flat: Mapping[str, np.ndarray]) -> Arrays:
    """Returns arrays under the names that transformers uses in files, without prefix.

    If two arrays have the same name, the one with the prefix belongs to the network and
    the other one to a head.
    """
    names = {name: file_name(family, name) for name in flat}
    ordered = sorted(names, key=lambda name: names[name] != name)
    return {names[name]: flat[name] for name in ordered}


def file_name(family: Family, name: str) -> str:
    """Returns the name that transformers uses in files for an array, without prefix."""
    for pattern, new in family.renames:
        name = re.sub(pattern, new, name)
    return name


def entries(family: Family, options: Mapping) -> list[ArrayEntry]:
    """Returns the table of a network; options at their defaults may be missing."""
    return name_entries(family.names, options) + family.more_names(options)


def read(family: Family, tensors: Tensors, num_heads: int = 0) -> Pretrained:
    """Reads a checkpoint of a family; see `registry.Reader`.

    Raises:
      UserError: this project does not support the network.
    """
    config, source, names = tensors.config, tensors.path, family.names
    values = {**family.defaults, **config}
    flat = rename(family, tensors.flat)
    notes = note_heads(family, tensors.flat) + family.prepare(flat, config)
    check_config(family, flat, config, source)
    if not config.get("qkv_bias", True):
        notes += add_biases(flat, r"\.(query|key|value)$")
    first_norm = next(v for k, v in names.items() if k.endswith("Norm_0"))
    depth = tables.count_blocks(flat, first_norm.partition("#")[0])
    num_heads, more = tables.choose_num_heads(
        values.get("num_attention_heads", 12 if config else 0),
        num_heads,
        len(flat[f"{names['embedding']}.weight"]),
        depth,
    )
    notes += more
    if not config:
        shown = ", ".join(f"{key}={value}" for key, value in family.defaults.items())
        notes.append(f"config.json: missing, assumed {shown}")
    form = _read_form(family, flat, config)
    table = entries(family, form | {"depth": depth, "num_heads": num_heads})
    if family.check:
        family.check(flat, table, config, source)
    else:
        tables.check_names(flat, table, source, network=f"{family.network}Model")
    params = tables.to_our_arrays(flat, table, source)
    sizes = linen.transformer_options(
        {k: v for k, v in params.items() if k != POSITIONS}
    )
    patch = params["embedding/kernel"].shape[0]
    size = values.get("image_size", 224 if config else None)
    image_size = _find_image_size(params, patch, size, source)
    preprocess, more = hugging_face_processor.read(
        tensors.sidecars, image_size, patch, any_size=family.any_size
    )
    if preprocess is None and family.preprocess:
        preprocess = family.preprocess(image_size)
    return Pretrained(
        params=unflatten_dict(params, sep="/"),
        options={
            **sizes,
            **form,
            "image_size": image_size,
            "layer_norm_eps": float(values["layer_norm_eps"]),
        },
        format=family.format,
        source=source,
        preprocess=preprocess,
        notes=(*notes, *more),
        **read_labels(config, form["num_classes"]),
    )


def _read_form(family: Family, flat: Arrays, config: Mapping) -> dict:
    """Returns the options determined by config.json and the names of arrays."""
    form = {
        "num_classes": len(flat.get("classifier.weight", ())),
        **{
            family.keys[key]: float(config.get(key) or family.defaults[key])
            for key in family.keys
            if key not in KEYS
        },
        **family.fixed,
        **family.options(flat, config),
    }
    if "register_tokens" in family.names:
        registers = flat.get(family.names["register_tokens"][0])
        form["num_register_tokens"] = 0 if registers is None else registers.shape[1]
    if "activation" not in form:
        form["activation"] = read_activation({**family.defaults, **config})
    if POSITIONS in family.names:
        default = form.get("posemb_resize", "bicubic")
        form["posemb_resize"] = config.get(RESIZE_KEY) or default
    return form


def check_config(family: Family, flat: Arrays, config: Mapping, source: str) -> None:
    """Raises UserError if config.json has a value that no model here supports."""
    if not config:
        return
    kind = config.get("model_type")
    if kind not in (None, *family.model_types):
        raise UserError(
            f"{source}: model_type={kind!r} in config.json is not one of "
            f"{', '.join(family.model_types)}, which models of this project support"
        )
    for key, (value, array) in family.must.items():
        configured = config.get(key, family.defaults.get(key, value))
        if configured != value and (not array or array in flat):
            raise UserError(
                f"{source}: {key}={configured!r} in config.json is not supported: models "
                f"of this project use {value!r}"
            )


def note_heads(family: Family, flat: Mapping[str, np.ndarray]) -> list[str]:
    """Returns a note if a head has arrays with the network's names, see `rename`."""
    names = {name: file_name(family, name) for name in flat}
    both = sorted({new for name, new in names.items() if new != name} & flat.keys())
    return [f"{', '.join(both)}: left out, part of a pretraining head"] if both else []


def drop_pretraining(flat: Arrays) -> list[str]:
    """Removes the mask token and SimMIM's decoder; returns notes on them."""
    notes = []
    for what, names in (("mask token", {MASK_TOKEN}), ("decoder", _DECODER)):
        present = names & flat.keys()
        if present:
            notes.append(f"{what}: dropped, only used for pretraining")
        for name in present:
            del flat[name]
    return notes


def add_biases(flat: Arrays, pattern: str) -> list[str]:
    """Adds zeros as missing biases to layers that match a pattern; returns a note."""
    layers = [name.removesuffix(".weight") for name in flat if name.endswith(".weight")]
    layers = [layer for layer in layers if re.search(pattern, layer)]
    missing = [layer for layer in layers if f"{layer}.bias" not in flat]
    for layer in missing:
        flat[f"{layer}.bias"] = np.zeros(len(flat[f"{layer}.weight"]), np.float32)
    parts = ", ".join(sorted({layer.split(".")[-1] for layer in missing}))
    return [f"biases of {parts}: not in the file, set to zeros"] if missing else []


def read_activation(config: Mapping) -> str:
    """Returns the activation of `hidden_act`, or raises UserError."""
    for activation, names in ACTIVATIONS.items():
        if config["hidden_act"] in names:
            return activation
    known = ", ".join(name for names in ACTIVATIONS.values() for name in names)
    raise UserError(
        f"hidden_act={config['hidden_act']!r} in config.json is not one of {known}, "
        "which models of this project support"
    )


def read_labels(config: Mapping, num_classes: int) -> dict:
    """Returns the fields of `Pretrained` that describe classes."""
    labels = config.get("id2label") or {}
    numbered = tuple(f"LABEL_{i}" for i in range(len(labels)))
    names = tuple(labels.get(str(i), name) for i, name in enumerate(numbered))
    named = names != numbered and len(names) == num_classes
    sigmoid = config.get("problem_type") == _SIGMOID
    return {
        "class_names": names if named else (),
        "loss": "sigmoid" if sigmoid else "softmax",
        "multi_label": sigmoid,
    }


def _find_image_size(
    params: Arrays, patch: int, configured: int | list[int] | None, source: str
) -> tuple[int, int]:
    """Returns the height and width that the parameters are for, in whole patches."""
    sides = (configured, configured) if isinstance(configured, int) else configured
    grid = sides and tuple(side // patch for side in sides)
    biases = [v for k, v in params.items() if k.startswith("Transformer/relative_bias")]
    if POSITIONS in params:
        count = params[POSITIONS].shape[1] - len({"cls", "dist"} & params.keys())
        size = 1
        side, what = math.isqrt(count), f"position embeddings of {count} patches"
    elif biases:  # One for each offset, and three for the class token.
        count, size = len(biases[0]) - 3, 2
        side, what = (math.isqrt(count) + 1) // 2, f"biases of {count} offsets"
    else:
        grid = grid or (round(224 / patch),) * 2
        return grid[0] * patch, grid[1] * patch
    # A row of n patches has n positions, or 2 n - 1 offsets.
    rows = lambda grid: math.prod(size * n - size + 1 for n in grid)
    if not grid or rows(grid) != count:
        grid = side, side
    if rows(grid) != count:
        raise UserError(
            f"{source} has {what}, which are not a square grid: keep its config.json "
            "in the same folder"
        )
    return grid[0] * patch, grid[1] * patch


def write(
    family: Family, pretrained: Pretrained, folder: str | os.PathLike
) -> list[str]:
    """Writes a folder that `from_pretrained` of transformers loads; see `registry.Writer`.

    Raises:
      UserError: transformers does not support the network or the image processor.
    """
    options, arrays, notes = to_their_arrays(family, pretrained)
    config = write_config(family, options, pretrained)
    if options["num_classes"]:  # The models without a classifier have no prefix.
        arrays = add_prefix(arrays, f"{config['model_type']}.")
    return notes + write_folder(folder, arrays, config, pretrained)


def to_their_arrays(
    family: Family, pretrained: Pretrained
) -> tuple[dict, Arrays, list[str]]:
    """Converts parameters to transformers' arrays.

    Returns:
      All options of `models.Model` and "patch"; the arrays without a prefix; and notes.

    Raises:
      UserError: transformers does not support the network.
    """
    model = models.create(**pretrained.options)
    options, names = {**model.options, "patch": model.config.patch_size}, family.names
    has = {name: (value,) for name, value in family.fixed.items()}
    if "register_tokens" in names:
        has["num_register_tokens"] = range(1_000)
    has |= {"activation": tuple(ACTIVATIONS), **family.has(options)}
    network = f"{family.network}Model of transformers"
    rewriting.check_network(options, network, has, to=family.others)
    flat = flatten_dict(pretrained.params, sep="/")
    notes = rewriting.norm_every_token(flat, options)
    if POSITIONS in names:
        fit_positions = (
            rewriting.learn_positions if family.optional else rewriting.store_positions
        )
        notes += fit_positions(flat, options, model.grid)
        notes += rewriting.note_resize(options, "transformers")
        biased = options.get("relative_bias", "none") != "none"
        if family.square and (biased or options["posemb"] == "learned"):
            others = "--to=timm or --to=safetensors"
            rewriting.check_square(model.grid, network, others)
    scales = [name for name in names if name.endswith("/gamma")]
    if not scales:
        notes += rewriting.fold_layer_scale(flat, options)
    elif not options["layer_scale_init"] and not family.optional:
        options["layer_scale_init"] = 1.0
        ones = np.ones(options["width"], np.float32)
        for i in range(options["depth"]):
            flat |= {name.replace("#", str(i)): ones for name in scales}
        notes.append("LayerScale: missing, written as ones")
    if not family.patch_bias:
        notes += rewriting.fold_patch_bias(flat, options, num_prefix_tokens=1)
    arrays = tables.to_their_arrays(flat, entries(family, options))
    return options, arrays, notes + family.finish(arrays, options)


def add_prefix(arrays: Arrays, prefix: str) -> Arrays:
    """Adds a prefix to the names of all arrays except those of classifiers."""
    return {k if _HEADS.match(k) else f"{prefix}{k}": v for k, v in arrays.items()}


def write_config(family: Family, options: Mapping, pretrained: Pretrained) -> dict:
    """Returns config.json, with the class names and the loss of `pretrained`."""
    num_classes = options["num_classes"]
    height, width = options["image_size"]
    # transformers ignores this key for gated MLPs.
    activations = ACTIVATIONS.get(options["activation"], ACTIVATIONS["gelu"])
    config = {
        "architectures": [architecture(family.network, options)],
        "model_type": family.model_types[0],
        **{key: options[option] for key, option in family.keys.items()},
        "hidden_act": activations[0],
        "image_size": height if height == width else [height, width],
        "dtype": "float32",
    }
    if options.get("posemb") == "learned":
        config[RESIZE_KEY] = options["posemb_resize"]
    if num_classes:
        names = pretrained.class_names or [f"LABEL_{i}" for i in range(num_classes)]
        config["id2label"] = {str(i): name for i, name in enumerate(names)}
        config["label2id"] = {name: i for i, name in enumerate(names)}
    if pretrained.loss == "sigmoid":
        config["problem_type"] = _SIGMOID
    return config | family.config(options)


def architecture(network: str, options: Mapping) -> str:
    """Returns the name of the network's class in transformers."""
    return f"{network}{'ForImageClassification' if options['num_classes'] else 'Model'}"


def write_folder(
    folder: str | os.PathLike, arrays: Arrays, config: dict, pretrained: Pretrained
) -> list[str]:
    """Writes the files that `from_pretrained` loads; returns a note if one is left out.

    Raises:
      UserError: transformers does not support the image processor; nothing is written.
    """
    contents, notes = {"config.json": config}, []
    if preprocess := pretrained.preprocess:
        network = config.get("vision_config", config)
        # Siglip2 reads images of any size as patches.
        patch = network["patch_size"] if "num_patches" in network else 0
        channels = network["num_channels"]
        preprocess, notes = rewriting.replace_filter(preprocess, "transformers")
        content = hugging_face_processor.write(preprocess, channels, patch)
        notes += hugging_face_processor.note_tokens(preprocess, patch)
        if not patch:
            notes += rewriting.note_crop(preprocess, "transformers", down=True)
        # The first layer of other networks drops these pixels.
        if any(preprocess.cut) and not patch:
            height, width = preprocess.crop_sides
            network["image_size"] = height if height == width else [height, width]
        contents["preprocessor_config.json"] = content
    else:
        notes.append("preprocessing: unknown, preprocessor_config.json is not written")
    files.write_folder(folder, arrays, contents)
    return notes


def _usage(family: Family, pretrained: Pretrained, path: str, on_hub: bool) -> str:
    """Returns Python code that loads a written checkpoint."""
    options = models.create(**pretrained.options).options
    kind = "ModelForImageClassification" if options["num_classes"] else "Model"
    arguments, comment = family.usage(options)
    return (
        f"from transformers import Auto{kind}\n"
        f'model = Auto{kind}.from_pretrained("{path}"{arguments}){comment}'
    )
