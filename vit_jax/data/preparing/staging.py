"""Where a data set grows: beside its final name, until it is whole."""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping

from vit_jax.data.preparing import manifest, shards
from vit_jax.errors import UserError

SUFFIX = ".incomplete"
_STATE = ".state"  # A folder of notes; none of it reaches the finished set.
_PLAN = "plan.json"


class Staging:
    """The unfinished data set; made by `begin`, which holds its lock.

    Attributes:
      target: final folder.
      folder: unfinished folder beside it.
    """

    def __init__(self, target: pathlib.Path):
        self.target = target
        self.folder = target.with_name(target.name + SUFFIX)
        self.state = self.folder / _STATE

    def finished(self, file_name: str) -> dict | None:
        """Returns the note of a finished shard; None if it is to be made."""
        try:
            note = json.loads((self.state / f"{file_name}.json").read_text())
            size = (self.folder / file_name).stat().st_size
        except (OSError, ValueError):
            return None
        return note if note["written"]["file_bytes"] == size else None

    def note(self, file_name: str, note: Mapping) -> None:
        """Writes down that a shard is finished."""
        manifest.save_json(self.state / f"{file_name}.json", note)

    def finish(self) -> None:
        """Gives the set its final name. All files and the manifest must be there."""
        shutil.rmtree(self.state, ignore_errors=True)
        _sync(self.folder)
        refuse_existing(self.target)
        self.folder.rename(self.target)
        _sync(self.target.parent)

    def reserve(self, size: int) -> None:
        """Raises UserError unless the disk has room for `size` more bytes."""
        free = shutil.disk_usage(self.folder).free
        if free < size:
            raise UserError(
                f"the disk of {self.target.parent} has {free / 1e6:,.1f} MB free, but "
                f"about {size / 1e6:,.1f} MB are to be written: make room or choose "
                "another --data_dir"
            )


@contextlib.contextmanager
def begin(target: pathlib.Path, plan: Mapping) -> Iterator[Staging]:
    """Begins a data set, or goes on with one that was interrupted.

    Args:
      target: final folder.
      plan: plain values; an interrupted set is taken up again only if they are equal.

    Raises:
      UserError: the target exists, another process is making it, it was begun in
        another way, or the folder cannot be made.
    """
    staging = Staging(target)
    refuse_existing(target)
    try:
        staging.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(staging.folder, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"cannot make {staging.folder}: {error.strerror}; choose another --data_dir"
        ) from error
    try:
        _take(lock, staging)
        _compare_plan(staging, plan)
        yield staging
    finally:
        os.close(lock)  # And with it goes the lock, also when the process is killed.


def refuse_existing(target: pathlib.Path) -> None:
    """Raises UserError if the target is there."""
    if target.exists():
        raise UserError(
            f"{target} exists: add --verify to check it, or remove it or choose another "
            "--data_dir to prepare it anew"
        )


def digest(items: Iterator | list) -> str:
    """Returns a checksum of plain values, for a plan."""
    total = hashlib.sha256()
    for item in items:
        total.update(json.dumps(item).encode() + b"\n")
    return total.hexdigest()


def _take(lock: int, staging: Staging) -> None:
    busy = UserError(f"another process is preparing {staging.target}: wait for it")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise busy from error
    except OSError:  # A file system without locks, as some of the network.
        return
    # It may have been finished and renamed between opening and locking.
    if not staging.folder.exists() or not os.path.samestat(
        os.fstat(lock), os.stat(staging.folder)
    ):
        raise busy


def _compare_plan(staging: Staging, plan: Mapping) -> None:
    plan = json.loads(json.dumps(plan))
    for folder in (staging.folder, staging.state):
        for stale in folder.glob(f"*{shards.PART}"):
            stale.unlink()
    if (staging.folder / manifest.NAME).exists():  # Only the renaming is left.
        begun = manifest.load(staging.folder)["made_from"]
    elif (staging.state / _PLAN).exists():
        begun = json.loads((staging.state / _PLAN).read_text())
    else:
        begun = plan
        staging.state.mkdir(exist_ok=True)
        manifest.save_json(staging.state / _PLAN, plan)
    if begun != plan:
        keys = [key for key in plan if plan[key] != begun.get(key)]
        raise UserError(
            f"{staging.folder} was begun from other input or with other flags "
            f"({', '.join(keys)}): remove it to begin anew, or give the same as then"
        )


def _sync(folder: pathlib.Path) -> None:
    """Makes names in a folder outlive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
