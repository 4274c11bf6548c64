"""Reads single lines of a compiled program (HLO), and the types of arrays in them."""

import dataclasses
import math
import re

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_NAME = re.compile(r"%?([\w.\-]+)")
_START = "-start"


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
      parts: arrays of each element of the tuple that it gives; one part if it gives
        no tuple.
      operands: names of what it takes.
      attributes: the rest of the line.
      root: whether its computation returns it.
    """

    name: str
    opcode: str
    parts: tuple[tuple[Array, ...], ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All that its type names."""
        return tuple(array for part in self.parts for array in part)

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def starts(self) -> bool:
        """Whether other work runs until what takes its result, an "-update" or "-done".

        XLA writes `async-start` with the computation that it runs, but if that holds
        nothing else than one instruction it writes that one: `reduce-scatter-start`.
        """
        return self.opcode.endswith(_START)

    @property
    def base(self) -> str:
        """Its opcode without "-start"."""
        return self.opcode.removesuffix(_START)

    @property
    def results(self) -> tuple[Array, ...]:
        """What it computes; of an asynchronous start neither operands nor state."""
        if not self.starts or self.base == "all-reduce" or len(self.parts) < 2:
            return self.arrays
        # Of all but a copy the operands come first.
        return self.parts[0 if self.base == "copy" else 1]

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


def read(name: str, text: str, root: bool) -> Instruction:
    """Reads what stands after "name = ": "type opcode(operands), attributes".

    Raises:
      ValueError: a parenthesis is not closed.
    """
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
    """Reads all types of arrays in a text."""
    return tuple(
        Array(
            dtype,
            tuple(int(n) for n in dims.split(",") if n),
            bool(re.search(r"S\([1-9]", layout)),
        )
        for dtype, dims, layout in _ARRAY.findall(text)
    )


def _elements(kind):
    """Splits the type of a tuple at the commas between its elements."""
    if not kind.startswith("("):
        return [kind]
    depth, found = 0, [""]
    for letter in kind[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found


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
