"""Classes of very different sizes: what weights of the classes and balanced draws give.

Run:  python -m benchmarks.finetuning.imbalance SET --work=DIR [--data_dir=DIR]
          [--methods=plain,weights,balance] [--seeds=0,1,2] [--ratio=100] [--side=64]
          [--epochs=6] [--model=deit:Ti/16, or a file of it]
      SET: cifar10 (the TFDS data set in data_dir) or digits (scikit-learn's)

Of the training images of class k of K, the part ratio ** (-k / (K - 1)) is kept, as in
CIFAR-10-LT (arXiv:1901.05555, section 5.1): of CIFAR-10 12,406 images, 5,000 airplanes
and 50 trucks. All test images are kept, so that every class counts the same there.
`vit_jax.finetune` holds a fifth of each class out, which chooses the checkpoint by
balanced accuracy, and scores the test images once. Runs that are done are kept.

plain      every image once per epoch
weights    task.class_weights=sqrt: losses weighted by the roots of the classes' sizes
inverse    task.class_weights=inverse
balance    data.class_balance=sqrt: images drawn by these roots, the default of `finetune`
equal      data.class_balance=inverse: all classes drawn equally often

Prints a row per method: balanced accuracy, the mean recall of the three rarest classes
and of the rarest, on the test images; mean and standard deviation over the seeds.
"""

import argparse
import json
import pathlib
import statistics

import numpy as np
from PIL import Image

from benchmarks import smoke
from benchmarks.finetuning.finetune import MODEL, run, score

METHODS = {
    "plain": ("data.class_balance=",),
    "weights": ("task.class_weights=sqrt",),
    "inverse": ("task.class_weights=inverse",),
    "balance": ("data.class_balance=sqrt",),
    "equal": ("data.class_balance=inverse",),
}


def arrays_of(name, data_dir):
    """Returns images, labels and names of classes by split."""
    if name == "digits":
        from sklearn.datasets import load_digits

        digits, names = load_digits(), [str(i) for i in range(10)]
        images, test = np.uint8(digits.images * 255 / 16), np.arange(1_797) % 5 == 4
        parts = {"train": ~test, "test": test}
        return {k: (images[v], digits.target[v], names) for k, v in parts.items()}
    import tensorflow_datasets as tfds

    names = tfds.builder(name, data_dir=str(data_dir)).info.features["label"].names
    found = {}
    for split in ("train", "test"):
        rows = list(tfds.data_source(name, data_dir=str(data_dir), split=split))
        images = [np.asarray(row["image"]) for row in rows]
        found[split] = images, np.array([row["label"] for row in rows]), names
    return found


def make_set(name, data_dir, work, ratio):
    """Returns a folder train/CLASS and test/CLASS of images, unequal in train."""
    made = work / f"{name}_{ratio:g}"
    if made.exists():
        return made
    rng, staged = np.random.default_rng(0), made.with_suffix(".part")
    for split, (images, labels, names) in arrays_of(name, data_dir).items():
        for number, class_name in enumerate(names):
            taken = rng.permutation(np.flatnonzero(labels == number))
            if split == "train":
                part = ratio ** (-number / (len(names) - 1))
                taken = taken[: max(2, int(part * len(taken)))]
            to = staged / split / f"{number} {class_name}"
            to.mkdir(parents=True, exist_ok=True)
            for i in taken.tolist():
                Image.fromarray(images[i]).save(to / f"{i}.png")
    return staged.rename(made)


def scores_of(photos, method, seed, args, to):
    """Fine-tunes, unless that is done; returns the scores of the test images."""
    if not (to / "report.html").exists():
        run(
            "vit_jax.finetune",
            photos,
            f"--model={args.model}",
            f"--minutes={args.minutes:g}",
            *([f"--config.epochs={args.epochs:g}"] if args.epochs else []),
            f"--config.data.image_size=({args.side},{args.side})",
            f"--config.seed={seed}",
            *(f"--config.{key}" for key in METHODS[method]),
            f"--workdir={to}",
        )
    found = score(to, "test")
    by_class = recalls(to)
    return found | {"last three": by_class[-3:].mean(), "rarest": by_class[-1]}


def recalls(to):
    """Returns the recall of each class on the test images."""
    from vit_jax import weights
    from vit_jax.evaluators import checkpoint
    from vit_jax.tools.soups.averaging import evaluation_of

    pretrained, how = weights.open_weights(
        str(to), {}, use_ema=True, num_heads=0, tell=str
    )
    found = checkpoint.evaluate(pretrained, how, evaluation_of(str(to), "test"))
    return found.confusions["test"].accuracies


def main(args):
    """Runs the methods with each seed, and prints a table."""
    work = pathlib.Path(args.work).resolve()
    if args.smoke:  # A network of seconds in place of published weights.
        run("vit_jax.train", "--config=digits:quick", f"--workdir={args.model}")
    data_dir = pathlib.Path(args.data_dir).resolve()
    photos = make_set(args.set, data_dir, work, args.ratio)
    columns = "balanced_accuracy", "last three", "rarest"
    print(f"| method | {' | '.join(columns)} |\n|---|---|---|---|")
    for method in args.methods.split(","):
        found = []
        for seed in map(int, args.seeds.split(",")):
            to = work / "runs" / photos.name / method / str(seed)
            found.append(scores_of(photos, method, seed, args, to))
            row = {name: float(found[-1][name]) for name in columns}
            print(json.dumps({"method": method, "seed": seed} | row), flush=True)
        cells = []
        for name in columns:
            values = [100 * one[name] for one in found]
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.2f}{spread}")
        print(f"| {method} | {' | '.join(cells)} |", flush=True)


def parse():
    """Returns the flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("set", choices=("cifar10", "digits"))
    add("--work", required=True, help="gets the images and the runs")
    add("--data_dir", default=".")
    add("--methods", default="plain,weights,balance")
    add("--seeds", default="0,1,2")
    add("--ratio", type=float, default=100)
    add("--side", type=int, default=64)
    add("--epochs", type=float, default=6)
    add("--minutes", type=float, default=0)
    add("--model", default=MODEL)
    return smoke.parse(
        parser,
        "digits --work={folder} --methods=plain --seeds=0 --ratio=10 --side=8 "
        "--epochs=0.2 --model={folder}/model",
    )


if __name__ == "__main__":
    main(parse())
