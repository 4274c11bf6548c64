"""Locks a workdir, so that only one start at a time writes to it.

The file `lock` in the workdir names the process that holds the lock. The operating
system also locks that file until the process ends, even if it is killed, so a restart
on the same host begins at once. Another host cannot see the process, and buckets do not
support file locks. So the holder also writes a heartbeat every few seconds, and if the
heartbeat stops for a minute, another start takes the lock over. Clocks of different
hosts are never compared.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import jax
from etils import epath

from vit_jax.command_line import files, processes
from vit_jax.distributed import ending
from vit_jax.errors import EXIT_USER_ERROR, UserError
from vit_jax.training.checkpoint import describe_failure

NAME = "lock"
_BEAT_SECONDS = 10.0
_LEASE_SECONDS = 60.0
_LOOK_SECONDS = 1.0
_ENDING_SECONDS = 3.0  # A killed process may keep its lock until its memory is freed.
_SETTLE_SECONDS = 2.0  # If two starts write at the same time, the last one wins.
_KEYS = {"host", "pid", "start", "boot", "processes", "born", "token", "lease_seconds"}


@contextlib.contextmanager
def held(workdir: str | os.PathLike) -> Iterator[None]:
    """Locks a workdir against other starts; creates it if needed.

    All processes of a job check that they can write to it; process 0 holds the lock.

    Args:
      workdir: folder of a run or of a study, on a disk or in a bucket.

    Raises:
      UserError: the workdir cannot be written, or another start holds the lock.
    """
    path, new = _absolute(workdir), False
    with contextlib.suppress(OSError):  # `probe` reports an invalid name.
        new = not path.exists()
    probe(workdir)
    lock = None
    if jax.process_index() == 0:
        try:
            lock = _Lock(path / NAME, str(workdir))
        except UserError:
            raise
        except Exception as error:  # Buckets do not raise OSErrors.
            raise UserError(
                f"--workdir={workdir}: {path / NAME} cannot be written "
                f"({describe_failure(error)}): remove that file, change its permissions, or choose "
                "another --workdir"
            ) from error
    try:
        yield
    finally:
        if lock:
            lock.release()
        if new and _is_local(path):
            with contextlib.suppress(OSError):  # A folder with files is kept.
                os.rmdir(path)


def probe(workdir: str | os.PathLike) -> None:
    """Writes a small file into a workdir and removes it.

    Raises:
      UserError: the workdir cannot be written.
    """
    path = _absolute(workdir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if _is_local(path):
            # A file without a name does not remain, even after a kill.
            with tempfile.TemporaryFile(dir=path) as opened:
                opened.write(bytes(4096))
                opened.flush()
                os.fsync(opened.fileno())  # Some disks report that they are full here.
        else:
            file = path / f".probe-{socket.gethostname()}-{os.getpid()}"
            try:
                file.write_bytes(bytes(4096))
            finally:
                file.unlink(missing_ok=True)
    except ImportError:
        raise  # `guards.clear_errors` names the packages for buckets.
    except Exception as error:  # Buckets do not raise OSErrors.
        if _is_local(path):
            path = next(p for p in (path, *path.parents) if os.path.lexists(p))
            if not path.is_dir():
                raise UserError(
                    f"--workdir={workdir}: {path} is a file, not a folder: choose "
                    "another --workdir"
                ) from error
        raise UserError(
            f"--workdir={workdir}: {path} cannot be written ({describe_failure(error)}): choose "
            "another --workdir, free space or change its permissions"
        ) from error


class _Lock:
    """Holds the lock of a workdir until `release`."""

    def __init__(self, path: epath.Path | pathlib.Path, workdir: str):
        self._path, self._workdir = path, workdir
        self._mine = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "start": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "boot": _boot(),
            "processes": f"{socket.gethostname()} {processes.namespace()}",
            "born": processes.started(os.getpid()),
            "token": secrets.token_hex(8),
            "beat": 0,
            "lease_seconds": _LEASE_SECONDS,
        }
        self._file, locked = None, False
        if _is_local(path):
            self._file, locked = self._open()
            self._mine["inode"] = os.fstat(self._file).st_ino
        try:
            self._wait_for_the_last_holder(locked)
            self._write()
            if not locked:
                time.sleep(_SETTLE_SECONDS)
                self._refuse_if(self._is_anothers)
        except BaseException:
            self._close()
            raise
        self._done = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name="lock")
        self._beating.start()

    def release(self) -> None:
        """Releases the workdir for the next start."""
        self._done.set()
        # A disk or bucket that hangs must not delay an error on the other hosts.
        self._beating.join(_LOOK_SECONDS)
        with contextlib.suppress(Exception):  # The disk or bucket may be unavailable.
            if not self._is_anothers(self._read()):
                self._path.unlink(missing_ok=True)
        self._close()

    def _open(self) -> tuple[int, bool]:
        """Opens the file; returns it and whether the operating system has locked it."""
        until = time.monotonic() + _ENDING_SECONDS
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self._read()
                if holder and holder["boot"] != self._mine["boot"]:
                    return file, False  # A file server may keep a dead host's lock.
                os.close(file)
                if time.monotonic() > until:
                    self._refuse_if(bool)
                time.sleep(_LOOK_SECONDS / 5)
            except OSError:  # This file system does not support locks.
                return file, False
            else:
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(file), os.stat(self._path)):
                        return file, True
                os.close(file)  # The holder has just removed this file.

    def _wait_for_the_last_holder(self, locked: bool) -> None:
        """Waits for the end of the process named in the file; raises if it is alive."""
        holder = self._read()
        if holder is None:
            return
        here = all(holder[key] == self._mine[key] for key in ("boot", "processes"))
        if here and self._mine["born"]:
            # The holder may be alive although the system has locked the file for this
            # process: it may have begun while a file server still kept the lock of a
            # dead host. A lock file that was copied with its workdir does not count.
            copied = locked and holder.get("inode") not in (None, self._mine["inode"])
            if not copied and processes.started(holder["pid"]) == holder["born"]:
                self._refuse_if(bool)
            return
        if locked and holder["boot"] == self._mine["boot"]:
            return
        seconds = holder["lease_seconds"]
        print(
            f"{_who(holder)} has left a lock in {self._workdir}: waiting up to "
            f"{seconds:.0f} s for a heartbeat from it",
            file=sys.stderr,
            flush=True,
        )
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
            self._refuse_if(lambda now: now and now != holder)

    def _refuse_if(self, wrong) -> None:
        holder = self._read()
        if wrong(holder):
            raise UserError(
                f"--workdir={self._workdir}: {_who(holder)} has been writing to it since "
                f"{holder['start']}: end that process, or choose another --workdir"
            )

    def _is_anothers(self, holder: dict | None) -> bool:
        return bool(holder) and holder["token"] != self._mine["token"]

    def _beat(self) -> None:
        while not self._done.wait(_BEAT_SECONDS):
            with contextlib.suppress(Exception):  # The next beat tries again.
                holder = self._read()
                if self._is_anothers(holder):
                    ending.end_job(
                        EXIT_USER_ERROR,
                        f"{_who(holder)} took {self._workdir} over at "
                        f"{holder['start']}, because this process was not responding: this "
                        "process ends, so that only one writes",
                    )
                self._mine["beat"] += 1
                self._write()

    def _read(self) -> dict | None:
        """Returns the content of the file; None if it is missing or not complete."""
        try:
            content = json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        whole = isinstance(content, dict) and content.keys() >= _KEYS
        return content if whole else None

    def _write(self) -> None:
        text = json.dumps(self._mine)
        if self._file is None:
            self._path.write_text(text)
            return
        # The system's lock belongs to this file, so it is overwritten, up to 1,000
        # bytes.
        os.pwrite(self._file, f"{text:<1000}\n".encode(), 0)
        os.fsync(self._file)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _absolute(workdir: str | os.PathLike) -> epath.Path | pathlib.Path:
    files.refuse_scheme("--workdir", workdir)
    bucket = "://" in str(workdir)
    path = epath.Path(workdir) if bucket else pathlib.Path(workdir).absolute()
    # Orbax merges the files of all hosts by a glob pattern with this path: it would
    # save a checkpoint that cannot be read, or merge files of another run.
    if match := re.search(r"[*?\[]", os.fspath(path)):
        raise UserError(
            f"--workdir={workdir}: {path} contains {match.group()!r}, but checkpoints cannot "
            "be saved in a folder with *, ? or [ in its path: choose another --workdir"
        )
    return path


def _is_local(path: epath.Path | pathlib.Path) -> bool:
    return "://" not in str(path)


def _who(holder: dict) -> str:
    return f"process {holder['pid']} on {holder['host']}"


def _boot() -> str:
    """Returns an id of this boot of the machine; a reboot releases all file locks."""
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()  # Not Linux.
