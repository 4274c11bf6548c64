"""Layouts of the encoder's two costly layers, interleaved: python -m benchmarks.step.layers

Attention over head-major against token-major operands, and the MLP over tokens merged
into one axis against three axes; forward pass and forward with backward pass, float32,
ViT-S/16 at 224 px. Prints medians and their ratio.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from benchmarks import smoke

N, H, K = 197, 6, 64
D, F = H * K, 4 * H * K


def attention(layout):
    """Attention on tokens (B, N, H, K), transposed first if head-major."""
    equations = {
        "head-major": ("bhnk,bhmk->bhnm", "bhnm,bhmk->bhnk"),
        "token-major": ("bnhk,bmhk->bhnm", "bhnm,bmhk->bnhk"),
    }[layout]

    def run(q, k, v):
        if layout == "head-major":
            q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        weights = jax.nn.softmax(jnp.einsum(equations[0], q * K**-0.5, k))
        out = jnp.einsum(equations[1], weights, v)
        return jnp.swapaxes(out, 1, 2) if layout == "head-major" else out

    return run


def mlp(layout):
    """Two dense layers with a GELU on tokens (B, N, D)."""

    def run(x, first, second):
        shape = x.shape
        if layout == "merged":
            x = x.reshape(-1, D)
        return (jax.nn.gelu(x @ first) @ second).reshape(shape)

    return run


def timed(functions, args, rounds):
    """Returns the seconds of each call, one of each function a round."""
    for function in functions.values():
        jax.block_until_ready(function(*args))
    seconds = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=16, help="images")
    flags = smoke.parse(parser, "--rounds=1 --batch=1")
    B = flags.batch

    def normal(i, *shape):
        return jax.random.normal(jax.random.key(i), shape)

    cases = {
        "attention": (
            {
                "head-major": attention("head-major"),
                "token-major": attention("token-major"),
            },
            [normal(i, B, N, H, K) for i in range(3)],
        ),
        "mlp": (
            {"merged": mlp("merged"), "3-D": mlp("3-D")},
            [normal(0, B, N, D), normal(1, D, F) / D**0.5, normal(2, F, D) / F**0.5],
        ),
    }
    print(
        "| layer | pass | ours, ms | other, ms | ours / other |\n|---|---|---|---|---|"
    )
    for layer, (functions, args) in cases.items():
        passes = {
            "forward": {n: jax.jit(f) for n, f in functions.items()},
            "forward and backward": {
                n: jax.jit(
                    jax.grad(lambda *a, f=f: (f(*a) ** 2).sum(), argnums=(0, 1, 2))
                )
                for n, f in functions.items()
            },
        }
        for name, jitted in passes.items():
            ours, other = timed(jitted, args, flags.rounds).values()
            print(
                f"| {layer}: {' against '.join(functions)} | {name} | {ours * 1e3:.0f} | "
                f"{other * 1e3:.0f} | {ours / other:.2f} |"
            )


if __name__ == "__main__":
    main()
