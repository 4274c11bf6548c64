"""Two-way tables: the arrays of another library, and ours that hold the same numbers.

A network's table of `ArrayEntry` maps each array of another library to ours. Reading and
writing use the same table, so what was read can be written back bit for bit. Most tables
come from `Names`, which state a layer once for all blocks.
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
    """Two functions that are inverse to each other.

    Attributes:
      to_ours: one array of theirs to our arrays.
      to_theirs: our arrays to one array of theirs.
    """

    to_ours: Callable[[np.ndarray], list[np.ndarray]]
    to_theirs: Callable[[list[np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """One array of theirs, and the arrays of ours that hold the same numbers.

    Attributes:
      theirs: name of their array.
      ours: names of our arrays, levels joined by "/".
      layout: converts between them.
    """

    theirs: str
    ours: tuple[str, ...]
    layout: ArrayLayout


def one_layout(to_ours: Callable, to_theirs: Callable) -> ArrayLayout:
    """Returns the layout of one array that is one array of ours."""
    return ArrayLayout(lambda a: [to_ours(a)], lambda arrays: to_theirs(arrays[0]))


SAME = one_layout(lambda a: a, lambda a: a)
LINEAR = one_layout(np.transpose, np.transpose)  # (out, in) and (in, out).
# (out, in, Y, X) and (Y, X, in, out).
CONV = one_layout(lambda a: a.transpose(2, 3, 1, 0), lambda a: a.transpose(3, 2, 0, 1))
# Two dense layers in one, one after the other, weight or bias.
PAIR = ArrayLayout(
    lambda a: [half.T for half in np.split(a, 2)],
    lambda arrays: np.concatenate([a.T for a in arrays]),
)
# Arrays of each layer, (2, depth, ...) and (depth, 2, ...).
DEPTH_SECOND = one_layout(lambda a: a.swapaxes(0, 1), lambda a: a.swapaxes(0, 1))
# A classifier written as a 1x1 convolution: (out, in, 1, 1) and (in, out).
POINTWISE = one_layout(
    lambda a: a.reshape(a.shape[:2]).T, lambda a: a.T.reshape(*a.T.shape, 1, 1)
)


def to_heads(num_heads: int, parts: int = 1) -> ArrayLayout:
    """Returns the layout of a projection to heads, weight or bias.

    Theirs are (parts x heads x K, D) and (parts x heads x K,), ours a (D, heads, K)
    and a (heads, K) for each part.
    """

    def to_ours(a):
        a = a.reshape(parts, num_heads, -1, *a.shape[1:])
        return [part.transpose(2, 0, 1) if part.ndim == 3 else part for part in a]

    def to_theirs(arrays):
        arrays = [a.transpose(1, 2, 0) if a.ndim == 3 else a for a in arrays]
        return np.stack(arrays).reshape(-1, *arrays[0].shape[2:])

    return ArrayLayout(to_ours, to_theirs)


def from_heads(num_heads: int) -> ArrayLayout:
    """Returns the layout of the output projection: (D, heads x K) and (heads, K, D)."""
    return one_layout(
        lambda a: a.reshape(len(a), num_heads, -1).transpose(1, 2, 0),
        lambda a: a.transpose(2, 0, 1).reshape(a.shape[2], -1),
    )


def dense(theirs: str, ours: str, layout: ArrayLayout = LINEAR) -> list[ArrayEntry]:
    """Returns the entries of the weight, in that layout, and the bias of a layer."""
    return [
        ArrayEntry(f"{theirs}.weight", (f"{ours}/kernel",), layout),
        ArrayEntry(f"{theirs}.bias", (f"{ours}/bias",), SAME),
    ]


def joined(theirs: str, ours: Iterable[str], layout: ArrayLayout) -> list[ArrayEntry]:
    """Returns the entries of one layer of theirs that is several of ours."""
    ours, dot = tuple(ours), "" if theirs.endswith("_") else "."
    return [
        ArrayEntry(f"{theirs}{dot}{kind}", tuple(f"{n}/{leaf}" for n in ours), layout)
        for kind, leaf in (("weight", "kernel"), ("bias", "bias"))
    ]


def norm(theirs: str, ours: str) -> list[ArrayEntry]:
    """Returns the entries of the weight and the bias of a normalisation."""
    return [
        ArrayEntry(f"{theirs}.weight", (f"{ours}/scale",), SAME),
        ArrayEntry(f"{theirs}.bias", (f"{ours}/bias",), SAME),
    ]


# The layers of a block, by their names in `block`; several of ours may be one of theirs.
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
# By a layer or array of ours a layer of theirs, or an array and its layout. A layer whose
# name ends with "_" has no dot before "weight".
Names = Mapping[str, str | tuple[str, ArrayLayout]]


def block(
    theirs: str, ours: str = "Transformer/encoderblock", **parts: str
) -> dict[str, str | tuple[str, ArrayLayout]]:
    """Returns the names of the layers of all blocks, whose number is "#".

    Args:
      theirs, ours: what is before the number.
      parts: by a key of `_BLOCK`, the name in a block of theirs.
    """
    names = {f"{ours}_#/{_BLOCK[k]}": f"{theirs}.#.{v}" for k, v in parts.items()}
    return {k: (v, SAME) if k.endswith("gamma") else v for k, v in names.items()}


def name_entries(names: Names, options: Mapping) -> list[ArrayEntry]:
    """Returns the entries of names, block by block, but of what the options exclude.

    Args:
      names: of a network.
      options: depth, num_heads, and the options of `models.Model` that are not plain.
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
            (ours, theirs)
            for ours, theirs in group
            if has.get(ours.split("_#/")[-1], True)
            and (pool == "map" or not ours.startswith("MAPHead_0/"))
        ]
        for i in range(options["depth"] if numbered else 1):
            for ours, theirs in rows:
                table += _entries_of(ours, theirs, str(i), options["num_heads"])
    return table


