"""What takes a chip's memory, and what the compiler says when it is too little."""

import dataclasses
import math
import re

import jax

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([BKMGT]?)"
_SHORTAGES = (
    # Of a program whose live arrays do not fit together.
    rf"Used {_SIZE} of {_SIZE} hbm",
    # Of one that is refused before its arrays are placed.
    rf"temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)",
)


@dataclasses.dataclass(frozen=True)
class Shortage:
    """Memory that a program wants and a chip does not have.

    Attributes:
      wanted: bytes of a chip.
      limit: bytes that a program can have.
    """

    wanted: int
    limit: int


def parse_shortage(message: str) -> Shortage | None:
    """Reads the compiler's error of a program that does not fit.

    Returns:
      None if it is another error, such as one about memory inside of the cores.
    """
    for pattern in _SHORTAGES:
        if match := re.search(pattern, message):
            wanted, wanted_unit, limit, limit_unit = match.groups()
            return Shortage(
                round(float(wanted) * _UNITS[wanted_unit]),
                round(float(limit) * _UNITS[limit_unit]),
            )
    return None


def bytes_a_device(shapes: object, shardings: object) -> int:
    """Returns what the arrays of a tree take on one device, without padding.

    Args:
      shapes: tree of shapes with types.
      shardings: the same tree of shardings.
    """
    sizes = jax.tree.map(
        lambda x, sharding: math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize,
        shapes,
        shardings,
    )
    return sum(jax.tree.leaves(sizes))
