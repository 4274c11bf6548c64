"""Images of any size: padding, and the speed of a training step by that of squares.

Run:  python -m benchmarks.prediction.any_size --photographs=FOLDER [--variant=Ti/16]
          [--side=224] [--rounds=10] [--batch_size=16]

FOLDER has train/ with a folder a class. Each way prepares the same images: squares, one image
a sequence, and four or eight packed into one, always with as many patches an image as the
square at most. "filled" is the part of all places that hold patches, over 20 batches. One step
of each way a round; brackets hold the quartiles of the ratios of single rounds.
"""

import argparse
import itertools
import pathlib

import jax
import numpy as np

from benchmarks import smoke
from benchmarks.step import step
from vit_jax.data import pipeline
from vit_jax.data.sources.open import open_source
from vit_jax.distributed import mesh as meshes
from vit_jax.training import config as configuration
from vit_jax.training import train_setup


class Run:
    """A training run: each call takes a step on its first batch."""

    def __init__(self, flags, transform):
        config = configuration.complete(
            {
                "batch_size": flags.batch_size,
                "total_steps": 1_000,
                "data": {
                    "name": "folder",
                    "data_dir": flags.photographs,
                    "num_classes": len(
                        list(pathlib.Path(flags.photographs, "train").iterdir())
                    ),
                    "image_size": (flags.side, flags.side),
                    "train_transform": transform,
                },
                "model": {"variant": flags.variant, "pool": "gap"},
                "optim": {"learning_rate": 1e-4},
            }
        )
        source = open_source(config.data, "train")
        mesh = meshes.create(config.mesh)
        self.setup = train_setup.build(config, mesh, len(source))
        how = {"batch_size": config.batch_size, "seed": 0, "start": 0, "stop": 20}
        with pipeline.train_batches(source, config.data, **how) as batches:
            self.batches = list(batches)
        self.state = self.setup.initial_state()
        first = {name: self.batches[0][name] for name in self.setup.layout.batch}
        self.batch = meshes.to_devices(first, mesh)
        self()

    @property
    def filled(self):
        """Part of the places that hold patches."""
        if "grids" not in self.batches[0]:
            return 1.0
        used = [batch["grids"].prod(-1).sum() for batch in self.batches]
        _, rows, side, _ = self.batches[0]["image"].shape
        places = len(self.batches[0]["image"]) * rows // side
        return float(np.mean(used) / places)

    def __call__(self):
        self.state, metrics = self.setup.train_step(self.state, self.batch)
        jax.block_until_ready(metrics)


def write_noise(folder):
    """Writes photographs of noise in some shapes."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for i, size in enumerate(itertools.product((40, 60), (40, 90))):
        for name in ("a", "b"):
            path = pathlib.Path(folder, "train", name, f"{i}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--photographs", default="", help="folder with train/")
    add("--variant", default="Ti/16")
    add("--side", type=int, default=224, help="of squares, in pixels")
    add("--rounds", type=int, default=10)
    add("--batch_size", type=int, default=16)
    add("--packs", default="1,4,8", help="images a sequence")
    flags = smoke.parse(
        parser,
        "--photographs={folder} --side=32 --rounds=1 --batch_size=8 --packs=4",
    )
    if flags.smoke:
        smoke.shrink()
        write_noise(flags.photographs)
    patch = int(flags.variant.partition("/")[2])
    tokens = (flags.side // patch) ** 2
    ways = {"squares": "random_resized_crop | flip"}
    for pack in map(int, flags.packs.split(",")):
        line = f"naflex({pack * tokens}, patch={patch}, area=(0.3, 1.0), flip=True"
        ways[f"{pack} a sequence"] = f"{line}, pack={pack})"
    runs = {name: Run(flags, transform) for name, transform in ways.items()}
    seconds = step.timed(runs, flags.rounds)
    print("images        filled  step, ms  speed")
    for name, took in seconds.items():
        speed = step.ratio(seconds["squares"], took)
        cells = f"{runs[name].filled:6.1%}  {1e3 * np.median(took):8.1f}"
        print(f"{name:12}  {cells}  {speed}")


if __name__ == "__main__":
    main()
