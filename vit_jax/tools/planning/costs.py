"""Counts what a compiled program computes, moves in memory and sends, per device."""

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from vit_jax.errors import UserError
from vit_jax.models.cost import window_products
from vit_jax.tools.planning.hlo import Array, Instruction, Module

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Collectives in which a device sends the whole array.
_WHOLE = ("collective-permute", "collective-broadcast")

# The purpose of a collective: sums over a backward pass or with the size of an array of
# the training state; such arrays themselves; a few numbers; or anything else, which
# grows with the batch.
GRADIENTS, PARAMETERS, SCALARS = "gradients", "parameters", "scalars"
BATCH = "the batch"
# Further purposes, for code that needs other images of the batch or whole gradients:
# the name of the `jax.named_scope` that the code opens.
SCOPES = ("contrastive", "koleo", "sinkhorn", "mixup", "muon")
_SCALARS_BYTES = 1 << 16
_SUMS = ("all-reduce", "reduce-scatter")

# The TPU compiler sends data between slices through the hosts over the data centre
# network; an attribute names the collective.
_TRANSFERS = {
    "ALL_REDUCE": "all-reduce",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_GATHER": "all-gather",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}

# Opcodes that move no data, or whose data are counted at another instruction.
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
      dtype: dtype of its largest array, such as "bf16".
      overlapped: whether the collective is asynchronous, so that other work runs at
        the same time.
      devices: number of devices in a group.
      bytes: size of the full arrays on a device: the result of an all-reduce or
        all-gather, the operand of a reduce-scatter.
      times: number of executions per step.
      slices: whether the transfer is between TPU slices, over the data centre network.
      hosts: number of GPU hosts in a group; a network connects several hosts.
      purpose: GRADIENTS, PARAMETERS, SCALARS, BATCH, or one of SCOPES.
      place: part of the model or loss that it comes from; "" if unknown.
    """

    kind: str
    dtype: str
    overlapped: bool
    devices: int
    bytes: int
    times: int
    slices: bool = False
    hosts: int = 1
    purpose: str = SCALARS
    place: str = ""

    @property
    def sent(self) -> float:
        """Bytes that a device sends per execution, with the best known algorithm.

        Each of n devices keeps its share, 1 / n, and sends the rest. An all-reduce is a
        reduce-scatter and an all-gather. With several hosts, these are the bytes sent
        within a host.
        """
        return self._sent(self.bytes, self.devices // self.hosts)

    @property
    def network(self) -> float:
        """Bytes that a device sends to other hosts: its share of its host's traffic."""
        if self.hosts == 1:
            return 0.0
        share = 1 if self.kind in _WHOLE else self.hosts / self.devices
        return self._sent(self.bytes * share, self.hosts)

    def _sent(self, size, n) -> float:
        if self.kind in _WHOLE:
            return float(size)
        return size * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)


def find_collectives(
    module: Module, hosts: Sequence[int], state: Collection[int] = ()
) -> list[Collective]:
    """Returns the collectives of a program; in loops, times their trip counts.

    A collective that joins arrays with several purposes is counted once for each of
    them.

    Args:
      module: compiled program.
      hosts: host of each device if a network connects hosts; equal numbers if links
        connect them.
      state: numbers of elements of the arrays in the training state, which determine
        purposes, see `Collective`.
    """
    # The TPU compiler splits an asynchronous collective into a chain of fusions with
    # other work. Each of them contains the collective, with the same channel.
    chains = set()
    collectives = []
    for run in module.runs():
        beside = run.beside or run.instruction.starts
        for inner, scattered in _within(module, run.instruction):
            if inner.opcode == "send" and "megascale_transfer_type" in inner.attributes:
                collectives.append(_between_slices(inner, module, run.times, state))
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
            groups = find_groups(inner.attributes, len(hosts))
            # The GPU compiler writes all of them as asynchronous, and marks exceptions.
            blocking = '"is_sync":true' in inner.attributes
            overlapped = (chained or beside or inner.starts) and not blocking
            around = module.origin(run.instruction.name)
            for (purpose, place), parts in _purposes(
                module, inner, arrays, state, around
            ):
                one = _collective(kind, parts, overlapped, len(groups[0]), run.times)
                count = _count_hosts(inner, groups, hosts)
                collectives.append(
                    dataclasses.replace(one, hosts=count, purpose=purpose, place=place)
                )
    return collectives


