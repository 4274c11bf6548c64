"""What `vit_jax.finetune` reaches with nothing else said, beside three rivals.

Run:  python -m benchmarks.finetuning.finetune SET --work=DIR [--data_dir=DIR]
          [--methods=finetune,recipe,sweep,features] [--seed=0] [--rates=0.003,0.01,0.03]
          [--model=deit:Ti/16, or a file of it]
      SET: flowers, flowers10 (folders train and val of photographs in data_dir), digits
      (scikit-learn's), cifar10, pairs (from the TFDS data set cifar10 in data_dir)

Each set becomes a folder with train/CLASS and test/CLASS: flowers as it lies; a tenth of
each class of its training images; four fifths of the digits; of CIFAR-10 a tenth of each
class of train, one class of it cut to a tenth again, and 2,000 images of test; of pairs (finetune
alone) the same images two by two, side by side, with a table of one or two labels each. No
method sees the test images before its last score. One method runs after the other:

finetune   python -m vit_jax.finetune FOLDER, which sets a fifth of train aside
recipe     configs/flowers_finetune.py: 3 epochs at 224 on all of train
sweep      python -m vit_jax.transfer, at the size that finetune chose, 100 steps of 32
           images a run, three of them at the best rate (the default, 500 steps of 512 images, takes
           2 cores a day)
features   timm's DeiT-Ti with its own transform, then scikit-learn's logistic regression,
           whose strength is chosen by 5-fold cross-validation on train

Prints the scores and wall seconds; of pairs scikit-learn's mean average precision of the
model's probabilities too. Needs the extra parity and scikit-learn.
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

SETS = ("flowers", "flowers10", "digits", "cifar10", "pairs")
MODEL, TIMM_MODEL = "deit:Ti/16", "deit_tiny_patch16_224.fb_in1k"
CUT = "cat"  # The class of CIFAR-10 that is cut.


def make_set(name, data_dir, work):
    """Returns a folder train/CLASS and test/CLASS of images."""
    made = work / name
    if made.exists():
        return made
    rng = np.random.default_rng(0)
    if name.startswith("flowers"):
        share = 0.1 if name == "flowers10" else 1.0
        for split, part in (("train", share), ("val", 1.0)):
            for folder in sorted((data_dir / split).iterdir()):
                files = sorted(folder.iterdir())
                taken = rng.permutation(len(files))[: round(part * len(files))]
                to = made / {"val": "test"}.get(split, split) / folder.name
                to.mkdir(parents=True)
                for i in taken:
                    (to / files[i].name).symlink_to(files[i].resolve())
        return made
    if name == "pairs":
        return make_pairs(arrays_of("cifar10", data_dir, rng), made, rng)
    for split, (images, labels, names) in arrays_of(name, data_dir, rng).items():
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            to = made / split / names[label]
            to.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(to / f"{i}.png")
    return made


def make_pairs(splits, made, rng):
    """Writes images side by side, and a table of their labels; returns its folder."""
    rows = ["path,labels,split"]
    for split, (images, labels, names) in splits.items():
        (made / split).mkdir(parents=True)
        order = rng.permutation(len(images))
        for i in range(0, len(order) - 1, 2):
            one, other = order[i], order[i + 1]
            path = f"{split}/{i}.png"
            Image.fromarray(np.hstack([images[one], images[other]])).save(made / path)
            both = sorted({names[labels[one]], names[labels[other]]})
            rows.append(f"{path},{'|'.join(both)},{split}")
    (made / "labels.csv").write_text("\n".join(rows) + "\n")
    return made


def arrays_of(name, data_dir, rng):
    """Returns images, labels and names of classes by split."""
    if name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = np.uint8(digits.images * 255 / 16)
        order = rng.permutation(len(images))
        names, border = [str(i) for i in range(10)], len(order) * 4 // 5
        parts = {"train": order[:border], "test": order[border:]}
        return {k: (images[v], digits.target[v], names) for k, v in parts.items()}
    import tensorflow_datasets as tfds

    builder = tfds.builder("cifar10", data_dir=str(data_dir))
    names, found = builder.info.features["label"].names, {}
    for split, most in (("train", 500), ("test", 200)):
        source = tfds.data_source("cifar10", data_dir=str(data_dir), split=split)
        labels = np.array([row["label"] for row in source])
        taken = []
        for number, label in enumerate(names):
            of_class = rng.permutation(np.flatnonzero(labels == number))
            cut = split == "train" and label == CUT
            taken.extend(of_class[: most // 10 if cut else most].tolist())
        images = [np.asarray(source[i]["image"]) for i in taken]
        found[split] = images, labels[taken], names
    return found


def run(*words):
    """Runs a command of the project; its output goes to a file beside the runs."""
    start(pathlib.Path(words[-1].partition("=")[2] + ".log"), "-m", *words)


def start(log, *words):
    """Runs Python with these words; its output goes to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        command = [sys.executable, *map(str, words)]
        if subprocess.run(command, stdout=out, stderr=out, check=False).returncode:
            raise SystemExit(f"{' '.join(command)} failed, see {log}")


