"""Parameters out of a training run's workdir (Orbax checkpoints)."""

import dataclasses
import os

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from vit_jax.data import host_ops, ops
from vit_jax.errors import UserError
from vit_jax.weights.preprocess import broadcast
from vit_jax.weights.pretrained import Preprocess, Pretrained

FOLDER = "checkpoints"  # In the workdir; one folder a step below it.


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
      UserError: there is no finished checkpoint.
    """
    workdir = epath.Path(workdir)
    if not has_checkpoint(workdir):
        raise UserError(
            f"{workdir} has no finished checkpoint under {workdir / FOLDER}: "
            "give the workdir of a run that has saved one"
        )
    path = _newest(workdir)
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
        notes.append(f"data.eval_ops={data['eval_ops']!r} is no resize and crop")
    return Pretrained(
        params=found.params,
        options={
            **{k: tuple(v) if isinstance(v, list) else v for k, v in model.items()},
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
        ) if _pair(size) == image_size and image_size[0] == image_size[1]:
            # A Preprocess with unequal sides resizes both to the crop's aspect.
            return Preprocess(**common, crop_fraction=image_size[0] / short)
    return None


def _pair(size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def read_config(workdir: str | os.PathLike) -> dict:
    """Returns the config of the newest checkpoint as plain dicts."""
    return ocp.metadata(_newest(workdir)).custom_metadata["config"]


def steps(workdir: str | os.PathLike) -> list[int]:
    """Returns the steps that have a finished checkpoint, ascending."""
    folder = epath.Path(workdir) / FOLDER
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal())


def absolute(workdir: str | os.PathLike) -> epath.Path:
    """Returns the path that Orbax wants: absolute, or in a bucket as it is."""
    path = epath.Path(workdir)
    return path if "://" in str(workdir) else path.resolve()


def _newest(workdir: str | os.PathLike) -> epath.Path:
    return absolute(workdir) / FOLDER / str(steps(workdir)[-1])
