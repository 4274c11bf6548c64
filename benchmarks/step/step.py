"""Forward pass and training step on this machine: ours, timm, and ViTs in plain Linen.

On a CPU: python -m benchmarks.step.step [--models=S/16,B/16] [--rounds=20]
          with --models=Swin-T,Mixer-B/16,R26+S/32,R50x1 the other networks
On a GPU: python -m benchmarks.step.step [--models=B/16,L/16,H/14]

On a CPU all three hold the same weights and compute the same function in one process,
float32 with SGD and momentum (--dtype=bfloat16: without the plain one), one call of each
a round, so that the machine's moods hit all. With --matmul-dtype=bfloat16 ours rounds the
operands of products (model.matmul_dtype), and timm with autocast joins. timm is as its
users run it on CPU: eager, with its fused attention.

On a GPU each works in bfloat16 with Adam at the largest batch that fits it, found by
doubling, in a process of its own; processes alternate. timm has autocast and
torch.compile; the plain one is benchmarks/compile/baseline_vit.py. Ours has each policy of
--remat and is shown with the fastest.

Prints medians, their ratios, and in brackets the quartiles of the ratios of single
rounds. timm needs the extra `parity`; without it that column is left out.
"""

import argparse
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time

import jax
import numpy as np

from benchmarks import smoke
from benchmarks.step import step_contenders
from vit_jax import models
from vit_jax.models import cost
from vit_jax.training import metric_logger

ON_CPU = {"S/16": 16, "B/16": 8}  # Batches; others have 4.
OUT_OF_MEMORY = 3
LARGEST = 8192
AUTOCAST = "timm bfloat16"


def timed(calls, rounds):
    """Returns the seconds of each call, (rounds,), one of each a round."""
    seconds = {name: [] for name in calls}
    names = list(calls)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in seconds.items()}


def ratio(ours, other):
    """Puts the ratio of two medians and the quartiles of the rounds' into a cell."""
    low, high = np.quantile(ours / other, (0.25, 0.75))
    return f"{np.median(ours) / np.median(other):.2f} ({low:.2f} to {high:.2f})"


def same_weights(variant, args):
    """Builds the contenders with the same weights and shows that they do the same."""
    size = args.batch or ON_CPU.get(variant, 4)
    images, labels = step_contenders.made_batch(size, args.side)
    keys = {"dtype": args.dtype, "optimizer": "sgd"}
    rounded = {"matmul_dtype": args.matmul_dtype}
    if variant not in step_contenders.TIMM:
        ours = step_contenders.Ours(variant, images, labels, **keys, **rounded)
        return {"ours": ours}
    if not args.timm:
        ours = step_contenders.Ours(
            variant, images, labels, activation="gelu", **keys, **rounded
        )
        params = jax.device_get(ours.state.params)
        found = {"ours": ours}
    else:
        # Each is made with the same weights.
        make = functools.partial(
            step_contenders.Timm, variant, images, labels, spread=0.02, optimizer="sgd"
        )
        timm = make(dtype=args.dtype)
        keys |= timm.for_ours()
        params = keys["params"]
        ours = step_contenders.Ours(variant, images, labels, **keys, **rounded)
        found = {"ours": ours, "timm": timm}
        if args.matmul_dtype:
            found[AUTOCAST] = make(dtype=args.matmul_dtype)
    if in_float32(args) and variant in step_contenders.PLAIN:
        found["plain"] = step_contenders.Plain(variant, images, labels, params=params)
    # timm's ResNets have other epsilons.
    exact = in_float32(args) and not variant.startswith("R")
    check_same(found, exact=exact, title=f"{variant} batch {size}")
    return found


def in_float32(args):
    """Returns whether all contenders compute in float32."""
    return args.dtype == "float32" and not args.matmul_dtype


def check_same(found, exact, title):
    """Compares logits and the losses of two steps, and prints how they differ."""
    logits = {name: one.forward() for name, one in found.items()}
    losses = {name: [one.step() for _ in range(2)] for name, one in found.items()}
    first, *others = reversed(found)
    for name in others:
        error = np.abs(logits[name] - logits[first]).max()
        most = np.abs(logits[first]).max()
        print(
            f"<!-- {title}: {name} and {first} differ by {error:.1e} in logits of up to "
            f"{most:.1f}; losses of two steps {losses[name]} and {losses[first]} -->",
            flush=True,
        )
        np.testing.assert_allclose(
            logits[name], logits[first], atol=1e-3 if exact else 0.05 * most
        )
        np.testing.assert_allclose(
            losses[name], losses[first], rtol=1e-4 if exact else 0.02
        )


def on_cpu(args):
    """Prints the table of a CPU."""
    if args.timm:
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))  # As XLA.
    names = ["timm"] * args.timm + ["plain"] * in_float32(args)
    names += [AUTOCAST] * (args.timm and bool(args.matmul_dtype))
    heads = ["ours, s", *(f"{n}, s" for n in names), *(f"ours / {n}" for n in names)]
    print(f"| model | what | {' | '.join(heads)} |\n|---|---{'|---' * len(heads)}|")
    for variant in args.models.split(","):
        found = same_weights(variant, args)
        for what in ("forward", "step"):
            calls = {name: getattr(one, what) for name, one in found.items()}
            seconds = timed(calls, args.rounds)
            cells = [f"{np.median(values):.3f}" for values in seconds.values()]
            others = [seconds[name] for name in names if name in seconds]
            cells += [ratio(seconds["ours"], other) for other in others]
            cells += ["-"] * (len(heads) - len(cells))
            print(f"| {variant} | {what} | {' | '.join(cells)} |", flush=True)


