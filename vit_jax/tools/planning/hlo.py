"""Reads the text of a compiled program (HLO), as `compiled.as_text()` returns it."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_NAME = re.compile(r"%?([\w.\-]+)")
_START = "-start"
# Opcodes that return the value of their operand unchanged.
_SAME = ("bitcast", "convert", "copy", "copy-done", "copy-start", "reshape")
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


@dataclasses.dataclass(frozen=True)
class Array:
    """Type, shape and memory space of an array.

    Attributes:
      dtype: XLA's name of the type, such as "bf16".
      dims: shape.
      fast: whether the array is in on-core memory, not in the chip's main memory (HBM).
    """

    dtype: str
    dims: tuple[int, ...]
    fast: bool = False

    @property
    def bytes(self) -> int:
        """Size in bytes, without padding."""
        if self.dtype in ("token", "opaque"):
            return 0
        digits = re.search(r"\d+", self.dtype)  # None in "pred".
        bits = int(digits[0]) if digits else 8
        return math.ceil(math.prod(self.dims) * bits / 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: name, unique in the program.
      opcode: operation, such as "all-reduce" or "fusion".
      parts: arrays of each element of the result tuple; a single part if the result is
        not a tuple.
      operands: names of the operands.
      attributes: rest of the line.
      root: whether the result is that of the whole computation.
    """

    name: str
    opcode: str
    parts: tuple[tuple[Array, ...], ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Arrays of the result type, in order."""
        return tuple(array for part in self.parts for array in part)

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def starts(self) -> bool:
        """Whether it starts an asynchronous operation, ended by "-update" or "-done".

        XLA writes `async-start` with the computation that it runs, or appends "-start"
        to the opcode of a single instruction: `reduce-scatter-start`.
        """
        return self.opcode.endswith(_START)

    @property
    def base(self) -> str:
        """Opcode without "-start"."""
        return self.opcode.removesuffix(_START)

    @property
    def results(self) -> tuple[Array, ...]:
        """Result arrays, without operands and state of an asynchronous start."""
        if not self.starts or self.base == "all-reduce" or len(self.parts) < 2:
            return self.arrays
        # The operands come first, except for a copy.
        return self.parts[0 if self.base == "copy" else 1]

    def attribute(self, name: str) -> str:
        """Returns the value of the attribute `name`, or "" if it is absent."""
        match = re.search(rf'\b{name}="?([^,"}}\s]+)', self.attributes)
        return match[1] if match else ""

    @property
    def origin(self) -> str:
        """Path of the traced code, "jit(step)/jvp(Model)/Block_0/add"; "" if unknown."""
        match = re.search(r'\bop_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs or applies."""
        names = _CALLED.findall(self.attributes)
        for branches in _BRANCHES.findall(self.attributes):
            names += _NAME.findall(branches)
        return tuple(names)


class Run(NamedTuple):
    """An executed instruction that is not inside a fusion.

    Attributes:
      instruction: the instruction.
      times: number of executions per step.
      beside: whether an `async-start` runs it at the same time as other work.
    """

    instruction: Instruction
    times: int
    beside: bool


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
      computations: instructions in order, by name of the computation.
      entry: name of the entry computation.
    """

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    def runs(self) -> Iterator[Run]:
        """Yields the executed instructions.

        Fusions are not expanded. All branches of a conditional count. A loop with an
        unknown trip count counts once, see `unread`.
        """
        yield from self._runs(self.entry, 1, False)

    def _runs(self, computation, times, beside):
        for instruction in self.computations[computation]:
            yield Run(instruction, times, beside)
            if instruction.opcode == "while":
                rounds = self.rounds(instruction)
                inside = times * (1 if rounds is None else rounds)
                body = instruction.attribute("body").strip("%")
                yield from self._runs(body, inside, beside)
            elif instruction.base in ("call", "conditional", "async"):
                for name in instruction.called:
                    yield from self._runs(name, times, beside or instruction.starts)

    def within(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields an instruction and everything fused into it."""
        yield instruction
        if instruction.base == "fusion":
            for inner in self.fused(instruction):
                yield from self.within(inner)

    def fused(self, fusion: Instruction) -> tuple[Instruction, ...]:
        """Returns the instructions of a fusion."""
        return self.called_by(fusion, "calls")

    def called_by(
        self, instruction: Instruction, attribute: str
    ) -> tuple[Instruction, ...]:
        """Returns the instructions of the computation that an attribute names."""
        return self.computations.get(instruction.attribute(attribute).strip("%"), ())

    def taken(self, instruction: Instruction) -> list[Array]:
        """Returns the operand arrays of an instruction."""
        operands = (self.by_name.get(name) for name in instruction.operands)
        return [array for operand in operands if operand for array in operand.results]

    def origin(self, name: str) -> str:
        """Returns the origin of a value, see `Instruction.origin`.

        Instructions that only move or join values have the origin of their first
        operand.
        """
        while instruction := self.by_name.get(name):
            roots = (i.origin for i in self.fused(instruction) if i.root)
            if origin := instruction.origin or next(roots, ""):
                return origin
            name = next(iter(instruction.operands), "")
        return ""

    def unread(self) -> list[Instruction]:
        """Returns the loops with an unknown trip count."""
        executed = [run.instruction for run in self.runs()]
        return [i for i in executed if i.opcode == "while" and self.rounds(i) is None]

    def body(self, loop: Instruction) -> Iterator[Run]:
        """Yields the instructions of one iteration of a loop."""
        yield from self._runs(loop.attribute("body").strip("%"), 1, False)

    def rounds(self, loop: Instruction) -> int | None:
        """Returns the trip count of a while loop; None if unknown."""
        return _count_rounds(loop, self)

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions of all computations, by name."""
        return {i.name: i for lines in self.computations.values() for i in lines}


def parse(text: str) -> Module:
    """Parses optimised HLO.

    Raises:
      ValueError: the text is not an HLO program.
    """
    computations, entry, current = {}, "", None
    for line in text.splitlines():
        if current is None:
            if match := _HEADER.match(line):
                current = computations.setdefault(match[2], [])
                entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            current = None
        elif match := _INSTRUCTION.match(line):
            current.append(_read_instruction(match[2], match[3], bool(match[1])))
    if not entry:
        raise ValueError("not an HLO program: no computation is marked ENTRY")
    return Module({name: tuple(lines) for name, lines in computations.items()}, entry)


def _read_instruction(name: str, text: str, root: bool) -> Instruction:
    """Parses the part after "name = ": "type opcode(operands), attributes"."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    kind, text = text[:end], text[end:].lstrip()
    opening = text.index("(")
    closing = _closing(text, opening)
    opcode, inside = text[:opening], text[opening + 1 : closing - 1]
    parts = tuple(arrays(part) for part in _elements(kind))
    return Instruction(
        name, opcode, parts, _operands(opcode, inside), text[closing:], root
    )


def arrays(text: str) -> tuple[Array, ...]:
    """Parses all array types in a text."""
    return tuple(
        Array(
            dtype,
            tuple(int(n) for n in dims.split(",") if n),
            bool(re.search(r"S\([1-9]", layout)),
        )
        for dtype, dims, layout in _ARRAY.findall(text)
    )


def _elements(kind):
    """Splits a tuple type into its elements."""
    if not kind.startswith("("):
        return [kind]
    depth, elements = 0, [""]
    for letter in kind[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += letter
    return elements


def _operands(opcode, inside):
    if opcode in ("constant", "parameter"):
        return (inside,)
    # Some versions print types before the names.
    return tuple(re.findall(r"%([\w.\-]+)", inside)) or tuple(
        word
        for word in re.sub(r"/\*.*?\*/", "", inside).replace(" ", "").split(",")
        if word
    )


def _closing(text, opening):
    """Returns the index after the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"no parenthesis closes the first one of {text[:80]!r}")


class _Number(NamedTuple):
    """A constant, optionally plus an element of the loop state.

    Attributes:
      element: index of the element in the state, or None.
      plus: the constant.
    """

    element: int | None
    plus: int


class _Scope(NamedTuple):
    """The computation in which names are looked up.

    Attributes:
      inside: instructions by name.
      given: values of a fusion's parameters; None for a loop's body or condition, whose
        only parameter is the loop state.
      module: the program.
    """

    inside: Mapping[str, Instruction]
    given: Sequence[_Number | None] | None
    module: Module


def _count_rounds(loop: Instruction, module: Module) -> int | None:
    """Returns the trip count of a while loop; None if unknown."""
    # XLA writes `known_trip_count`, except on TPU. Otherwise the condition must compare
    # a counter with a constant, and the counter must start at a constant and change by
    # a constant in every iteration.
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(match[1])
    condition, body = (
        _Scope({i.name: i for i in module.called_by(loop, name)}, None, module)
        for name in ("condition", "body")
    )
    test = _comparison(_root(condition), condition)
    if test is None:
        return None
    direction, left, right = test
    if left.element is None:
        direction, left, right = _MIRRORED[direction], right, left
    start = _Scope(module.by_name, None, module)
    begins = module.by_name.get(loop.operands[0])
    first = _element(begins, left.element, start)
    after = _element(_root(body), left.element, body)
    limit = right
    if right.element is not None:  # The limit is in the state too and must not change.
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
    """Returns the trip count of `for (i = first; i < limit; i += step)`."""
    if direction in ("GT", "GE"):
        first, limit, step = -first, -limit, -step
    distance = limit - first + (direction in ("LE", "GE"))
    if distance == 0 or (distance < 0 and direction != "NE"):
        return 0
    if direction == "NE":  # The counter must reach the limit exactly.
        exact = step and distance % step == 0 and distance // step > 0
        return distance // step if exact else None
    return -(-distance // step) if step > 0 else None


def _root(scope) -> Instruction | None:
    return next((i for i in scope.inside.values() if i.root), None)


def _element(whole, index, scope) -> _Number | None:
    """Returns the value of an element of a tuple; None if unknown."""
    if whole is None or whole.opcode != "tuple":
        return None
    return _value(scope.inside.get(whole.operands[index]), scope)


def _fused(instruction, scope) -> _Scope:
    given = [_value(scope.inside.get(name), scope) for name in instruction.operands]
    inside = {i.name: i for i in scope.module.fused(instruction)}
    return _Scope(inside, given, scope.module)


def _comparison(instruction, scope) -> tuple[str, _Number, _Number] | None:
    """Returns direction, left and right side of a condition; None if unknown."""
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
    """Traces a number back to a constant or the loop state; None if not possible."""
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
        if right.element is not None:  # The counter must not be subtracted.
            return None
        right = right._replace(plus=-right.plus)
    if left.element is not None and right.element is not None:
        return None
    element = right.element if left.element is None else left.element
    return _Number(element, left.plus + right.plus)
