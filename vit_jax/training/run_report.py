"""The report of a run: `report.json`, and the table that is printed at the end."""

import functools
import hashlib
import importlib.resources
import json
import os
import pathlib
import subprocess

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from vit_jax.command_line.files import read_json, replace_text
from vit_jax.errors import UserError
from vit_jax.evaluators.metric_names import (
    fewer_images,
    is_accuracy,
    is_beside,
    text,
)

FILE = "report.json"
# Titles of the metrics that the lines of evaluations show, each a fraction.
_QUOTED = {"top1": "top-1", "map": "mAP", "miou": "mean IoU"}
_BALANCED = "balanced_accuracy"
_COLUMNS = {"top1": "top-1", "loss": "loss"}  # Of the table at the end of a run.
_UNEVEN_COLUMNS = {
    _BALANCED: "balanced",
    "worst_class_recall": "worst",
    "top1": "top-1",
    "majority_baseline": "majority",
    "loss": "loss",
}


def params_sha256(params: dict) -> str:
    """Returns a hash of the path, shape and bytes of each parameter, in path order.

    All processes of the job must call it, because each has only a part of the
    parameters.
    """
    digest = hashlib.sha256()
    leaves = {
        "/".join(k.key for k in path): _whole(leaf)
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    for path in sorted(leaves):
        digest.update(f"{path}{leaves[path].shape}".encode())
        digest.update(np.ascontiguousarray(leaves[path]).tobytes())
    return digest.hexdigest()


def _whole(leaf: jax.Array | np.ndarray) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(jax.device_get(leaf))


def commit() -> str | None:
    """Returns the commit of this code, "-dirty" if files differ; None without git."""
    here = pathlib.Path(__file__).parent

    def git(*words):
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        # Fails if this file only lies inside another repository.
        git("ls-files", "--error-unmatch", __file__)
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def read_report(workdir: str | os.PathLike) -> dict | None:
    """Returns the report of a finished run; None without a report.

    Raises:
      UserError: the file is damaged.
    """
    path = epath.Path(workdir) / FILE
    return read_json(path) if path.exists() else None


def write_report(workdir: str | os.PathLike, report: dict) -> None:
    """Writes the report.

    Raises:
      UserError: the workdir is gone, full or read-only.
    """
    path = epath.Path(workdir) / FILE
    try:
        replace_text(path, json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"the training is done, but {path} cannot be written "
            f"({error.strerror or error}): make it writable, then start again; saved steps "
            "are not trained again"
        ) from error


def flatten_scores(scores: dict) -> dict[str, float]:
    """Returns a flat dict of scores with the names "evaluation/parameters/metric"."""
    return {
        f"{name}/{kind}/{metric}": value
        for name, kinds in scores.items()
        for kind, values in kinds.items()
        for metric, value in values.items()
    }


def scores_line(scores: dict, best_metric: str = "") -> str:
    """Returns one line with the accuracies, mAP and F1, or else losses, of evaluations.

    Mean average precisions and mean IoUs count as accuracies. Of an evaluation that has
    none of these, the first metric is shown.

    Args:
      scores: metrics by name, by set of parameters, by evaluation.
      best_metric: `checkpoint.best_metric`. A balanced accuracy is shown first, with
        the recall of the worst class, and accuracies with that of always predicting the
        most frequent class.
    """
    flat = flatten_scores(scores)
    uneven = best_metric.endswith(f"/{_BALANCED}")
    parts = {"balanced accuracy: ": _balanced(flat) if uneven else []}
    for metric, title in _QUOTED.items():
        parts[f"{title}: "] = [
            f"{name.removesuffix(f'/{metric}')} {value:.2%}"
            + _baseline(name, flat) * (uneven and metric == "top1")
            + _f1(name.removesuffix("map"), flat) * (metric == "map")
            for name, value in flat.items()
            if name.endswith(f"/{metric}")
        ]
    parts["top-1: "] += [
        f"{name} {value:.2%}{fewer_images(name, flat)}"
        for name, value in flat.items()
        if is_accuracy(name)
    ]
    parts["loss: "] = [
        f"{name}/{kind} {values['loss']:.4f}"
        for name, kinds in scores.items()
        for kind, values in kinds.items()
        if "loss" in values and not any(metric in values for metric in _QUOTED)
    ]
    parts[""] = [
        f"{name}/{kind}/{metric} {text(metric, values[metric])}"
        for name, kinds in scores.items()
        for kind, values in kinds.items()
        for metric in list(values)[:1]
        if not any(map(_is_quoted, values))
    ]
    return "  ".join(name + ", ".join(part) for name, part in parts.items() if part)


def _balanced(flat: dict[str, float]) -> list[str]:
    """Returns balanced accuracies, each with the recall of the worst class."""
    shown = []
    for name, value in flat.items():
        if name.endswith(f"/{_BALANCED}"):
            prefix = name.removesuffix(_BALANCED)
            worst = flat.get(f"{prefix}worst_class_recall")
            more = "" if worst is None else f" (worst class {worst:.2%})"
            shown.append(f"{prefix[:-1]} {value:.2%}{more}")
    return shown


def _baseline(name: str, flat: dict[str, float]) -> str:
    """Returns the accuracy of the most frequent class beside that with the name."""
    value = flat.get(f"{name.removesuffix('top1')}majority_baseline")
    return "" if value is None else f" (majority class {value:.2%})"


def _f1(prefix: str, flat: dict[str, float]) -> str:
    """Returns the micro and macro F1 at the first threshold, in parentheses."""
    shown = []
    for kind in ("micro", "macro"):
        named = (v for k, v in flat.items() if k.startswith(f"{prefix}{kind}_f1@"))
        shown += [f"{value:.2%} {kind}" for value in [*named][:1]]
    return f" (F1 {', '.join(shown)})" if shown else ""


def _is_quoted(metric: str) -> bool:
    """Returns whether `scores_line` prefers a metric to the first one."""
    name = metric.split("/")[-1]
    return name in (*_QUOTED, "loss") or is_accuracy(metric)


def quoted_scores(kinds: dict) -> tuple[str, dict]:
    """Returns name and scores of the parameters to quote, averaged if there are any.

    Args:
      kinds: kind of parameters ("ema", "weights" or "params") to metrics of one
        evaluation.
    """
    order = "ema", "weights", "params", *kinds
    name = next((kind for kind in order if kind in kinds), "")
    return name, kinds.get(name, {})


def format_report(report: dict) -> str:
    """Returns the report as a table for a terminal."""
    speed = report["images_per_second"]
    head = [
        ("config", report["config"]),
        ("commit", report["commit"] or "unknown"),
        ("devices", f"{report['devices']} x {report['device_kind']}"),
        ("steps", report["steps"]),
        ("wall seconds", f"{report['wall_seconds']:.1f}"),
        ("images/s", "not measured in this start" if speed is None else f"{speed:.0f}"),
        ("params sha256", report["params_sha256"]),
    ]
    lines = [f"{name:<14} {value}" for name, value in head]
    if not report["final"]:
        return "\n".join(lines)
    columns = _COLUMNS
    if (report.get("best") or {}).get("metric", "").endswith(f"/{_BALANCED}"):
        columns = _UNEVEN_COLUMNS
    kinds = [scores for each in report["final"].values() for scores in each.values()]
    head = "".join(f" {title:>8}" for title in columns.values())
    head *= any("top1" in scores for scores in kinds)
    lines += ["", f"{'evaluation':<14} {'parameters':<10}{head}"]
    for name, kinds in report["final"].items():
        for kind, scores in kinds.items():
            lines.append(f"{name:<14} {kind:<10} {_scores(scores, columns)}")
    return "\n".join(lines)


def _scores(scores: dict[str, float], columns: dict[str, str]) -> str:
    """Returns one evaluation as text: accuracy and loss, or else other metrics."""
    if "top1" not in scores:
        shown = {k: v for k, v in scores.items() if is_accuracy(k)}
        shown = shown or {
            k: v for k, v in scores.items() if "/" not in k and not is_beside(k)
        }  # No classes.
        return "  ".join(
            f"{k} {text(k, v)}{fewer_images(k, scores)}" for k, v in shown.items()
        )
    cells = {
        name: f"{scores[name]:.4f}" if name == "loss" else f"{scores[name]:.2%}"
        for name in columns
        if name in scores
    }
    return " ".join(f"{cells.get(name, ''):>8}" for name in columns).rstrip()


def compute_record(
    *,
    images: int,
    flops_per_image: int | None,
    device_kind: str,
    devices: int,
    device_seconds: float,
) -> dict:
    """Returns the compute of a run, for its report.

    Args:
      images: number of images seen in training, summed over epochs.
      flops_per_image: result of `Task.training_flops`, counted as in the paper's table
        6, or None.
      device_kind, devices: name and number of the devices at the end of the run.
      device_seconds: sum over all starts of seconds times number of devices. It
        includes compilation, evaluation and saving, but not the time of a killed start
        after its last checkpoint.

    Returns:
      "images_seen", "device_kind", "devices" and "device_days"; also "exaflops" and
      "tpuv3_core_days" if `flops_per_image` is not None.
    """
    record = {
        "images_seen": images,
        "device_kind": device_kind,
        "devices": devices,
        "device_days": device_seconds / 86_400,
    }
    if flops_per_image is None:
        return record
    exaflops = 1e-18 * flops_per_image * images
    core_days = exaflops / exaflops_a_core_day()
    return record | {"exaflops": exaflops, "tpuv3_core_days": core_days}


@functools.cache
def exaflops_a_core_day() -> float:
    """Returns the exaFLOPs per day of a TPU v3 core in the paper's pretraining.

    It is computed from two runs of 14 epochs, whose core-days are in table 2 and whose
    FLOPs are in table 6.
    """
    tables = published_tables()
    columns, days = (tables["table2"][k] for k in ("cols", "TPUv3-core-days"))
    days = dict(zip(columns, days, strict=True))
    exaflops = {(row[0], row[1]): row[-1] for row in tables["table6"]["rows"]}
    total = exaflops["ViT-L/16", 14] + exaflops["ViT-H/14", 14]
    return total / (days["L/16 JFT"] + days["H/14 JFT"])


@functools.cache
def published_tables() -> dict:
    """Returns the paper's tables 2 and 5 to 9, from published.json in this folder.

    Percentages are top-1 on the test split. Table 2 has (mean, standard deviation) of
    three runs; an entry may be None if it is missing, or a text.
    """
    here = importlib.resources.files("vit_jax.training")
    return json.loads((here / "published.json").read_text(encoding="utf-8"))
