"""Counts the multiply-accumulates of a compiled program, which is that of one device."""

import math
import re

import numpy as np

from vit_jax.planning.hlo import Module
from vit_jax.planning.instructions import Instruction


def count(module: Module) -> int:
    """Returns the multiply-accumulates of a step's matrix products and convolutions.

    Of a convolution only the products of two numbers that are there count, neither
    padding nor the zeros that it spreads its operands with: TPU's compiler writes
    batched products so. What several devices compute alike, each does. Not counted is
    what the program does not show (custom calls, such as a Pallas kernel).

    Args:
      module: optimised program of one device; a loop whose rounds cannot be read counts
        once.
    """
    return sum(
        run.times * _macs(module, inner)
        for run in module.runs()
        for inner in module.within(run.instruction)
    )


def _macs(module: Module, instruction: Instruction) -> int:
    if instruction.base == "dot":
        return _dot(module, instruction)
    if instruction.base == "convolution":
        return _convolution(module, instruction)
    return 0


def _dot(module, instruction):
    left = module.by_name[instruction.operands[0]].results[0].dims
    stated = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    contracted = [int(n) for n in stated[1].split(",") if n] if stated else []
    out = instruction.results[0].dims
    return math.prod(out) * math.prod(left[axis] for axis in contracted)


def _convolution(module, instruction):
    """Counts by "dim_labels=b01f_01io->b01f" and "window={size=3x3 pad=1_1x1_1}"."""
    left, kernel = (
        module.by_name[name].results[0].dims for name in instruction.operands
    )
    out = instruction.results[0].dims
    of_left, of_kernel, of_out = re.search(
        r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes
    ).groups()
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    words = dict(word.split("=") for word in window[1].split()) if window else {}
    found = out[of_out.index("b")] * out[of_out.index("f")]
    found *= kernel[of_kernel.index("i")]  # Those of its group.
    for axis in filter(str.isdigit, of_left):

        def stated(name, default, axis=int(axis)):
            return words[name].split("x")[axis] if name in words else default

        steps, side = out[of_out.index(axis)], left[of_left.index(axis)]
        taps, stride = int(stated("size", 1)), int(stated("stride", 1))
        spread, dilation = int(stated("lhs_dilate", 1)), int(stated("rhs_dilate", 1))
        before = int(stated("pad", "0_0").split("_")[0])
        place = np.add.outer(np.arange(steps) * stride, np.arange(taps) * dilation)
        place -= before
        inside = (place >= 0) & (place <= (side - 1) * spread)
        found *= int((inside & (place % spread == 0)).sum())
    return found
