"""Checksums of a checkpoint's files: damage is found and named before it is read.

Orbax notices damage in its index, not in the numbers: every single flipped bit in a file
of array data loads without a word. So a file of CRC-32C sums is written beside the data,
last, and a checkpoint counts as finished when it is there.
"""

import json
from collections.abc import Iterator

import google_crc32c
from etils import epath

NAME = "checksums.json"
_DATA = "d"  # The folders of array data; the other files are small.
_PIECE = 8 << 20  # Bytes read at once.


def sums(folder: epath.Path, part: int = 0, parts: int = 1) -> dict[str, list]:
    """Reads a checkpoint's files and returns their sizes and checksums.

    Args:
      folder: of one step.
      part: which share of the files to read; several hosts each read one.
      parts: number of shares.

    Returns:
      Path below the folder to [bytes, CRC-32C in hexadecimal].
    """
    names = sorted(_files(folder))[part::parts]
    return {name: _sum(folder / name) for name in names}


def write(folder: epath.Path, files: dict[str, list]) -> None:
    """Writes the checksums, which declares the checkpoint finished.

    Args:
      folder: of one step.
      files: from `sums`, of all parts.
    """
    text = json.dumps(files, sort_keys=True)
    new = folder / f".{NAME}.new"
    new.write_text(json.dumps({"files": files, "crc32c": _crc(text.encode())}))
    new.replace(folder / NAME)


def has_sums(folder: epath.Path) -> bool:
    """Tells whether a checkpoint carries checksums; those of old versions do not."""
    return (folder / NAME).exists()


def damage(
    folder: epath.Path, part: int = 0, parts: int = 1, *, data: bool = True
) -> list[str]:
    """Compares a checkpoint's files with their checksums.

    Args:
      folder: of one step.
      part: which share of the files to read; several hosts each read one.
      parts: number of shares.
      data: False leaves out the array data and looks at the small files alone.

    Returns:
      A line for every file that is missing or is not what was written; empty if all is
      well or there are no checksums.
    """
    if not has_sums(folder):
        return []
    try:
        stored = json.loads((folder / NAME).read_text())
        files = stored["files"]
        if _crc(json.dumps(files, sort_keys=True).encode()) != stored["crc32c"]:
            raise ValueError
    except (ValueError, TypeError, KeyError):
        return [f"{NAME} is damaged"]
    found = []
    for name in sorted(files)[part::parts]:
        if not data and epath.Path(name).parent.name == _DATA:
            continue
        path, (size, _) = folder / name, files[name]
        if not path.exists():
            found.append(f"{name} is missing")
        elif path.stat().length != size:
            found.append(f"{name} has {path.stat().length:,} of {size:,} bytes")
        elif _sum(path) != files[name]:
            found.append(f"{name} is not what was written (CRC-32C)")
    return found


def _files(folder: epath.Path, below: str = "") -> Iterator[str]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path, f"{below}{path.name}/")
        elif path.name not in (NAME, f".{NAME}.new"):
            yield below + path.name


def _sum(path: epath.Path) -> list:
    crc = size = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            crc, size = google_crc32c.extend(crc, piece), size + len(piece)
    return [size, f"{crc:08x}"]


def _crc(data: bytes) -> str:
    return f"{google_crc32c.value(data):08x}"