def child(args):
    """Times one contender in this process; prints JSON."""
    images, labels = step_contenders.made_batch(args.batch, args.side)
    keys = {"dtype": args.dtype, "optimizer": "adam"}
    try:
        if args.child == "timm":
            one = step_contenders.Timm(args.models, images, labels, **keys)
        elif args.child == "plain":
            one = step_contenders.Baseline(args.models, images, labels)
        else:
            policy = args.child.partition(":")[2]
            one = step_contenders.Ours(
                args.models, images, labels, remat_policy=policy, **keys
            )
        seconds = {}
        for what in ("forward", "step"):
            call = getattr(one, what)
            for _ in range(3):  # Compiles, and chooses its kernels.
                call()
            seconds[what] = list(timed({what: call}, args.calls)[what])
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if "RESOURCE_EXHAUSTED" in text or "ut of memory" in text:
            print(text[:300], file=sys.stderr)
            sys.exit(OUT_OF_MEMORY)
        raise
    print(json.dumps(seconds | {"peak": one.peak()}))


def measure(name, variant, batch, args):
    """Times one contender in a process of its own; None if it does not fit."""
    words = [f"--child={name}", f"--models={variant}", f"--batch={batch}"]
    words += [f"--dtype={args.dtype}", f"--side={args.side}", f"--calls={args.calls}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.step.step", *words],
        stdout=subprocess.PIPE,
        # JAX and PyTorch both say what they really use, and take no more.
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        text=True,
        check=False,
    )
    if done.returncode == OUT_OF_MEMORY:
        return None
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def largest(name, variant, args):
    """Returns the largest batch that fits, 0 if none does."""
    if args.batch:
        return args.batch if measure(name, variant, args.batch, args) else 0
    batch = 32
    while batch <= LARGEST and measure(name, variant, batch, args):
        batch *= 2
    return batch // 2 if batch > 32 else 0


def on_gpu(args):
    """Prints the table of a GPU."""
    device = jax.devices()[0].device_kind
    print(f"{device}, {args.dtype}, {args.side} px\n")
    print(
        "| model | what | batch | images/s | MFU | peak GiB | ours, times as fast |\n"
        "|---|---|---|---|---|---|---|"
    )
    for variant in args.models.split(","):
        names = [f"ours:{policy}" for policy in args.remat.split(",")]
        names += ["timm"] * args.timm
        names += ["plain"] * (variant in step_contenders.baseline_vit.SIZES)
        batches = {name: largest(name, variant, args) for name in names}
        for name in [name for name, batch in batches.items() if not batch]:
            print(f"| {variant} {name} | does not fit | | | | | |")
        rounds = {name: [] for name, batch in batches.items() if batch}
        for _ in range(args.rounds):
            for name, found in rounds.items():
                found.append(measure(name, variant, batches[name], args))
        for what in ("forward", "step"):
            model = models.create(
                variant,
                num_classes=step_contenders.CLASSES,
                image_size=(args.side, args.side),
            )
            ideal = metric_logger.ideal_seconds(cost.training_flops(model), device)
            # A third of a step is its forward pass.
            report(variant, what, rounds, batches, ideal / (1 + 2 * (what != "step")))


def report(variant, what, rounds, batches, ideal):
    """Prints the lines of one model."""
    speeds = {
        name: np.array([batches[name] / np.median(one[what]) for one in found])
        for name, found in rounds.items()
    }
    best = max(
        (n for n in speeds if n.startswith("ours")), key=lambda n: speeds[n].mean()
    )
    for name, speed in speeds.items():
        peak = max(one["peak"] or 0 for one in rounds[name])
        cells = [
            f"{variant} {name}",
            what,
            str(batches[name]),
            f"{np.median(speed):.0f}",
            f"{np.median(speed) * ideal:.1%}" if ideal else "",
            f"{peak / 2**30:.1f}",
            "" if name == best else ratio(speeds[best], speed),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def main():
    """Reads the flags."""
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--models", default="B/16,L/16,H/14" if gpu else "S/16,B/16")
    add("--rounds", type=int, default=3 if gpu else 20)
    add("--calls", type=int, default=20, help="a process, on a GPU")
    add("--batch", type=int, default=0, help="0: the largest that fits, on a GPU")
    add("--side", type=int, default=224, help="of the images, in pixels")
    add("--dtype", default="bfloat16" if gpu else "float32")
    add("--matmul-dtype", default="", help="of ours on a CPU, beside float32")
    add("--remat", default="none,dots,full", help="policies of ours, on a GPU")
    add("--alone", action="store_true", help="processes as on a GPU, also on a CPU")
    add("--child", default="", help=argparse.SUPPRESS)
    args = smoke.parse(parser, "--models=Ti/16 --side=32 --batch=1 --rounds=1")
    if args.smoke:
        smoke.shrink()
    args.timm = bool(importlib.util.find_spec("timm"))
    if args.child:
        child(args)
    elif gpu or args.alone:
        on_gpu(args)
    else:
        on_cpu(args)


if __name__ == "__main__":
    main()
