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
from vit_jax.evaluators.metric_names import fewer_images, is_accuracy, text

FILE = "report.json"


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


def scores_line(scores: dict) -> str:
    """Returns one line with accuracies, mAP and F1, mean IoUs, or else losses.

    Of an evaluation that has none of these, the first metric is shown.
    """
    flat = flatten_scores(scores)
    tops = {k[:-5]: v for k, v in flat.items() if k.endswith("/top1")}
    losses = [
        f"{k[:-5]} {v:.4f}"
        for k, v in flat.items()
        if k.endswith("/loss") and k[:-5] not in tops and f"{k[:-4]}map" not in flat
    ]
    maps = [
        f"{k[:-4]} {v:.2%}{_f1(k[:-3], flat)}"
        for k, v in flat.items()
        if k.endswith("/map")
    ]
    tops |= {k: v for k, v in flat.items() if is_accuracy(k)}
    tops = [f"{k} {v:.2%}{fewer_images(k, flat)}" for k, v in tops.items()]
    ious = [f"{k[:-5]} {v:.2%}" for k, v in flat.items() if k.endswith("/miou")]
    parts = {"top-1: ": tops, "mAP: ": maps, "mean IoU: ": ious, "loss: ": losses}
    parts[""] = [
        f"{name}/{kind}/{metric} {text(metric, values[metric])}"
        for name, kinds in scores.items()
        for kind, values in kinds.items()
        for metric in list(values)[:1]
        if not any(map(_is_quoted, values))
    ]
    return "  ".join(name + ", ".join(part) for name, part in parts.items() if part)


def _f1(prefix: str, flat: dict[str, float]) -> str:
    """Returns the micro and macro F1 at the first threshold, in parentheses."""
    shown = []
    for kind in ("micro", "macro"):
        named = (v for k, v in flat.items() if k.startswith(f"{prefix}{kind}_f1@"))
        shown += [f"{value:.2%} {kind}" for value in [*named][:1]]
    return f" (F1 {', '.join(shown)})" if shown else ""


def _is_quoted(metric: str) -> bool:
    """Returns whether `scores_line` prefers a metric to the first one."""
    last = metric.split("/")[-1]
    return last in ("top1", "loss", "map", "miou") or is_accuracy(metric)


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
    kinds = [scores for each in report["final"].values() for scores in each.values()]
    columns = f" {'top-1':>8} {'loss':>8}" if any("top1" in x for x in kinds) else ""
    lines += ["", f"{'evaluation':<14} {'parameters':<10}{columns}"]
    for name, kinds in report["final"].items():
        for kind, scores in kinds.items():
            lines.append(f"{name:<14} {kind:<10} {_scores(scores)}")
    return "\n".join(lines)


def _scores(scores: dict[str, float]) -> str:
    """Returns one evaluation as text: accuracy and loss, or else other metrics."""
    if "top1" not in scores:
        shown = {k: v for k, v in scores.items() if is_accuracy(k)}
        shown = shown or {
            k: v for k, v in scores.items() if "/" not in k
        }  # No classes.
        return "  ".join(
            f"{k} {text(k, v)}{fewer_images(k, scores)}" for k, v in shown.items()
        )
    loss = f" {scores['loss']:>8.4f}" if "loss" in scores else ""
    return f"{scores['top1']:>8.2%}{loss}"


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
