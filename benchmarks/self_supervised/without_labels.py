"""Pretraining without labels on CIFAR-10 against none, in equal minutes.

Run: python -m benchmarks.self_supervised.without_labels --data_dir=DIR --out=runs/proof \\
         [--minutes=15] [--epochs=3] [--seeds=0] [--only="scratch;mae"] [--plot=FILE.png]

One network (6 blocks of width 128, 4 heads, patch 4, 0.8 M parameters) is pretrained by
each task of configs/{masked_patch,mae,simmim,dino,dinov2}.py for so many minutes of a speed that
a short trial measures; DINO's and DINOv2's has four convolutions and two blocks, which the tasks
that hide patches of the image cannot have. It is then scored by k-NN and by a linear probe on
its frozen features, and fine-tuned on a tenth of the labels and on all of them: --epochs passes
over the whole set, or half as many steps on the tenth. "scratch" is fine-tuned from random
weights; "longer" too, for the minutes of the pretraining in addition. The last lines are
controls: MAE that hides nothing, as long as the others; and with --control_steps and
without fine-tuning DINO without a moving teacher, DINO without centring, and the features
of random weights.

Every run is a command, which is printed. Runs that are done are kept: the script goes on
where it was ended, and several calls with different --only may share a folder. The table
and the plot show medians over the seeds of all that is done in --out.
"""

import argparse
import json
import math
import os
import pathlib
import shlex
import statistics
import subprocess
import sys

from benchmarks import smoke
from configs.common import JITTER

NETWORK = {"width": 128, "depth": 6, "num_heads": 4, "mlp_dim": 256}
EXAMPLES, CLASSES = 50_000, 10
OUTPUTS = 1_024  # Of DINO's head.
TASKS = ("masked_patch", "mae", "simmim", "dino", "dinov2")
CONTROLS = {
    "mae, nothing hidden": ("mae", {"task.mask_ratio": 0.0}),
    "dino, momentum 0": ("dino", {"task.teacher_momentum": 0.0}),
    "dino, no centring": ("dino", {"task.center_momentum": 1.0}),
    "untrained": ("mae", {}),  # One step, whose rate is still 0.
}
SHORT = ("dino, momentum 0", "dino, no centring", "untrained")
NAMES = ("scratch", "longer", *TASKS, *CONTROLS)
TRIAL = 30  # Steps by which a run's speed is measured.
COLUMNS = {
    "steps": "steps of pretraining",
    "knn": "k-NN",
    "probe": "linear probe",
    "tenth": "10 % of the labels",
    "all": "all labels",
}
# Published rates are for thousands of images a step and hundreds of epochs, with Adam. After
# 700 steps on a half of the training images MAE had 43.5 % by k-NN with Muon and 41.4 % with
# Adam (base_learning_rate 2e-3); a second block of its decoder takes 1.4 times as long and had
# no more after 400. DINO's teacher had not left equal outputs after 220 steps of the published
# temperature 0.07 and momentum 0.996, nor after 300 of 0.04. The crops, temperatures and network
# of DINO and DINOv2 were chosen in runs of 150 to 300 steps. Nothing else is tuned.
MUON = {
    "optim.name": "muon",
    "optim.base_learning_rate": 0,
    "optim.learning_rate": 3e-3,
}
# The network, views and teacher of DINO and DINOv2.
DISTILLED = {
    # Two blocks behind four convolutions, as in configs/cifar10.py:size=cpu.
    "model.variant": "C+Ti/4",
    "model.depth": 2,
    "model.num_heads": 2,
    "model.mlp_dim": 128,
    "model.stem_widths": (64, 128, 128, 128),
    "model.stem_strides": (2, 2, 1, 1),
    "model.drop_path_rate": 0.0,
    # Without blur, which leaves little of 32 pixels.
    "data.train_transform": "multi_crop(small_size=16, num_small=2, "
    "area=(0.3, 1.0), small_area=(0.1, 0.3))",
    "task.large_transforms": (JITTER, JITTER),
    "task.small_transform": JITTER,
    "task.num_outputs": OUTPUTS,
    "task.teacher_momentum": 0.99,
    "task.teacher_temperature_start": 0.02,
    "task.teacher_temperature": 0.04,
}
KEYS = {
    "masked_patch": {"optim.learning_rate": 1e-3},
    # The mean of the patches has more of an image than the class token, which no loss reads.
    "mae": {
        **MUON,
        "task.decoder_depth": 1,
        "model.pool": "gap",
        "model.class_token": True,
    },
    "simmim": {"optim.base_learning_rate": 2e-3},
    "dino": {
        **MUON,
        **DISTILLED,
        "optim.freeze_epochs": 0.1,
        "task.teacher_temperature_epochs": 5,
    },
    "dinov2": {
        **MUON,
        **DISTILLED,
        "optim.freeze_steps": 40,
        # At 1e-5, LayerScale would not let a short run begin.
        "model.layer_scale_init": 0.0,
        "model.drop_path_group": 0,
        "task.centering": "sinkhorn",
        "task.koleo_group": 8,
        "task.patch_weight": 0.5,
        "task.teacher_temperature_steps": 0,
        "task.teacher_temperature_fraction": 0.5,
    },
}
FEATURES = """
from ml_collections import ConfigDict

def get_config(arg=None):
    c = ConfigDict(dict(batch_size=500))
    c.data = dict(name="cifar10", data_dir={data_dir!r})
    c.evals = dict(knn=dict(kind="knn", train="train", test="test"))
    c.evals.probe = dict(kind="probe", train="train", test="test", held_out=0.1)
    return c
"""


