"""Folders and files of a run's checkpoints: names, metadata, checksums, damage.

Training writes them, and workdir.py reads weights from them.

Orbax detects damage in its index but not in the array data: it loads a file with a
flipped bit without an error. Therefore a file of SHA-256 checksums is written last,
beside the data, and a checkpoint counts as finished once that file exists. Earlier
versions wrote CRC-32C, which is the same for all files that end with their CRC, as
Orbax's files do.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator

import google_crc32c
from etils import epath
from orbax.checkpoint import v1 as ocp

from vit_jax.config import loading
from vit_jax.errors import UserError
from vit_jax.models.variants import FORMER_KEYS

FOLDER = "checkpoints"  # Folder in the workdir, with one folder per step.
BEST_FILE = "best.json"  # File in the workdir, see `best`.
SUMMED = "checksums"  # Metadata key: the checkpoint is unfinished without checksums.
CHECKSUMS_FILE = "checksums.json"

_DATA = "d"  # Name of the folders with array data; all other files are small.
_CHUNK_BYTES = 8 << 20
_HASHES = {"sha256": hashlib.sha256, "crc32c": google_crc32c.Checksum}
_HASH = "sha256"  # The hash that is written.


def has_checkpoint(workdir: str | os.PathLike) -> bool:
    """Returns whether a folder is a workdir with a checkpoint, or one of its steps."""
    return bool(steps(split_step(workdir)[0]))


def at_step(workdir: str | os.PathLike, step: int) -> str:
    """Returns the path of one checkpoint of a run, which opens like the workdir.

    Raises:
      UserError: `workdir` is not a workdir, or has no finished checkpoint of that step.
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

    For other paths, returns the path and None.
    """
    text = os.fspath(path)
    match = re.fullmatch(rf"(?:(?P<workdir>.*)/)?{FOLDER}/(?P<step>[0-9]+)/*", text)
    workdir = match and (match["workdir"] or ".")
    if match and _may_be_workdir(workdir) and steps(workdir):
        return workdir, int(match["step"])
    return text, None


def _may_be_workdir(text: str) -> bool:
    return bool(text) and ("://" not in text or text.startswith("gs://"))


def read_metadata(workdir: str | os.PathLike) -> dict:
    """Returns the metadata of the newest checkpoint that can be read.

    "config" is the run's config as plain dicts, "task" the metadata of its task, and
    "network" the options of the network and the path of its parameters in the state.

    Raises:
      UserError: no checkpoint has undamaged metadata, or an earlier version wrote it.
    """
    silence_orbax()
    damage = []
    for step in reversed(steps(workdir)):
        path = path_of(workdir, step)
        defects = find_damage(path, data=False)
        if not defects:
            metadata = {}
            with contextlib.suppress(Exception):  # Checksums may be missing.
                metadata = ocp.metadata(path).custom_metadata or {}
            if "config" in metadata:
                check_version(path, metadata)
                for key in FORMER_KEYS:
                    metadata["config"]["model"].pop(key, None)
                loading.drop_former_keys(metadata["config"])
                return metadata
        damage.append(f"{step}: {'; '.join(defects) or 'unreadable'}")
    raise UserError(
        f"no checkpoint under {absolute(workdir) / FOLDER} is intact ("
        f"{', '.join(damage)}): move that folder away to start again"
    )


def check_version(path: epath.Path, metadata: dict) -> None:
    """Raises UserError for earlier versions, whose state or metadata are different."""
    if not {"task", "network"} <= metadata.keys():
        raise UserError(
            f"{path} was saved by an earlier version of vit_jax, whose checkpoints do "
            "not describe their task and network: continue the run, or convert its "
            "weights to safetensors, with that version"
        )


def steps(workdir: str | os.PathLike) -> list[int]:
    """Returns the steps with a finished checkpoint, in ascending order."""
    folder = epath.Path(workdir) / FOLDER
    if not folder.is_dir():
        return []
    named = [p for p in path_of(workdir, 0).parent.iterdir() if is_step(p.name)]
    return sorted(int(path.name) for path in named if is_finished(path))


def is_step(name: str) -> bool:
    """Returns whether a name is a valid name of a step's folder: 12, but not 012."""
    return name.isdecimal() and str(int(name)) == name


def best(workdir: str | os.PathLike) -> dict:
    """Returns step, metric and score of the run's best checkpoint.

    Empty if the run chose none (`checkpoint.best_metric`), or if it was deleted.
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
    try:  # Orbax's check would require other files too.
        about = json.loads((path / "_CHECKPOINT_METADATA").read_text())
        return not about["custom_metadata"].get(SUMMED, False)
    except OSError:
        return False
    except (ValueError, KeyError, AttributeError):
        return True  # Written by an older version and damaged; reading it reports that.


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
      shard: index of the shard of files to read; each of several hosts reads one shard.
      num_shards: number of shards.

    Returns:
      Path, relative to the folder, to [bytes, SHA-256 in hexadecimal].
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
      data: whether to read the array data too, or only the small files.

    Returns:
      One line for every file that is missing or different; empty without checksums.
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
            damage.append(f"{name} has changed since it was written ({kind})")
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
    """Silences Orbax's output about failed saves and reads, which are reported once."""
    for logger in "absl", "asyncio":
        logging.getLogger(logger).addFilter(_not_of_orbax)
    if sys.unraisablehook is not _unraisable:
        _unraisable.before = sys.unraisablehook
        sys.unraisablehook = _unraisable


def _not_of_orbax(record: logging.LogRecord) -> bool:
    if record.name == "asyncio":
        # Arrays are read concurrently: the first failure is raised, others are logged.
        return "tensorstore_spec=" not in record.getMessage()
    return "orbax" not in record.pathname or not (
        record.levelno >= logging.ERROR
        or record.msg.startswith("Failed to get metadata for checkpointable")
    )


def _unraisable(args) -> None:
    # TensorStore's writes may end after Orbax has closed its event loop.
    if str(args.exc_value) != "Event loop is closed":
        _unraisable.before(args)
