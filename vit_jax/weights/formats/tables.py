"""Two-way tables between another library's arrays and this project's parameters.

Each `ArrayEntry` of a network's table maps one array of the library to parameters.
Reading and writing use the same table, so that a network is written back bit for bit.
Most tables are built from `Names`, which name a layer once for all blocks.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import variants
from vit_jax.weights.pretrained import POSITIONS


@dataclasses.dataclass(frozen=True)
class ArrayLayout:
    """Two functions that are inverses of each other.

    Attributes:
      to_params: function that converts one array of the other library to parameters.
      from_params: function that converts these parameters to that array.
    """

    to_params: Callable[[np.ndarray], list[np.ndarray]]
    from_params: Callable[[list[np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """One array of another library, and the parameters with the same numbers.

    Attributes:
      name: name of the array in the other library.
      params: names of the parameters, levels joined by "/".
      layout: conversion between them.
    """

    name: str
    params: tuple[str, ...]
    layout: ArrayLayout


def one_layout(to_param: Callable, from_param: Callable) -> ArrayLayout:
    """Returns the layout of an array that is a single parameter."""
    return ArrayLayout(lambda a: [to_param(a)], lambda arrays: from_param(arrays[0]))


SAME = one_layout(lambda a: a, lambda a: a)
LINEAR = one_layout(np.transpose, np.transpose)  # (out, in) and (in, out).
# (out, in, Y, X) and (Y, X, in, out).
CONV = one_layout(lambda a: a.transpose(2, 3, 1, 0), lambda a: a.transpose(3, 2, 0, 1))
# Weights or biases of two dense layers, concatenated.
PAIR = ArrayLayout(
    lambda a: [half.T for half in np.split(a, 2)],
    lambda arrays: np.concatenate([a.T for a in arrays]),
)
# Arrays for all layers, (2, depth, ...) and (depth, 2, ...).
DEPTH_SECOND = one_layout(lambda a: a.swapaxes(0, 1), lambda a: a.swapaxes(0, 1))
ROWS = one_layout(lambda a: a[None], lambda a: a[0])  # (N, D) and (1, N, D).
TOKEN = one_layout(lambda a: a[None, None], lambda a: a[0, 0])  # (D,) and (1, 1, D).
# A classifier written as a 1x1 convolution: (out, in, 1, 1) and (in, out).
POINTWISE = one_layout(
    lambda a: a.reshape(a.shape[:2]).T, lambda a: a.T.reshape(*a.T.shape, 1, 1)
)


def to_heads(num_heads: int, parts: int = 1) -> ArrayLayout:
    """Returns the layout of a projection to heads, weight or bias.

    Arrays have shape (parts x heads x K, D) and (parts x heads x K,); the parameters of
    each part have shape (D, heads, K) and (heads, K).
    """

    def to_params(a):
        a = a.reshape(parts, num_heads, -1, *a.shape[1:])
        return [part.transpose(2, 0, 1) if part.ndim == 3 else part for part in a]

    def from_params(arrays):
        arrays = [a.transpose(1, 2, 0) if a.ndim == 3 else a for a in arrays]
        return np.stack(arrays).reshape(-1, *arrays[0].shape[2:])

    return ArrayLayout(to_params, from_params)


def from_heads(num_heads: int) -> ArrayLayout:
    """Returns the layout of the output projection: (D, heads x K) and (heads, K, D)."""
    return one_layout(
        lambda a: a.reshape(len(a), num_heads, -1).transpose(1, 2, 0),
        lambda a: a.transpose(2, 0, 1).reshape(a.shape[2], -1),
    )


def dense_to_conv(weight: np.ndarray, side: int) -> np.ndarray:
    """Returns the convolution that equals a dense layer on flattened patches.

    Args:
      weight: dense kernel for the flattened pixels of patches, (out, Y x X x in).
      side: side of a patch, both Y and X.

    Returns:
      The convolution kernel, (out, in, Y, X).
    """
    return weight.reshape(len(weight), side, side, -1).transpose(0, 3, 1, 2)


def conv_to_dense(weight: np.ndarray) -> np.ndarray:
    """Converts a convolution on patches to a dense layer; inverts `dense_to_conv`."""
    return weight.transpose(0, 2, 3, 1).reshape(len(weight), -1)


def dense(name: str, module: str, layout: ArrayLayout = LINEAR) -> list[ArrayEntry]:
    """Returns the entries of a dense layer's weight, in the given layout, and bias."""
    return [
        ArrayEntry(f"{name}.weight", (f"{module}/kernel",), layout),
        ArrayEntry(f"{name}.bias", (f"{module}/bias",), SAME),
    ]


def joined(name: str, modules: Iterable[str], layout: ArrayLayout) -> list[ArrayEntry]:
    """Returns the entries of one layer that is split into several modules here."""
    modules, dot = tuple(modules), "" if name.endswith("_") else "."
    return [
        ArrayEntry(f"{name}{dot}{kind}", tuple(f"{m}/{leaf}" for m in modules), layout)
        for kind, leaf in (("weight", "kernel"), ("bias", "bias"))
    ]


