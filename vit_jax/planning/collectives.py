"""What the devices of a compiled program exchange."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

from vit_jax.planning.hlo import Instruction, Module

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange that a program runs.

    Attributes:
      kind: one of KINDS.
      dtype: of its largest array, as "bf16".
      overlapped: whether other work runs beside it (it is asynchronous).
      devices: in a group.
      bytes: of the whole arrays on a device: what an all-reduce returns, an all-gather
        returns, a reduce-scatter takes.
      times: how often a step runs it.
    """

    kind: str
    dtype: str
    overlapped: bool
    devices: int
    bytes: int
    times: int

    @property
    def sent(self) -> float:
        """Bytes that a device sends each time, by the best algorithm there is.

        Each of n devices keeps its own part, 1 / n, and sends the rest; an all-reduce
        is a reduce-scatter and an all-gather.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.bytes)
        share = (self.devices - 1) / self.devices
        return self.bytes * share * (2 if self.kind == "all-reduce" else 1)


def find(module: Module, devices: int) -> list[Collective]:
    """Lists the collectives of a program, those in loops with their number of rounds.

    Args:
      module: compiled program.
      devices: all there are.
    """
    # TPU's compiler splits an asynchronous collective into a chain of fusions that do
    # other work beside it. Each of them shows the collective, with the same channel.
    chains = set()
    found = []
    for instruction, times in module.runs():
        for inner, fused in _within(module, instruction):
            kind = _kind(inner.opcode)
            if not kind:
                continue
            chained = "chain_id=" in inner.attributes
            if chained:
                key = inner.attribute("channel_id"), inner.attribute("chain_id"), times
                if key in chains:
                    continue
                chains.add(key)
            found.append(
                _collective(
                    "reduce-scatter" if fused == "scattered" else kind,
                    inner,
                    module,
                    overlapped=chained
                    or inner.opcode.endswith("-start")
                    or instruction.opcode == "async-start",
                    devices=_group(inner.attributes, devices),
                    times=times,
                )
            )
    return found


def summarize(found: list[Collective]) -> list[dict]:
    """Adds up collectives by kind, type, and whether they are overlapped.

    Returns:
      One dict each: kind, dtype, overlapped, count, bytes and sent, a device and step.
    """
    rows = collections.defaultdict(lambda: [0, 0, 0.0])
    for one in found:
        row = rows[KINDS.index(one.kind), one.dtype, one.overlapped]
        row[0] += one.times
        row[1] += one.times * one.bytes
        row[2] += one.times * one.sent
    return [
        {
            "kind": KINDS[kind],
            "dtype": dtype,
            "overlapped": overlapped,
            "count": count,
            "bytes": size,
            "sent": round(sent),
        }
        for (kind, dtype, overlapped), (count, size, sent) in sorted(rows.items())
    ]


def _within(
    module: Module, instruction: Instruction
) -> Iterator[tuple[Instruction, str]]:
    """Goes through an instruction and what is fused into it."""
    yield instruction, ""
    if instruction.opcode == "fusion":
        for name in instruction.called:
            # A fusion that reduces over the devices and keeps a part of the result.
            scattered = (
                "scattered" if name.startswith("all-reduce-scatter") else "fused"
            )
            for inner in module.computations.get(name, ()):
                for found, _ in _within(module, inner):
                    yield found, scattered


def _kind(opcode: str) -> str:
    kind = opcode.removesuffix("-start")
    return kind if kind in KINDS else ""


def _collective(kind, instruction, module, *, overlapped, devices, times):
    arrays = instruction.arrays
    taken = [
        array
        for name in instruction.operands
        if name in module.by_name
        for array in module.by_name[name].arrays
    ]
    if kind == "reduce-scatter" and instruction.opcode == "reduce-scatter":
        arrays = taken
    elif instruction.opcode in ("all-gather-start", "collective-permute-start"):
        # It gives its operands, its results and what the runtime needs.
        results = arrays[len(taken) : 2 * len(taken)]
        arrays = results or arrays
    largest = max(arrays, key=lambda array: array.bytes)
    size = sum(array.bytes for array in arrays)
    return Collective(kind, largest.dtype, overlapped, devices, size, times)


def _group(attributes: str, devices: int) -> int:
    """Returns how many devices take part together.

    Three ways to write that are known: {{0,1},{2,3}}; [2,4]<=[8], groups by members;
    and mesh['a'=2,'b'=4] {'b'}, the axes of a mesh that they lie along, or a part of
    one: 'b':(1)2.
    """
    if match := re.search(r"source_target_pairs=", attributes):
        return devices
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return match[1].count(",") + 1
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(match[2])
    if match := re.search(
        r"replica_groups=(?:@?\w*)?mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes
    ):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices
