"""Patch dropout: the training step of a recipe at several fractions of dropped patches.

Run:  python -m benchmarks.step.patch_dropout [--fractions=0,0.25,0.5,0.75]
          [--config=configs/cifar10.py:size=small] [--rounds=20] [--batch_size=128]

Images are made, one step of each fraction a round. Prints medians in milliseconds and the
ratios to the first fraction; brackets hold the quartiles of the ratios of single rounds.
"""

import argparse

import jax
import numpy as np

from benchmarks import smoke
from benchmarks.step import step
from vit_jax.distributed import mesh as meshes
from vit_jax.training import config as configuration
from vit_jax.training import train_setup


class Run:
    """A training run without data: each call takes a step on the same images."""

    def __init__(self, flags, fraction):
        keys = {"batch_size": flags.batch_size, "model.patch_dropout": fraction}
        config = configuration.load(flags.config, keys)
        mesh = meshes.create(config.mesh)
        self.setup = train_setup.build(config, mesh, 50_000)
        self.state = self.setup.initial_state()
        rng = np.random.default_rng(0)
        batch = {
            name: rng.integers(0, 10, x.shape).astype(x.dtype)
            for name, x in self.setup.layout.batch.items()
        }
        self.batch = meshes.to_devices(batch, mesh)
        self()

    def __call__(self):
        self.state, metrics = self.setup.train_step(self.state, self.batch)
        jax.block_until_ready(metrics)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fractions", default="0,0.25,0.5,0.75")
    parser.add_argument("--config", default="configs/cifar10.py:size=small")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=128)
    flags = smoke.parse(
        parser,
        "--config=configs/cifar10.py:size=small,quick --fractions=0,0.5 --rounds=1 "
        "--batch_size=8",
    )
    fractions = [float(text) for text in flags.fractions.split(",")]
    seconds = step.timed({f: Run(flags, f) for f in fractions}, flags.rounds)
    print("dropped  step, ms  speed")
    for fraction, took in seconds.items():
        speed = step.ratio(seconds[fractions[0]], took)
        print(f"{fraction:7.2f}  {1e3 * np.median(took):8.1f}  {speed}")


if __name__ == "__main__":
    main()
