"""Checkpoints in the workdir of a training run: parameters, config, checksums.

Orbax detects damage in its index, not in the array data: it loads a file with a flipped
bit without an error. Therefore a file of SHA-256 checksums is written last, beside the
data, and a checkpoint counts as finished once that file exists. Earlier versions wrote
CRC-32C, which is the same for all files that end with their CRC, as Orbax's do.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import operator
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import NoReturn

import google_crc32c
import jax
import numpy as np
from etils import epath
from orbax.checkpoint import v1 as ocp

from vit_jax import models
from vit_jax.data.config import DEPTHS
from vit_jax.data.sources.base import composed
from vit_jax.data.transforms import host as host_transforms
from vit_jax.data.transforms import parse
from vit_jax.data.transforms.base import pair
from vit_jax.data.transforms.naflex import NaFlex
from vit_jax.errors import UserError
from vit_jax.models.variants import FORMER_KEYS
from vit_jax.weights.pretrained import (
    Preprocess,
    Pretrained,
    per_channel,
    resize_sides,
)

FOLDER = "checkpoints"  # In the workdir, with one folder per step.
BEST_FILE = "best.json"  # In the workdir, see `best`.
SUMMED = "checksums"  # Key of metadata: the checkpoint is unfinished without checksums.
CHECKSUMS_FILE = "checksums.json"

_DATA = "d"  # Name of the folders of array data; the other files are small.
_CHUNK_BYTES = 8 << 20
_HASHES = {"sha256": hashlib.sha256, "crc32c": google_crc32c.Checksum}
_HASH = "sha256"  # The kind that is written.


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The network of a run, and what was stored beside it.

    Attributes:
      params: the network's parameters, nested dict of float32 arrays.
      options: arguments of `models.create` that build the network.
      kind: "params", or "ema" for their moving average.
      step: optimiser steps taken.
      best: record of the best checkpoint, see `best`; empty if this is the newest.
      config: the run's config, as plain dicts.
      class_names: names in label order; empty if the data set has none.
      task_params: parameters that the task has beside the network; empty unless
        requested.
    """

    params: dict
    options: dict
    kind: str
    step: int
    best: dict
    config: dict
    class_names: tuple[str, ...]
    task_params: dict = dataclasses.field(default_factory=dict)


def has_checkpoint(workdir: str | os.PathLike) -> bool:
    """Returns whether a folder is a workdir, or the checkpoint of a step in one."""
    return bool(steps(split_step(workdir)[0]))


def at_step(workdir: str | os.PathLike, step: int) -> str:
    """Returns the path of one checkpoint of a run, which opens like the workdir.

    Raises:
      UserError: `workdir` is no workdir, or has no finished checkpoint of that step.
    """
    known = steps(workdir) if _may_be_workdir(os.fspath(workdir)) else []
    if step not in known:
        there = f"there are {', '.join(map(str, known))}" if known else "it has none"
        raise UserError(
            f"step={step}: {workdir or 'no model'} has no finished checkpoint of that "
            f"step; {there}: give the workdir of a run, and one of its steps"
        )
    return os.path.join(workdir, FOLDER, str(step))


def split_step(path: str | os.PathLike) -> tuple[str, int | None]:
    """Returns the workdir and the step of WORKDIR/checkpoints/STEP.

    For other paths returns the path and None.
    """
    text = os.fspath(path)
    match = re.fullmatch(rf"(?:(?P<workdir>.*)/)?{FOLDER}/(?P<step>[0-9]+)/*", text)
    workdir = match and (match["workdir"] or ".")
    if match and _may_be_workdir(workdir) and steps(workdir):
        return workdir, int(match["step"])
    return text, None


def _may_be_workdir(text: str) -> bool:
    return bool(text) and ("://" not in text or text.startswith("gs://"))


