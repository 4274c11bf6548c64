"""What a user reaches in equal minutes: `vit_jax.finetune`, timm's train.py, transformers' Trainer.

Run:  python -m benchmarks.finetuning.peers SET --work=DIR --model=FOLDER --timm=CLONE
          [--data_dir=DIR] [--methods=vit_jax,timm,transformers] [--seeds=0,1,2] [--minutes=5]
          [--dtype=bfloat16] [--batch_size=32] [--rates=5e-5,1e-4]
      SET: flowers, digits, cifar10, as in benchmarks/finetuning/finetune.py
      FOLDER: DeiT-Ti as timm writes it, model.safetensors and config.json
      CLONE: timm's repository at the installed version, for its train.py

Each method gets the same folders: train and val (a fifth of each class, drawn once) to train and to
choose a checkpoint, and test, which is scored once at the end, outside of the minutes. The minutes
hold start-up, training and validation. A peer's first epoch is timed in a run of its own, which
does not count, and sets the number of its epochs. Methods alternate by seed.

vit_jax        python -m vit_jax.finetune FOLDER --minutes=M
timm           train.py --pretrained --opt adamw --weight-decay 0.05 --layer-decay 0.75
               --warmup-epochs 1 --lr R, its own augmentations; model_best.pth.tar
transformers   Trainer as in its image-classification example: random resized crops and flips,
               AdamW, linear decay, 2e-5 and batches of 8, the best epoch

--dtype is that of products on the peers' side (autocast). timm has no documented rate for
fine-tuning, so its runs divide the minutes by the number of --rates and keep the best by val.

Prints top-1 of test and wall seconds per run, then a row per method. Needs the extra parity and
scikit-learn; transformers' Trainer also accelerate.
"""

import argparse
import csv
import json
import os
import pathlib
import shutil
import statistics
import time

import numpy as np

from benchmarks import smoke
from benchmarks.finetuning import finetune

TIMM_MODEL = "deit_tiny_patch16_224"
# Programs, which work beside a torchvision that PyTorch's CPU build cannot use.
TIMM = """
import runpy, sys
from benchmarks.timm_import import import_timm
import_timm()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TRANSFORMERS = """
from benchmarks.finetuning import peers_transformers
peers_transformers.main()
"""


def make_folders(photos):
    """Returns train, val and test of a set that has train and test, as links."""
    made = photos.with_name(f"{photos.name}_split")
    if made.exists():
        return made
    staged, rng = made.with_suffix(".part"), np.random.default_rng(0)
    for split in ("train", "test"):
        for folder in sorted((photos / split).iterdir()):
            files = sorted(folder.iterdir())
            held = set(rng.permutation(len(files))[: len(files) // 5].tolist())
            for i, file in enumerate(files):
                kind = "val" if split == "train" and i in held else split
                to = staged / kind / folder.name / file.name
                to.parent.mkdir(parents=True, exist_ok=True)
                to.symlink_to(file.resolve())
    return staged.rename(made)


def vit_jax(photos, seed, args, to):
    """Returns the accuracy of `vit_jax.finetune`."""
    args = argparse.Namespace(**{**vars(args), "seed": seed})
    return finetune.finetune(photos, args, to)["top1"]


def epochs_of(seconds, file, measure):
    """Returns how many epochs fit the seconds.

    `measure` returns the seconds before the first epoch and those of an epoch; the file
    keeps them.
    """
    if not file.exists():
        times = measure()
        file.write_text(json.dumps(times))
    before, epoch = json.loads(file.read_text())
    return max(1, int((seconds - before) / epoch))


def timm(photos, seed, args, to):
    """Returns the accuracy of the best of the rates of timm's train.py."""
    rates, best = args.rates.split(","), (-1.0, None)
    trial = to.parents[1] / "timm_epoch"

    def measure():
        began = time.time()
        run_timm(photos, seed, args, rates[0], 1, trial)
        files = (trial / "run" / name for name in ("args.yaml", "summary.csv"))
        first, last = (os.path.getmtime(file) for file in files)
        epoch = last - first
        return time.time() - began - epoch, epoch

    seconds = 60 * args.minutes / len(rates)
    epochs = epochs_of(seconds, trial / "seconds.json", measure)
    for rate in rates:
        run_timm(photos, seed, args, rate, epochs, to / rate)
        with (to / rate / "run" / "summary.csv").open() as file:
            reached = max(float(row["eval_top1"]) for row in csv.DictReader(file))
        best = max(best, (reached, rate))
    return test_timm(photos, to / best[1] / "run" / "model_best.pth.tar")


