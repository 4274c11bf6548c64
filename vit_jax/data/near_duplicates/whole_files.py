"""Files that other processes, and later starts, see whole or not at all."""

import os
import pathlib


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """Writes a file that is never seen half done; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.tmp")
    new.write_bytes(data)
    os.replace(new, path)