def make_cifar10(data_dir, count):
    """Prepares random images as CIFAR-10 has them."""
    import numpy as np
    import tensorflow_datasets as tfds

    tests = pathlib.Path(__file__).resolve().parents[2] / "tests"
    sys.path.insert(0, str(tests))
    import tfds_sets

    rng = np.random.default_rng(0)
    features = {
        "image": tfds.features.Image(shape=(32, 32, 3)),
        "label": tfds.features.ClassLabel(num_classes=CLASSES),
    }

    def examples(count):
        for i in range(count):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            yield {"image": tfds_sets.png(pixels), "label": i % CLASSES}

    splits = {"train": lambda: examples(10 * count), "test": lambda: examples(count)}
    builder = tfds_sets.builder_class("cifar10", "3.0.2", features, splits, tests)
    builder(data_dir=data_dir, file_format="array_record").download_and_prepare()


def command(words, cwd, **variables):
    """Runs a command of the project, which it prints; returns what that prints."""
    given = [f"{name}={value}" for name, value in variables.items()]
    print("$", shlex.join([*given, "python", *words]), flush=True)
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def train(config, workdir, keys, args):
    """Trains, if that was not done; returns report.json."""
    if not (workdir / "report.json").exists():
        given = {f"model.{name}": value for name, value in NETWORK.items()}
        given |= {"data.data_dir": args.data_dir, "data.num_examples": 0}
        given |= {"batch_size": args.batch} | keys
        flags = [f"--config.{name}={value}" for name, value in given.items()]
        words = ["-m", "vit_jax.train", f"--config={config}", *flags]
        command([*words, f"--workdir={workdir}"], args.root)
    return json.loads((workdir / "report.json").read_text())


