"""Parameters out of a training run's workdir (Orbax checkpoints)."""

import dataclasses
import os

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from vit_jax.errors import UserError

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
