"""Training steps of MAE and DINO on this machine: ours, and plain PyTorch.

On a CPU: python -m benchmarks.self_supervised.selfsup [--what=mae,dino] [--rounds=12]
On a GPU: the same; it was not run on one yet.

MAE hides 75 % of the patches and has a decoder of 8 blocks 512 wide; DINO has 2 crops of
224 and 8 of 96. What each contender is stands in selfsup_contenders.py and
selfsup_torch.py. "supervised" is our step of classification with MAE's encoder, "encoder
alone" our step of MAE without its decoder: the encoder sees the class token and a quarter
of the patches, and its loss is of its own outputs. The aim of 0.45 times the supervised
step is for that one; MAE with its decoder has 0.56 of the products of B/16's supervised
step, so it cannot be reached with it.

On a CPU all are in one process, float32, one call of each a round; ours and PyTorch's have
the same weights and masks, and before anything is timed, their outputs and their losses
over two steps must agree. `--calls=forward,teacher,gradient,step` shows where the time
goes: what the learning network answers, what DINO's teacher answers, loss and gradients,
and with clipping, optimiser and teacher the whole step.

On a GPU each has a process of its own, in bfloat16; processes alternate. PyTorch has
autocast and torch.compile.

Prints medians and their ratios, in brackets the quartiles of the ratios of single rounds,
and the ratio of the products that are needed. Without PyTorch its lines are left out.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys

import jax
import numpy as np

from benchmarks import smoke
from benchmarks.self_supervised import selfsup_contenders
from benchmarks.step import step

MAKE = {"mae": selfsup_contenders.mae, "dino": selfsup_contenders.dino}
NAMES = {"mae": ("supervised", "encoder alone", "PyTorch", "ours")}
NAMES["dino"] = NAMES["mae"][2:]
# By whether there is a GPU.
BATCHES = {False: {"mae": 16, "dino": 4}, True: {"mae": 256, "dino": 32}}
PER_PROCESS = 20  # Calls.


def names_of(what):
    """Returns the names of the contenders that can be."""
    found = importlib.util.find_spec("torch")
    return [name for name in NAMES[what] if found or name != "PyTorch"]


def make(names, what, args):
    """Returns contenders by name."""
    return MAKE[what](names, args.model, args.batches[what], args.side, args.dtype)


def on_cpu(args):
    """Prints the tables of a CPU."""
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))  # As XLA.
    for what in args.what:
        found = make(names_of(what), what, args)
        same = {name: found[name] for name in ("ours", "PyTorch") if name in found}
        exact = args.dtype == "float32"
        title = f"{args.model} {what}, batch {args.batches[what]}, {args.side} px"
        step.check_same(same, exact=exact, title=title)
        header(what)
        flops = flops_of(found)
        for call in args.calls:
            calls = {k: getattr(v, call) for k, v in found.items() if hasattr(v, call)}
            for function in calls.values():  # Compiles.
                function()
            if calls:
                report(call, step.timed(calls, args.rounds), flops)
        del found, same, calls, function  # The next one needs the memory.


def flops_of(found):
    """Returns the operations of each one's step on an image, by name."""
    flops = {name: one.flops for name, one in found.items() if hasattr(one, "flops")}
    return {"PyTorch": flops.get("ours")} | flops


def header(what):
    """Prints the first lines of a table."""
    heads = [what, "call", "s", "by PyTorch's", "by supervised", "GFLOP an image"]
    print(f"\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)


def report(call, seconds, flops):
    """Prints the lines of one call.

    Args:
      call: its name.
      seconds: of each round, by contender.
      flops: of a step, by contender.
    """
    for name, values in seconds.items():
        cells = [name, call, f"{np.median(values):.3f}"]
        for other, wanted in (("PyTorch", name == "ours"), ("supervised", True)):
            wanted = wanted and other in seconds and name != other
            cells.append(step.ratio(values, seconds[other]) if wanted else "")
        known = call == "step" and flops.get(name)
        cells.append(f"{flops[name] / 1e9:.1f}" if known else "")
        print(f"| {' | '.join(cells)} |", flush=True)


def on_gpu(args):
    """Prints the tables of a GPU; each number is the median of a process."""
    print(f"{jax.devices()[0].device_kind}, {args.model}, {args.dtype}, {args.side} px")
    for what in args.what:
        rounds = {name: [] for name in names_of(what)}
        for _ in range(args.rounds):
            for name, found in rounds.items():
                found.append(measure(name, what, args))
        header(f"{what}, batch {args.batches[what]}")
        flops = {name: found[0]["flops"] for name, found in rounds.items()}
        flops["PyTorch"] = flops["ours"]
        for call in args.calls:
            seconds = {
                name: np.array([one["seconds"][call] for one in found])
                for name, found in rounds.items()
                if call in found[0]["seconds"]
            }
            report(call, seconds, flops)
        peaks = [
            f"{name} {max(one['peak'] or 0 for one in found) / 2**30:.1f}"
            for name, found in rounds.items()
        ]
        print(f"\nPeak GiB: {', '.join(peaks)}", flush=True)


def measure(name, what, args):
    """Times one contender in a process of its own."""
    words = [f"--child={name}", f"--what={what}", f"--model={args.model}"]
    words += [f"--batch={args.batches[what]}", f"--side={args.side}"]
    words += [f"--dtype={args.dtype}", f"--calls={','.join(args.calls)}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.self_supervised.selfsup", *words],
        stdout=subprocess.PIPE,
        # JAX and PyTorch both say what they really use, and take no more.
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def child(args):
    """Times one contender in this process; prints JSON."""
    one = make([args.child], args.what[0], args)[args.child]
    seconds = {}
    for call in args.calls:
        if function := getattr(one, call, None):
            for _ in range(3):  # Compiles, and chooses its kernels.
                function()
            values = step.timed({call: function}, PER_PROCESS)[call]
            seconds[call] = float(np.median(values))
    flops = getattr(one, "flops", None)
    print(json.dumps({"seconds": seconds, "peak": one.peak(), "flops": flops}))


def main():
    """Reads the flags."""
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add, words = parser.add_argument, lambda text: text.split(",")
    add("--model", default="B/16")
    add("--what", type=words, default="mae,dino")
    add("--calls", type=words, default="step", help="forward,teacher,gradient,step")
    add("--rounds", type=int, default=3 if gpu else 12)
    add("--batch", type=int, default=0, help="0: 16 of mae, 4 of dino; on a GPU more")
    add("--side", type=int, default=224, help="of the (large) images, in pixels")
    add("--dtype", default="bfloat16" if gpu else "float32")
    add("--alone", action="store_true", help="processes as on a GPU, also on a CPU")
    add("--child", default="", help=argparse.SUPPRESS)
    args = smoke.parse(parser, "--model=Ti/16 --side=32 --batch=1 --rounds=1")
    if args.smoke:
        selfsup_contenders.shrink()
    args.batches = {k: args.batch or size for k, size in BATCHES[gpu].items()}
    if args.child:
        child(args)
    elif gpu or args.alone:
        on_gpu(args)
    else:
        on_cpu(args)


if __name__ == "__main__":
    main()
