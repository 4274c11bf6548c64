"""Time and memory of the closed form of few-shot evaluation on made features.

Run:  python -m benchmarks.prediction.fewshot
      python -m benchmarks.prediction.fewshot --num_classes=21843 --features=1280 \
          --shots=1 --strengths=1 --test=1000

Prints the seconds of the processor and of the clock: of solving, of the weights for
every strength, and of predicting test examples with each; and the most memory that the
process had beyond what it had with the features.
"""

import argparse
import resource
import time

import numpy as np

from benchmarks import smoke
from vit_jax.evaluators import fewshot


class Stage:
    """Prints how long the work within took."""

    def __init__(self, name):
        self._name = name

    def __enter__(self):
        self._began = time.perf_counter(), time.process_time()

    def __exit__(self, *_):
        wall = time.perf_counter() - self._began[0]
        cpu = time.process_time() - self._began[1]
        print(f"{self._name:<28} {wall:8.2f} s  {cpu:8.2f} s of processors", flush=True)


def peak():
    """Returns the most memory that this process had so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(args):
    """Makes features, and takes the time."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((args.num_classes, args.features), np.float32)

    def made(labels):
        x = rng.standard_normal((len(labels), args.features), np.float32)
        for i, label in enumerate(labels):
            x[i] += centres[label] / 4
        return x, labels

    train = made(np.repeat(np.arange(args.num_classes), args.shots))
    test = made(rng.integers(0, args.num_classes, args.test))
    strengths = 2.0 ** np.arange(args.strengths)[::-1] * 4
    before = peak()
    with Stage("solve"):
        solution = fewshot.solve(*train, args.num_classes)
    with Stage(f"weights of {args.strengths} strengths"):
        for l2 in strengths:
            solution.weights(l2)
    with Stage(f"predict {args.test} examples"):
        tops = [(solution.predict(test[0], x) == test[1]).mean() for x in strengths]
    print(f"memory beside the features: {peak() - before:.0f} MB")
    print("accuracy by strength:", " ".join(f"{top:.3f}" for top in tops))


def parse():
    """Returns the flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--num_classes", type=int, default=1_000)
    add("--shots", type=int, default=25)
    add("--features", type=int, default=768)
    add("--strengths", type=int, default=10)
    add("--test", type=int, default=10_000)
    return smoke.parse(parser, "--num_classes=10 --features=16 --test=50")


if __name__ == "__main__":
    main(parse())
