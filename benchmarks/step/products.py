"""The matrix products of a block on a CPU: float32, bfloat16 operands, and PyTorch's.

Run:  python -m benchmarks.step.products [--widths=384,768] [--tokens=3152] [--rounds=20]

For each width D, the first layer of an MLP with 4 D hidden units: its output, the gradient
of its input and that of its kernel, and the two products of attention with heads of 64
features and 197 tokens. Ours are those of `kernels.einsum` with the compiler options of
training; "float32" has float32 operands, "bfloat16" operands that are rounded within the
program, with float32 sums. PyTorch's operands are bfloat16 before. One call of each a round.
Prints medians of 10^9 floating-point operations a second, and how many times as fast
bfloat16 is as float32, with the quartiles of single rounds. Without PyTorch its column is
empty.
"""

import argparse
import contextlib
import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import smoke
from benchmarks.step import step
from vit_jax.distributed import compilation
from vit_jax.models import cost, kernels

FEATURES, TOKENS = 64, 197  # Of a head, and of an image.


def products(width, tokens):
    """Returns equations and shapes of operands by what they compute."""
    hidden, images = 4 * width, max(1, tokens // TOKENS)
    head = (images, width // FEATURES, TOKENS, FEATURES)
    return {
        "layer": ("tm,mf->tf", (tokens, width), (width, hidden)),
        "gradient of input": ("tf,mf->tm", (tokens, hidden), (width, hidden)),
        "gradient of kernel": ("tm,tf->mf", (tokens, width), (tokens, hidden)),
        "queries and keys": ("bhnk,bhmk->bhnm", head, head),
        "weights and values": ("bhnm,bhmk->bhnk", (*head[:3], TOKENS), head),
    }


def ours(equation, left, right, rounded):
    """Returns a call of our product."""
    precision = contextlib.nullcontext()
    if rounded:
        precision = jax.default_matmul_precision(kernels.BFLOAT16_OPERANDS)
    with precision:
        product = jax.jit(functools.partial(kernels.einsum, equation))
        lowered = product.lower(left, right)
    compiled = lowered.compile(compilation.options("cpu", bfloat16=rounded))
    return lambda: compiled(left, right).block_until_ready()


def theirs(equation, left, right):
    """Returns a call of PyTorch's product of bfloat16."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))  # As XLA.
    left, right = (
        torch.from_numpy(np.array(x)).to(torch.bfloat16) for x in (left, right)
    )
    return lambda: torch.einsum(equation, left, right)


def main():
    """Prints a line for each product."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--widths", default="384,768")
    parser.add_argument("--tokens", type=int, default=16 * TOKENS)
    parser.add_argument("--rounds", type=int, default=20)
    args = smoke.parse(parser, "--widths=64 --tokens=8 --rounds=2")
    has_torch = bool(importlib.util.find_spec("torch"))
    print(
        "| width | product | float32 | bfloat16 | PyTorch bfloat16 | bfloat16 / float32 |"
    )
    print("|---|---|---|---|---|---|")
    for width in map(int, args.widths.split(",")):
        for name, (equation, *shapes) in products(width, args.tokens).items():
            rng = np.random.default_rng(0)
            left, right = (
                jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes
            )
            calls = {
                "float32": ours(equation, left, right, rounded=False),
                "bfloat16": ours(equation, left, right, rounded=True),
            }
            if has_torch:
                calls["torch"] = theirs(equation, left, right)
            np.testing.assert_allclose(
                calls["bfloat16"](),
                calls["float32"](),
                atol=0.05 * shapes[0][-1] ** 0.5,
            )
            seconds = step.timed(calls, args.rounds)
            plain = functools.partial(jnp.einsum, equation)
            work = 2 * cost.macs(plain, left, right)
            speed = [f"{work / np.median(s) / 1e9:.0f}" for s in seconds.values()]
            speed += [""] * (not has_torch)
            cell = step.ratio(seconds["float32"], seconds["bfloat16"])
            print(f"| {width} | {name} | {' | '.join(speed)} | {cell} |", flush=True)


if __name__ == "__main__":
    main()
