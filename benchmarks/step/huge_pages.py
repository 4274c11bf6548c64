"""Training on a CPU with glibc's memory in huge pages and without, process by process.

Run: python -m benchmarks.step.huge_pages [--rounds=5] [--steps=40]
         [--config=configs/cifar10.py:size=cpu] [-- --config.KEY=VALUE ...]

XLA maps the temporaries of a step afresh each time; in pages of 2 MB instead of 4 KB that
takes fewer page faults. Each round trains so many steps in either.

Prints medians of images per second, and of the ratios of single rounds with their quartiles.
Linux alone; /sys/kernel/mm/transparent_hugepage/enabled must be "madvise" (if "always", there
is nothing to gain).
"""

import argparse
import json
import pathlib
import tempfile

import numpy as np

from benchmarks import smoke
from benchmarks.self_supervised import without_labels

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONTENDERS = {"small pages": "0", "huge pages": "1"}


def speed(value, args):
    """Returns images per second of a run."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "vit_jax.train", f"--config={args.config}"]
        words += ["--config.evals={}", "--config.epochs=0"]
        words += [f"--config.total_steps={args.steps}", *args.more]
        words += [f"--workdir={folder}"]
        tunables = f"glibc.malloc.hugetlb={value}"
        without_labels.command(words, ROOT, GLIBC_TUNABLES=tunables)
        report = json.loads((pathlib.Path(folder) / "report.json").read_text())
    return report["images_per_second"]


def main():
    """Prints one line for each contender, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default="configs/cifar10.py:size=cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "more", nargs="*", help="further flags of vit_jax.train, after --"
    )
    args = smoke.parse(parser, "--config=configs/digits.py:quick --rounds=1 --steps=3")
    found = {name: [] for name in CONTENDERS}
    for _ in range(args.rounds):
        for name, value in CONTENDERS.items():
            found[name].append(speed(value, args))
    for name, values in found.items():
        print(f"{name}: {np.median(values):.1f} images/s")
    ratios = np.divide(*reversed(found.values()))
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    print(f"huge to small: {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
