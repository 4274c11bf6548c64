"""What a workdir and all hosts must be for a run to begin or go on."""

import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
from collections.abc import Mapping

import jax

import vit_jax
from vit_jax.config import fields
from vit_jax.data import fingerprint
from vit_jax.data.sources import Source
from vit_jax.errors import UserError
from vit_jax.parallel import agreement
from vit_jax.printing import masked
from vit_jax.report import result
from vit_jax.training import config as training_config
from vit_jax.training.config import EvaluationConfig, TrainConfig
from vit_jax.weights import workdir as layout
from vit_jax.weights.pretrained import Preprocess, Pretrained

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "grain", "numpy", "pillow")


def check_hosts(config: TrainConfig | EvaluationConfig) -> None:
    """Refuses hosts that were started with other configs, code or devices.

    Nothing may be compiled before it: programs that differ would wait for each other.

    Raises:
      UserError: with what differs, and on which hosts.
    """
    if jax.process_count() > 1:
        agreement.check(
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
        )


def check_data_of_hosts(sources: Mapping[str, Source], latest: int | None) -> None:
    """Refuses hosts with other data, or that see other checkpoints.

    Args:
      sources: what is read, by a name for messages.
      latest: step of the newest checkpoint in the workdir, or None.

    Raises:
      UserError: with what differs, and on which hosts.
    """
    if jax.process_count() > 1:
        agreement.check(data=_data(sources), workdir={"latest checkpoint": latest})


def check_evaluation_of_hosts(
    pretrained: Pretrained, preprocess: Preprocess, sources: Mapping[str, Source]
) -> None:
    """Refuses hosts that would evaluate other weights, images or data.

    Args:
      pretrained: the weights.
      preprocess: how images are prepared.
      sources: what is read, by a name for messages.

    Raises:
      UserError: with what differs, and on which hosts.
    """
    if jax.process_count() > 1:
        agreement.check(
            weights={"sha256": result.params_sha256(pretrained.params)}
            | pretrained.options
            | {"class_names": pretrained.class_names},
            preprocess=dataclasses.asdict(preprocess),
            data=_data(sources),
        )


def _data(sources: Mapping[str, Source]) -> dict[str, object]:
    """Returns the fingerprints of sources, as short values for `agreement.check`."""
    data = {}
    for name, source in sources.items():
        found = fingerprint.fingerprint(source)
        found["cells"] = hashlib.sha256(found["cells"].encode()).hexdigest()[:16]
        data |= {f"{name} {key}": value for key, value in found.items()}
    return data


def _hash_of_sources() -> str:
    """Returns a hash of this package's files: a commit does not tell what was edited."""
    folder, digest = pathlib.Path(vit_jax.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def check_workdir(workdir: str | os.PathLike, config: TrainConfig) -> None:
    """Refuses a workdir that holds a run of another config.

    Raises:
      UserError: with the keys that differ.
    """
    if not layout.has_checkpoint(workdir):
        return
    stored = _decisive_stored(layout.read_config(workdir))
    if changed := fields.differences(stored, decisive(config)):
        raise UserError(
            f"{workdir} holds a run of another config ({'; '.join(changed[:6])}): "
            "choose another --workdir, or state the same config"
        )


def decisive(config: TrainConfig) -> dict[str, object]:
    """Returns the keys of a config that decide what a run gives, with their values."""
    return {
        ".".join(path): masked(value) if isinstance(value, str) else value
        for path, about, value in fields.walk(config)
        if about.changes_result
    }


def _decisive_stored(stored: dict) -> dict[str, object]:
    """Adds the keys that came after a run was begun, with what it did without them."""
    try:
        return decisive(training_config.complete(stored))
    except UserError:  # A key has gone since then.
        return fields.flatten(stored)
