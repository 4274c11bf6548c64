"""Forward pass and training step on a CPU with other options of XLA, and timm's.

Run:  python -m benchmarks.step.cpu_options [--models=S/16,B/16] [--rounds=12]
          NAME=VALUE[,NAME=VALUE] ...

Each argument is a set of XLA's options (xla_cpu_...); the first contender has those of the
product (distributed/compilation.py). All hold timm's weights and compute the same function
in one process, float32, SGD with momentum, one call of each a round. A set that XLA refuses
is reported and left out. Prints medians in seconds, and the ratios to the product's and to
timm's, with the quartiles of the ratios of single rounds; before these, how far the logits
after one step are from the product's, since an option can make a gradient wrong. Needs the
extra `parity`.
"""

import argparse
import os
from unittest import mock

import jax
import numpy as np
import torch

from benchmarks import smoke
from benchmarks.step import step, step_contenders
from vit_jax.distributed import compilation

PRODUCT = "the product's"


def parsed(words):
    """Returns the options of NAME=VALUE,NAME=VALUE."""
    return dict(word.split("=", 1) for word in words.split(","))


def contenders(variant, sets, batch, side):
    """Returns timm's network and one of ours with each set of options."""
    images, labels = step_contenders.made_batch(batch, side)
    keys = {"dtype": "float32", "optimizer": "sgd"}
    timm = step_contenders.Timm(variant, images, labels, spread=0.02, **keys)
    keys |= timm.for_ours()
    found = {}
    for name, options in sets.items():
        with mock.patch.object(compilation, "options", return_value=options):
            try:
                ours = step_contenders.Ours(variant, images, labels, **keys)
                ours.step()
            except jax.errors.JaxRuntimeError as error:
                print(f"<!-- {name}: {str(error).splitlines()[0]} -->", flush=True)
                continue
        found[name] = ours
    timm.step()
    return found | {"timm": timm}


def main():
    """Prints one line for each contender and model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("options", nargs="*")
    parser.add_argument("--models", default="S/16,B/16")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--side", type=int, default=224, help="of the images, in pixels"
    )
    args = smoke.parse(parser, "--models=Ti/16 --rounds=1 --side=32")
    if args.smoke:
        smoke.shrink()
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # As XLA.
    sets = {PRODUCT: compilation.options()} | {w: parsed(w) for w in args.options}
    print(f"<!-- jax {jax.__version__}, {PRODUCT}: {sets[PRODUCT]} -->")
    print("| model | what | options | s | to the product's | to timm |")
    print("|---|---|---|---|---|---|")
    for variant in args.models.split(","):
        found = contenders(variant, sets, step.ON_CPU.get(variant, 8), args.side)
        reference = found[PRODUCT].forward()
        for name, one in found.items():
            error = np.abs(one.forward() - reference).max()
            print(f"<!-- {variant}, {name}: after a step {error:.1e} apart -->")
        for what in ("forward", "step"):
            calls = {name: getattr(one, what) for name, one in found.items()}
            seconds = step.timed(calls, args.rounds)
            for name, values in seconds.items():
                ratios = [step.ratio(values, seconds[n]) for n in (PRODUCT, "timm")]
                cells = [variant, what, name, f"{np.median(values):.3f}", *ratios]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
