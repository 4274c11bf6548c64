"""How well `vit_jax.finetune` predicts numbers, by loss.

Run:  python -m benchmarks.finetuning.regression SET --work=DIR [--data_dir=DIR]
          [--methods=mse,gaussian,ridge] [--seed=0] [--minutes=15]
          [--model=deit:Ti/16, or a file of it]
      SET: flowers (folders train and val of photographs in data_dir: tf_flowers), digits
      (scikit-learn's)

flowers   the number is computed: the share of a photograph's area that is yellow, in percent (a
          hue from 40 to 70 degrees, saturation and value above 0.4)
digits    the number is the digit, as if the ten classes were grades

Each set becomes a folder of images with a table of path, number and split; a fifth of train is
set aside to choose the checkpoint, and the test images are predicted once, at the end, by
`python -m vit_jax.predict`. Methods: the losses of task.name=regression; "softmax",
classification of the numbers as classes, for digits; "ridge", ridge regression from the features
of the weights (configs/eval/ridge.py); "median", always the median of train.

Prints mean absolute error, root mean squared error, R2, Spearman's correlation, and for digits
Cohen's kappa with quadratic weights and accuracy of the rounded numbers, and wall seconds.
"""

import argparse
import csv
import json
import pathlib
import subprocess
import sys
import time

import numpy as np
from PIL import Image

from benchmarks import smoke

METHODS = {
    "flowers": ("median", "ridge", "mse", "mae", "huber", "gaussian"),
    "digits": ("median", "softmax", "mse", "ordinal"),
}
TARGET = {"flowers": "yellow", "digits": "digit"}
MODEL = "deit:Ti/16"


def make_set(name, data_dir, work):
    """Returns the table of a set; its images lie beside it."""
    folder = work / name
    table = folder / "table.csv"
    if table.exists():
        return table
    rows = list((flowers if name == "flowers" else digits)(data_dir, folder))
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", TARGET[name], "split"])
        writer.writerows(rows)
    return table


def flowers(data_dir, folder):
    """Yields path, yellow share in percent, and split of each photograph."""
    folder.mkdir(parents=True)
    for split in ("train", "val"):
        for path in sorted((data_dir / split).glob("*/*")):
            to = folder / split / path.parent.name / path.name
            to.parent.mkdir(parents=True, exist_ok=True)
            to.symlink_to(path.resolve())
            shown = to.relative_to(folder).as_posix()
            with Image.open(path) as image:
                share = yellow(np.asarray(image.convert("HSV")))
            yield shown, round(100 * share, 2), {"val": "test"}.get(split, split)


def yellow(pixels):
    """Returns the yellow share of an image's pixels, (H, W, 3), in HSV from 0 to 255."""
    hue, saturation, value = np.moveaxis(pixels.astype(float), -1, 0)
    degrees = hue * 360 / 255
    chosen = (40 <= degrees) & (degrees <= 70)
    return (chosen & (saturation > 0.4 * 255) & (value > 0.4 * 255)).mean()


def digits(_, folder):
    """Yields path, digit and split of each image; every fifth of a class is for testing."""
    from sklearn.datasets import load_digits

    known, seen = load_digits(), np.zeros(10, int)
    folder.mkdir(parents=True)
    for i, (image, digit) in enumerate(zip(known.images, known.target, strict=True)):
        seen[digit] += 1
        Image.fromarray((image * 255 / 16).astype(np.uint8)).save(folder / f"{i}.png")
        yield f"{i}.png", digit, "train" if seen[digit] % 5 else "test"


def rows_of(table, split):
    """Returns paths and numbers of a split."""
    name = TARGET[table.parent.name]
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == split]
    paths = [str(table.parent / row["path"]) for row in rows]
    return paths, np.array([float(row[name]) for row in rows])


def predict(method, table, args, to):
    """Returns the predicted number of each test image."""
    target, (paths, _) = TARGET[args.set], rows_of(table, "test")
    if method == "median":
        return np.full(len(paths), np.median(rows_of(table, "train")[1]))
    words = [str(table), f"--model={args.model}", f"--workdir={to}"]
    words += [f"--minutes={args.minutes}", f"--config.seed={args.seed}"]
    words += ["--config.epochs=1"] * args.smoke
    if method == "softmax":
        words.append(f"--config.data.label_key={target}")
    else:
        words += [f"--target={target}", f"--config.task.loss={method}"]
    run("vit_jax.finetune", *words)
    listed = "\n".join(paths)
    out = run("vit_jax.predict", f"--model={to}", "--json", "-", given=listed)
    best = [json.loads(line)["predictions"][0] for line in out.splitlines()]
    return np.array(
        [float(one["name" if method == "softmax" else "value"]) for one in best]
    )


def ridge(table, args):
    """Returns the scores of ridge regression from the features of the weights."""
    config = f"data={table},target={TARGET[args.set]},train=train,test=test"
    out = run(
        "vit_jax.evaluate",
        f"--model={args.model}",
        f"--config=configs/eval/ridge.py:{config}",
        "--config.data.image_key=path",
        "--json",
    )
    found = json.loads(out.splitlines()[-1])["ridge"]
    return {name: found[name] for name in ("mae", "rmse", "r2", "spearman")}


def scores_of(predicted, truth, name):
    """Returns the scores of predictions."""
    from scipy import stats
    from sklearn import metrics

    found = {
        "mae": metrics.mean_absolute_error(truth, predicted),
        "rmse": metrics.root_mean_squared_error(truth, predicted),
        "r2": metrics.r2_score(truth, predicted),
    }
    if np.ptp(predicted):
        found["spearman"] = stats.spearmanr(truth, predicted).statistic
    if name == "digits":
        whole = predicted.round().clip(0, 9).astype(int)
        pair = truth.astype(int), whole
        found["qwk"] = metrics.cohen_kappa_score(*pair, weights="quadratic")
        found["accuracy"] = (whole == truth).mean()
    return {key: float(value) for key, value in found.items()}


def run(module, *words, given=None):
    """Runs a command; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        input=given,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def main(args):
    """Runs the methods on the set."""
    work = pathlib.Path(args.work).resolve()
    if args.smoke:  # A network of seconds in place of published weights.
        run("vit_jax.train", "--config=digits:quick", f"--workdir={args.model}")
    table = make_set(args.set, pathlib.Path(args.data_dir).resolve(), work)
    _, truth = rows_of(table, "test")
    for method in args.methods.split(",") if args.methods else METHODS[args.set]:
        began = time.perf_counter()
        to = work / "runs" / args.set / str(args.seed) / method
        if method == "ridge":
            scores = ridge(table, args)
        else:
            scores = scores_of(predict(method, table, args, to), truth, args.set)
        seconds = round(time.perf_counter() - began)
        row = {"set": args.set, "seed": args.seed, "method": method, "scores": scores}
        print(json.dumps(row | {"seconds": seconds}), flush=True)


def parse():
    """Returns the flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("set", choices=METHODS)
    add("--work", required=True, help="gets the images and the runs")
    add("--data_dir", default=".")
    add("--methods", default="", help="default: all of the set")
    add("--minutes", type=float, default=15)
    add("--seed", type=int, default=0)
    add("--model", default=MODEL)
    return smoke.parse(
        parser,
        "digits --work={folder} --methods=ordinal --minutes=0.02 --model={folder}/model",
    )


if __name__ == "__main__":
    main(parse())
