"""Checks before a run begins or resumes: hosts, config, data, and intact checkpoints."""

import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import jax

import vit_jax
from vit_jax.config import fields
from vit_jax.data import fingerprint
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.base import Source
from vit_jax.data.tokenizer import checksum
from vit_jax.distributed import mesh as meshes
from vit_jax.distributed import multihost
from vit_jax.errors import UserError
from vit_jax.printing import masked, print_error
from vit_jax.training import config as training_config
from vit_jax.training.config import EvaluationConfig, TrainConfig
from vit_jax.training.run_report import params_sha256
from vit_jax.training.train_state import TrainState
from vit_jax.weights import workdir as layout
from vit_jax.weights.pretrained import Preprocess, Pretrained

# Files whose content is compared with the data, wherever they lie.
_OF_DATA = ("data.exclude", "data.tokenizer")
_LENGTH = {"total_steps", "epochs"}
_TOKENIZER = "tokenizer"  # Its checksum, in what is stored of the data.
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "grain", "numpy", "pillow")


def check_hosts(
    config: TrainConfig | EvaluationConfig, workdir: str | os.PathLike = ""
) -> None:
    """Checks that all hosts were started with the same config, code, devices and workdir.

    Call it before anything is compiled: programs that differ would wait for each other.

    Raises:
      UserError: they differ; it names what, and on which hosts.
    """
    if jax.process_count() > 1:
        multihost.check_agreement(
            config={
                ".".join(path): value
                for path, about, value in fields.walk(config)
                if not about.of_host
            },
            code={"vit_jax": _hash_of_sources()}
            | {name: importlib.metadata.version(name) for name in _PACKAGES},
            devices={
                "count": jax.local_device_count(),
                "kind": jax.local_devices()[0].device_kind,
            },
            workdir={"--workdir": str(workdir and layout.absolute(workdir))},
        )


def data_read(data: DataConfig, source: Source) -> dict[str, str | int]:
    """Returns the fingerprint of the training split, and of the tokenizer if there is one."""
    found = fingerprint.fingerprint(source)
    return found | ({_TOKENIZER: checksum(data.tokenizer)} if data.tokenizer else {})


def check_data_of_hosts(
    sources: Mapping[str, Source], latest: int | None, tokenizer: int | None = None
) -> None:
    """Checks that all hosts read the same data and see the same checkpoints.

    Args:
      sources: name for messages to data source.
      latest: step of the newest checkpoint in the workdir, or None.
      tokenizer: its checksum, or None.

    Raises:
      UserError: they differ; it names what, and on which hosts.
    """
    if jax.process_count() > 1:
        multihost.check_agreement(
            data=_data(sources) | {_TOKENIZER: tokenizer},
            workdir={"latest checkpoint": latest},
        )


def check_evaluation_of_hosts(
    pretrained: Pretrained, preprocess: Preprocess, sources: Mapping[str, Source]
) -> None:
    """Checks that all hosts evaluate the same weights, preprocessing and data.

    Args and Raises: as `check_data_of_hosts`.
    """
    if jax.process_count() > 1:
        multihost.check_agreement(
            weights={"sha256": params_sha256(pretrained.params)}
            | pretrained.options
            | {"class_names": pretrained.class_names},
            preprocess=dataclasses.asdict(preprocess),
            data=_data(sources),
        )


def _data(sources: Mapping[str, Source]) -> dict[str, object]:
    """Returns the fingerprints of sources for `multihost.check_agreement`."""
    return {
        f"{name} {key}": value
        for name, source in sources.items()
        for key, value in fingerprint.fingerprint(source).items()
    }


