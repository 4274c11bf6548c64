"""Counts what a compiled program computes, moves in memory and sends, per device."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator

from vit_jax.models.cost import window_products
from vit_jax.tools.planning.hlo import Instruction, Module

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# Between slices, the TPU compiler sends through the hosts over the data centre network;
# an attribute names the collective.
_TRANSFERS = {
    "ALL_REDUCE": "all-reduce",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_GATHER": "all-gather",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}

# Opcodes that move no data, or whose data is counted at another instruction.
_FREE = {
    "add-dependency",
    "after-all",
    "async-start",
    "bitcast",
    "call",
    "call-start",
    "conditional",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
}
_ENDS = ("-done", "-update")
# Custom calls of the TPU compiler that only annotate memory.
_NAMES_MEMORY = ("AllocateBuffer", "ConcatBitcast")
_SLICES = ("dynamic-slice", "slice", "gather")
_SAME = ("bitcast", "reshape", "copy", "convert", "transpose")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation of a program.

    Attributes:
      kind: one of KINDS.
      dtype: type of its largest array, such as "bf16".
      overlapped: whether it is asynchronous, so that other work runs beside it.
      devices: number of devices in a group.
      bytes: size of the full arrays on a device: the result of an all-reduce or
        all-gather, the operand of a reduce-scatter.
      times: executions per step.
      slices: whether it is between slices, over the data centre network.
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
        """Bytes that a device sends per execution, with the best known algorithm.

        Each of n devices keeps its share, 1 / n, and sends the rest. An all-reduce is
        a reduce-scatter and an all-gather.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.bytes)
        share = (self.devices - 1) / self.devices
        return self.bytes * share * (2 if self.kind == "all-reduce" else 1)


def find_collectives(module: Module, devices: int) -> list[Collective]:
    """Returns the collectives of a program; those in loops with the trip count.

    Args:
      module: compiled program.
      devices: total number of devices.
    """
    # The TPU compiler splits an asynchronous collective into a chain of fusions with
    # other work. Each of them contains the collective, with the same channel.
    chains = set()
    collectives = []
    for run in module.runs():
        beside = run.beside or run.instruction.starts
        for inner, scattered in _within(module, run.instruction):
            if inner.opcode == "send" and "megascale_transfer_type" in inner.attributes:
                collectives.append(_between_slices(inner, module, run.times))
            if inner.base not in KINDS:
                continue
            chained = "chain_id=" in inner.attributes
            if chained:
                channel = inner.attribute("channel_id"), inner.attribute("chain_id")
                if (*channel, run.times) in chains:
                    continue
                chains.add((*channel, run.times))
            kind = "reduce-scatter" if scattered else inner.base
            # The operand of a reduce-scatter is larger than its result.
            scatters = inner.base == "reduce-scatter"
            arrays = module.taken(inner) if scatters else inner.results
            group = _group(inner.attributes, devices)
            overlapped = chained or beside or inner.starts
            collectives.append(_collective(kind, arrays, overlapped, group, run.times))
    return collectives


def summarize_collectives(collectives: list[Collective]) -> list[dict]:
    """Sums collectives by kind, type, network and overlap.

    Returns:
      One dict each: kind, dtype, overlapped, slices, count, bytes and sent, per device
      and step.
    """
    rows = defaultdict(lambda: [0, 0, 0.0])
    for each in collectives:
        row = rows[KINDS.index(each.kind), each.dtype, each.overlapped, each.slices]
        row[0] += each.times
        row[1] += each.times * each.bytes
        row[2] += each.times * each.sent
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
    """Yields an instruction and those fused into it, and whether a fusion scatters it."""
    name = instruction.attribute("calls").strip("%")
    scattered = instruction.base == "fusion" and name.startswith("all-reduce-scatter")
    yield instruction, False
    if instruction.base == "fusion":
        for part in module.fused(instruction):
            for inner, deeper in _within(module, part):
                yield inner, scattered or deeper


def _collective(kind, arrays, overlapped, group, times, slices=False):
    largest = max(arrays, key=lambda array: array.bytes)
    size = sum(array.bytes for array in arrays)
    return Collective(kind, largest.dtype, overlapped, group, size, times, slices)


def _between_slices(send, module, times):
    """Parses a transfer to other slices; the matching `recv` repeats it."""
    kind = _TRANSFERS.get(send.attribute("_xla_megascale_transfer_type"), KINDS[-1])
    # "{1,2}x{0:3}": slices and devices of each; or groups with a device of each slice.
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
    sent = _collective(kind, module.taken(send), True, count, times, slices=True)
    if kind == "all-gather":
        return dataclasses.replace(sent, bytes=sent.bytes * count)
    return sent


def _group(attributes: str, devices: int) -> int:
    """Returns the number of devices in a group."""
    # Three notations are known: {{0,1},{2,3}}; [2,4]<=[8], groups by members; and
    # mesh['a'=2,'b'=4] {'b'}, the mesh axes of a group, or a part of one: 'b':(1)2.
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


