"""Token merging: accuracy and images/s of a network at several numbers of merged tokens.

Run:  python -m benchmarks.prediction.token_merging --model=FILE --photographs=FOLDER
          [--counts=0,4,8,13,16] [--rounds=5] [--batch_size=32]

Photographs are named by their synset, as n01440764_tench.JPEG, and are decoded once. Each
round passes them through the network with each number, in turn, as `predict
--token_merging` does. Prints top-1, multiply-accumulates, and medians of images/s with
the ratio to the first number; brackets hold the quartiles of the ratios of single rounds.
"""

import argparse
import functools
import pathlib

import jax
import numpy as np

import vit_jax
from benchmarks import smoke
from benchmarks.step import step
from vit_jax.data import imagenet
from vit_jax.models import cost


def write_small(folder, flags):
    """Writes a network with random parameters and noise, to see that the script works."""
    from PIL import Image

    from vit_jax import models
    from vit_jax.weights import export
    from vit_jax.weights.pretrained import Pretrained

    smoke.shrink()
    model = models.create("Ti/16", num_classes=1_000, depth=2)
    params = model.init(jax.random.key(0))
    made = Pretrained(params, model.options, "vit_jax", "made")
    flags.model = pathlib.Path(folder, "made.safetensors")
    flags.photographs = f"{folder}/photos"
    export.export(made, "safetensors", flags.model)
    pathlib.Path(flags.photographs).mkdir()
    rng = np.random.default_rng(0)
    for synset in imagenet.synsets()[:3]:
        pixels = rng.integers(0, 256, (240, 300, 3), np.uint8)
        Image.fromarray(pixels).save(f"{flags.photographs}/{synset}_x.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="weights with ImageNet's classes")
    parser.add_argument("--photographs", default="", help="folder of images")
    parser.add_argument("--counts", default="0,4,8,13,16", help="tokens per block")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    flags = smoke.parse(parser, "--folder={folder} --rounds=1 --counts=0,4")
    if flags.folder:
        write_small(flags.folder, flags)
    counts = [int(count) for count in flags.counts.split(",")]
    opened = {
        r: vit_jax.load_model(flags.model, token_merging=r, tell=lambda line: None)
        for r in counts
    }
    paths = sorted(pathlib.Path(flags.photographs).iterdir())
    synsets = imagenet.synsets()
    labels = np.array([synsets.index(path.name.split("_")[0]) for path in paths])
    images = np.asarray(opened[counts[0]].preprocess(paths))
    networks = {
        r: jax.jit(lambda *args, model=model: model.apply(*args)["logits"])
        for r, model in opened.items()
    }
    calls = {
        r: functools.partial(
            logits, networks[r], opened[r].params, images, flags.batch_size
        )
        for r in counts
    }
    outputs = {r: call() for r, call in calls.items()}  # Compiles.
    seconds = step.timed(calls, flags.rounds)
    print("merged  top-1, %  GMACs  images/s  speed")
    for r, took in seconds.items():
        top1 = 100 * np.mean(outputs[r].argmax(1) == labels)
        macs = 1e-9 * cost.macs_per_image(opened[r].model)
        rate = len(paths) / np.median(took)
        speed = step.ratio(seconds[counts[0]], took)
        print(f"{r:6}  {top1:8.1f}  {macs:5.2f}  {rate:8.1f}  {speed}")


def logits(network, params, images, batch_size):
    """Returns the logits of prepared images, the last batch as large as the others."""
    rows = []
    for i in range(0, len(images), batch_size):
        batch = images[i : i + batch_size]
        short = min(batch_size, len(images)) - len(batch)
        batch = np.pad(batch, ((0, short), (0, 0), (0, 0), (0, 0)))
        rows.append(np.asarray(network(params, batch))[: len(batch) - short])
    return np.concatenate(rows)


if __name__ == "__main__":
    main()
