"""Reads the weights of a run from the checkpoints in its workdir."""

import dataclasses
import functools
import json
import operator
import os
from collections.abc import Sequence
from typing import NoReturn

import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from vit_jax import models
from vit_jax.command_line.files import read_json, replace_text
from vit_jax.data.preprocess import Preprocess
from vit_jax.data.sources.base import composed
from vit_jax.errors import UserError
from vit_jax.models.targets import Targets
from vit_jax.weights import calibration
from vit_jax.weights.checkpoint_folders import (
    FOLDER,
    at_step,
    best,
    check_version,
    find_damage,
    path_of,
    silence_orbax,
    split_step,
    steps,
)
from vit_jax.weights.pretrained import LINKS, Pretrained

# File with the widths of intervals of predicted numbers, see `write_margins`.
MARGINS = "margins.json"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The network of a run, and what its checkpoint stores besides.

    Attributes:
      params: the network's parameters, nested dict of float32 arrays.
      options: arguments of `models.create` that build the network.
      kind: "params", or "ema" for their moving average.
      step: optimiser steps taken.
      best: record of the best checkpoint, see `best`; empty if this is the newest one.
      config: the run's config, as plain dicts.
      class_names: class names in label order; empty if the data set has none.
      task_params: parameters of the task outside the network; empty unless requested.
      targets: what the network's outputs mean if they are numbers; None for classes.
    """

    params: dict
    options: dict
    kind: str
    step: int
    best: dict
    config: dict
    class_names: tuple[str, ...]
    task_params: dict = dataclasses.field(default_factory=dict)
    targets: Targets | None = None


def load(
    workdir: str | os.PathLike, *, use_ema: bool = True, with_task: bool = False
) -> Checkpoint:
    """Reads the network from the best checkpoint, or from the newest.

    Args:
      workdir: workdir of a run, or path of one checkpoint in it, see `at_step`.
      use_ema: whether to load the averaged parameters if the run has them.
      with_task: whether to also load the task's other parameters, averaged as well.

    Raises:
      UserError: no checkpoint is finished, it is damaged, or an earlier version
        wrote it.
    """
    folder, step = split_step(workdir)
    workdir = epath.Path(folder)
    if not steps(workdir):
        raise UserError(
            f"{workdir} has no finished checkpoint under {workdir / FOLDER}: "
            "give the workdir of a run that has saved one"
        )
    record = best(workdir)
    if step is None:
        step = record.get("step", steps(workdir)[-1])
    else:
        at_step(folder, step)
        record = record if record.get("step") == step else {}
    path = path_of(workdir, step)
    if damage := find_damage(path):
        _refuse(path, damage)
    try:
        checkpoint = _read(path, use_ema=use_ema, with_task=with_task)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 (files may belong to another checkpoint)
        _refuse(path, [f"cannot be read: {' '.join(str(error).split())[:200]}"])
    if checkpoint.step != step:
        _refuse(path, [f"it is the checkpoint of step {checkpoint.step}"])
    return dataclasses.replace(checkpoint, best=record)


def _refuse(path: epath.Path, damage: list[str]) -> NoReturn:
    before = [s for s in steps(path.parent.parent) if s < int(path.name)]
    remedy = (
        f"move that folder away to use the one before it, of step {before[-1]}"
        if before
        else "no earlier one exists; restore it from a backup"
    )
    raise UserError(f"the checkpoint {path} is damaged ({'; '.join(damage)}): {remedy}")


def _read(path: epath.Path, *, use_ema: bool, with_task: bool) -> Checkpoint:
    silence_orbax()
    stored = ocp.metadata(path)
    if stored.metadata is None:
        raise ValueError("its arrays' metadata are missing or damaged")
    check_version(path, stored.custom_metadata)
    network = stored.custom_metadata["network"]
    names = [name for name in ("path", "state") if name in network]
    keys, *_ = places = [network[name].split("/") for name in names]
    averaged = use_ema and keys[0] == "params" and "average" in stored.metadata
    if averaged:  # The average is structured like the parameters.
        keys[0] = "average"
    find = functools.partial(functools.reduce, operator.getitem)
    target = {"step": stored.metadata["step"]}
    for place in places:
        part = find(place, stored.metadata)
        for key in reversed(place):
            part = {key: part}
        target |= part
    statistics = network.get("statistics", ())
    if with_task:
        kind = "average" if averaged else "params"
        target |= {kind: stored.metadata[kind]}
        if statistics:
            beside = {name: stored.metadata["extra"][name] for name in statistics}
            target["extra"] = target.get("extra", {}) | beside
    target = jax.tree.map(lambda a: np.empty(a.shape, a.dtype), target)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        loaded = ocp.load(path, target)
    params, *state = [find(place, loaded) for place in places]
    targets = stored.custom_metadata["task"].get("targets")
    task_params = {}
    if with_task:
        task_params = {name: loaded["extra"][name] for name in statistics}
        task_params |= _others(loaded[kind], keys[1:])
    return Checkpoint(
        params={**params, models.STATE: state[0]} if state else params,
        task_params=task_params,
        options={
            name: tuple(value) if isinstance(value, list) else value
            for name, value in network["options"].items()
        },
        kind="ema" if averaged else "params",
        step=int(loaded["step"]),
        best={},
        config=stored.custom_metadata["config"],
        class_names=tuple(map(composed, stored.custom_metadata["class_names"])),
        targets=targets and Targets.of_json(targets),
    )


def _others(params: dict, path: list[str]) -> dict:
    """Returns parameters without those at a path; all of them if it does not exist."""
    if not path:
        return {}
    first, *rest = path
    if first not in params:
        return params
    inner = _others(params[first], rest)
    others = {name: value for name, value in params.items() if name != first}
    return others | ({first: inner} if inner else {})


def write_margins(workdir: str | os.PathLike, margins: Sequence[float] | None) -> None:
    """Writes `Targets.margins` of the checkpoint that `load` reads by default.

    None removes those of an earlier checkpoint.
    """
    path = epath.Path(workdir) / MARGINS
    if margins is None:
        path.unlink(missing_ok=True)
        return
    step = best(epath.Path(workdir)).get("step", steps(epath.Path(workdir))[-1])
    replace_text(path, json.dumps({"step": step, "margins": list(margins)}) + "\n")


def _with_margins(targets: Targets | None, workdir: str, step: int) -> Targets | None:
    """Returns targets with the margins of `write_margins` if they are of this step."""
    path = epath.Path(split_step(workdir)[0]) / MARGINS
    if targets is None or not path.exists():
        return targets
    stored = read_json(path)
    if stored.get("step") != step:
        return targets
    return dataclasses.replace(targets, margins=tuple(stored["margins"]))


def load_pretrained(
    workdir: str | os.PathLike, *, use_ema: bool = True, with_task: bool = False
) -> Pretrained:
    """Reads the best checkpoint, or the newest, as a `Pretrained`.

    The first note names the parameters and their step. Args: see `load`.

    Raises:
      UserError: `load` fails, or the network's module cannot be imported.
    """
    checkpoint = load(workdir, use_ema=use_ema, with_task=with_task)
    data = checkpoint.config["data"]
    # Imports the network from a user's module, or reports that it is missing.
    models.VARIANTS.find(checkpoint.options["variant"], f"{workdir}: model")
    # A data set may have names for classes that the network was not trained on.
    of_pixels = data["num_classes"] if data.get("mask_key") else 0
    classes = checkpoint.options["num_classes"] or of_pixels
    named = len(checkpoint.class_names) == classes
    loss = checkpoint.config["task"].get("loss", "softmax")
    averaged = "averaged " if checkpoint.kind == "ema" else ""
    notes = [f"{averaged}parameters of step {checkpoint.step}"]
    if checkpoint.best:
        notes[0] += (
            f", best by {checkpoint.best['metric']} ({checkpoint.best['score']:.4f})"
        )
    decisions, line = calibration.read(split_step(workdir)[0], checkpoint.params)
    notes += [line] * bool(line)
    return Pretrained(
        params=checkpoint.params,
        options=checkpoint.options,
        format="workdir",
        source=str(workdir),
        preprocess=Preprocess.of_data(data),
        class_names=checkpoint.class_names if named else (),
        loss=LINKS.get(loss, loss),
        notes=tuple(notes),
        task=checkpoint.config["task"],
        task_params=checkpoint.task_params,
        tokenizer=data.get("tokenizer", ""),
        start=checkpoint.config.get("init", {}).get("checkpoint", ""),
        multi_label=data.get("multi_label", False),
        calibration=decisions,
        targets=_with_margins(checkpoint.targets, os.fspath(workdir), checkpoint.step),
    )