def run_timm(photos, seed, args, rate, epochs, to):
    """Runs timm's train.py once."""
    shutil.rmtree(to, ignore_errors=True)
    classes = len(list((photos / "train").iterdir()))
    words = f"--model {TIMM_MODEL} --pretrained --num-classes {classes} --device cpu"
    words += f" --pretrained-path {args.model}/model.safetensors --val-split val"
    words += f" --opt adamw --weight-decay 0.05 --layer-decay 0.75 --lr {rate}"
    words += f" --epochs {epochs} --warmup-epochs {min(1, epochs - 1)} --seed {seed}"
    words += f" --batch-size {args.batch_size} --workers 2 --no-prefetcher"
    words += f" --output {to} --experiment run --checkpoint-hist 1"
    if args.dtype != "float32":
        words += f" --amp --amp-dtype {args.dtype}"
    train = pathlib.Path(args.timm).resolve() / "train.py"
    finetune.start(to / "log", "-c", TIMM, train, "--data-dir", photos, *words.split())


def test_timm(photos, checkpoint):
    """Returns the accuracy of timm's model on the test images."""
    import torch

    from benchmarks.timm_import import import_timm

    library = import_timm()
    dataset = library.data.create_dataset("", root=photos / "test")
    classes = len(list((photos / "train").iterdir()))
    model = library.create_model(TIMM_MODEL, num_classes=classes)
    library.models.load_checkpoint(model.eval(), str(checkpoint), weights_only=False)
    dataset.transform = library.data.create_transform(
        **library.data.resolve_data_config(model=model)
    )
    right = 0
    for images, labels in torch.utils.data.DataLoader(dataset, batch_size=32):
        with torch.inference_mode():
            right += int((model(images).argmax(-1) == labels).sum())
    return right / len(dataset)


def transformers(photos, seed, args, to):
    """Returns the accuracy of transformers' Trainer."""
    weights = to.parents[1] / "transformers_weights"
    if not weights.exists():
        finetune.run(
            "vit_jax.convert", f"--model={args.model}", "--to=hf", f"--out={weights}"
        )
    trial = to.parents[1] / "transformers_epoch"

    def measure():
        return run_transformers(photos, seed, args, weights, 1, trial)["seconds"]

    epochs = epochs_of(60 * args.minutes, trial / "seconds.json", measure)
    return run_transformers(photos, seed, args, weights, epochs, to)["test"]


def run_transformers(photos, seed, args, weights, epochs, to):
    """Runs transformers' Trainer in a process of its own; returns what it wrote."""
    words = f"--weights={weights} --seed={seed} --epochs={epochs} --dtype={args.dtype}"
    finetune.start(
        to / "log", "-c", TRANSFORMERS, photos, *words.split(), f"--out={to}"
    )
    return json.loads((to / "scores.json").read_text())


METHODS = {"vit_jax": vit_jax, "timm": timm, "transformers": transformers}


def main(args):
    """Runs the methods with each seed, and prints a table."""
    work = pathlib.Path(args.work).resolve()
    if args.smoke:  # A network of seconds in place of published weights.
        finetune.run(
            "vit_jax.train", "--config=digits:quick", f"--workdir={args.model}"
        )
    data_dir = pathlib.Path(args.data_dir).resolve()
    photos = make_folders(finetune.make_set(args.set, data_dir, work))
    methods, scores = args.methods.split(","), {}
    for seed in map(int, args.seeds.split(",")):
        for method in methods:
            to = work / "peers" / args.set / f"{args.minutes:g}" / str(seed) / method
            began = time.perf_counter()
            top1 = 100 * METHODS[method](photos, seed, args, to)
            seconds = round(time.perf_counter() - began)
            scores.setdefault(method, []).append(top1)
            row = {"set": args.set, "seed": seed, "method": method, "top1": top1}
            print(json.dumps(row | {"seconds": seconds}), flush=True)
    print("| method | top-1 of test, % |\n|---|---|")
    for method, values in scores.items():
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        print(f"| {method} | {statistics.mean(values):.2f}{spread} |")


def parse():
    """Returns the flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("set", choices=("flowers", "digits", "cifar10"))
    add("--work", required=True, help="gets the images and the runs")
    add("--model", required=True, help="DeiT-Ti in timm's format")
    add("--timm", help="timm's repository")
    add("--data_dir", default=".")
    add("--methods", default=",".join(METHODS))
    add("--seeds", default="0,1,2")
    add("--minutes", type=float, default=5)
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    add("--batch_size", type=int, default=32, help="of timm")
    add("--rates", default="5e-5,1e-4", help="learning rates of timm")
    return smoke.parse(
        parser,
        "digits --work={folder} --methods=vit_jax --seeds=0 --minutes=0.02 "
        "--model={folder}/model",
    )


if __name__ == "__main__":
    main(parse())