def load(
    workdir: str | os.PathLike, *, use_ema: bool = True, with_task: bool = False
) -> Checkpoint:
    """Reads the network of the best checkpoint, or of the newest.

    Args:
      workdir: workdir of a run, or path of one checkpoint in it, see `at_step`.
      use_ema: load the averaged parameters if the run kept them.
      with_task: load the other parameters of its task too, averaged as well.

    Raises:
      UserError: there is no finished checkpoint, or it is damaged or of an earlier
        version.
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
    except Exception as error:  # noqa: BLE001 (its files may be another checkpoint's)
        _refuse(path, [f"cannot be read: {' '.join(str(error).split())[:200]}"])
    if checkpoint.step != step:
        _refuse(path, [f"it is that of step {checkpoint.step}"])
    return dataclasses.replace(checkpoint, best=record)


def _read(path: epath.Path, *, use_ema: bool, with_task: bool) -> Checkpoint:
    silence_orbax()
    stored = ocp.metadata(path)
    if stored.metadata is None:
        raise ValueError("its arrays' metadata are missing or damaged")
    _check_version(path, stored.custom_metadata)
    network = stored.custom_metadata["network"]
    names = [name for name in ("path", "state") if name in network]
    keys, *_ = places = [network[name].split("/") for name in names]
    averaged = use_ema and keys[0] == "params" and "average" in stored.metadata
    if averaged:  # The average has the structure of the parameters.
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
    )


def _others(params: dict, path: list[str]) -> dict:
    """Returns parameters without those at a path; all if the path is not among them."""
    if not path:
        return {}
    first, *rest = path
    if first not in params:
        return params
    inner = _others(params[first], rest)
    others = {name: value for name, value in params.items() if name != first}
    return others | ({first: inner} if inner else {})


def load_pretrained(
    workdir: str | os.PathLike, *, use_ema: bool = True, with_task: bool = False
) -> Pretrained:
    """Reads the best checkpoint, or the newest, as a `Pretrained`.

    The first note says which parameters of which step these are. Args: see `load`.

    Raises:
      UserError: errors of `load`, or the network's module cannot be imported.
    """
    checkpoint = load(workdir, use_ema=use_ema, with_task=with_task)
    data = checkpoint.config["data"]
    # Imports the network of a user's module, or reports that it is missing.
    models.VARIANTS.find(checkpoint.options["variant"], f"{workdir}: model")
    preprocess = _preprocess(data)
    # A data set may name classes that the network was not trained on.
    of_pixels = data["num_classes"] if data.get("mask_key") else 0
    classes = checkpoint.options["num_classes"] or of_pixels
    named = len(checkpoint.class_names) == classes
    averaged = "averaged " if checkpoint.kind == "ema" else ""
    notes = [f"{averaged}parameters of step {checkpoint.step}"]
    if checkpoint.best:
        notes[0] += (
            f", best by {checkpoint.best['metric']} ({checkpoint.best['score']:.4f})"
        )
    if preprocess is None:
        notes.append(
            f"data.eval_transform={data['eval_transform']!r} is no resize and crop; set "
            "it as eval_transform of an evaluation (evals.val.eval_transform) to use it"
        )
    return Pretrained(
        params=checkpoint.params,
        options=checkpoint.options,
        format="workdir",
        source=str(workdir),
        preprocess=preprocess,
        class_names=checkpoint.class_names if named else (),
        loss=checkpoint.config["task"].get("loss", "softmax"),
        notes=tuple(notes),
        task=checkpoint.config["task"],
        task_params=checkpoint.task_params,
        tokenizer=data.get("tokenizer", ""),
        multi_label=data.get("multi_label", False),
    )


def _preprocess(data: dict) -> Preprocess | None:
    """Returns the preprocessing of evaluations; None if it is no resize and crop."""
    image_size = tuple(data["image_size"])
    mean, std = (
        tuple(per_channel(data[name], data["channels"])) for name in ("mean", "std")
    )
    common = {"image_size": image_size, "mean": mean, "std": std}
    common["exif"] = data.get("exif", False)
    common["pixels"] = data.get("pixels", DEPTHS[0])
    common["bands"] = tuple(data.get("bands", ()))
    if parse.names_custom(data["eval_transform"]):  # Weights must not import a module.
        return None
    transforms = parse.parse_eval(data["eval_transform"], image_size)
    resizes = host_transforms.Resize | host_transforms.ResizeSmall
    if transforms and isinstance(transforms[0], resizes):
        common["interpolation"] = transforms[0].interpolation
        if isinstance(transforms[-1], host_transforms.CentralCrop):
            common["crop_down"] = transforms[-1].down
    match transforms:
        case ():  # The images already have this size.
            return Preprocess(**common, squash=True)
        case (host_transforms.Resize(size=size),) if pair(size) == image_size:
            return Preprocess(**common, squash=True)
        case (
            host_transforms.ResizeSmall(size=(rows, columns)),
            host_transforms.CentralCrop(size=size),
        ) if pair(size) == image_size:
            how = Preprocess(**common, crop_fraction=image_size[0] / rows)
            return how if resize_sides(how) == (rows, columns) else None
        case (
            host_transforms.ResizeSmall(size=short),
            host_transforms.CentralCrop(size=size),
        ) if pair(size) == image_size:
            return Preprocess(
                **common,
                crop_fraction=min(image_size) / short,
                short_side=image_size[0] != image_size[1],
            )
        case (
            host_transforms.Resize(size=resized),
            host_transforms.CentralCrop(size=size),
        ) if pair(size) == image_size and _same_shape(pair(resized), image_size):
            fraction = image_size[0] / pair(resized)[0]
            return Preprocess(**common, crop_fraction=fraction, squash=True)
        case (NaFlex(choices=[(most, patch)], interpolation=how),):
            kept = {"max_tokens": most, "patch": patch, "interpolation": how}
            return Preprocess(**common, **kept)
    return None


def _same_shape(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] * other[1] == one[1] * other[0]


def read_metadata(workdir: str | os.PathLike) -> dict:
    """Returns the metadata of the newest checkpoint that can be read.

    "config" is the run's config as plain dicts, "task" the metadata of its task, and
    "network" the path of the network's parameters in the state and its options.

    Raises:
      UserError: no checkpoint has undamaged metadata, or it is of an earlier version.
    """
    silence_orbax()
    damage = []
    for step in reversed(steps(workdir)):
        path = path_of(workdir, step)
        defects = find_damage(path, data=False)
        if not defects:
            metadata = {}
            with contextlib.suppress(Exception):  # There may be no checksums.
                metadata = ocp.metadata(path).custom_metadata or {}
            if "config" in metadata:
                _check_version(path, metadata)
                for key in FORMER_KEYS:
                    metadata["config"]["model"].pop(key, None)
                return metadata
        damage.append(f"{step}: {'; '.join(defects) or 'unreadable'}")
    raise UserError(
        f"no checkpoint under {absolute(workdir) / FOLDER} is intact ("
        f"{', '.join(damage)}): move that folder away to begin anew"
    )


def _check_version(path: epath.Path, metadata: dict) -> None:
    """Raises UserError for earlier versions, whose state or metadata differ."""
    if not {"task", "network"} <= metadata.keys():
        raise UserError(
            f"{path} was saved by an earlier version of vit_jax, whose checkpoints do "
            "not describe their task and network: continue the run, or convert its "
            "weights to safetensors, with that version"
        )


def steps(workdir: str | os.PathLike) -> list[int]:
    """Returns the steps that have a finished checkpoint, ascending."""
    folder = epath.Path(workdir) / FOLDER
    if not folder.is_dir():
        return []
    named = [p for p in path_of(workdir, 0).parent.iterdir() if is_step(p.name)]
    return sorted(int(path.name) for path in named if is_finished(path))


def is_step(name: str) -> bool:
    """Returns whether a name is that of a step's folder: 12, but not 012."""
    return name.isdecimal() and str(int(name)) == name


