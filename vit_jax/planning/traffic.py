"""What a compiled program reads and writes in a chip's main memory."""

from vit_jax.planning.hlo import Instruction, Module

# What moves nothing, or is counted where it ends or in what it runs.
_FREE = {
    "add-dependency",
    "after-all",
    "all-gather-done",
    "all-reduce-done",
    "async-done",
    "async-start",
    "async-update",
    "bitcast",
    "call",
    "collective-permute-done",
    "conditional",
    "constant",
    "copy-done",
    "get-tuple-element",
    "optimization-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "slice-done",
    "tuple",
    "while",
}
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
    return sum(
        times * _moved(module, instruction) for instruction, times in module.runs()
    )


def _moved(module: Module, instruction: Instruction) -> int:
    if instruction.opcode in _FREE:
        return 0
    operands = [module.by_name.get(name) for name in instruction.operands]
    if instruction.opcode in ("copy-start", "slice-start"):
        return _copied(operands[0], instruction)
    if instruction.opcode == "fusion":
        return _fusion(module, instruction, operands, _called(module, instruction))
    if instruction.opcode in _SLICES:
        return 2 * _slow(instruction)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _slow(operands[1])
    return _slow(instruction) + sum(_slow(operand) for operand in operands if operand)


def _copied(source: Instruction, start: Instruction) -> int:
    """Counts an asynchronous copy, of which the start gives source, result and more."""
    size = min(source.bytes, *(array.bytes for array in start.arrays[:2]))
    # A copy names its result first, a slice its source.
    result = start.arrays[0 if start.opcode == "copy-start" else 1]
    return size * [source.arrays[0].fast, result.fast].count(False)


def _slow(instruction: Instruction) -> int:
    return sum(array.bytes for array in instruction.arrays if not array.fast)


def _fusion(module, instruction, operands, body):
    """Counts slices where a fusion reads or writes no more of an array."""
    total, replaced = 0, dict(_replaced(module, body))
    for inner in body:
        if inner.opcode == "parameter":
            operand = operands[int(inner.operands[0])]
            if operand and _slow(operand):
                total += min(_slow(operand), _read(module, inner, body))
    for array in instruction.arrays:
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
            yield from _replaced(module, _called(module, inner))


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
                nested = _called(module, user)
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


def _called(module, fusion):
    return module.computations.get(fusion.attribute("calls").strip("%"), ())