def count_macs(module: Module) -> int:
    """Returns the multiply-accumulates of a step's matrix products and convolutions.

    In convolutions, padding and dilation zeros do not count: the TPU compiler writes
    batched products that way. Work repeated on several devices counts on each. Custom
    calls, such as Pallas kernels, are not counted.

    Args:
      module: optimised program of one device; a loop with an unknown trip count counts
        once.
    """
    counts = {"dot": _dot_macs, "convolution": _convolution_macs}
    return sum(
        run.times * counts[inner.base](module, inner)
        for run in module.runs()
        for inner in module.within(run.instruction)
        if inner.base in counts
    )


def _dot_macs(module, instruction):
    left = module.by_name[instruction.operands[0]].results[0].dims
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    contracted = [int(n) for n in match[1].split(",") if n] if match else []
    out = instruction.results[0].dims
    return math.prod(out) * math.prod(left[axis] for axis in contracted)


def _convolution_macs(module, instruction):
    """Counts with "dim_labels=b01f_01io->b01f" and "window={size=3x3 pad=1_1x1_1}"."""
    left, kernel = (
        module.by_name[name].results[0].dims for name in instruction.operands
    )
    out = instruction.results[0].dims
    left_axes, kernel_axes, out_axes = re.search(
        r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes
    ).groups()
    match = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    window = dict(word.split("=") for word in match[1].split()) if match else {}
    macs = out[out_axes.index("b")] * out[out_axes.index("f")]
    macs *= kernel[kernel_axes.index("i")]  # Input features of one group.
    for axis in filter(str.isdigit, left_axes):

        def option(name, default, axis=int(axis)):
            return window[name].split("x")[axis] if name in window else default

        steps, side = out[out_axes.index(axis)], left[left_axes.index(axis)]
        taps, stride = int(option("size", 1)), int(option("stride", 1))
        spread, dilation = int(option("lhs_dilate", 1)), int(option("rhs_dilate", 1))
        before = int(option("pad", "0_0").split("_")[0])
        macs *= window_products(side, taps, steps, stride, before, spread, dilation)
    return macs


def count_bytes_moved(module: Module) -> int:
    """Returns the bytes that a step reads and writes in a chip's main memory.

    Each instruction reads its operands and writes its results, except those in on-core
    memory. Where a fusion reads or updates a slice of an array, only the slice counts.
    Loops count with their trip counts.

    Args:
      module: optimised program of one device.
    """
    return sum(run.times * _moved(module, run.instruction) for run in module.runs())


def _moved(module: Module, instruction: Instruction) -> int:
    opcode, base = instruction.opcode, instruction.base
    if opcode in _FREE or opcode.endswith(_ENDS):
        return 0
    if instruction.attribute("custom_call_target") in _NAMES_MEMORY:
        return 0
    operands = [module.by_name.get(name) for name in instruction.operands]
    if base in ("copy", *_SLICES) and instruction.starts:
        return _copied(operands[0], instruction)
    if base == "fusion":
        return _moved_by_fusion(module, instruction, operands)
    if base in _SLICES:
        return 2 * _slow(instruction.results)
    if base == "dynamic-update-slice":
        return 2 * _slow(operands[1].results)
    if opcode == "send":  # Its result repeats its operand.
        return _slow(module.taken(instruction))
    if opcode == "recv":
        return _slow(instruction.parts[0])
    return _slow(instruction.results) + _slow(module.taken(instruction))


def _copied(source: Instruction, start: Instruction) -> int:
    """Counts an asynchronous copy or slice, from or to on-core memory."""
    (result,) = start.results
    size = min(source.bytes, result.bytes)
    return size * [source.results[0].fast, result.fast].count(False)


def _slow(arrays) -> int:
    return sum(array.bytes for array in arrays if not array.fast)


def _moved_by_fusion(module, instruction, operands):
    """Counts a fusion; of arrays that it slices or updates, only the slices."""
    body = module.fused(instruction)
    total, replaced = 0, dict(_replaced(module, body))
    for inner in body:
        if inner.opcode == "parameter":
            operand = operands[int(inner.operands[0])]
            if operand and (size := _slow(operand.results)):
                total += min(size, _read(module, inner, body))
    for array in instruction.results:
        if not array.fast:
            total += min(array.bytes, replaced.get(array.dims, array.bytes))
    return total


def _replaced(module, body):
    """Yields the shapes that a fusion updates in part, and the bytes of each update."""
    inside = {i.name: i for i in body}
    for inner in body:
        if inner.opcode == "dynamic-update-slice":
            yield inner.arrays[0].dims, inside[inner.operands[1]].bytes
        elif inner.opcode == "fusion":
            yield from _replaced(module, module.fused(inner))


def _read(module, inner, body):
    """Returns the bytes of an array that its users within a fusion read."""
    size = 0
    for user in body:
        for position, name in enumerate(user.operands):
            if name != inner.name or user.opcode == "parameter":
                continue
            if user.opcode in _SLICES and position == 0:
                size += user.bytes
            elif user.opcode == "fusion":
                nested = module.fused(user)
                size += sum(
                    _read(module, parameter, nested)
                    for parameter in nested
                    if parameter.opcode == "parameter"
                    and parameter.operands == (str(position),)
                )
            elif user.opcode in _SAME:
                size += _read(module, user, body)
            # The updated part is not read.
            elif user.opcode != "dynamic-update-slice" or position:
                return inner.bytes
    return size