def _purposes(
    module: Module,
    collective: Instruction,
    arrays: Sequence[Array],
    state: Collection[int],
    around: str = "",
) -> list[tuple[tuple[str, str], list[Array]]]:
    """Returns the arrays of a collective by purpose and place.

    Args:
      module, state: arguments of `find_collectives`.
      collective: instruction of the collective.
      arrays: full arrays that it exchanges.
      around: origin of the fusion that contains it.
    """
    names = collective.operands[: len(arrays)]
    parts = list(itertools.zip_longest(arrays, names, fillvalue=""))
    joined = _joined(module, names[0]) if len(arrays) == 1 else []
    if joined and sum(part.bytes for part, _ in joined) == arrays[0].bytes:
        parts = joined
    sums = collective.base in _SUMS
    # If the compiler has joined several sums, the name is only that of one of them.
    common = "" if sums and len(parts) > 1 else collective.origin
    by_purpose = defaultdict(list)
    for array, name in parts:
        origin = common or module.origin(name) or around
        words = _words(origin)
        purpose, place = BATCH, ""
        if scopes := [scope for scope in SCOPES if scope in words]:
            purpose = scopes[0]
        elif sums and ("transpose" in words or math.prod(array.dims) in state):
            purpose = GRADIENTS
        elif math.prod(array.dims) in state:
            purpose = PARAMETERS
        elif array.bytes <= _SCALARS_BYTES:
            purpose = SCALARS
        else:
            place = "/".join(words[-2:])
        by_purpose[purpose, place].append(array)
    # Small arrays are not collectives in themselves.
    if len(by_purpose) > 1 and (small := by_purpose.pop((SCALARS, ""), [])):
        next(iter(by_purpose.values())).extend(small)
    return list(by_purpose.items())


def _joined(module: Module, name: str) -> list[tuple[Array, str]]:
    """Returns the arrays, with their names, that the GPU compiler joined into one."""
    whole = module.by_name.get(name)
    body = module.fused(whole) if whole and whole.base == "fusion" else ()
    joins = [inner for inner in body if inner.opcode != "parameter"]
    if [inner.opcode for inner in joins] != ["concatenate"]:
        return []
    return [
        (array, operand)
        for operand in whole.operands
        for array in module.by_name[operand].results
    ]


def _words(origin: str) -> list[str]:
    """Splits "jit(step)/jvp(koleo)/dot" into the names of functions and scopes."""
    return [word for word in re.split(r"[/()]+", origin) if word]