def norm(name: str, module: str) -> list[ArrayEntry]:
    """Returns the entries of the weight and bias of a normalisation."""
    return [
        ArrayEntry(f"{name}.weight", (f"{module}/scale",), SAME),
        ArrayEntry(f"{name}.bias", (f"{module}/bias",), SAME),
    ]


# Modules of a block, by their names in the arguments of `block`. One layer of another
# library may be several modules, separated by commas.
_ATTENTION, _MLP = "MultiHeadDotProductAttention_1", "MlpBlock_3"
_BLOCK = {
    "norm1": "LayerNorm_0",
    **{part: f"{_ATTENTION}/{part}" for part in ("query", "key", "value", "out")},
    "heads": f"{_ATTENTION}/query,key,value",
    "query_norm": f"{_ATTENTION}/LayerNorm_query",
    "key_norm": f"{_ATTENTION}/LayerNorm_key",
    "out_norm": f"{_ATTENTION}/LayerNorm_out",
    "scale1": "LayerScale_1/gamma",
    "norm2": "LayerNorm_2",
    "fc1": f"{_MLP}/Dense_0",
    "fc2": f"{_MLP}/Dense_1",
    "gate": f"{_MLP}/gate",
    "hidden_norm": f"{_MLP}/LayerNorm_hidden",
    "scale2": "LayerScale_3/gamma",
}
# Maps a module to the other library's layer, or a parameter to its array and layout. If
# the name of a layer ends with "_", no dot is put before "weight".
Names = Mapping[str, str | tuple[str, ArrayLayout]]


def block(
    prefix: str, modules: str = "Transformer/encoderblock", **parts: str
) -> dict[str, str | tuple[str, ArrayLayout]]:
    """Returns the names of the layers of all blocks, with "#" for a block's number.

    Args:
      prefix: start of the other library's names, before the number.
      modules: start of the modules' names, before the number.
      parts: names of layers in a block of the other library, by a key of `_BLOCK`.
    """
    names = {f"{modules}_#/{_BLOCK[k]}": f"{prefix}.#.{v}" for k, v in parts.items()}
    return {k: (v, SAME) if k.endswith("gamma") else v for k, v in names.items()}


def name_entries(names: Names, options: Mapping) -> list[ArrayEntry]:
    """Returns the entries of names, block by block, without layers that are not used.

    Args:
      names: names of all layers that the network can have.
      options: depth, num_heads, and all options that differ from their defaults.
    """
    pool, classes = options.get("pool", "token"), options.get("num_classes")
    has = {
        POSITIONS: options.get("posemb") != "none",
        "cls": pool.startswith("token") or options.get("class_token"),
        "dist": options.get("distillation"),
        "register_tokens": options.get("num_register_tokens"),
        "Transformer/pre_norm": options.get("pre_norm", True),
        "Transformer/rope_frequencies": options.get("rope") == "mixed",
        "Transformer/relative_bias": options.get("relative_bias") == "shared",
        "Transformer/relative_bias_#": options.get("relative_bias") == "every",
        _BLOCK["scale1"]: options.get("layer_scale_init"),
        _BLOCK["scale2"]: options.get("layer_scale_init"),
        _BLOCK["gate"]: options.get("activation") == "swiglu",
        _BLOCK["query_norm"]: options.get("qk_norm"),
        _BLOCK["key_norm"]: options.get("qk_norm"),
        _BLOCK["out_norm"]: options.get("attention_out_norm"),
        _BLOCK["hidden_norm"]: options.get("mlp_norm"),
        "Transformer/encoder_norm": options.get("final_norm", True)
        and not options.get("fc_norm"),
        "Transformer/cls_norm": options.get("cls_norm"),
        "fc_norm": options.get("fc_norm"),
        "pre_logits": options.get("representation_layer"),
        "head": classes,
        "head_dist": classes and options.get("distillation"),
    }
    table = []
    for numbered, group in itertools.groupby(
        names.items(), lambda pair: "#" in pair[0]
    ):
        rows = [
            (module, layer)
            for module, layer in group
            if has.get(module.split("_#/")[-1], True)
            and (pool == "map" or not module.startswith("MAPHead_0/"))
        ]
        for i in range(options["depth"] if numbered else 1):
            for module, layer in rows:
                table += _entries_of(module, layer, str(i), options["num_heads"])
    return table


