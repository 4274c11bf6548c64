"""Captions of data sets: the texts of an image, one or several per record."""

import dataclasses
import functools
import json
import os
import pathlib
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.data import fingerprint
from vit_jax.data.decode import DamagedImage
from vit_jax.data.sources.base import Beside
from vit_jax.errors import UserError

TEXT = "text"  # Name of captions in a record, and of their tokens in a batch.
_METADATA = "metadata.jsonl"


@functools.lru_cache(maxsize=4)
def _metadata(folder: str) -> dict[str, dict]:
    """Returns the rows of a folder's metadata.jsonl by the path of the image."""
    path = pathlib.Path(folder, _METADATA)
    if not path.exists():
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        return {os.path.normpath(row["file_name"]): row for row in rows}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} must have a line of JSON with file_name per image: {error}"
        ) from error


def metadata_of(root: str, path: str) -> dict | None:
    """Returns the image's row of the nearest metadata.jsonl of its parent folders.

    Args:
      root: `data.data_dir`.
      path: path of the image below it.

    Raises:
      UserError: a metadata.jsonl is damaged.
    """
    for above in pathlib.PurePosixPath(path).parents:
        rows = _metadata(os.path.join(root, above))
        if (row := rows.get(os.path.relpath(path, above))) is not None:
            return row
    return None


def of_file(root: str, path: str, key: str) -> list[str]:
    """Returns the captions of an image file, [] if it has none.

    Captions are the field `key` of the image in the nearest metadata.jsonl of its
    parent folders, which is the format of Hugging Face's image folders; otherwise the
    lines of the file beside the image with the suffix `key`, such as "txt".

    Args:
      root: `data.data_dir`.
      path: path of the image below it.
      key: `data.caption_key`.

    Raises:
      UserError: a metadata.jsonl is damaged.
    """
    if (row := metadata_of(root, path)) is not None:
        return of_value(row.get(key))
    beside = pathlib.Path(root, path).with_suffix(f".{key}")
    try:
        lines = beside.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except UnicodeDecodeError as error:
        raise DamagedImage(f"has a caption that is not UTF-8 ({beside})") from error
    return [line.strip() for line in lines if line.strip()]


@dataclasses.dataclass(frozen=True)
class CaptionFiles(Beside):
    """The captions of image files, see `of_file`."""

    name = TEXT
    part = "captions"

    key: str

    def read(self, root, path):
        return of_file(root, path, self.key)

    def entries(self, root, paths):
        return list(sums_of_files(root, paths, self.key).items())


def sums_of_files(root: str, paths: Sequence[str], key: str) -> dict[str, int]:
    """Returns checksums of the captions of image files; of many files, every n-th."""
    sums = {}
    for path in paths[:: max(1, -(-len(paths) // fingerprint.NAMES))]:
        try:
            texts = of_file(root, path, key)
        except (DamagedImage, OSError) as error:  # Left to `data.on_error`.
            texts = [str(error)]
        sums[path] = zlib.crc32(json.dumps(texts).encode())
    return sums


def of_value(value: object) -> list[str]:
    """Returns the captions in a value: text, bytes, several of them, or None."""
    if value is None:
        return []
    if isinstance(value, bytes):
        return [value.decode("utf-8", "replace")]
    if isinstance(value, str):
        return [value]
    if isinstance(value, np.ndarray):
        value = value.reshape(-1).tolist()
    if isinstance(value, Mapping):
        value = next(iter(value.values()), None)
    return [text for one in value for text in of_value(one)]
