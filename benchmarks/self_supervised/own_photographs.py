"""Photographs without labels: what `vit_jax.pretrain` adds to published weights.

Run: python -m benchmarks.self_supervised.own_photographs --photos=DIR --model=DEIT_TI \\
         --out=runs/own [--only="adapt;few;student"] [--seeds=0,1,2] [--steps=STEPS]
         [--side=SIDE] [--few=5] [--minutes=5]

DIR has train/CLASS and val/CLASS; DEIT_TI is a file or folder of DeiT-Ti's weights, or
deit:Ti/16. No class is read in pretraining; val is never trained on.

adapt    `pretrain --model=DEIT_TI` for STEPS steps at SIDE pixels (0: as it chooses for
         --minutes of training), then k-NN and 5-shot accuracy on val (the mean of 20
         draws of five images of each class) of both weights, at SIDE and at 224 pixels
few      `finetune` with so many labelled photographs of each class, from the adapted
         weights and from DEIT_TI at the same size; accuracy on val; one draw a seed
student  a network of 6 blocks of width 96 with patches of 8 pixels, on images of 64, in
         equal CPU seconds (--minutes of two cores): trained with all labels of train,
         by DINOv2's loss, by the features of DEIT_TI, and by MAE, the last three scored
         by k-NN and a linear probe on train's labels

Every run is a command, which is printed; runs that are done are kept. Lengths are in
steps, so that other work on the machine does not change a result; steps of `student`
follow from the CPU time of two short runs of each method. The last lines are tables of
all that is done in --out.
"""

import argparse
import json
import os
import pathlib
import resource
import shlex
import statistics
import subprocess
import sys

import jax
import numpy as np
from PIL import Image

import vit_jax
from benchmarks import smoke
from vit_jax.data.preprocess import Preprocess
from vit_jax.weights import export
from vit_jax.weights.pretrained import Pretrained

PARTS = ("adapt", "few", "student")
STUDENT = {
    "model.width": 96,
    "model.depth": 6,
    "model.num_heads": 3,
    "model.mlp_dim": 192,
    "data.image_size": (64, 64),
}
METHODS = {
    "labels": "all labels, from random weights",
    "dinov2": "DINOv2's loss",
    "distillation": "features of DeiT-Ti",
    "mae": "MAE",
}
TRIAL = (20, 60)  # Steps of the two runs that measure CPU seconds a step.
CORES = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--photos", type=pathlib.Path, required=True)
    add("--model", required=True)
    add("--out", type=pathlib.Path, required=True)
    add("--only", default=";".join(PARTS))
    add("--seeds", default="0,1,2")
    add("--steps", type=int, default=0)
    add("--side", type=int, default=0)
    add("--few", type=int, default=5)
    add("--minutes", type=float, default=5.0)
    add("--trial", type=int, nargs=2, default=TRIAL)
    made = (
        "--photos={folder}/photos --model={folder}/made.safetensors --out={folder}/out"
    )
    words = f"--only=adapt --seeds=0 --steps=2 --side=32 {made}"
    flags = smoke.parse(parser, words)
    if flags.smoke:
        make_input(flags)
    flags.out.mkdir(parents=True, exist_ok=True)
    for part in flags.only.split(";"):
        for seed in flags.seeds.split(","):
            {"adapt": adapt, "few": few, "student": student}[part](flags, int(seed))
    print(tables(flags.out))


def make_input(flags):
    """Writes noise as photographs of two classes, and weights of a small network."""
    rng = np.random.default_rng(0)
    for i in range(60):
        split = "val" if i < 20 else "train"
        path = flags.photos / split / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(path)
    model = vit_jax.create_model("Ti/16", num_classes=2, image_size=32, depth=1)
    params = jax.device_get(model.init(jax.random.key(0)))
    made = Pretrained(params, model.options, "vit_jax", "made", Preprocess((32, 32)))
    export.export(made, "safetensors", pathlib.Path(flags.model))


