"""manifest.json of a prepared data set: counts and checksums, to be checked again."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

from vit_jax.data.preparing import shards
from vit_jax.errors import UserError

NAME = "manifest.json"
_FORMAT = 1
_VERSIONS_OF = ("vit_jax", "tensorflow-datasets", "array_record")


def save_json(path: pathlib.Path, value) -> None:
    """Writes a file that is either whole or absent, even after a power cut."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{shards.PART}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        raise shards.cannot_write(path, error) from error


def write(
    folder: pathlib.Path,
    made_from: Mapping,
    splits: Mapping[str, Sequence[shards.Written]],
    skipped: Sequence[Mapping],
) -> dict:
    """Writes the manifest of a folder whose other files are all there.

    Args:
      folder: of the data set.
      made_from: how and from what it was made; plain values.
      splits: split name -> its shards in order.
      skipped: {"split", "record", "reason"} of each record left out.

    Returns:
      The manifest's content.
    """
    known = {shard.file for written in splits.values() for shard in written}
    others = (p for p in folder.iterdir() if p.is_file() and p.name not in known)
    content = {
        "format": _FORMAT,
        "made_from": dict(made_from),
        "versions": {name: _version(name) for name in _VERSIONS_OF},
        "splits": {
            name: {
                "records": sum(shard.records for shard in written),
                "shards": [dataclasses.asdict(shard) for shard in written],
            }
            for name, written in splits.items()
        },
        "skipped": list(skipped),
        "other_files": {p.name: _sha256(p) for p in sorted(others) if p.name != NAME},
    }
    save_json(folder / NAME, content)
    return content


def verify(
    folder: pathlib.Path, progress: Callable[[int], object] = lambda n: None
) -> dict:
    """Reads every file of a data set again and compares it with its manifest.

    Args:
      folder: of the data set.
      progress: is told the number of records of each shard that was checked.

    Returns:
      The manifest's content.

    Raises:
      UserError: there is no manifest, or a file is not as it says.
    """
    content = load(folder)
    wrong = []
    for name, digest in content["other_files"].items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif _sha256(path) != digest:
            wrong.append(f"{name} has changed")
    for name, split in content["splits"].items():
        for expected in split["shards"]:
            try:
                found = dataclasses.asdict(shards.check(folder / expected["file"]))
            except shards.DamagedShard as error:
                wrong.append(f"{expected['file']}: {error}")
            else:
                wrong += _differences(expected, found)
            progress(expected["records"])
        if split["records"] != sum(s["records"] for s in split["shards"]):
            wrong.append(f"{NAME} contradicts itself about split {name}")
    wrong += _metadata_differences(folder, content)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(
            f"{folder} is not what was prepared: {wrong[0]}{more}; remove the folder "
            "and prepare it again"
        )
    return content


def load(folder: pathlib.Path) -> dict:
    """Reads the manifest.

    Raises:
      UserError: there is none that can be read.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise UserError(f"{path} has format {content['format']}, not {_FORMAT}")
        return content
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} has no {NAME} to verify it by: it was not prepared by "
            "python -m vit_jax.prepare"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path} is damaged ({error}): remove {folder} and prepare it again"
        ) from error


def _differences(expected: Mapping, found: Mapping) -> list[str]:
    for key in ("records", "file_bytes", "sha256", "records_crc32c"):
        if expected[key] != found[key]:
            was, now = expected[key], found[key]
            return [f"{expected['file']} has {key} {now}, not {was}"]
    return []


def _metadata_differences(folder: pathlib.Path, content: Mapping) -> list[str]:
    """Compares the counts with those that TFDS will believe."""
    try:
        info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
        lengths = {
            s["name"]: [int(n) for n in s["shardLengths"]] for s in info["splits"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"dataset_info.json cannot be read ({error})"]
    counted = {
        name: [shard["records"] for shard in split["shards"]]
        for name, split in content["splits"].items()
    }
    return [] if lengths == counted else ["dataset_info.json has other counts"]


def _sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # A checkout that was not installed.