def best(workdir: str | os.PathLike) -> dict:
    """Returns step, metric and score of the run's best checkpoint.

    Empty if the run chose none (`checkpoint.best_metric`), or it was deleted.
    """
    try:
        record = json.loads((absolute(workdir) / BEST_FILE).read_text())
        return record if record["step"] in steps(workdir) else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def is_finished(path: epath.Path) -> bool:
    """Returns whether a checkpoint was written completely; later damage is ignored."""
    if has_checksums(path):
        return True
    try:  # Orbax would check other files too.
        about = json.loads((path / "_CHECKPOINT_METADATA").read_text())
        return not about["custom_metadata"].get(SUMMED, False)
    except OSError:
        return False
    except (ValueError, KeyError, AttributeError):
        return True  # Of an older version and damaged, which reading it will report.


def _refuse(path: epath.Path, damage: list[str]) -> NoReturn:
    before = [s for s in steps(path.parent.parent) if s < int(path.name)]
    remedy = (
        f"move that folder away to use the one before it, of step {before[-1]}"
        if before
        else "no earlier one exists; restore it from a backup"
    )
    raise UserError(f"the checkpoint {path} is damaged ({'; '.join(damage)}): {remedy}")


def absolute(workdir: str | os.PathLike) -> epath.Path:
    """Returns the absolute path that Orbax needs; bucket addresses are unchanged."""
    path = epath.Path(workdir)
    return path if "://" in str(workdir) else path.resolve()


