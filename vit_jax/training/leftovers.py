"""Removes files that killed and failed saves leave behind.

While a checkpoint is written or removed, there is an empty file `STEP.unfinished`
beside it. A folder without checksums is removed only if this file exists. Without it,
the folder may be the only copy of a checkpoint whose checksums were lost, so it is only
reported.
"""

import contextlib
import re
import time

from etils import epath

from vit_jax.weights import checkpoint_folders as folders

_UNFINISHED = ".unfinished"
_ORBAX = ".orbax-checkpoint-tmp"
# Names of these empty files, and of checkpoints that `put_aside` has renamed.
_KNOWN = re.compile(r"\d+\.(unfinished|(damaged|unverified)(-\d+)?)")
_LISTED = 5


def begin(path: epath.Path) -> None:
    """Marks a checkpoint as unfinished, until `end`.

    A folder that exists already, without checksums and without a mark, is put aside.
    """
    note = _note(path)
    if path.exists() and not note.exists() and not folders.is_finished(path):
        put_aside(path, "unverified")
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text("")


def end(path: epath.Path) -> None:
    """Removes the mark of a checkpoint that is now finished or removed."""
    _note(path).unlink(missing_ok=True)


def put_aside(path: epath.Path, why: str) -> epath.Path:
    """Renames a checkpoint, so that it no longer counts as one; returns its new path."""
    first = f"{path.name}.{why}"
    names = (first, *(f"{first}-{i}" for i in range(2, 99)))
    return path.rename(
        next(p for p in (path.parent / name for name in names) if not p.exists())
    )


def remove_unfinished(folder: epath.Path) -> list[str]:
    """Removes files that failed and killed saves have left behind.

    Args:
      folder: parent of the folders of steps.

    Returns:
      Lines about other unexpected files, which are not changed.
    """
    paths = []
    with contextlib.suppress(OSError):  # The folder may not exist yet.
        paths = sorted(folder.iterdir(), key=lambda path: path.name)
    names = {path.name for path in paths}
    noted = {n.removesuffix(_UNFINISHED) for n in names if n.endswith(_UNFINISHED)}
    unverified, foreign = [], []
    for path in paths:
        name = path.name
        if _ORBAX in name:
            _remove_tree(path)
        elif not folders.is_step(name):
            foreign += [] if _KNOWN.fullmatch(name) else [name]
        elif not folders.is_finished(path):
            if name in noted:
                with contextlib.suppress(OSError):  # The disk may be read-only.
                    remove(path)
            else:
                unverified.append(name)
    for name in filter(folders.is_step, noted):
        with contextlib.suppress(OSError):
            if folders.is_finished(folder / name) or not (folder / name).exists():
                end(folder / name)
    lines = []
    if unverified:
        lines.append(
            f"{folder} contains folders without {folders.CHECKSUMS_FILE} "
            f"({_some(unverified)}): not used and not changed; remove them if a killed "
            "start left them"
        )
    if foreign:
        lines.append(
            f"{folder} contains files that are not checkpoints ({_some(foreign)}): not "
            "changed"
        )
    return lines


def remove(path: epath.Path) -> None:
    """Removes a checkpoint; if killed, the next save or start completes the removal."""
    _note(path).write_text("")
    (path / folders.CHECKSUMS_FILE).unlink(missing_ok=True)
    _remove_tree(path)
    if not path.exists():
        end(path)


def _note(path: epath.Path) -> epath.Path:
    return path.parent / f"{path.name}{_UNFINISHED}"


def _some(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _remove_tree(path: epath.Path) -> None:
    # Threads of TensorStore, or other processes, may still be writing there. If files
    # cannot be removed now, the next save or start tries again.
    for pause in (0.1, 0.3, 1.0, 0.0):
        with contextlib.suppress(OSError):
            path.rmtree()
        if not path.exists():
            return
        time.sleep(pause)