def _entries_of(
    ours: str, theirs: str | tuple[str, ArrayLayout], number: str, num_heads: int
) -> list[ArrayEntry]:
    ours = ours.replace("#", number)
    if isinstance(theirs, tuple):
        return [ArrayEntry(theirs[0].replace("#", number), (ours,), theirs[1])]
    theirs = theirs.replace("#", number)
    module, _, kinds = ours.rpartition("/")
    places = [f"{module}/{kind}" if module else kind for kind in kinds.split(",")]
    kind = places[0].split("/")[-1]
    if kind in ("query", "key", "value"):
        return joined(theirs, places, to_heads(num_heads, len(places)))
    if len(places) > 1:
        return joined(theirs, places, PAIR)
    if "norm" in kind.casefold():
        return norm(theirs, ours)
    layouts = {"embedding": CONV, "out": from_heads(num_heads)}
    return dense(theirs, ours, layouts.get(kind, LINEAR))


def rename(
    flat: Mapping[str, np.ndarray], patterns: Iterable[tuple[str, str]]
) -> dict[str, np.ndarray]:
    """Returns arrays whose names have each pattern replaced, one after the other."""
    renamed = {}
    for name, value in flat.items():
        for pattern, new in patterns:
            name = re.sub(pattern, new, name)
        renamed[name] = value
    return renamed


def choose_num_heads(
    stated: int, asked: int, width: int, depth: int
) -> tuple[int, list[str]]:
    """Returns the number of attention heads of an encoder, and a note if it may be wrong.

    PyTorch's arrays do not show it, because all heads share one axis.

    Args:
      stated: number in a config file; 0 if there is none.
      asked: number that the caller assumes; 0 if unknown.
      width, depth: features per token, and number of blocks.
    """
    if stated:
        return stated, []
    known = [
        size.num_heads
        for size in variants.SIZES.values()
        if (size.width, size.depth) == (width, depth)
    ]
    usual = known[0] if known else max(1, width // 64)
    note = "heads: nothing says how many, so"
    if asked and asked != usual:
        return asked, [f"{note} {asked} as asked for, not the usual {usual}"]
    if asked or known:
        return usual, []
    return usual, [f"{note} {usual}, one for 64 features"]


def to_our_arrays(
    flat: Mapping[str, np.ndarray], table: Iterable[ArrayEntry], source: str
) -> dict[str, np.ndarray]:
    """Returns our arrays by name, levels joined by "/", floats as float32.

    Arrays that are not in the table keep their name, and missing ones stay missing: fitting
    the parameters to a model reports both, because a user may allow them.

    Args:
      flat: theirs by name.
      table: of the network.
      source: for messages.

    Raises:
      UserError: an array is of integers, or of a shape that makes no sense.
    """
    table = list(table)
    known = {entry.theirs for entry in table}
    ours = {name: value for name, value in flat.items() if name not in known}
    for entry in table:
        if entry.theirs not in flat:
            continue
        value = flat[entry.theirs]
        check_floating(entry.theirs, value, source)
        try:
            arrays = entry.layout.to_ours(value.astype(np.float32, copy=False))
        except ValueError as error:
            raise UserError(
                f"{source}: {entry.theirs} has shape {value.shape}, which does not fit "
                f"the model: {error}"
            ) from error
        ours |= dict(zip(entry.ours, arrays, strict=True))
    return ours


def check_names(
    flat: Mapping[str, np.ndarray],
    table: Iterable[ArrayEntry],
    source: str,
    *,
    part: str = "",
    network: str,
) -> None:
    """Raises UserError unless the arrays are those of a table, no more and no less.

    Args:
      flat: theirs by name.
      table: of the network.
      source, part, network: for messages, as " of the decoder" of what is stored whole.
    """
    known = {entry.theirs for entry in table}
    if wrong := sorted(known ^ flat.keys()):
        what = "missing" if wrong[0] in known else "not supported"
        raise UserError(
            f"{source}: {wrong[0]}{part} is {what}: give the whole file of {network}"
        )


def check_floating(name: str, value: np.ndarray, source: str) -> None:
    """Raises UserError if an array holds integers, whose scale is unknown."""
    if not np.issubdtype(value.dtype, np.floating):
        raise UserError(
            f"{source}: {name} holds {value.dtype} numbers, as quantised weights do: "
            "give the weights as float16, bfloat16 or float32"
        )


def to_their_arrays(
    flat: Mapping[str, np.ndarray], table: Iterable[ArrayEntry]
) -> dict[str, np.ndarray]:
    """Returns their arrays by name.

    Args:
      flat: ours by name, levels joined by "/".
      table: of the network, with each of our arrays once.

    Raises:
      UserError: one of our arrays is missing or left over.
    """
    table = list(table)
    known = [name for entry in table for name in entry.ours]
    for names, what in (
        (flat.keys() - known, "has {}, which its options do not explain"),
        (known - flat.keys(), "lacks {}, which its options ask for"),
    ):
        if names:
            raise UserError(f"the model {what.format(min(names))}: it is not complete")
    return {
        entry.theirs: entry.layout.to_theirs(
            [np.asarray(flat[name]) for name in entry.ours]
        )
        for entry in table
    }