def adapt(flags, seed):
    """Adapts the weights, and scores them and the published ones."""
    workdir = adapted(flags.out, seed)
    keys = {"seed": seed}
    if flags.steps:
        keys |= {"total_steps": flags.steps, "data.image_size": (flags.side,) * 2}
    seconds = f"--minutes={flags.minutes}"
    run("pretrain", flags.photos, f"--model={flags.model}", seconds, workdir, keys)
    side = json.loads((workdir / "pretrain.json").read_text())["data"]["image_size"][0]
    for name, model in (("start", flags.model), (f"adapted{seed}", workdir)):
        for pixels in dict.fromkeys((side, 32 if flags.smoke else 224)):
            score(flags, model, pixels, flags.out / f"{name}_{pixels}.json")


def adapted(out, seed):
    return out / f"adapt{seed}"


def score(flags, model, pixels, path):
    """Writes k-NN and few-shot accuracies of a model's features."""
    if path.exists():
        return
    recipe = f"--config=configs/eval/fewshot.py:data={flags.photos}"
    words = f"--model={model}", recipe, f"--resolution={pixels}", "--json"
    path.write_text(run("evaluate", *words).splitlines()[-1])


def few(flags, seed):
    """Fine-tunes with a few labels of each class, from both weights."""
    folder = flags.out / f"few_labels{seed}"
    rng = np.random.default_rng(seed)
    for place in sorted((flags.photos / "train").iterdir()):
        files = sorted(place.iterdir())
        to = folder / "train" / place.name
        to.mkdir(parents=True, exist_ok=True)
        for i in rng.choice(len(files), flags.few, replace=False):
            if not (to / files[i].name).exists():
                (to / files[i].name).symlink_to(files[i].resolve())
    if not (folder / "test").exists():
        (folder / "test").symlink_to((flags.photos / "val").resolve())
    start = adapted(flags.out, seed)
    side = json.loads((start / "pretrain.json").read_text())["data"]["image_size"]
    keys = {"seed": seed, "data.image_size": tuple(side)}
    for name, model in (("start", flags.model), ("adapted", start)):
        workdir = flags.out / f"few_{name}{seed}"
        run("finetune", folder, f"--model={model}", "--minutes=5", workdir, keys)


def student(flags, seed):
    """Trains the small network by each method in equal CPU seconds."""
    for method in METHODS:
        steps, workdir = steps_of(flags, method), flags.out / f"student_{method}{seed}"
        train(flags, method, steps, workdir, seed)
        path = flags.out / f"student_{method}{seed}.json"
        if method != "labels" and not path.exists():
            recipe = f"--config=configs/eval/probe.py:data={flags.photos}"
            words = (
                f"--model={workdir}",
                recipe,
                "--json",
                "--config.evals.knn.kind=knn",
            )
            split = "--config.evals.knn.train=train", "--config.evals.knn.test=val"
            path.write_text(run("evaluate", *words, *split).splitlines()[-1])


def steps_of(flags, method):
    """Returns the number of steps in the CPU seconds of two cores in --minutes."""
    path = flags.out / f"seconds_{method}.json"
    if not path.exists():
        used = []
        for steps in flags.trial:
            workdir = flags.out / "trials" / f"{method}{steps}"
            before = cpu_seconds()
            train(flags, method, steps, workdir, 0)
            used.append(cpu_seconds() - before)
        a_step = max(1e-3, (used[1] - used[0]) / (flags.trial[1] - flags.trial[0]))
        path.write_text(json.dumps(a_step))
    return max(1, round(60 * flags.minutes * CORES / json.loads(path.read_text())))


