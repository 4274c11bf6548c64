"""Loader processes: they end with their parent, and leave no shared memory behind.

Grain starts them. It passes batches in segments of shared memory, and uses semaphores;
both are files in /dev/shm with random names. Here they are named after the process that
trains, so that a later start can remove the files of dead processes.
"""

import concurrent.futures
import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import re
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, shared_memory

from vit_jax.command_line import processes
from vit_jax.errors import UserError, keep_warnings_from_raising

_FOLDER = pathlib.Path("/dev/shm")
_OPEN_FILES = pathlib.Path("/proc/self/fd")
_NAME = re.compile(r"(?:sem\.)?vit_jax-(\d+)-(\d+)-(\d+)-")
_RANDOM = 16  # Characters at the end of a segment's name.
# A terminal sends these to the whole process group; only the parent handles them.
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGHUP)
_NO_WARNING = "ignore:resource_tracker:UserWarning"

_listeners: list[Callable[[int], None]] = []


def end_with_parent() -> None:
    """Starts a thread that ends this child process when its parent ends in any way."""
    # Not prctl(PR_SET_PDEATHSIG), which fires when the thread that forked ends: Grain
    # starts processes from threads that end.
    parent = multiprocessing.parent_process().sentinel

    def follow():
        multiprocessing.connection.wait([parent])
        os._exit(1)

    threading.Thread(target=follow, daemon=True, name="parent").start()


def initializer() -> Callable[[int, int], None]:
    """Returns the function that Grain calls first in each loader process."""
    # Without /dev/shm no file is removed by name, and names must be shorter: macOS
    # allows 31 characters.
    prefix = f"/{_prefix()}" if _FOLDER.exists() else ""
    if prefix:  # Python has no public way to name semaphores.
        multiprocessing.current_process()._config["semprefix"] = prefix
        _remove_at_exit()
    return functools.partial(_initialize, prefix)


def _initialize(prefix: str, index: int, count: int) -> None:
    end_with_parent()
    keep_warnings_from_raising()
    if prefix:  # Python fills the name up with random characters.
        shared_memory._SHM_NAME_PREFIX = prefix
        shared_memory._SHM_SAFE_NAME_LENGTH = len(prefix) + _RANDOM


class Shipped:
    """A picklable function that is sent to loader processes in an unnamed file.

    The pipe of Python's `spawn` is not used: its writer has the read end open too, so
    writing more than 64 KiB would wait forever for a process that dies while it starts.

    Raises:
      UserError: the folder of temporary files is full or cannot be written.
    """

    def __init__(self, function: Callable):
        import cloudpickle  # Grain uses it too.

        self._function = function
        try:
            linux = _OPEN_FILES.exists()
            kind = tempfile.TemporaryFile if linux else tempfile.NamedTemporaryFile
            file = kind()
            weakref.finalize(self, file.close)
            self._path = file.name
            if linux:
                self._path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
            cloudpickle.dump(function, file)
            file.flush()
        except OSError as error:
            raise UserError(
                f"TMPDIR={tempfile.gettempdir()}: the data set cannot be written there for "
                f"loader processes ({error}): free space, name another folder, or set "
                "data.num_workers=0"
            ) from error

    def __call__(self, *args):
        return self._function(*args)

    def __reduce__(self):
        return _receive, (self._path,)


def _receive(path: str) -> Callable:
    try:
        with open(path, "rb") as file:
            return pickle.load(file)
    except OSError:
        if multiprocessing.parent_process().is_alive():
            raise
        os._exit(1)  # The parent has ended, and the file is gone.


def first_batch(batches: Iterator) -> object:
    """Returns the first batch of a Grain iterator, which starts its processes.

    The processes ignore Ctrl-C and SIGHUP, also while they start.
    """
    batch = concurrent.futures.Future()

    def begin():
        # Processes inherit the signals blocked in the thread that starts them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        # Python's resource tracker would warn when it removes shared memory after a
        # kill.
        sys.warnoptions.append(_NO_WARNING)
        try:
            resource_tracker.ensure_running()
        finally:
            sys.warnoptions.remove(_NO_WARNING)
        # Starting the tracker has unblocked them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        try:
            batch.set_result(next(batches))
        except BaseException as error:  # noqa: BLE001 (raised by `result`)
            batch.set_exception(error)

    threading.Thread(target=begin, daemon=True, name="first batch").start()
    return batch.result()


def signal_that_killed(error: RuntimeError) -> int:
    """Returns the signal that killed a loader process, from Grain's error; 0 if none."""
    match = re.search(r"Worker process was terminated .* exit code -(\d+)", str(error))
    return int(match[1]) if match else 0


@contextlib.contextmanager
def listening(listener: Callable[[int], None]) -> Iterator[None]:
    """Calls `listener` with the signal if a signal kills a loader process."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell_killed(number: int, workers: int) -> None:
    """Calls the listeners with the signal that killed a loader, or prints it."""
    for listener in _listeners:
        listener(number)
    if not _listeners:
        print(
            f"{killed(number)}: this process loads the remaining batches; lower "
            f"data.num_workers (now {workers}) or data.prefetch",
            file=sys.stderr,
            flush=True,
        )


def killed(number: int) -> str:
    """Returns the beginning of a message about a loader process killed by a signal."""
    why = ", probably out of memory" if number == signal.SIGKILL else ""
    return f"a loader process was killed by {signal.Signals(number).name}{why}"


@functools.cache
def remove_leftovers() -> None:
    """Removes the shared memory of dead processes of vit_jax, once per process."""
    with contextlib.suppress(OSError):  # Not Linux, or no permission.
        for path in _FOLDER.iterdir():
            if not (match := _NAME.match(path.name)):
                continue
            namespace, pid, started = match.groups()
            # A process of another namespace, such as a container's, is not visible
            # here.
            visible = namespace == processes.namespace()
            if visible and processes.started(pid) != started:
                with contextlib.suppress(OSError):
                    path.unlink()


@functools.cache
def _remove_at_exit() -> None:
    """Removes the shared memory of killed loader processes when this process ends."""

    def remove():
        for path in _FOLDER.glob(f"{_prefix()}*"):
            path.unlink(missing_ok=True)

    processes.after_children(remove)


def _prefix() -> str:
    pid = str(os.getpid())
    return f"vit_jax-{processes.namespace()}-{pid}-{processes.started(pid) or 0}-"
