"""`report.json` and the table at the end of a run."""

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

from vit_jax.errors import UserError
from vit_jax.evaluators.fewshot import fewer_images, is_accuracy
from vit_jax.evaluators.result_tables import text
from vit_jax.files import read_json, replace_text

FILE = "report.json"
# Parameters to quote where an evaluation has several, in this order.
_QUOTED = ("ema", "weights", "params")


def params_sha256(params: dict) -> str:
    """Hashes parameters: path, shape and bytes of each, in path order.

    All processes of the job must call it: each has only its part of them.
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
    """Returns the commit of this code, "-dirty" if files differ; None outside git."""
    here = pathlib.Path(__file__).parent

    def git(*words):
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)  # Not installed in another's.
        dirty = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def read_report(workdir: str | os.PathLike) -> dict | None:
    """Returns the report of a finished run, or None.

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
            f"({error.strerror or error}): mend that, then start again: what is saved "
            "is not trained again"
        ) from error


def flatten_scores(scores: dict) -> dict[str, float]:
    """Returns scores by their names "evaluation/parameters/metric"."""
    return {
        f"{name}/{kind}/{metric}": value
        for name, kinds in scores.items()
        for kind, values in kinds.items()
        for metric, value in values.items()
    }


def scores_line(scores: dict) -> str:
    """Returns the accuracies of all evaluations as one line, and the losses of others."""
    flat = flatten_scores(scores)
    tops = {k[:-5]: v for k, v in flat.items() if k.endswith("/top1")}
    losses = {k[:-5]: v for k, v in flat.items() if k.endswith("/loss")}
    losses = {k: v for k, v in losses.items() if k not in tops}
    tops |= {k: v for k, v in flat.items() if is_accuracy(k)}
    tops = [f"{k} {v:.2%}{fewer_images(k, flat)}" for k, v in tops.items()]
    losses = [f"{k} {v:.4f}" for k, v in losses.items()]
    named = {"top-1: ": tops, "loss: ": losses}
    return "  ".join(name + ", ".join(words) for name, words in named.items() if words)


def quoted_scores(kinds: dict) -> tuple[str, dict]:
    """Returns the name and scores of the parameters to quote: averaged if there are any.

    Args:
      kinds: parameters ("ema", "weights" or "params") -> metrics of one evaluation.
    """
    name = next((kind for kind in _QUOTED if kind in kinds), next(iter(kinds), ""))
    return name, kinds.get(name, {})


def format_report(report: dict) -> str:
    """Returns the report as a table for a terminal."""
    head = [
        ("config", report["config"]),
        ("commit", report["commit"] or "unknown"),
        ("devices", f"{report['devices']} x {report['device_kind']}"),
        ("steps", report["steps"]),
        ("wall seconds", f"{report['wall_seconds']:.1f}"),
        ("images/s", _number(report["images_per_second"])),
        ("params sha256", report["params_sha256"]),
    ]
    lines = [f"{name:<14} {value}" for name, value in head]
    lines += ["", f"{'evaluation':<14} {'parameters':<10} {'top-1':>8} {'loss':>8}"]
    for name, kinds in report["final"].items():
        for kind, scores in kinds.items():
            lines.append(f"{name:<14} {kind:<10} {_scores(scores)}")
    return "\n".join(lines)


def _scores(scores: dict[str, float]) -> str:
    """Returns one evaluation as text: accuracy and loss, or its other metrics."""
    if "top1" not in scores:
        shown = {k: v for k, v in scores.items() if is_accuracy(k)}
        return "  ".join(
            f"{k} {text(k, v)}{fewer_images(k, scores)}"
            for k, v in (shown or scores).items()
        )
    loss = f" {scores['loss']:>8.4f}" if "loss" in scores else ""
    return f"{scores['top1']:>8.2%}{loss}"


def _number(value: float | None) -> str:
    return "not measured in this start" if value is None else f"{value:.0f}"


# Table 2's column of core-days, and the row of table 6 of the same run.
_BOTH = (("L/16 JFT", "ViT-L/16"), ("H/14 JFT", "ViT-H/14"))
_EPOCHS = 14
_DAY = 86_400  # Seconds.


def compute_record(
    *,
    images: int,
    flops_per_image: int | None,
    device_kind: str,
    devices: int,
    device_seconds: float,
) -> dict:
    """Returns what a run records of its compute.

    Args:
      images: seen in training, each epoch's counted.
      flops_per_image: of `Task.training_flops`, as table 6 counts; None if unknown.
      device_kind: as JAX says it.
      devices: at the end of the run.
      device_seconds: of all starts, each start's seconds times its devices. What counts
        is the time in which the devices were taken: compiling, evaluating and saving
        with it, and not what a killed start did after its last checkpoint.

    Returns:
      "images_seen", "exaflops", "device_kind", "devices", "device_days" and
      "tpuv3_core_days", without the exaflops and what follows from them if unknown.
    """
    record = {
        "images_seen": images,
        "device_kind": device_kind,
        "devices": devices,
        "device_days": device_seconds / _DAY,
    }
    if flops_per_image is None:
        return record
    exaflops = 1e-18 * flops_per_image * images
    return record | {
        "exaflops": exaflops,
        "tpuv3_core_days": exaflops / exaflops_a_core_day(),
    }


@functools.cache
def exaflops_a_core_day() -> float:
    """Returns what a TPU v3 core did in a day of the paper's pretraining."""
    tables = published_tables()
    days = dict(
        zip(tables["table2"]["cols"], tables["table2"]["TPUv3-core-days"], strict=True)
    )
    done = {(row[0], row[1]): row[-1] for row in tables["table6"]["rows"]}
    return sum(done[name, _EPOCHS] for _, name in _BOTH) / sum(
        days[column] for column, _ in _BOTH
    )


@functools.cache
def published_tables() -> dict:
    """Returns the paper's tables 2 and 5 to 9, as published.json beside this has them.

    Percentages are top-1 on the test split. Table 2 has (mean, standard deviation) of
    three runs; a number may be missing (None), or be words.
    """
    here = importlib.resources.files("vit_jax.training")
    return json.loads((here / "published.json").read_text(encoding="utf-8"))