def train(flags, method, steps, workdir, seed):
    """Trains the small network for some steps, without evaluations on the way."""
    keys = {"seed": seed, "total_steps": steps, "batch_size": 64}
    if method == "labels":
        recipe = "--config=configs/flowers.py", f"--config.data.data_dir={flags.photos}"
        end = {"eval_every_steps": steps, "checkpoint_every_steps": steps}
        keys |= {"optim.warmup_epochs": 0, "optim.warmup_fraction": 0.1} | end
        run("train", *recipe, workdir, keys)
        return
    words = f"--method={method}", "--variant=Ti/8", "--labels=none"
    if method == "distillation":
        words += (f"--teacher={flags.model}",)
    end = {"eval_every_steps": steps, "checkpoint_every_steps": steps}
    keys |= STUDENT | end | {"evals": None, "checkpoint.best_metric": ""}
    run("pretrain", flags.photos / "train", *words, workdir, keys)


def tables(out):
    """Returns the scores of all that is done, with means over seeds."""
    lines = ["", "features of              pixels  seeds  k-NN   5-shot"]
    by_model = {}
    for path in sorted(out.glob("*_[0-9]*.json")):
        name, _, pixels = path.stem.rpartition("_")
        if pixels.isdigit():
            key = "start" if name == "start" else "adapted", int(pixels)
            by_model.setdefault(key, []).append(json.loads(path.read_text()))
    for (name, pixels), found in sorted(by_model.items()):
        knn = shown([one["knn"] for one in found])
        five = shown([one["fewshot"]["5"]["mean"] for one in found])
        lines.append(f"{name:<25}{pixels:<8}{len(found):<7}{knn}  {five}")
    lines += ["", "fine-tuned with few labels from    seeds  accuracy on val"]
    for name in ("start", "adapted"):
        reports = sorted(out.glob(f"few_{name}[0-9]*/report.json"))
        accuracies = [final(path)["test"] for path in reports]
        lines.append(f"{name:<35}{len(reports):<7}{shown(accuracies)}")
    lines += ["", "student                         steps   k-NN   linear probe"]
    for method, what in METHODS.items():
        for workdir in sorted(out.glob(f"student_{method}[0-9]")):
            path = workdir.with_suffix(".json")
            if method == "labels" and (workdir / "report.json").exists():
                steps = json.loads((workdir / "report.json").read_text())["steps"]
                scores = f"accuracy {shown([final(workdir / 'report.json')['val']])}"
            elif path.exists():
                steps = json.loads((workdir / "report.json").read_text())["steps"]
                done = json.loads(path.read_text())
                scores = f"{shown([done['knn']])}   {shown([done['probe']['top1']])}"
            else:
                continue
            lines.append(f"{what:<32}{steps:<8}{scores}")
    return "\n".join(lines)


def final(report):
    """Returns the accuracy of each evaluation at the end of a run."""
    done = json.loads(report.read_text())["final"]
    best = {name: by.get("ema", by["params"]) for name, by in done.items()}
    return {name: scores["top1"] for name, scores in best.items()}


def shown(values):
    """Returns the mean of fractions in percent, and their range if there are several."""
    if not values:
        return "-"
    mean = f"{100 * statistics.mean(values):.2f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({100 * min(values):.2f} to {100 * max(values):.2f})"


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(command, *words):
    """Runs a command of vit_jax; returns what it prints.

    Paths after the first word and dicts stand for a workdir and config keys; a run whose
    report is in the workdir is not begun again.
    """
    given = []
    for i, word in enumerate(words):
        if isinstance(word, dict):
            given += [f"--config.{key}={value}" for key, value in word.items()]
        elif isinstance(word, pathlib.Path) and i:
            given.append(f"--workdir={word}")
            if (word / "report.json").exists():
                return ""
        else:
            given.append(str(word))
    line = [sys.executable, "-m", f"vit_jax.{command}", *given]
    print(shlex.join(["python", *line[1:]]), flush=True)
    done = subprocess.run(
        line, stdout=subprocess.PIPE, text=True, check=True, env=os.environ
    )
    print(done.stdout, flush=True)
    return done.stdout


if __name__ == "__main__":
    main()
