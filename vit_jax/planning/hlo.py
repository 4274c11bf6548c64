"""Reads the text of a compiled program (HLO, as `compiled.as_text()` gives it)."""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from vit_jax.planning import instructions, loops
from vit_jax.planning.instructions import Array, Instruction

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")


class Run(NamedTuple):
    """An instruction as the program runs it.

    Attributes:
      instruction: outside of fusions.
      times: how often, in a step.
      beside: whether it is in what an `async-start` runs beside other work.
    """

    instruction: Instruction
    times: int
    beside: bool


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
      computations: name -> its instructions, in order.
      entry: name of the first.
    """

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    def runs(self) -> Iterator[Run]:
        """Goes through what the program runs.

        What is inside of fusions is part of them; of a condition every branch counts, and
        a loop counts once where its rounds cannot be read (see `unread`).
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
        """Goes through an instruction and all that is fused into it."""
        yield instruction
        if instruction.base == "fusion":
            for inner in self.fused(instruction):
                yield from self.within(inner)

    def fused(self, fusion: Instruction) -> tuple[Instruction, ...]:
        """Returns what a fusion computes."""
        return self.computations.get(fusion.attribute("calls").strip("%"), ())

    def taken(self, instruction: Instruction) -> list[Array]:
        """Returns the arrays that an instruction takes."""
        operands = (self.by_name.get(name) for name in instruction.operands)
        return [array for one in operands if one for array in one.results]

    def unread(self) -> list[Instruction]:
        """Returns the loops whose rounds cannot be read."""
        found = [run.instruction for run in self.runs()]
        return [i for i in found if i.opcode == "while" and self.rounds(i) is None]

    def body(self, loop: Instruction) -> Iterator[Run]:
        """Goes through what one round of a loop runs."""
        yield from self._runs(loop.attribute("body").strip("%"), 1, False)

    def rounds(self, loop: Instruction) -> int | None:
        """Returns how often a while loop runs; see `loops.rounds`."""
        return loops.rounds(loop, self.computations, self.by_name)

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Every instruction of the program."""
        return {i.name: i for lines in self.computations.values() for i in lines}


def parse(text: str) -> Module:
    """Reads a program.

    Args:
      text: of the optimised HLO.

    Raises:
      ValueError: it is none.
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
            current.append(instructions.read(match[2], match[3], bool(match[1])))
    if not entry:
        raise ValueError("this is no HLO program: no computation is marked ENTRY")
    return Module({name: tuple(lines) for name, lines in computations.items()}, entry)