def _hash_of_sources() -> str:
    # Of files, so that it shows uncommitted edits too.
    folder, digest = pathlib.Path(vit_jax.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def check_workdir(workdir: str | os.PathLike, config: TrainConfig) -> dict | None:
    """Checks that a workdir holds no run of another config.

    Returns:
      Metadata of the run's task, from its checkpoint; None if there is no run.

    Raises:
      UserError: it does; the message names the keys that differ.
    """
    if not layout.has_checkpoint(workdir):
        return None
    metadata, now = layout.read_metadata(workdir), decisive(config)
    try:
        stored = decisive(training_config.complete(metadata["config"]))
    except UserError:  # A key has gone since then.
        may_change = fields.flatten(config).keys() - now.keys()
        stored = fields.flatten(metadata["config"])
        stored = {key: stored[key] for key in stored.keys() - may_change}
    stored |= {key: now[key] for key in _OF_DATA if stored.get(key) and now[key]}
    if config.extend_schedule != "none":
        stored |= {key: now[key] for key in _LENGTH}
    if changed := fields.differences(stored, now):
        remedy = ""
        if {key for key in now if stored.get(key) != now[key]} <= _LENGTH:
            remedy = (
                "go on on the schedule of the new length by "
                "--config.extend_schedule=stretch, "
            )
        raise UserError(
            f"{workdir} holds a run of another config ({'; '.join(changed[:6])}): "
            f"choose another --workdir, {remedy}or state the same config"
        )
    return metadata["task"]


def decisive(config: TrainConfig) -> dict[str, object]:
    """Returns the keys of a config that change the result of a run, with their values."""
    return {
        ".".join(path): masked(value) if isinstance(value, str) else value
        for path, about, value in fields.walk(config)
        if about.changes_result
    }


class Restored(NamedTuple):
    """A state to continue from.

    Attributes:
      state: on the devices; None if nothing was found.
      step: optimiser steps taken.
      seconds: wall-clock time of the starts before.
      device_seconds: the same, each start's times its number of devices.
      notes: lines for the log.
    """

    state: TrainState | None
    step: int
    seconds: float
    device_seconds: float
    notes: list[str]


def newest_intact(
    workdir: str | os.PathLike, unreadable: Mapping[int, str]
) -> tuple[int, list[int]]:
    """Finds the newest intact checkpoint.

    All processes call it. Each verifies its share of the files.

    Args:
      workdir: holds at least one finished checkpoint.
      unreadable: steps whose checkpoints could not be restored, and why.

    Returns:
      Its step, and the steps of newer ones, which are damaged.

    Raises:
      UserError: none is intact.
    """
    me, everyone = jax.process_index(), jax.process_count()
    damaged = []
    for step in reversed(layout.steps(workdir)):
        path = layout.path_of(workdir, step)
        if step not in unreadable:
            found = layout.find_damage(path, me, everyone)
            if found:
                print_error(
                    f"error: the checkpoint {path} is damaged: {'; '.join(found)}"
                )
            if not meshes.process_allgather(found=len(found))["found"].any():
                return step, damaged
        damaged.append(step)
    why = "".join(f"; {reason}" for reason in unreadable.values())
    raise UserError(
        f"no checkpoint under {path.parent} is intact (damaged: step "
        f"{', '.join(map(str, damaged))}{why}): move that folder away to begin anew"
    )


def check_data(
    stored: dict[str, str | int],
    data: dict[str, str | int],
    source: Source,
    workdir: str | os.PathLike,
    *,
    check: bool,
) -> list[str]:
    """Checks that the training split is the one that a run was trained on.

    Args:
      stored: `data_read` of the split that it was trained on.
      data: `data_read` of `source`.
      source: training split of this start.
      workdir: of the run.
      check: `config.data.check`.

    Returns:
      Notes: what differs if that is allowed.

    Raises:
      UserError: the data differ.
    """
    if stored == data:
        return []
    found = fingerprint.differences(stored, source)
    known = stored.get(_TOKENIZER)
    if known is not None and data.get(_TOKENIZER, known) != known:
        found.append("data.tokenizer has files of other content")
    if not found:
        return []
    changed = f"the training split has changed since {workdir} was begun"
    if check:
        raise UserError(
            f"{changed}: {'; '.join(found)}; restore the data, or go on with them as "
            "they are: --config.data.check=False"
        )
    return [f"{changed} (data.check=False): {'; '.join(found)}"]
