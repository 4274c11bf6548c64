"""Folders as runs leave them, with numbers that are all different."""

import json

import numpy as np

from vit_jax.data.sources import vtab as vtab_tasks
from vit_jax.evaluators.protocol import Confusion
from vit_jax.evaluators.result_tables import confusion_to_csv
from vit_jax.tools.report.blocks import Table

CLASSES = ("cat", "dog", "a_<very> long & odd name of a class")


def write(folder, name, content):
    """Writes a file of a run's folder and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder


def compute(images, exaflops):
    return {
        "images_seen": images,
        "exaflops": exaflops,
        "device_kind": "TPU v3",
        "devices": 16,
        "device_days": 3.25,
        "tpuv3_core_days": exaflops / 1.833,
    }


def training(folder, *, variant, dataset, init="", top1=0.5, images=None, batch=64):
    """A finished training run with curves."""
    report = {
        "config": folder.name,
        "steps": 40,
        "variant": variant,
        "dataset": dataset,
        "examples": images or 303_000_000,
        "init": init,
        "compute": compute(40 * batch, 0.0625),
        "final": {"test": {"params": {"top1": top1 / 2}, "ema": {"top1": top1}}},
    }
    if images is None and not init:
        report["compute"] = compute(7 * 303_000_000, 223.5)
        report["steps"] = 7 * 303_000_000 // 4096
    write(folder, "report.json", report)
    lines = []
    for step in range(2, 41, 2):
        lines.append({"step": step, "train/loss": 2.3 / step**0.5, "train/top1": 0.1})
        if step % 10 == 0:
            scores = {"test/params/top1": step / 100, "test/ema/top1": step / 90}
            lines.append({"step": step} | scores)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    # A run that goes on may be in the middle of a line.
    (folder / "metrics.jsonl").write_text(text + '{"step": 42, "tra')
    return folder


def transfer(folder, *, model, variant, dataset, mean, std=0.0003, mode="full"):
    trials = [
        {
            "learning_rate": rate,
            "steps": 500,
            "score": score,
            "seconds": 12.5,
            "compute": compute(500 * 24, 0.125),
        }
        for rate, score in ((0.003, 0.71), (0.01, 0.74), (0.03, 0.69))
    ]
    failed = {"learning_rate": 1e9, "steps": None, "score": None}
    trials.append(failed | {"diverged": "loss is NaN"})
    runs = [
        {
            "seed": seed,
            "top1": mean + 0.001 * (seed - 1),
            "seconds": 31.0,
            "steps": 500,
            "compute": compute(500 * 24, 0.125 * (seed + 1)),
        }
        for seed in range(3)
    ]
    content = {
        "kind": "transfer",
        "model": str(model),
        "variant": variant,
        "dataset": dataset,
        "resolution": [384, 512],
        "mode": mode,
        "layer_decay": 0.75 if mode == "full" else 0.0,
        "overrides": {"batch_size": 24},
        "trials": trials,
        "best": {"learning_rate": 0.01},
        "runs": runs,
        "mean": mean,
        "std": std,
    }
    return write(folder, "transfer.json", content)


def vtab(folder, *, model, variant, tasks, mode="full"):
    """Tasks: name to mean, to words on how to prepare it, or to an error."""
    told = {name: {"group": "natural", **_task(value)} for name, value in tasks.items()}
    means = [value for value in tasks.values() if isinstance(value, float)]
    mean = sum(means) / len(means)
    content = {
        "kind": "vtab",
        "model": str(model),
        "variant": variant,
        "mode": mode,
        "tasks": told,
        "groups": {"natural": {"mean": mean, "interval": 0.012, "tasks": len(means)}},
        "mean": mean,
        "interval": 0.0046,
    }
    return write(folder, "vtab.json", content)


def _task(value):
    if isinstance(value, str):
        return {"absent": value}
    if isinstance(value, Exception):
        return {"failed": str(value)}
    ran = {"seed": 0, "top1": value, "steps": 2500, "compute": compute(300, 0.75)}
    return {"runs": [ran], "mean": value, "std": 0.01}


def evaluation(folder, *, model, variant, results, counts=None, evals=None):
    content = {
        "kind": "evaluate",
        "model": str(model),
        "variant": variant,
        "config": "fewshot",
        "results": results,
    }
    if evals:
        content["evals"] = evals
    if counts:
        table = confusion_to_csv(Confusion(np.array(counts), CLASSES))
        folder.mkdir(parents=True)
        (folder / "confusion_val_weights.csv").write_text(table)
        (folder / "other.csv").write_text("a,b\n1,2\n")
    return write(folder, "evaluate.json", content)


def study(folder):
    """Three ViTs, a hybrid and a ResNet; the ResNet leads on few images."""
    models = [
        ("ViT-64", "ViT", 1e-4, 0.30, 0.14),
        ("ViT-96", "ViT", 2.5e-4, 0.28, 0.17),
        ("ViT-128", "ViT", 6e-4, 0.25, 0.20),
        ("R+ViT-96", "hybrid", 3e-4, 0.33, 0.15),
        ("ResNet-32", "ResNet", 3.5e-4, 0.38, 0.10),
    ]
    points = []
    for name, family, exaflops, low, slope in models:
        for i, images in enumerate((3_000, 12_000, 24_000, 48_000)):
            scores = {
                "5-shot": (low + slope * i / 2, 0.02),
                "fine-tuned": (low + slope * i / 1.8 + 0.1, 0.01),
                "loss": (1.0 + (i + 1) ** -0.5 + exaflops, 0.1),
            }
            if i == 2:
                del scores["fine-tuned"]
            axes, labels = {"model": name, "images": images}, {"family": family}
            points.append(study_point(axes, labels, exaflops, scores))
    lines = {"lines": ["model"], "colours": "family", "log_x": True}
    figures = [
        {"x": "images", "y": score} | lines for score in ("5-shot", "fine-tuned")
    ]
    figures.append({"x": "exaflops", "y": "5-shot", "lines": ["family", "images"]})
    config = {
        "axes": {
            "images": [3_000, 12_000, 24_000, 48_000],
            "model": [m[0] for m in models],
        },
        "stages": ["pretrain", "finetune"],
        "scores": {
            "5-shot": "pretrain:fewshot/5shot",
            "fine-tuned": "test/top1",
            "loss": "pretrain:test/loss",
        },
        "tune": {"pretrain": {"optim.learning_rate": [0.001, 0.002]}},
        "published": {"ViT-64,3000": 0.5, "ViT-96,3000": 0.6, "ResNet-32,3000": 0.4},
        "source": "table 0",
        "figures": figures,
        "laws": [{"x": "images", "y": "loss", "lines": ["model"]}],
    }
    told = {"kind": "study", "name": "own", "config": config, "points": points}
    return write(folder, "study.json", told)


def study_point(axes, labels, exaflops, scores):
    """Returns a point of study.json with two stages of two seeds."""
    name, stages, used = ",".join(map(str, axes.values())), {}, compute(256, exaflops)
    for stage in ("pretrain", "finetune"):
        chosen = {"optim.learning_rate": 0.002} if stage == "pretrain" else {}
        about = {"variant": "Ti/4", "dataset": "cifar10", "steps": 4, "compute": used}
        done = [
            {"seed": seed, "folder": f"{name}/{stage}/run/seed{seed}"} | about
            for seed in (0, 1)
        ]
        trials = [{"choice": chosen, "score": 0.5, "compute": used}]
        if chosen:
            other = {"optim.learning_rate": 0.001}
            trials.append({"choice": other, "score": 0.25, "compute": used})
        stages[stage] = {"trials": trials, "chosen": chosen, "runs": done}
    found = {
        score: {
            "values": [mean] * (1 if half is None else 2),
            "mean": mean,
            "half_interval": half,
        }
        for score, (mean, half) in scores.items()
    }
    return {
        "name": name,
        "axes": axes,
        "labels": labels,
        "stages": stages,
        "images_seen": 256,
        "exaflops": exaflops,
        "scores": found,
    }


def small_study(folder, axis, points, scores, published=None, source=""):
    """A study of one axis; points: value -> score -> mean and half the interval."""
    config = {
        "axes": {axis: list(points)},
        "stages": ["pretrain", "finetune"],
        "scores": scores,
        "tune": {},
        "published": published or {},
        "source": source,
        "figures": [{"x": axis, "y": next(iter(scores))}],
        "laws": [],
    }
    points = [study_point({axis: x}, {}, 0.5, found) for x, found in points.items()]
    content = {"kind": "study", "name": "own", "config": config, "points": points}
    return write(folder, "study.json", content)


def change_study(folder, change):
    """Applies a function to the content of study.json."""
    content = json.loads((folder / "study.json").read_text())
    change(content)
    return write(folder, "study.json", content)


TASKS = tuple(vtab_tasks.TASKS)


def everything(root):
    """A pretraining on JFT, what followed from it, and others; returns the folders."""
    b16 = training(root / "b16_jft", variant="B/16", dataset="jft300m")
    five = {
        "cifar10": 0.9893,
        "cifar100": 0.9201,
        "imagenet2012": 0.8402,
        "oxford_iiit_pet": 0.9552,
        "oxford_flowers102": 0.9961,
    }
    found = [b16]
    about = {"model": b16, "variant": "B/16"}
    for name, mean in five.items():
        place = root / f"transfer_{name}"
        found.append(transfer(place, dataset=name, mean=mean, **about))
    paper = {"model": "paper:L/16-i21k", "variant": "L/16"}
    cifar10 = {"dataset": "cifar10", "mean": 0.9921}
    found.append(transfer(root / "l16" / "cifar10", **paper, **cifar10))
    whole = {task: 0.5 + 0.02 * i for i, task in enumerate(TASKS)}
    found.append(vtab(root / "l16" / "vtab", **paper, tasks=whole))
    some = whole | {"dmlab": "python -m vit_jax.prepare --dataset=dmlab"}
    some["svhn"] = OSError("no space")
    deit = {"model": "deit:Ti/16", "variant": "Ti/16"}
    found.append(vtab(root / "deit" / "vtab", **deit, tasks=some))
    scores = {"top1": 0.912, "top5": 0.988, "loss": 0.31, "examples": 736}
    few = {"1shot": 0.51, "1shot_std": 0.021, "5shot": 0.72, "5shot_std": 0.009}
    told = {"val": {"weights": scores}, "fewshot": {"weights": few}}
    counts = [[51, 3, 0], [4, 40, 1], [0, 0, 0]]
    evaluated = root / "deit" / "evaluate"
    found.append(evaluation(evaluated, **deit, results=told, counts=counts))
    scratch, small = root / "scratch", {"variant": "Ti/4"}
    about = {"dataset": "cifar10", "images": 50_000, "top1": 0.664}
    found.append(training(scratch, **small, **about))
    tuned = {"dataset": "cifar100", "init": str(scratch)}
    found.append(training(root / "tuned", **small, **tuned))
    found.append(study(root / "study"))
    return found


def cell(table: Table, column: str, *labels: str) -> str:
    (row,) = (row for row in table.rows if row[: len(labels)] == labels)
    return row[table.head.index(column)]


def blocks(parts, kind):
    return [block for part in parts for block in part.blocks if isinstance(block, kind)]
