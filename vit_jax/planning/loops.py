"""How often a while loop of a compiled program runs."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.planning.instructions import Instruction

Computations = Mapping[str, Sequence[Instruction]]

# What hands on the number that it takes.
_SAME = ("bitcast", "convert", "copy", "copy-done", "copy-start", "reshape")
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


class _Number(NamedTuple):
    """An element of the loop's state plus a constant, or a constant alone.

    Attributes:
      element: place in the state; None of a constant.
      plus: the constant.
    """

    element: int | None
    plus: int


class _Scope(NamedTuple):
    """Where names are looked up.

    Attributes:
      inside: name -> instruction.
      given: of a fusion, what its parameters are; None where the only parameter is the
        state of a loop.
      computations: of the program.
    """

    inside: Mapping[str, Instruction]
    given: Sequence[_Number | None] | None
    computations: Computations


def rounds(
    loop: Instruction, computations: Computations, by_name: Mapping[str, Instruction]
) -> int | None:
    """Returns how often a while loop runs, None if that is not to be read.

    Read is XLA's own word for it (`known_trip_count`), which TPU's compiler leaves out;
    else a condition that compares a counter with a constant, where the counter begins
    at a constant and every round adds the same to it.

    Args:
      loop: a `while`.
      computations: of the program, by name.
      by_name: all instructions of the program.
    """
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(match[1])
    condition, body = (
        _scope(loop.attribute(name).strip("%"), None, computations)
        for name in ("condition", "body")
    )
    test = _comparison(_root(condition), condition)
    if test is None:
        return None
    direction, left, right = test
    if left.element is None:
        direction, left, right = _MIRRORED[direction], right, left
    start = _Scope(by_name, None, computations)
    begins = by_name.get(loop.operands[0])
    first = _element(begins, left.element, start)
    after = _element(_root(body), left.element, body)
    limit = right
    if right.element is not None:  # It is in the state too: does any round change it?
        if _element(_root(body), right.element, body) != (right.element, 0):
            return None
        limit = _element(begins, right.element, start)
        limit = limit and limit._replace(plus=limit.plus + right.plus)
    if first is None or limit is None or after is None:
        return None
    if (first.element, limit.element, after.element) != (None, None, left.element):
        return None
    return _count(direction, first.plus + left.plus, limit.plus, after.plus)


def _count(direction: str, first: int, limit: int, step: int) -> int | None:
    """Counts the rounds of `for (i = first; i < limit; i += step)` and its like."""
    if direction in ("GT", "GE"):
        first, limit, step = -first, -limit, -step
    distance = limit - first + (direction in ("LE", "GE"))
    if distance == 0 or (distance < 0 and direction != "NE"):
        return 0
    if direction == "NE":  # It must be met exactly.
        exact = step and distance % step == 0 and distance // step > 0
        return distance // step if exact else None
    return -(-distance // step) if step > 0 else None


def _scope(name, given, computations):
    inside = {i.name: i for i in computations.get(name, ())}
    return _Scope(inside, given, computations)


def _root(scope) -> Instruction | None:
    return next((i for i in scope.inside.values() if i.root), None)


def _element(whole, place, scope) -> _Number | None:
    """Returns what an element of a tuple is."""
    if whole is None or whole.opcode != "tuple":
        return None
    return _value(scope.inside.get(whole.operands[place]), scope)


def _fused(instruction, scope) -> _Scope:
    given = [_value(scope.inside.get(name), scope) for name in instruction.operands]
    called = instruction.attribute("calls").strip("%")
    return _scope(called, given, scope.computations)


def _comparison(instruction, scope) -> tuple[str, _Number, _Number] | None:
    """Returns direction, left and right side of a condition."""
    if instruction is not None and instruction.opcode == "fusion":
        inner = _fused(instruction, scope)
        return _comparison(_root(inner), inner)
    if instruction is None or instruction.opcode != "compare":
        return None
    direction = instruction.attribute("direction")
    sides = [_value(scope.inside.get(name), scope) for name in instruction.operands]
    if direction not in _MIRRORED or None in sides:
        return None
    return direction, *sides


def _value(instruction, scope) -> _Number | None:
    """Follows a number to a constant or the loop's state, None if it cannot be."""
    if instruction is None:
        return None
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "constant":
        whole = re.fullmatch(r"-?\d+", operands[0])
        return _Number(None, int(operands[0])) if whole else None
    if opcode == "parameter":
        return scope.given[int(operands[0])] if scope.given is not None else None
    if opcode == "get-tuple-element":
        source = scope.inside.get(operands[0])
        state = source and source.opcode == "parameter" and scope.given is None
        return _Number(int(instruction.attribute("index")), 0) if state else None
    if opcode == "fusion":
        inner = _fused(instruction, scope)
        return _value(_root(inner), inner)
    if opcode in _SAME:
        return _value(scope.inside.get(operands[0]), scope)
    if opcode not in ("add", "subtract"):
        return None
    left, right = (_value(scope.inside.get(name), scope) for name in operands)
    if left is None or right is None:
        return None
    if opcode == "subtract":
        if right.element is not None:  # What is taken from a number runs backwards.
            return None
        right = right._replace(plus=-right.plus)
    if left.element is not None and right.element is not None:
        return None
    element = right.element if left.element is None else left.element
    return _Number(element, left.plus + right.plus)
