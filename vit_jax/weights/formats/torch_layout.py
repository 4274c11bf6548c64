"""Between arrays as PyTorch lays them out and as Flax does, by one table for both ways.

A network's table has an entry for each array of the other library. Reading and writing
use the same entries, so that what is read can be written back bit for bit.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models import variants

Arrays = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Two functions that undo each other.

    Attributes:
      to_ours: one array of theirs to our arrays.
      to_theirs: back.
    """

    to_ours: Callable[[np.ndarray], Arrays]
    to_theirs: Callable[[Arrays], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of theirs.

    Attributes:
      theirs: its name.
      ours: names of what it becomes, levels joined by "/".
      layout: how.
    """

    theirs: str
    ours: tuple[str, ...]
    layout: Layout


def _one(to_ours: Callable, to_theirs: Callable) -> Layout:
    return Layout(lambda a: [to_ours(a)], lambda arrays: to_theirs(arrays[0]))


SAME = _one(lambda a: a, lambda a: a)
LINEAR = _one(np.transpose, np.transpose)  # (out, in) and (in, out).
# (out, in, Y, X) and (Y, X, in, out).
CONV = _one(lambda a: a.transpose(2, 3, 1, 0), lambda a: a.transpose(3, 2, 0, 1))
# A classifier written as a 1x1 convolution: (out, in, 1, 1) and (in, out).
POINTWISE = _one(
    lambda a: a.reshape(a.shape[:2]).T, lambda a: a.T.reshape(*a.T.shape, 1, 1)
)


def to_heads(heads: int, parts: int = 1) -> Layout:
    """Layout of a projection to heads, weight or bias.

    Theirs are (parts x heads x K, D) and (parts x heads x K,), ours a (D, heads, K)
    and a (heads, K) for each part.
    """

    def to_ours(a):
        a = a.reshape(parts, heads, -1, *a.shape[1:])
        return [part.transpose(2, 0, 1) if part.ndim == 3 else part for part in a]

    def to_theirs(arrays):
        arrays = [a.transpose(1, 2, 0) if a.ndim == 3 else a for a in arrays]
        return np.stack(arrays).reshape(-1, *arrays[0].shape[2:])

    return Layout(to_ours, to_theirs)


def from_heads(heads: int) -> Layout:
    """Layout of the projection back: (D, heads x K) and (heads, K, D)."""
    return _one(
        lambda a: a.reshape(len(a), heads, -1).transpose(1, 2, 0),
        lambda a: a.transpose(2, 0, 1).reshape(a.shape[2], -1),
    )


def dense(theirs: str, ours: str, layout: Layout = LINEAR) -> list[Entry]:
    """Lists the weight, of that layout, and the bias of a layer."""
    return [
        Entry(f"{theirs}.weight", (f"{ours}/kernel",), layout),
        Entry(f"{theirs}.bias", (f"{ours}/bias",), SAME),
    ]


def norm(theirs: str, ours: str) -> list[Entry]:
    """Lists the weight and the bias of a normalisation."""
    return [
        Entry(f"{theirs}.weight", (f"{ours}/scale",), SAME),
        Entry(f"{theirs}.bias", (f"{ours}/bias",), SAME),
    ]


def choose_heads(
    stated: int, asked: int, width: int, depth: int
) -> tuple[int, list[str]]:
    """Returns the attention heads of an encoder.

    PyTorch's arrays do not tell: all heads share one axis.

    Args:
      stated: number in a config; 0 where there is none.
      asked: number that the caller takes it to be; 0 if it does not know.
      width: features a token.
      depth: blocks.

    Returns:
      The number, and a note if it may be wrong.
    """
    if stated:
        return stated, []
    known = [
        size.heads
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


def read(
    flat: Mapping[str, np.ndarray], table: Iterable[Entry], source: str
) -> dict[str, np.ndarray]:
    """Turns their arrays into ours.

    Args:
      flat: theirs by name.
      table: of the network.
      source: for messages.

    Returns:
      Ours by name, levels joined by "/"; floats as float32. What the table does not
      know keeps its name, and what is missing stays so: whoever fits the parameters to
      a model finds both, and may have been told to allow them.

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


def check_floating(name: str, value: np.ndarray, source: str) -> None:
    """Raises UserError if an array holds integers, whose scale nothing tells."""
    if not np.issubdtype(value.dtype, np.floating):
        raise UserError(
            f"{source}: {name} holds {value.dtype} numbers, as quantised weights do: "
            "give the weights as float16, bfloat16 or float32"
        )


def write(
    flat: Mapping[str, np.ndarray], table: Iterable[Entry]
) -> dict[str, np.ndarray]:
    """Turns our arrays into theirs.

    Args:
      flat: ours by name, levels joined by "/".
      table: of the network; it names each of ours once.

    Returns:
      Theirs by name, contiguous.

    Raises:
      UserError: an array of the model's is missing or left over.
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
        entry.theirs: np.ascontiguousarray(
            entry.layout.to_theirs([np.asarray(flat[name]) for name in entry.ours])
        )
        for entry in table
    }