def score(workdir, split):
    """Returns the scores of a run, of its average where it has one."""
    report = json.loads((workdir / "report.json").read_text())
    scores = report["final"][split]
    return scores.get("ema") or scores["params"]


def finetune(photos, args, to):
    """Returns the scores of `vit_jax.finetune`."""
    minutes = f"--minutes={args.minutes:g}"
    seed = f"--config.seed={args.seed}"
    model = f"--model={args.model}"
    short = ["--config.epochs=1"] * args.smoke
    run("vit_jax.finetune", photos, minutes, seed, model, *short, f"--workdir={to}")
    found = score(to, "test")
    if (photos / "labels.csv").exists():
        found["map of scikit-learn"] = precision(to, photos)
    return found


def precision(run, photos):
    """Returns scikit-learn's mean average precision of a run on the test images."""
    from sklearn.metrics import average_precision_score

    import vit_jax

    model = vit_jax.load_model(run)
    with (photos / "labels.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "test"]
    found = model.predict([photos / row["path"] for row in rows], threshold=0.0)
    given = [{each.name: each.probability for each in row} for row in found]
    return float(
        np.mean(
            [
                average_precision_score(
                    [name in row["labels"].split("|") for row in rows],
                    [row[name] for row in given],
                )
                for name in model.class_names
            ]
        )
    )


def recipe(photos, args, to):
    """Returns the scores of the recipe."""
    classes = len(list((photos / "train").iterdir()))
    run(
        "vit_jax.train",
        "--config=flowers_finetune",
        f"--config.data.data_dir={photos}",
        f"--config.data.num_classes={classes}",
        f"--config.init={args.model}",
        f"--config.seed={args.seed}",
        "--config.evals.val=test",
        f"--workdir={to}",
    )
    return score(to, "val")


def sweep(photos, args, to):
    """Returns the scores of the best rate of a sweep."""
    chosen = json.loads((to.parent / "finetune" / "finetune.json").read_text())
    run(
        "vit_jax.transfer",
        f"--model={args.model}",
        f"--dataset={photos}",
        f"--resolution={chosen['data']['image_size'][0]}",
        f"--learning_rates={args.rates}",
        "--seeds=3",
        "--config.total_steps=100",
        "--config.batch_size=32",
        f"--workdir={to}",
    )
    return json.loads((to / "transfer.json").read_text())


def features(photos, args, to):
    """Returns the scores of logistic regression on timm's features."""
    import torch
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from benchmarks.timm_import import import_timm

    timm = import_timm()
    model = timm.create_model(TIMM_MODEL, pretrained=True, num_classes=0).eval()
    config = timm.data.resolve_data_config(model=model)
    transform = timm.data.create_transform(**config)
    found = {}
    for split in ("train", "test"):
        files = sorted(photos.glob(f"{split}/*/*"))
        rows = []
        for start in range(0, len(files), 32):
            images = (Image.open(f).convert("RGB") for f in files[start : start + 32])
            with torch.inference_mode():
                rows.append(model(torch.stack([transform(i) for i in images])).numpy())
        found[split] = np.concatenate(rows), [f.parent.name for f in files]
    classifier = make_pipeline(
        StandardScaler(),
        LogisticRegressionCV(Cs=np.logspace(-4, 1, 6), cv=5, max_iter=1000),
    ).fit(*found["train"])
    right, said = found["test"][1], classifier.predict(found["test"][0])
    return {
        "top1": float(np.mean(said == np.array(right))),
        "balanced_accuracy": float(balanced_accuracy_score(right, said)),
    }


METHODS = {
    "finetune": finetune,
    "recipe": recipe,
    "sweep": sweep,
    "features": features,
}


def main(args):
    """Runs the methods on the set."""
    work = pathlib.Path(args.work).resolve()
    if args.smoke:  # A network of seconds in place of published weights.
        run("vit_jax.train", "--config=digits:quick", f"--workdir={args.model}")
    photos = make_set(args.set, pathlib.Path(args.data_dir).resolve(), work)
    for method in args.methods.split(","):
        began = time.perf_counter()
        to = work / "runs" / args.set / str(args.seed) / method
        scores = METHODS[method](photos, args, to)
        seconds = time.perf_counter() - began
        row = {"set": args.set, "seed": args.seed, "method": method, "scores": scores}
        print(json.dumps(row | {"seconds": round(seconds)}), flush=True)


def parse():
    """Returns the flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("set", choices=SETS)
    add("--work", required=True, help="gets the images and the runs")
    add("--data_dir", default=".")
    add("--methods", default=",".join(METHODS))
    add("--minutes", type=float, default=15)
    add("--seed", type=int, default=0)
    add("--model", default=MODEL)
    add("--rates", default="0.003,0.01,0.03,0.1")
    return smoke.parse(
        parser,
        "digits --work={folder} --methods=finetune --minutes=0.02 --model={folder}/model",
    )


if __name__ == "__main__":
    main(parse())
