"""What a compiled program reads and writes in a chip's main memory."""

from vit_jax.planning.hlo import Module
from vit_jax.planning.instructions import Instruction

# What moves nothing, or is counted where it begins or in what it runs.
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
# Custom calls of TPU's compiler that only say what memory is used for.
_NAMES_MEMORY = ("AllocateBuffer", "ConcatBitcast")
_SLICES = ("dynamic-slice", "slice", "gather")
_SAME = ("bitcast", "reshape", "copy", "convert", "transpose")


def count(module: Module) -> int:
    """Returns the bytes that a step reads and writes in a chip's main memory.

    Each instruction reads what it takes and writes what it gives, but for what lies in
    a memory of the core; of an array of which a fusion takes or replaces a slice only
    the slice counts. Loops count for all their rounds.

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
        return _fusion(module, instruction, operands, module.fused(instruction))
    if base in _SLICES:
        return 2 * _slow(instruction.results)
    if base == "dynamic-update-slice":
        return 2 * _slow(operands[1].results)
    if opcode == "send":  # It gives again what it takes.
        return _slow(module.taken(instruction))
    if opcode == "recv":
        return _slow(instruction.parts[0])
    return _slow(instruction.results) + _slow(module.taken(instruction))


def _copied(source: Instruction, start: Instruction) -> int:
    """Counts an asynchronous copy or slice, from or to a memory of the core."""
    (result,) = start.results
    size = min(source.bytes, result.bytes)
    return size * [source.results[0].fast, result.fast].count(False)


def _slow(arrays) -> int:
    return sum(array.bytes for array in arrays if not array.fast)


def _fusion(module, instruction, operands, body):
    """Counts slices where a fusion reads or writes no more of an array."""
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
    """Yields the shapes of which a fusion replaces a part, and that part's bytes."""
    inside = {i.name: i for i in body}
    for inner in body:
        if inner.opcode == "dynamic-update-slice":
            yield inner.arrays[0].dims, inside[inner.operands[1]].bytes
        elif inner.opcode == "fusion":
            yield from _replaced(module, module.fused(inner))


def _read(module, inner, body):
    """Returns how much of an array its users within a fusion look at."""
    size = 0
    for user in body:
        for place, name in enumerate(user.operands):
            if name != inner.name or user.opcode == "parameter":
                continue
            if user.opcode in _SLICES and place == 0:
                size += user.bytes
            elif user.opcode == "fusion":
                nested = module.fused(user)
                size += sum(
                    _read(module, parameter, nested)
                    for parameter in nested
                    if parameter.opcode == "parameter"
                    and parameter.operands == (str(place),)
                )
            elif user.opcode in _SAME:
                size += _read(module, user, body)
            # What is replaced is not read.
            elif user.opcode != "dynamic-update-slice" or place:
                return inner.bytes
    return size
