"""What the devices of a compiled program exchange."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

from vit_jax.planning.hlo import Module
from vit_jax.planning.instructions import Instruction

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# Between slices TPU's compiler sends to the host, which sends over the data centre's
# network; what for stands beside it.
_TRANSFERS = {
    "ALL_REDUCE": "all-reduce",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_GATHER": "all-gather",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}


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
      slices: whether it goes from slice to slice, over the data centre's network.
    """

    kind: str
    dtype: str
    overlapped: bool
    devices: int
    bytes: int
    times: int
    slices: bool = False

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
    for run in module.runs():
        beside = run.beside or run.instruction.starts
        for inner, scattered in _within(module, run.instruction):
            if inner.opcode == "send" and "megascale_transfer_type" in inner.attributes:
                found.append(_between_slices(inner, module, run.times))
            if inner.base not in KINDS:
                continue
            chained = "chain_id=" in inner.attributes
            if chained:
                channel = inner.attribute("channel_id"), inner.attribute("chain_id")
                if (*channel, run.times) in chains:
                    continue
                chains.add((*channel, run.times))
            kind = "reduce-scatter" if scattered else inner.base
            # What reduces and scatters at once gives less than it takes.
            scatters = inner.base == "reduce-scatter"
            arrays = module.taken(inner) if scatters else inner.results
            group = _group(inner.attributes, devices)
            overlapped = chained or beside or inner.starts
            found.append(_collective(kind, arrays, overlapped, group, run.times))
    return found


def summarize(found: list[Collective]) -> list[dict]:
    """Adds up collectives by kind, type, way, and whether they are overlapped.

    Returns:
      One dict each: kind, dtype, overlapped, slices, count, bytes and sent, a device and
      step.
    """
    rows = collections.defaultdict(lambda: [0, 0, 0.0])
    for one in found:
        row = rows[KINDS.index(one.kind), one.dtype, one.overlapped, one.slices]
        row[0] += one.times
        row[1] += one.times * one.bytes
        row[2] += one.times * one.sent
    return [
        {
            "kind": KINDS[kind],
            "dtype": dtype,
            "overlapped": overlapped,
            "slices": slices,
            "count": count,
            "bytes": size,
            "sent": round(sent),
        }
        for (kind, dtype, overlapped, slices), (count, size, sent) in sorted(
            rows.items()
        )
        if count
    ]


def _within(
    module: Module, instruction: Instruction
) -> Iterator[tuple[Instruction, bool]]:
    """Goes through an instruction and what is fused into it.

    Yields:
      Each, and whether the fusion keeps a part only of what is reduced in it.
    """
    name = instruction.attribute("calls").strip("%")
    scattered = instruction.base == "fusion" and name.startswith("all-reduce-scatter")
    yield instruction, False
    if instruction.base == "fusion":
        for inner in module.fused(instruction):
            for found, deeper in _within(module, inner):
                yield found, scattered or deeper


def _collective(kind, arrays, overlapped, group, times, slices=False):
    largest = max(arrays, key=lambda array: array.bytes)
    size = sum(array.bytes for array in arrays)
    return Collective(kind, largest.dtype, overlapped, group, size, times, slices)


def _between_slices(send, module, times):
    """Reads a transfer to other slices; its `recv` says the same again."""
    kind = _TRANSFERS.get(send.attribute("_xla_megascale_transfer_type"), KINDS[-1])
    # "{1,2}x{0:3}", slices and devices of each, or groups of devices, one of each slice.
    match = re.search(r'_xla_megascale_target="?\{+([^}]*)\}', send.attributes)
    words = match[1].split(",") if match else ()
    bounds = [[int(n) for n in re.findall(r"\d+", word)] for word in words]
    count = (
        sum(
            ends[-1] - ends[0] + 1 if ":" in word else 1
            for word, ends in zip(words, bounds, strict=True)
        )
        or 1
    )
    one = _collective(kind, module.taken(send), True, count, times, slices=True)
    if kind == "all-gather":
        return dataclasses.replace(one, bytes=one.bytes * count)
    return one


def _group(attributes: str, devices: int) -> int:
    """Returns how many devices take part together.

    Three ways to write that are known: {{0,1},{2,3}}; [2,4]<=[8], groups by members;
    and mesh['a'=2,'b'=4] {'b'}, the axes of a mesh that they lie along, or a part of
    one: 'b':(1)2.
    """
    if re.search(r"source_target_pairs=", attributes):
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