def path_of(workdir: str | os.PathLike, step: int) -> epath.Path:
    """Returns the folder of the checkpoint of a step."""
    return absolute(workdir) / FOLDER / str(step)


def compute_checksums(
    folder: epath.Path, shard: int = 0, num_shards: int = 1
) -> dict[str, list]:
    """Computes the sizes and checksums of a checkpoint's files.

    Args:
      folder: folder of one step.
      shard: index of the shard of files to read; each of several hosts reads one.
      num_shards: number of shards.

    Returns:
      Path relative to the folder to [bytes, SHA-256 in hexadecimal].
    """
    names = sorted(_list_files(folder))[shard::num_shards]
    return {name: _checksum(folder / name) for name in names}


def write_checksums(folder: epath.Path, files: dict[str, list]) -> None:
    """Writes the checksums of all shards, which marks the checkpoint as finished."""
    text = json.dumps(files, sort_keys=True)
    new = folder / f".{CHECKSUMS_FILE}.new"
    new.write_text(json.dumps({"files": files, _HASH: _hash([text.encode()])}))
    new.replace(folder / CHECKSUMS_FILE)


def has_checksums(folder: epath.Path) -> bool:
    """Returns whether a checkpoint has checksums; old versions wrote none."""
    return (folder / CHECKSUMS_FILE).exists()


def find_damage(
    folder: epath.Path, shard: int = 0, num_shards: int = 1, *, data: bool = True
) -> list[str]:
    """Compares the files of a checkpoint with their checksums.

    Args:
      folder: folder of one step.
      shard, num_shards: index and number of shards, see `compute_checksums`.
      data: whether to read the array data too, or the small files only.

    Returns:
      A line for every file that is missing or differs; empty without checksums.
    """
    if not has_checksums(folder):
        return []
    try:
        stored = json.loads((folder / CHECKSUMS_FILE).read_text())
        files, kind = stored["files"], next(k for k in _HASHES if k in stored)
        text = json.dumps(files, sort_keys=True)
        if _hash([text.encode()], kind) != stored[kind]:
            raise ValueError
    except (ValueError, TypeError, KeyError, StopIteration):
        return [f"{CHECKSUMS_FILE} is damaged"]
    damage = []
    for name in sorted(files)[shard::num_shards]:
        if not data and epath.Path(name).parent.name == _DATA:
            continue
        path, (size, _) = folder / name, files[name]
        if not path.exists():
            damage.append(f"{name} is missing")
        elif path.stat().length != size:
            damage.append(f"{name} has {path.stat().length:,} of {size:,} bytes")
        elif _checksum(path, kind) != files[name]:
            damage.append(f"{name} is not what was written ({kind})")
    return damage


def _list_files(folder: epath.Path, below: str = "") -> Iterator[str]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _list_files(path, f"{below}{path.name}/")
        elif path.name not in (CHECKSUMS_FILE, f".{CHECKSUMS_FILE}.new"):
            yield below + path.name


def _checksum(path: epath.Path, kind: str = _HASH) -> list:
    with path.open("rb") as file:
        digest = _hash(iter(lambda: file.read(_CHUNK_BYTES), b""), kind)
    return [path.stat().length, digest]


def _hash(chunks: Iterable[bytes], kind: str = _HASH) -> str:
    digest = _HASHES[kind]()
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest().hex()


def silence_orbax() -> None:
    """Silences what Orbax prints of failed saves and reads, which are reported once."""
    for logger in "absl", "asyncio":
        logging.getLogger(logger).addFilter(_not_of_orbax)
    if sys.unraisablehook is not _unraisable:
        _unraisable.before = sys.unraisablehook
        sys.unraisablehook = _unraisable


def _not_of_orbax(record: logging.LogRecord) -> bool:
    if record.name == "asyncio":
        # Arrays are read concurrently: the first failure is raised, others come here.
        return "tensorstore_spec=" not in record.getMessage()
    return "orbax" not in record.pathname or not (
        record.levelno >= logging.ERROR
        or record.msg.startswith("Failed to get metadata for checkpointable")
    )


def _unraisable(args) -> None:
    # TensorStore's writes may end after Orbax gave up and closed its event loop.
    if str(args.exc_value) != "Event loop is closed":
        _unraisable.before(args)