def summarize_collectives(collectives: list[Collective]) -> list[dict]:
    """Sums collectives by kind, type, network, overlap and purpose.

    Returns:
      One dict per group: kind, dtype, overlapped, slices, hosts, purpose, place, count,
      bytes, sent and network, per device and step.
    """
    rows = defaultdict(lambda: [0, 0, 0.0, 0.0])
    for one in collectives:
        kind = KINDS.index(one.kind)
        key = kind, one.dtype, one.overlapped, one.slices, one.hosts
        row = rows[*key, one.purpose, one.place]
        row[0] += one.times
        row[1] += one.times * one.bytes
        row[2] += one.times * one.sent
        row[3] += one.times * one.network
    return [
        {
            "kind": KINDS[kind],
            "dtype": dtype,
            "overlapped": overlapped,
            "slices": slices,
            "hosts": hosts,
            "purpose": purpose,
            "place": place,
            "count": count,
            "bytes": size,
            "sent": round(sent),
            "network": round(network),
        }
        for key, (count, size, sent, network) in sorted(rows.items())
        for kind, dtype, overlapped, slices, hosts, purpose, place in [key]
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


def _between_slices(send, module, times, state):
    """Parses a transfer to other slices; the matching `recv` repeats it."""
    kind = _TRANSFERS.get(send.attribute("_xla_megascale_transfer_type"), KINDS[-1])
    # "{1,2}x{0:3}": slices and their devices; or groups with one device per slice.
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
    ((purpose, place), arrays), *_ = _purposes(module, send, module.taken(send), state)
    sent = _collective(kind, arrays, True, count, times, slices=True)
    sent = dataclasses.replace(sent, purpose=purpose, place=place)
    if kind == "all-gather":
        return dataclasses.replace(sent, bytes=sent.bytes * count)
    return sent


def _count_hosts(instruction, groups, hosts):
    if instruction.base == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", instruction.attributes)
        return 1 + any(hosts[int(a)] != hosts[int(b)] for a, b in pairs)
    return max(len({hosts[device] for device in group}) for group in groups)


def find_groups(attributes: str, devices: int) -> list[list[int]]:
    """Returns the devices of each group of a collective, in the order of the program.

    XLA has three notations: {{0,1},{2,3}}, or {} for a single group of all devices;
    [2,4]<=[8], groups by members, with T(...) from a transposed array; and the axes of
    a mesh, or parts of them, mesh['a'=2,'b'=4] {'b'} or {'b':(1)2}, with
    device_ids=(...) if the devices of that mesh are in another order.

    Args:
      attributes: attributes of an instruction; without groups, all devices are one
        group.
      devices: number of devices of the program.

    Raises:
      UserError: the notation is unknown, or the groups are not a partition of the
        devices or of the devices of a slice.
    """
    everything = list(range(devices))
    start = re.search(r"\breplica_groups=", attributes)
    if not start:
        return [everything]
    text, groups = attributes[start.end() :], None
    if match := re.match(r"\{((?:\{[\d,]*\},?)*)\}", text):
        lists = re.findall(r"\{([\d,]*)\}", match[1])
        groups = [_numbers(each) for each in lists] or [everything]
    elif match := re.match(rf"\[(\d+),(\d+)\]<={_IOTA}", text):
        members = _iota(*match.groups()[2:])
        if members is not None and members.size == int(match[1]) * int(match[2]):
            groups = members.reshape(int(match[1]), int(match[2])).tolist()
    elif match := re.match(
        r"(?:@?\w*)?mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", text
    ):
        groups = _mesh_groups(*match.groups())
    members = sorted(itertools.chain(*groups or ()))
    # A program for several TPU slices is written for one of them.
    if not members or members != everything[: len(members)] or devices % len(members):
        shown = " ".join(text.split())[:80]
        raise UserError(
            f"replica_groups={shown}: these groups of {devices} devices cannot be read; "
            "install the versions of jax in requirements.txt"
        )
    return groups


# An array of increasing numbers, reshaped and then transposed.
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def _iota(shape: str, order: str | None) -> np.ndarray | None:
    """Returns the array for such a text; None if its axes do not fit."""
    shape, order = _numbers(shape), _numbers(order or "")
    order = order or list(range(len(shape)))
    if sorted(order) != list(range(len(shape))):
        return None
    return np.arange(math.prod(shape)).reshape(shape).transpose(order)


def _mesh_groups(mesh: str, order: str | None, chosen: str) -> list[list[int]] | None:
    """Returns the groups along axes of a mesh; None if they do not fit the mesh."""
    sizes = {axis: int(n) for axis, n in re.findall(r"'?([^',=]+)'?=(\d+)", mesh)}
    members = np.arange(math.prod(sizes.values()))
    if order:
        iota = re.fullmatch(_IOTA, order)
        members = _iota(*iota.groups()) if iota else np.array(_numbers(order))
    parts = defaultdict(list)  # Parts that a group spans, by axis: (before, size).
    for axis, before, size in re.findall(
        r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", chosen
    ):
        parts[axis].append((int(before or 1), int(size or sizes.get(axis, 0))))
    shape, within = [], []
    for axis, size in sizes.items():
        done = 1
        for before, part in sorted(parts.pop(axis, [])):
            shape += [before // done, part]
            within += [False, True]
            done = before * part
        shape.append(size // done if done else 0)
        within.append(False)
    if parts or members is None or members.size != math.prod(shape):
        return None
    axes = sorted(range(len(shape)), key=within.__getitem__)
    size = math.prod(n for n, inside in zip(shape, within, strict=True) if inside)
    return members.reshape(shape).transpose(axes).reshape(-1, size).tolist()


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def count_macs(module: Module) -> int:
    """Returns the multiply-accumulates of a step's matrix products and convolutions.

    In convolutions, zeros from padding and dilation do not count: the TPU compiler
    writes batched products as convolutions. Work that several devices repeat counts on
    each. Of custom calls, only those of cuDNN and cuBLAS count, not others such as
    Pallas kernels.

    Args:
      module: optimised program of one device; loops with an unknown trip count count
        once.
    """
    total = 0
    for run in module.runs():
        for inner in module.within(run.instruction):
            count = _MACS.get(inner.attribute("custom_call_target") or inner.base)
            if count:
                total += run.times * count(module, inner)
    return total


def count_kernels(module: Module) -> dict[str, int]:
    """Returns the number of executions of each library kernel per step, by name."""
    counts = defaultdict(int)
    for run in module.runs():
        for inner in module.within(run.instruction):
            if is_kernel(inner):
                counts[inner.attribute("custom_call_target")] += run.times
    return dict(sorted(counts.items()))


def is_kernel(instruction: Instruction) -> bool:
    """Returns whether an instruction computes products in a library or Pallas kernel."""
    name = instruction.attribute("custom_call_target")
    return name in _MACS or name == _PALLAS


def _dot_macs(module, instruction):
    left = module.by_name[instruction.operands[0]].results[0].dims
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    contracted = [int(n) for n in match[1].split(",") if n] if match else []
    out = instruction.results[0].dims
    return math.prod(out) * math.prod(left[axis] for axis in contracted)


def _convolution_macs(module, instruction):
    return _window_macs(
        instruction, *_operands(module, instruction), _result(instruction)
    )


def _operands(module, instruction):
    return [module.by_name[name].results[0].dims for name in instruction.operands[:2]]


def _result(instruction):
    return instruction.results[0].dims


def _input_gradient_macs(module, instruction):
    out, kernel = _operands(module, instruction)
    return _window_macs(instruction, _result(instruction), kernel, out)


def _kernel_gradient_macs(module, instruction):
    left, out = _operands(module, instruction)
    return _window_macs(instruction, left, _result(instruction), out)


def _window_macs(instruction, left, kernel, out):
    """Counts with "dim_labels=b01f_01io->b01f" and "window={size=3x3 pad=1_1x1_1}"."""
    left_axes, kernel_axes, out_axes = re.search(
        r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes
    ).groups()
    match = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    window = dict(word.split("=") for word in match[1].split()) if match else {}
    macs = out[out_axes.index("b")] * out[out_axes.index("f")]
    macs *= kernel[kernel_axes.index("i")]  # Input features per group.
    for axis in filter(str.isdigit, left_axes):

        def option(name, default, axis=int(axis)):
            return window[name].split("x")[axis] if name in window else default

        steps, side = out[out_axes.index(axis)], left[left_axes.index(axis)]
        taps, stride = int(option("size", 1)), int(option("stride", 1))
        spread, dilation = int(option("lhs_dilate", 1)), int(option("rhs_dilate", 1))
        before = int(option("pad", "0_0").split("_")[0])
        macs *= window_products(side, taps, steps, stride, before, spread, dilation)
    return macs


def _cublas_macs(module, instruction):
    left, _ = _operands(module, instruction)
    match = re.search(
        r'"lhs_contracting_dimensions": ?\[([^\]]*)\]', instruction.attributes
    )
    contracted = [int(n) for n in re.findall(r"\d+", match[1])]
    return math.prod(_result(instruction)) * math.prod(
        left[axis] for axis in contracted
    )


def _attention_macs(products):
    """Returns a counter for attention kernels with `products` of queries and keys."""

    def count(module, instruction):
        match = re.search(
            r'"intermediate_tensor_shape": ?\{[^}]*"dimensions": ?\[([^\]]*)\]',
            instruction.attributes,
        )
        logits = [int(n) for n in re.findall(r"\d+", match[1])]
        head_width = module.taken(instruction)[0].dims[-1]
        return products * math.prod(logits) * head_width

    return count


_PALLAS = "tpu_custom_call"
# The backward pass computes the logits and four gradients.
_MACS = {
    "dot": _dot_macs,
    "convolution": _convolution_macs,
    "__cudnn$convForward": _convolution_macs,
    "__cudnn$convBiasActivationForward": _convolution_macs,
    "__cudnn$convBackwardInput": _input_gradient_macs,
    "__cudnn$convBackwardFilter": _kernel_gradient_macs,
    "__cublas$gemm": _cublas_macs,
    "__cublas$lt$matmul": _cublas_macs,
    "__cudnn$fmhaSoftmax": _attention_macs(2),
    "__cudnn$fmhaSoftmaxBackward": _attention_macs(5),
    # With a mask, for several images in a sequence.
    "__cudnn$fmhaScaleBiasSoftmax": _attention_macs(2),
    "__cudnn$fmhaScaleBiasSoftmaxBackward": _attention_macs(5),
}


def count_bytes_moved(module: Module) -> int:
    """Returns the bytes that a step reads and writes in a chip's main memory.

    Each instruction reads its operands and writes its results, except for those in
    on-core memory. If a fusion reads or updates a slice of an array, only the slice
    counts. Loops count times their trip counts.

    Args:
      module: optimised program of one device.
    """
    return sum(run.times * moved_by(module, run.instruction) for run in module.runs())


def moved_by(module: Module, instruction: Instruction) -> int:
    """Returns the bytes that one execution of an instruction reads and writes."""
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
    results = instruction.results
    if is_kernel(instruction):  # Its use of the workspace is unknown and not counted.
        results = [array for array in results if array.dtype not in ("s8", "u8")]
    return _slow(results) + _slow(module.taken(instruction))


def _copied(source: Instruction, start: Instruction) -> int:
    """Counts an asynchronous copy or slice, from or to on-core memory."""
    (result,) = start.results
    size = min(source.bytes, result.bytes)
    return size * [source.results[0].fast, result.fast].count(False)


def _slow(arrays) -> int:
    return sum(array.bytes for array in arrays if not array.fast)


def _moved_by_fusion(module, instruction, operands):
    """Counts a fusion; for arrays that it slices or updates, only the slices."""
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
    """Yields the shapes that a fusion updates partially, and each update's bytes."""
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
            elif user.opcode == "pad" and position == 0:  # The padding is not read.
                size += _read(module, user, body) * inner.bytes // user.bytes
            # The updated part is not read.
            elif user.opcode != "dynamic-update-slice" or position:
                return inner.bytes
    return size