def _entries_of(
    module: str, layer: str | tuple[str, ArrayLayout], number: str, num_heads: int
) -> list[ArrayEntry]:
    module = module.replace("#", number)
    if isinstance(layer, tuple):
        return [ArrayEntry(layer[0].replace("#", number), (module,), layer[1])]
    layer = layer.replace("#", number)
    parent, _, kinds = module.rpartition("/")
    modules = [f"{parent}/{kind}" if parent else kind for kind in kinds.split(",")]
    kind = modules[0].split("/")[-1]
    if kind in ("query", "key", "value"):
        return joined(layer, modules, to_heads(num_heads, len(modules)))
    if len(modules) > 1:
        return joined(layer, modules, PAIR)
    if "norm" in kind.casefold():
        return norm(layer, module)
    layouts = {"embedding": CONV, "out": from_heads(num_heads)}
    return dense(layer, module, layouts.get(kind, LINEAR))


def below(flat: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Returns the arrays whose names start with a prefix, with the prefix removed."""
    names = (name for name in flat if name.startswith(prefix))
    return {name.removeprefix(prefix): flat[name] for name in names}


def rename(
    flat: Mapping[str, np.ndarray], patterns: Iterable[tuple[str, str]]
) -> dict[str, np.ndarray]:
    """Returns arrays by names in which each pattern was replaced in turn."""
    renamed = {}
    for name, value in flat.items():
        for pattern, new in patterns:
            name = re.sub(pattern, new, name)
        renamed[name] = value
    return renamed


def count_blocks(flat: Mapping[str, np.ndarray], prefix: str) -> int:
    """Returns the number of blocks, whose names start with `prefix` and a number."""
    return len({name.split(".")[0] for name in below(flat, prefix)})


def choose_num_heads(
    configured: int, requested: int, width: int, depth: int
) -> tuple[int, list[str]]:
    """Returns an encoder's number of attention heads, and a note if it may be wrong.

    PyTorch's arrays do not show it, because all heads share one axis.

    Args:
      configured: number in a config file; 0 without one.
      requested: number that the caller assumes; 0 if unknown.
      width: number of features per token.
      depth: number of blocks.
    """
    if configured:
        return configured, []
    known = [
        size.num_heads
        for size in variants.SIZES.values()
        if (size.width, size.depth) == (width, depth)
    ]
    usual = known[0] if known else max(1, width // 64)
    note = "heads: number unknown, assumed"
    if requested and requested != usual:
        return requested, [f"{note} {requested} as requested, not the usual {usual}"]
    if requested or known:
        return usual, []
    return usual, [f"{note} {usual}, with 64 features each"]


def to_our_arrays(
    flat: Mapping[str, np.ndarray], table: Iterable[ArrayEntry], source: str
) -> dict[str, np.ndarray]:
    """Converts arrays of another library to float32 parameters by name.

    Arrays that are not in the table keep their names, and missing ones stay missing:
    fitting the parameters to a model reports both, because users can allow them.

    Raises:
      UserError: an array holds integers, or its shape does not fit its layout.
    """
    table = list(table)
    known = {entry.name for entry in table}
    params = {name: value for name, value in flat.items() if name not in known}
    for entry in table:
        if entry.name not in flat:
            continue
        value = flat[entry.name]
        check_floating(entry.name, value, source)
        try:
            arrays = entry.layout.to_params(value.astype(np.float32, copy=False))
        except ValueError as error:
            raise UserError(
                f"{source}: {entry.name} has shape {value.shape}, which does not fit "
                f"the model: {error}"
            ) from error
        params |= dict(zip(entry.params, arrays, strict=True))
    return params


def check_names(
    flat: Mapping[str, np.ndarray],
    table: Iterable[ArrayEntry],
    source: str,
    *,
    part: str = "",
    network: str,
) -> None:
    """Raises UserError unless arrays have exactly the names of a table.

    In messages, `part` is " of the decoder" or similar, and `network` the whole
    network.
    """
    known = {entry.name for entry in table}
    if wrong := sorted(known ^ flat.keys()):
        what, remedy = "not supported", f"give weights of {network} without it"
        if wrong[0] in known:
            what, remedy = "missing", f"give the whole file of {network}"
        raise UserError(f"{source}: {wrong[0]}{part} is {what}: {remedy}")


def check_floating(name: str, value: np.ndarray, source: str) -> None:
    """Raises UserError if an array holds integers or other types without a scale."""
    if not np.issubdtype(value.dtype, np.floating):
        raise UserError(
            f"{source}: {name} holds {value.dtype} numbers: give the weights as float16, "
            "bfloat16 or float32"
        )


def to_their_arrays(
    flat: Mapping[str, np.ndarray], table: Iterable[ArrayEntry]
) -> dict[str, np.ndarray]:
    """Converts parameters to arrays of another library by name.

    Raises:
      UserError: a parameter is missing or left over.
    """
    table = list(table)
    known = [name for entry in table for name in entry.params]
    for names, what in (
        (flat.keys() - known, "has {}, which does not follow from its options"),
        (known - flat.keys(), "lacks {}, which its options require"),
    ):
        if names:
            raise UserError(f"the model {what.format(min(names))}: it is not complete")
    return {
        entry.name: entry.layout.from_params(
            [np.asarray(flat[name]) for name in entry.params]
        )
        for entry in table
    }
