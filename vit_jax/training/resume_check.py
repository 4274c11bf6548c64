"""Checks before a run begins or resumes: hosts, config and data."""

import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax

import vit_jax
from vit_jax.command_line.printing import masked
from vit_jax.config import fields
from vit_jax.data import fields as records
from vit_jax.data import fingerprint
from vit_jax.data.config import DataConfig
from vit_jax.data.sources.base import Source
from vit_jax.distributed import agreement
from vit_jax.errors import UserError
from vit_jax.training import config as training_config
from vit_jax.training.config import EvaluationConfig, TrainConfig
from vit_jax.training.run_report import params_sha256
from vit_jax.training.train_state import TrainState
from vit_jax.weights import checkpoint_folders as folders

if TYPE_CHECKING:  # Only evaluations of weights have them.
    from vit_jax.data.preprocess import Preprocess
    from vit_jax.weights.pretrained import Pretrained

# Keys of files that are compared by content, as data; their paths may change.
_OF_DATA = ("data.exclude", "data.tokenizer")
_LENGTH = {"total_steps", "epochs"}
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "grain", "numpy", "pillow")


class Restored(NamedTuple):
    """A state to continue from.

    Attributes:
      state: arrays on the devices; None if nothing was restored.
      step: number of optimiser steps taken.
      seconds: wall-clock time of the earlier starts in seconds.
      device_seconds: sum over the earlier starts of seconds times number of devices.
      notes: lines for the log.
    """

    state: TrainState | None = None
    step: int = 0
    seconds: float = 0.0
    device_seconds: float = 0.0
    notes: Sequence[str] = ()


def check_hosts(
    config: TrainConfig | EvaluationConfig, workdir: str | os.PathLike = ""
) -> None:
    """Checks that all hosts were started with the same config, code, devices and workdir.

    Call it before anything is compiled: hosts with different programs would wait for
    each other forever.

    Raises:
      UserError: the hosts differ; the message names the values and the hosts.
    """
    if jax.process_count() > 1:
        agreement.check_agreement(
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
            workdir={"--workdir": str(workdir and folders.absolute(workdir))},
        )


def data_read(data: DataConfig, source: Source) -> dict[str, str | int]:
    """Returns fingerprints of the training split and of files needed to read it."""
    return fingerprint.fingerprint(source) | records.checksums(data)


def check_data_of_hosts(
    data: DataConfig, sources: Mapping[str, Source], latest: int | None
) -> None:
    """Checks that all hosts read the same data and see the same newest checkpoint.

    Raises:
      UserError: the hosts differ; the message names the values and the hosts.
    """
    if jax.process_count() > 1:
        agreement.check_agreement(
            data={**_data(sources), **records.checksums(data)},
            workdir={"latest checkpoint": latest},
        )


def check_evaluation_of_hosts(
    pretrained: "Pretrained", preprocess: "Preprocess", sources: Mapping[str, Source]
) -> None:
    """Checks that all hosts evaluate the same weights, preprocessing and data.

    Raises:
      UserError: the hosts differ; the message names the values and the hosts.
    """
    if jax.process_count() > 1:
        agreement.check_agreement(
            weights={"sha256": params_sha256(pretrained.params)}
            | pretrained.options
            | {"class_names": pretrained.class_names},
            preprocess=dataclasses.asdict(preprocess),
            data=_data(sources),
        )


def _data(sources: Mapping[str, Source]) -> dict[str, object]:
    return {
        f"{name} {key}": value
        for name, source in sources.items()
        for key, value in fingerprint.fingerprint(source).items()
    }


def _hash_of_sources() -> str:
    # The content of the files rather than the commit, to include uncommitted edits.
    folder, digest = pathlib.Path(vit_jax.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def check_workdir(workdir: str | os.PathLike, config: TrainConfig) -> dict | None:
    """Checks that a workdir does not contain a run of another config.

    Returns:
      Metadata of the run's task, from its checkpoint; None if the workdir does not
      contain a run.

    Raises:
      UserError: it contains a run of another config; the message names the keys that
        differ.
    """
    if not folders.has_checkpoint(workdir):
        return None
    metadata, now = folders.read_metadata(workdir), decisive(config)
    try:
        stored = decisive(training_config.complete(metadata["config"]))
    except UserError:  # The stored config has a key that no longer exists.
        may_change = fields.flatten(config).keys() - now.keys()
        stored = fields.flatten(metadata["config"])
        stored = {key: stored[key] for key in stored.keys() - may_change}
    stored |= {key: now[key] for key in _OF_DATA if stored.get(key) and now[key]}
    if config.extend_schedule != "none":
        stored |= {key: now[key] for key in _LENGTH}
    if changed := fields.differences(stored, now):
        remedy = ""
        keys = stored.keys() | now.keys()
        if {key for key in keys if stored.get(key) != now.get(key)} <= _LENGTH:
            remedy = (
                "set --config.extend_schedule=stretch to continue with the schedule of "
                "the new length, "
            )
        raise UserError(
            f"{workdir} contains a run of another config ({'; '.join(changed[:6])}): "
            f"choose another --workdir, {remedy}or set the same config"
        )
    return metadata["task"]


def decisive(config: TrainConfig) -> dict[str, object]:
    """Returns the keys of a config that change the result of a run, with their values."""
    return {
        ".".join(path): masked(value) if isinstance(value, str) else value
        for path, about, value in fields.walk(config)
        if about.changes_result
    }


def check_data(
    stored: dict, data: dict, source: Source, workdir: str | os.PathLike, *, check: bool
) -> list[str]:
    """Compares the training split with the split that a run was trained on.

    Args:
      stored: result of `data_read` in the checkpoint.
      data: result of `data_read` now.
      source: training split.
      workdir: folder of the run.
      check: whether a difference is an error.

    Returns:
      Notes on differences.

    Raises:
      UserError: the data differ and `check` is set.
    """
    if stored == data:
        return []
    changes = fingerprint.differences(stored, source)
    for name in sorted(data.keys() - fingerprint.fingerprint(source).keys()):
        if stored.get(name, data[name]) != data[name]:
            changes.append(f"the content of the files of data.{name} has changed")
    if not changes:
        return []
    changed = f"the training split has changed since the run in {workdir} was begun"
    if check:
        raise UserError(
            f"{changed}: {'; '.join(changes)}; restore the data, or set "
            "--config.data.check=False to continue with the changed data"
        )
    return [f"{changed} (data.check=False): {'; '.join(changes)}"]
