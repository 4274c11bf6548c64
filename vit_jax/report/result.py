"""`report.json` and the table at the end of a run."""

import hashlib
import json
import os
import pathlib
import re
import subprocess

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from vit_jax.errors import UserError
from vit_jax.report.writer import replace_text

FILE = "report.json"
# Parameters to quote where an evaluation has several, in this order.
_QUOTED = ("ema", "weights", "raw")


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


def read(workdir: str | os.PathLike) -> dict | None:
    """Returns the report of a finished run, or None."""
    path = epath.Path(workdir) / FILE
    return json.loads(path.read_text()) if path.exists() else None


def write(workdir: str | os.PathLike, report: dict) -> None:
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


def flatten(scores: dict) -> dict[str, float]:
    """Names scores "evaluation/parameters/metric"."""
    return {
        f"{name}/{kind}/{metric}": value
        for name, kinds in scores.items()
        for kind, values in kinds.items()
        for metric, value in values.items()
    }


def line(scores: dict) -> str:
    """Puts the accuracies of all evaluations into one line."""
    flat = flatten(scores)
    tops = {k[:-5]: v for k, v in flat.items() if k.endswith("/top1")}
    tops |= {k: v for k, v in flat.items() if re.fullmatch(r".*/\d+shot", k)}
    shown = (f"{k} {v:.2%}{fewer_images(k, flat)}" for k, v in tops.items())
    return "top-1: " + ", ".join(shown)


def fewer_images(metric: str, scores: dict[str, float]) -> str:
    """Returns " (3 classes have fewer images)" of a few-shot accuracy; "" if none has.

    Args:
      metric: name in `scores`, as "25shot", "25shot_l2_1" or "few/raw/25shot".
      scores: with "25shot_short", the number of classes with fewer images, if any.
    """
    shots = re.fullmatch(r"(.*?\d+shot)(_l2_[^_]+)?", metric)
    count = scores.get(f"{shots[1]}_short", 0) if shots else 0
    if not count:
        return ""
    return f" ({count} class{'es have' if count > 1 else ' has'} fewer images)"


def quoted_scores(kinds: dict) -> tuple[str, dict]:
    """Returns the name and scores of the parameters to quote: averaged if there are any.

    Args:
      kinds: parameters ("ema", "weights" or "raw") -> metrics of one evaluation.
    """
    name = next((kind for kind in _QUOTED if kind in kinds), next(iter(kinds), ""))
    return name, kinds.get(name, {})


def table(report: dict) -> str:
    """Lays the report out for a terminal."""
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
    """Lays out one evaluation: the accuracy and the loss, or what else it gives."""
    if "top1" not in scores:
        shown = {k: v for k, v in scores.items() if re.fullmatch(r"\d+shot", k)}
        return "  ".join(
            f"{k} {v:.2%}{fewer_images(k, scores)}"
            for k, v in (shown or scores).items()
        )
    loss = f" {scores['loss']:>8.4f}" if "loss" in scores else ""
    return f"{scores['top1']:>8.2%}{loss}"


def _number(value: float | None) -> str:
    return "not measured in this start" if value is None else f"{value:.0f}"
