"""Parameters out of a training run's workdir (Orbax checkpoints)."""

import contextlib
import dataclasses
import json
import os

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from vit_jax import models
from vit_jax.data import host_ops, ops
from vit_jax.errors import UserError
from vit_jax.weights import intact
from vit_jax.weights.preprocess import broadcast
from vit_jax.weights.pretrained import Preprocess, Pretrained

FOLDER = "checkpoints"  # In the workdir; one folder a step below it.
SUMMED = "checksums"  # In a checkpoint's metadata: it is unfinished without them.


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Parameters and what was stored beside them.

    Attributes:
      params: nested dict of float32 arrays.
      kind: "raw" or "average".
      step: optimiser steps taken.
      config: of the run, as plain dicts.
      class_names: names in label order; empty if the data set has none.
    """

    params: dict
    kind: str
    step: int
    config: dict
    class_names: tuple[str, ...]


def has_checkpoint(workdir: str | os.PathLike) -> bool:
    """Tells whether a folder is a workdir with at least one finished checkpoint."""
    return bool(steps(workdir))


def load(workdir: str | os.PathLike, *, average: bool = True) -> Checkpoint:
    """Reads the newest checkpoint's parameters; optimiser state stays on disk.

    Args:
      workdir: of a training run.
      average: take the Polyak average if the run kept one.

    Returns:
      The checkpoint.

    Raises:
      UserError: there is no finished checkpoint, or the newest one is damaged.
    """
    workdir = epath.Path(workdir)
    if not has_checkpoint(workdir):
        raise UserError(
            f"{workdir} has no finished checkpoint under {workdir / FOLDER}: "
            "give the workdir of a run that has saved one"
        )
    path = path_of(workdir, steps(workdir)[-1])
    refuse_damage(path)
    stored = ocp.metadata(path)
    kind = "average" if average and "average" in stored.metadata else "params"
    target = jax.tree.map(lambda a: np.empty(a.shape, a.dtype), stored.metadata[kind])
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        params = ocp.load(path, {kind: target})[kind]
    return Checkpoint(
        params=params,
        kind={"params": "raw"}.get(kind, kind),
        step=int(path.name),
        config=stored.custom_metadata["config"],
        class_names=tuple(stored.custom_metadata["class_names"]),
    )


def pretrained(workdir: str | os.PathLike, *, average: bool = True) -> Pretrained:
    """Reads the newest checkpoint as any other published one.

    Args and Raises: as `load`.

    Returns:
      The checkpoint; its first note tells which parameters of which step.
    """
    found = load(workdir, average=average)
    data, model = found.config["data"], found.config["model"]
    preprocess = _preprocess(data)
    notes = [f"{found.kind} parameters of step {found.step}"]
    if preprocess is None:
        notes.append(
            f"data.eval_ops={data['eval_ops']!r} is no resize and crop; an evaluation "
            "prepares images so with eval_ops set to it, as evals.val.eval_ops"
        )
    return Pretrained(
        params=found.params,
        options={
            **{
                k: tuple(v) if isinstance(v, list) else v
                for k, v in model.items()
                if k not in models.EXECUTION  # Of the place where it was trained.
            },
            "classes": data["classes"],
            "image_size": tuple(data["image_size"]),
            "channels": data["channels"],
        },
        format="workdir",
        source=str(workdir),
        preprocess=preprocess,
        class_names=found.class_names,
        loss=found.config["loss"]["name"],
        notes=tuple(notes),
    )


def _preprocess(data: dict) -> Preprocess | None:
    """Returns what a run's evaluation does to its images, if it is of the usual kind."""
    image_size = tuple(data["image_size"])
    mean, std = (
        tuple(broadcast(data[name], data["channels"])) for name in ("mean", "std")
    )
    common = {"image_size": image_size, "mean": mean, "std": std}
    match ops.parse_eval(data["eval_ops"], image_size):
        case ():  # The images are of this size already.
            return Preprocess(**common, squash=True)
        case (host_ops.Resize(size=size),) if _pair(size) == image_size:
            return Preprocess(**common, squash=True)
        case (
            host_ops.ResizeSmall(size=short),
            host_ops.CentralCrop(size=size),
        ) if _pair(size) == image_size:
            return Preprocess(
                **common,
                crop_fraction=min(image_size) / short,
                short_side=image_size[0] != image_size[1],
            )
        case (
            host_ops.Resize(size=resized),
            host_ops.CentralCrop(size=size),
        ) if _pair(size) == image_size and _same_shape(_pair(resized), image_size):
            fraction = image_size[0] / _pair(resized)[0]
            return Preprocess(**common, crop_fraction=fraction, squash=True)
    return None


def _same_shape(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] * other[1] == one[1] * other[0]


def _pair(size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def read_config(workdir: str | os.PathLike) -> dict:
    """Returns the config of the newest checkpoint that can be read, as plain dicts.

    Raises:
      UserError: there are checkpoints, and none whose metadata is undamaged.
    """
    damage = []
    for step in reversed(steps(workdir)):
        path = path_of(workdir, step)
        found = intact.damage(path, data=False)
        if not found:
            with contextlib.suppress(Exception):  # Of an old one, without checksums.
                return ocp.metadata(path).custom_metadata["config"]
        damage.append(f"{step}: {'; '.join(found) or 'unreadable'}")
    raise UserError(
        f"no checkpoint under {absolute(workdir) / FOLDER} is intact ("
        f"{', '.join(damage)}): move that folder away to begin anew"
    )


def steps(workdir: str | os.PathLike) -> list[int]:
    """Returns the steps that have a finished checkpoint, ascending."""
    folder = epath.Path(workdir) / FOLDER
    if not folder.is_dir():
        return []
    named = [p for p in path_of(workdir, 0).parent.iterdir() if p.name.isdecimal()]
    return sorted(int(path.name) for path in named if is_finished(path))


def is_finished(path: epath.Path) -> bool:
    """Tells whether all of a checkpoint was written; it may be damaged since."""
    if intact.has_sums(path):
        return True
    try:  # Not by Orbax, which looks at other files too.
        about = json.loads((path / "_CHECKPOINT_METADATA").read_text())
        return not about["custom_metadata"].get(SUMMED, False)
    except OSError:
        return False
    except (ValueError, KeyError, AttributeError):
        return True  # Of an older version and damaged: to be refused by name.


def refuse_damage(path: epath.Path) -> None:
    """Raises UserError if a checkpoint is not what was written.

    Args:
      path: of one step.
    """
    if found := intact.damage(path):
        before = [s for s in steps(path.parent.parent) if s < int(path.name)]
        remedy = (
            f"move that folder away to use the one before it, of step {before[-1]}"
            if before
            else "there is none before it; restore it from a backup"
        )
        raise UserError(
            f"the checkpoint {path} is damaged ({'; '.join(found)}): {remedy}"
        )


def absolute(workdir: str | os.PathLike) -> epath.Path:
    """Returns the path that Orbax wants: absolute, or in a bucket as it is."""
    path = epath.Path(workdir)
    return path if "://" in str(workdir) else path.resolve()


def path_of(workdir: str | os.PathLike, step: int) -> epath.Path:
    """Returns the folder of a step's checkpoint."""
    return absolute(workdir) / FOLDER / str(step)
