"""Lists the instructions of a compiled program that move the most bytes in memory."""

import dataclasses
import re
from collections import defaultdict

from vit_jax.tools.planning import costs
from vit_jax.tools.planning.hlo import Instruction, Module

# Blocks of a network, whose instructions are counted together.
_BLOCKS = re.compile(r"(encoderblock|MixerBlock|stage|block)_\d+")
# Parts of an origin that are not modules or operations: methods, jitted functions.
_WRAPPER = re.compile(r"\.|^_|^jit$|^train_step$")
# Names of library kernels, by the start of the name that XLA gives them.
_LIBRARIES = {"__cublas": "cuBLAS", "__cudnn": "cuDNN", "tpu_custom_call": "Pallas"}


@dataclasses.dataclass(frozen=True)
class Mover:
    """Instructions of all blocks of a network that move equal arrays for one purpose.

    Attributes:
      kind: "cuBLAS", "cuDNN", "Pallas", or XLA's name of the operation: "fusion".
      backward: whether the instructions are part of a backward pass.
      place: module and operation that the first of them comes from.
      count: number of executions per step.
      bytes: bytes read and written per step.
      reads, writes: largest arrays of one execution, as "bf16[25216,768]".
    """

    kind: str
    backward: bool
    place: str
    count: int
    bytes: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def find(module: Module, most: int = 10) -> tuple[Mover, ...]:
    """Returns the instructions that move the most bytes, the largest first.

    Args:
      module: optimised program of one device.
      most: number of rows; instructions that differ only in the block they belong to
        are one row.
    """
    rows = defaultdict(lambda: [0, 0])
    for run in module.runs():
        size = costs.moved_by(module, run.instruction)
        if size:
            row = rows[_describe(module, run.instruction)]
            row[0] += run.times
            row[1] += run.times * size
    largest = sorted(rows.items(), key=lambda item: -item[1][1])[:most]
    return tuple(
        Mover(*key[:3], count, size, *key[3:]) for key, (count, size) in largest
    )


def _describe(module: Module, instruction: Instruction) -> tuple:
    """Returns what instructions of one row have in common."""
    name = instruction.attribute("custom_call_target")
    libraries = (word for start, word in _LIBRARIES.items() if name.startswith(start))
    origin = instruction.origin or module.origin(instruction.name)
    words = [
        _BLOCKS.sub(r"\1", word)
        for word in re.split(r"[/()]+", origin)
        if word and not _WRAPPER.search(word)
    ]
    return (
        next(libraries, instruction.base),
        "transpose(" in origin,
        "/".join(words[-3:]),
        _largest(module.taken(instruction)),
        _largest(instruction.results),
    )


def _largest(arrays) -> tuple[str, ...]:
    """Returns the arrays that have at least a tenth of the bytes of the largest."""
    # Workspaces of library kernels are bytes.
    arrays = [array for array in arrays if array.dtype not in ("s8", "u8")]
    least = max((array.bytes for array in arrays), default=0) / 10
    return tuple(
        f"{array.dtype}[{','.join(map(str, array.dims))}]"
        for array in arrays
        if array.bytes >= least
    )
