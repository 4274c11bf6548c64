"""Data sets of the Hugging Face hub: which Parquet files hold which split.

Names: hf://datasets/OWNER/NAME, then @REVISION and /FOLDER where needed. The files are
downloaded once, into the hub's own cache; without a network that cache is read.
"""

import pathlib
import re
from collections.abc import Sequence

from vit_jax.errors import UserError

_PREFIX = "hf://datasets/"
_NAME = re.compile(
    r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/@]+))?(/(?P<folder>.+?))?/?"
)
# How the hub names the files of a split: data/train-00000-of-00005.parquet, with a
# hash behind it in older sets; train/0000.parquet in converted ones; train.parquet.
_SHARD = re.compile(r"(?P<split>.+?)-(?P<number>\d+)-of-(?P<count>\d+)(-[0-9a-f]{8,})?")


def is_hub(name: str) -> bool:
    """Returns whether data.name is a data set of the hub."""
    return name.startswith(_PREFIX)


def download(name: str) -> str:
    """Downloads a data set's Parquet files, as far as they are not there yet.

    Args:
      name: as "hf://datasets/ylecun/mnist" or "hf://datasets/o/n@main/folder".

    Returns:
      The local folder that holds them.

    Raises:
      UserError: a bad name, no such set, or neither network nor a copy.
    """
    import huggingface_hub
    from huggingface_hub import errors

    match = _NAME.fullmatch(name)
    if not match:
        raise UserError(
            f"data.name={name!r}: write hf://datasets/OWNER/NAME, with @REVISION and "
            "/FOLDER where needed"
        )
    folder = match["folder"] or ""
    try:
        root = huggingface_hub.snapshot_download(
            match["repo"],
            repo_type="dataset",
            revision=match["revision"],
            allow_patterns=f"{folder}/**.parquet" if folder else "**.parquet",
        )
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"data.name={name!r} cannot be downloaded "
            f"({str(error).strip().splitlines()[0]}): check the name and the network, "
            "and for a gated set accept its terms and run `hf auth login`"
        ) from error
    return str(pathlib.Path(root, folder))


def files_of_splits(root: str, name: str) -> dict[str, list[str]]:
    """Finds the Parquet files of each split, in the order of their numbers.

    Args:
      root: local folder.
      name: of the data set, for messages.

    Raises:
      UserError: no files, a file of a split is missing, or several folders hold files
        of the same split.
    """
    paths = sorted(pathlib.Path(root).rglob("*.parquet"))
    if not paths:
        raise UserError(
            f"data.name={name!r}: no *.parquet files below {root!r}: set data.data_dir "
            "to a folder with files such as train-00000-of-00005.parquet"
        )
    found: dict[str, list[pathlib.Path]] = {}
    for path in paths:
        found.setdefault(_split_of(path), []).append(path)
    return {split: _ordered(split, group, name) for split, group in found.items()}


def _split_of(path: pathlib.Path) -> str:
    match = _SHARD.fullmatch(path.stem)
    if match:
        return match["split"]
    return path.parent.name if path.stem.isdecimal() else path.stem


def _ordered(split: str, paths: Sequence[pathlib.Path], name: str) -> list[str]:
    folders = sorted({str(path.parent) for path in paths})
    if len(folders) > 1:
        raise UserError(
            f"data.name={name!r} has split {split!r} in several folders "
            f"({', '.join(folders)}): choose one, as a further part of "
            "hf://datasets/OWNER/NAME/FOLDER or of data.data_dir"
        )
    matches = [_SHARD.fullmatch(path.stem) for path in paths]
    counts = {int(match["count"]) for match in matches if match}
    if counts and counts != {len(paths)}:
        raise UserError(
            f"data.name={name!r}: split {split!r} has {len(paths)} of "
            f"{max(counts)} files in {folders[0]}: download it again"
        )
    return [str(path) for path in paths]
