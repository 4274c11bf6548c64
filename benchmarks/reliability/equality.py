"""How far 20 steps on a mesh of 8 fake devices are from 20 steps on one.

Run: python -m benchmarks.reliability.equality [--options=all,sgd]

What tests/training/test_strategies.py holds to 1e-5, as a table: the largest absolute
difference of parameters, moments and average, and of the metrics of the last step.
"""

import argparse
import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)
TESTS = pathlib.Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "training")]

import jax
import numpy as np
import test_strategies as strategies

from benchmarks import smoke

STEPS = 20
MESHES = {
    "data 8": {"data": 8},
    "fsdp 8": {"data": 1, "fsdp": 8},
    "data 2 x fsdp 4": {"data": 2, "fsdp": 4},
    "data 4 x model 2": {"data": 4, "model": 2},
    "data 2 x model 4": {"data": 2, "model": 4},
    "data 2 x fsdp 2 x model 2": strategies.THREE_AXES,
}
OPTIONS = {
    "all": ({"optim": strategies.ADAM, "model": strategies.RANDOM}, MESHES),
    "sgd": ({"optim": strategies.SGD}, ["data 2 x fsdp 2 x model 2"]),
}


def furthest(one, other):
    """Returns the largest absolute difference between two trees of arrays."""
    differences = jax.tree.map(lambda a, b: np.abs(a - b).max(initial=0.0), one, other)
    return max(float(x) for x in jax.tree.leaves(differences))


def main():
    """Trains with every strategy and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--options", default=",".join(OPTIONS))
    wanted = smoke.parse(parser, "--options=sgd").options.split(",")
    print("| mesh | optimiser | parameters | moments | average | metrics |")
    print("|---|---|---|---|---|---|")
    for options, names in (OPTIONS[name] for name in wanted):
        one = strategies.train(strategies.ONE, STEPS, **options)
        for mesh in names:
            other = strategies.train(MESHES[mesh], STEPS, **options)
            cells = [
                furthest(getattr(one[0], name), getattr(other[0], name))
                for name in ("params", "opt_state", "average")
            ]
            cells.append(furthest(one[1], other[1]))
            numbers = " | ".join(f"{x:.1e}" for x in cells)
            print(f"| {mesh} | {options['optim']['name']} | {numbers} |")


if __name__ == "__main__":
    main()
