"""What killed and failed saves leave behind: removed if it is ours, else only told.

Before a checkpoint is written, and before one in a bucket is removed, an empty file
`STEP.unfinished` is put beside it, and taken away when that is done. A folder without
checksums is ours to remove only where there is such a file: another one may be the only
copy of a checkpoint whose checksums were lost.
"""

import contextlib
import re
import time

from etils import epath

from vit_jax.weights import workdir as layout

_REMOVED = ".removed"  # A folder that a kill may leave half deleted.
_UNFINISHED = ".unfinished"
_ORBAX = ".orbax-checkpoint-tmp"
# Such a note, or what an earlier start has put aside, and told of.
_KNOWN = re.compile(r"\d+\.(unfinished|(damaged|unverified)(-\d+)?)")
_LISTED = 5


def begin(path: epath.Path) -> None:
    """Notes that a checkpoint is ours and not whole, until `end`.

    One that lies there already, without checksums and not known as ours, is put aside.
    """
    note = _note(path)
    if path.exists() and not note.exists() and not layout.is_finished(path):
        put_aside(path, "unverified")
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text("")


def end(path: epath.Path) -> None:
    """Notes that a checkpoint is whole, or gone."""
    _note(path).unlink(missing_ok=True)


def put_aside(path: epath.Path, why: str) -> epath.Path:
    """Renames a checkpoint, so that it counts no more; returns its new place."""
    first = f"{path.name}.{why}"
    names = (first, *(f"{first}-{i}" for i in range(2, 99)))
    return path.rename(
        next(p for p in (path.parent / name for name in names) if not p.exists())
    )


def remove_unfinished(folder: epath.Path, *, again_after: float = 0.0) -> list[str]:
    """Removes what our saves that failed or were killed have left.

    Args:
      folder: folder with one folder per step.
      again_after: seconds until a second look: TensorStore's threads write on for a
        moment after a save has failed, and make its folder anew.

    Returns:
      Lines on what is there but is not ours to remove.
    """
    found = _remove_unfinished(folder)
    if again_after:
        time.sleep(again_after)
        found = _remove_unfinished(folder)
    return found


def _remove_unfinished(folder: epath.Path) -> list[str]:
    paths = []
    with contextlib.suppress(OSError):  # There is none yet, or the disk is gone.
        paths = sorted(folder.iterdir(), key=lambda path: path.name)
    notes = [re.fullmatch(rf"(\d+){_UNFINISHED}", path.name) for path in paths]
    ours = {note[1] for note in notes if note}
    unverified, foreign = [], []
    for path in paths:
        name = path.name
        if _ORBAX in name or re.fullmatch(rf"\d+{_REMOVED}", name):
            _remove_tree(path)
        elif layout.is_step(name) and not layout.is_finished(path):
            if name not in ours:
                unverified.append(name)
                continue
            with contextlib.suppress(OSError):  # A disk that is read-only.
                remove(path)
        elif not (layout.is_step(name) or _KNOWN.fullmatch(name)):
            foreign.append(name)
    for name in ours:
        with contextlib.suppress(OSError):
            if layout.is_finished(folder / name) or not (folder / name).exists():
                end(folder / name)
    lines = []
    if unverified:
        lines.append(
            f"{folder} has {_some(unverified)} without {layout.CHECKSUMS_FILE}: not used and left "
            "alone; if a start that was killed left it, remove it"
        )
    if foreign:
        lines.append(f"{folder} has {_some(foreign)}, of no checkpoint: left alone")
    return lines


def remove(path: epath.Path) -> None:
    """Removes a checkpoint, such that a kill does not leave half of it."""
    if "://" in str(path):  # Nothing can be renamed in a bucket at once.
        _note(path).write_text("")
        (path / layout.CHECKSUMS_FILE).unlink(missing_ok=True)
        _remove_tree(path)
        end(path)
    else:
        _remove_tree(path.rename(path.parent / f"{path.name}{_REMOVED}"))


def _note(path: epath.Path) -> epath.Path:
    return path.parent / f"{path.name}{_UNFINISHED}"


def _some(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _remove_tree(path: epath.Path) -> None:
    # Threads of TensorStore, or other processes, may be writing there still. What is left
    # in the end, as on a read-only disk, goes with the next save or the next start.
    for pause in (0.1, 0.3, 1.0, 0.0):
        with contextlib.suppress(OSError):
            path.rmtree()
        if not path.exists():
            return
        time.sleep(pause)
