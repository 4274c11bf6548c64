"""Reads the text of a compiled program (HLO, as `compiled.as_text()` gives it)."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_NAME = re.compile(r"%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Array:
    """Type, shape and place of an array.

    Attributes:
      dtype: as "bf16".
      dims: its shape.
      fast: whether it lies in a memory of the core, not in the chip's main memory.
    """

    dtype: str
    dims: tuple[int, ...]
    fast: bool = False

    @property
    def bytes(self) -> int:
        """Its size without padding."""
        if self.dtype in ("token", "opaque"):
            return 0
        digits = re.search(r"\d+", self.dtype)  # Of pred there are none.
        bits = int(digits[0]) if digits else 8
        return math.ceil(math.prod(self.dims) * bits / 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in the program.
      opcode: as "all-reduce" or "fusion".
      arrays: what it gives; several of a tuple.
      operands: names of what it takes.
      attributes: the rest of the line.
      root: whether its computation returns it.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    def attribute(self, name: str) -> str:
        """Returns the word after `name=`, "" if there is none."""
        match = re.search(rf'\b{name}="?([^,"}}\s]+)', self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that it runs or applies."""
        names = _CALLED.findall(self.attributes)
        for branches in _BRANCHES.findall(self.attributes):
            names += _NAME.findall(branches)
        return tuple(names)


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
      computations: name -> its instructions, in order.
      entry: name of the first.
    """

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    def runs(self) -> Iterator[tuple[Instruction, int]]:
        """Goes through what the program runs: each instruction, and how often.

        What is inside of fusions is part of them; of a condition every branch counts, and
        a loop counts once where its rounds cannot be read (see `unread`).
        """
        yield from self._runs(self.entry, 1)

    def _runs(self, computation, times):
        for instruction in self.computations[computation]:
            yield instruction, times
            if instruction.opcode == "while":
                rounds = self.rounds(instruction) or 1
                yield from self._runs(
                    instruction.attribute("body").strip("%"), times * rounds
                )
            elif instruction.opcode in ("call", "conditional", "async-start"):
                for name in instruction.called:
                    yield from self._runs(name, times)

    def unread(self) -> int:
        """Returns how many loops there are whose rounds cannot be read."""
        loops = [i for i, _ in self.runs() if i.opcode == "while"]
        return sum(self.rounds(loop) is None for loop in loops)

    def rounds(self, loop: Instruction) -> int | None:
        """Returns how often a while loop runs, None if it is not to be read.

        Read is XLA's own word for it, or a condition "counter < constant" of a counter
        that begins at a constant (0 if it cannot be seen) and takes steps of one.
        """
        if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(match[1])
        condition = self.computations[loop.attribute("condition").strip("%")]
        by_name = {i.name: i for i in condition}
        root = next(i for i in condition if i.root)
        if root.opcode != "compare" or "direction=LT" not in root.attributes:
            return None
        counter, limit = (by_name[name] for name in root.operands)
        if counter.opcode != "get-tuple-element" or limit.opcode != "constant":
            return None
        first = self._first(loop, int(counter.attribute("index")))
        return int(limit.operands[0]) - first

    def _first(self, loop, index) -> int:
        """Returns what element `index` of a loop's state is before the loop."""
        start = self.by_name.get(loop.operands[0])
        if start is None or start.opcode != "tuple":
            return 0
        value = self.by_name[start.operands[index]]
        while value.opcode in ("copy", "bitcast"):
            value = self.by_name[value.operands[0]]
        return int(value.operands[0]) if value.opcode == "constant" else 0

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Every instruction of the program."""
        return {i.name: i for lines in self.computations.values() for i in lines}


def parse(text: str) -> Module:
    """Reads a program.

    Args:
      text: of the optimised HLO.
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
            current.append(_instruction(match[2], match[3], bool(match[1])))
    if not entry:
        raise ValueError("this is no HLO program: no computation is marked ENTRY")
    return Module({name: tuple(lines) for name, lines in computations.items()}, entry)


def _instruction(name, rest, root):
    """Reads "type opcode(operands), attributes"."""
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    opcode, inside, attributes = (
        rest[:opening],
        rest[opening + 1 : closing - 1],
        rest[closing:],
    )
    return Instruction(
        name, opcode, arrays(kind), _operands(opcode, inside), attributes, root
    )


def arrays(text: str) -> tuple[Array, ...]:
    """Reads all types of arrays in a text."""
    return tuple(
        Array(
            dtype,
            tuple(int(n) for n in dims.split(",") if n),
            bool(re.search(r"S\([1-9]", layout)),
        )
        for dtype, dims, layout in _ARRAY.findall(text)
    )


def _operands(opcode, inside):
    if opcode in ("constant", "parameter"):
        return (inside,)
    # Some printers put types before the names.
    return tuple(re.findall(r"%([\w.\-]+)", inside)) or tuple(
        word
        for word in re.sub(r"/\*.*?\*/", "", inside).replace(" ", "").split(",")
        if word
    )


def _closing(text, opening):
    """Returns the place after the parenthesis that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place + 1
    raise ValueError(f"no parenthesis closes the first one of {text[:80]!r}")