def length(config, steps):
    """Returns the keys of a run of so many steps, a tenth of which is the warm-up."""
    units = ("steps", "fraction" if "cifar10.py" in config else "epochs")
    warmup = {f"optim.warmup_{unit}": 0 for unit in units}
    return warmup | {
        "epochs": 0,
        "total_steps": steps,
        "optim.warmup_steps": max(1, steps // 10),
        "log_every_steps": min(50, max(1, steps // 10)),
        "checkpoint_every_epochs": 0,
        "checkpoint_every_steps": max(TRIAL, steps // 8),  # To resume from.
        "eval_every_epochs": 0,
        "eval_every_steps": steps,
    }


def steps_of(name, config, keys, args):
    """Returns how many steps of a run fit the minutes, from a short trial of it."""
    keys = keys | length(config, TRIAL)
    report = train(config, args.out / f"{name}_trial", keys, args)
    return int(60 * args.minutes * report["images_per_second"] / args.batch)


def pretrain(name, seed, args):
    """Pretrains for the minutes of the budget; returns the workdir and the steps."""
    task, changes = CONTROLS.get(name, (name, {}))
    config = f"configs/{task}.py:data=cifar10"
    keys = KEYS[task] | {"model.activation": "gelu", "evals": "{}"}
    keys |= changes
    stem = name.replace(", ", "_").replace(" ", "_")
    if name in SHORT:
        steps = 1 if name == "untrained" else args.control_steps
    else:
        steps = steps_of(stem, config, keys, args)
    workdir = args.out / f"{stem}_{seed}"
    train(config, workdir, keys | {"seed": seed} | length(config, steps), args)
    return workdir, steps


def fine_tune(name, workdir, init, steps, seed, split, args):
    """Trains on labels, with or without a checkpoint; returns the test accuracy."""
    task = CONTROLS.get(name, (name,))[0]
    network = {k: v for k, v in KEYS.get(task, {}).items() if k.startswith("model.")}
    keys = network | {
        "seed": seed,
        "data.split": split,
        "model.pool": "gap",
        "model.class_token": True,
        "model.activation": "gelu",
    }
    if init:
        keys["init"] = init
    config = "configs/cifar10.py:size=small"
    report = train(config, workdir, keys | length(config, steps), args)
    return report["final"]["test"]["params"]["top1"]


def features(workdir, args):
    """Returns the accuracies of k-NN and of a linear probe on frozen features."""
    config = args.out / "features.py"
    config.write_text(FEATURES.format(data_dir=args.data_dir))
    words = ["-m", "vit_jax.evaluate", f"--config={config}", f"--model={workdir}"]
    found = json.loads(command([*words, "--json"], args.root).splitlines()[-1])
    return {"knn": found["knn"], "probe": found["probe"]["top1"]}


def last_metrics(workdir):
    """Returns the metrics of the last step that was logged."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [found for found in map(json.loads, lines) if "train/loss" in found][-1]


def measure(name, seed, args):
    """Returns the scores of one way of pretraining and one seed."""
    found, workdir, init = {}, args.out / f"{name}_{seed}", None
    steps = round(args.epochs * EXAMPLES / args.batch)
    if name == "longer":
        trial = {"model.pool": "gap", "model.activation": "gelu"}
        steps += steps_of("longer", "configs/cifar10.py:size=small", trial, args)
    elif name != "scratch":
        workdir, found["steps"] = pretrain(name, seed, args)
        metrics = last_metrics(workdir)
        found["loss"] = metrics["train/loss"]
        if "dino" in name:  # 0 is a collapse to one output, 1 one to equal outputs.
            found["entropy"] = metrics["train/teacher_entropy"] / math.log(OUTPUTS)
        found |= features(workdir, args)
        init = workdir
    if name in SHORT:
        return found
    for column in filter(None, args.labels.split(",")):
        if column == "tenth" and name == "longer":
            continue  # "scratch" has a hundred passes over the tenth.
        split, part = {"tenth": ("train[:10%]", 2), "all": ("train", 1)}[column]
        target = workdir.with_name(f"{workdir.name}_{column}")
        found[column] = fine_tune(name, target, init, steps // part, seed, split, args)
    return found


def results(out):
    """Returns the medians over seeds of what is done, by name."""
    found = {}
    for name in NAMES:
        runs = [json.loads(p.read_text()) for p in out.glob(f"{name}_*.result.json")]
        if runs:
            medians = {c: statistics.median(run[c] for run in runs) for c in runs[0]}
            found[name] = medians | {"seeds": len(runs)}
    return found


def table(found):
    """Prints a table of the results."""
    heads = ("pretraining", "seeds", *COLUMNS.values(), "teacher's entropy / ln K")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name, medians in found.items():
        cells = [name, str(medians["seeds"])]
        for column in (*COLUMNS, "entropy"):
            form = {"steps": "{:,.0f}", "entropy": "{:.3f}"}.get(column, "{:.1%}")
            cells.append(form.format(medians[column]) if column in medians else "")
        print(f"| {' | '.join(cells)} |")


def plot(found, path, title):
    """Draws a bar for each score of each way of pretraining."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    scores = list(COLUMNS)[1:]
    figure, grid = pyplot.subplots(1, len(scores), figsize=(11, 3.4), sharey=True)
    names = list(found)[::-1]
    for place, column in zip(grid, scores, strict=True):
        values = [100 * found[name].get(column, math.nan) for name in names]
        colors = ["#b0b0b0" if name in CONTROLS else "#2a6f97" for name in names]
        bars = place.barh(names, values, color=colors)
        labels = ["" if math.isnan(value) else f"{value:.1f}" for value in values]
        place.bar_label(bars, labels, padding=2, fontsize=8)
        place.axvline(100 / CLASSES, color="black", linewidth=0.8, linestyle=":")
        place.set_xlim(0, 100)
        place.set_title(COLUMNS[column], fontsize=10)
        place.set_xlabel("accuracy in % (dotted: chance)", fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    """Reads the flags, runs what is missing, prints the table and draws the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data_dir", required=True, help="of CIFAR-10 as TFDS has it, in ArrayRecord")
    add("--out", type=pathlib.Path, required=True)
    add("--minutes", type=float, default=15.0, help="of each pretraining")
    add("--epochs", type=float, default=3.0, help="of fine-tuning on all labels")
    add("--seeds", default="0", help="as 0,1,2")
    add("--only", default=";".join(NAMES), help="names, separated by semicolons")
    add("--control_steps", type=int, default=150, help="of DINO's controls")
    add("--labels", default="tenth,all", help="that fine-tuning has")
    add("--batch", type=int, default=128, help="images of a step")
    add("--plot", help="PNG to write")
    args = smoke.parse(
        parser,
        "--data_dir={folder} --out={folder}/runs --batch=8 --epochs=0.0004 "
        "--labels=all --only='scratch;untrained'",
    )
    args.root = pathlib.Path(__file__).resolve().parents[2]
    args.data_dir, args.out = (
        str(pathlib.Path(args.data_dir).resolve()),
        args.out.resolve(),
    )
    args.out.mkdir(parents=True, exist_ok=True)
    if args.smoke:
        NETWORK.update(width=32, depth=1, mlp_dim=32)
        make_cifar10(args.data_dir, args.batch)
    for seed in map(int, args.seeds.split(",")):
        for name in filter(None, args.only.split(";")):
            place = args.out / f"{name}_{seed}.result.json"
            if not place.exists():
                place.write_text(json.dumps(measure(name, seed, args)))
    found = results(args.out)
    table(found)
    if args.plot:
        title = f"CIFAR-10, {args.minutes:g} minutes of pretraining"
        plot(found, args.plot, f"{title}, {args.epochs:g} epochs of fine-tuning")


if __name__ == "__main__":
    main()
