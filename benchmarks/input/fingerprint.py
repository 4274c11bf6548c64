"""Times the fingerprint of a training set of 1.3 million listed files.

Run: python -m benchmarks.input.fingerprint [--files=1300000] [--rounds=5]

A start computes it once, and once more where a checkpoint is resumed. It is paired with
building the list of names itself, to tell a slow machine from slow code.
"""

import argparse
import statistics
import time

import numpy as np

from benchmarks import smoke
from vit_jax.data.fingerprint import differences, fingerprint
from vit_jax.data.sources.folder import FolderSource


def listing(files: int) -> FolderSource:
    """Returns a source of so many files in 1,000 classes."""
    names = [f"train/n{i % 1000:08}/n{i % 1000:08}_{i}.JPEG" for i in range(files)]
    sizes = 100_000 + np.arange(files) % 7_919
    classes = tuple(f"n{i:08}" for i in range(1000))
    return FolderSource("root", names, [i % 1000 for i in range(files)], classes, sizes)


def seconds(function, *args) -> float:
    """Returns the processor's seconds of a call."""
    began = time.process_time()
    function(*args)
    return time.process_time() - began


def main() -> None:
    """Prints medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=1_300_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = smoke.parse(parser, "--files=2000 --rounds=1")
    source = listing(args.files)
    stored = fingerprint(source)
    rows = [
        (
            seconds(listing, args.files),
            seconds(fingerprint, source),
            seconds(differences, stored, source),
        )
        for _ in range(args.rounds)
    ]
    for name, column in zip(
        ("making the names", "fingerprint", "comparing"),
        zip(*rows, strict=True),
        strict=True,
    ):
        print(f"{name:18} {statistics.median(column):.2f} s of {args.files:,} files")


if __name__ == "__main__":
    main()
