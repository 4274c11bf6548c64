"""Ends the processes of a job together, with one reason.

A process that fails writes its reason to the key-value store (agreement.py); the others
read it there (multihost.py). JAX aborts a process whose job is gone, which is caught
here.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable

from vit_jax.command_line import processes
from vit_jax.command_line.printing import printable
from vit_jax.distributed import agreement, crash_reporter

# Folders of the key-value store.
FAILURE = "vit_jax/failure"
BEATS = "vit_jax/beats"
_LEAVING = "vit_jax/leaving"
LEFT = "left"  # The heartbeat of a process that has ended in order.
_POLL_SECONDS = 1.0
# A third of the minute that docs/launch.md promises, for hosts too busy to react at
# once.
_PATIENCE_SECONDS = 20.0
_STACKS_SECONDS = 2.0  # For a loader process to write its stacks.


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why the job ends."""

    process: int  # Index of the one that failed.
    code: int  # Exit code of all processes.
    reason: str
    lost: bool = False  # Whether the process is gone, and another one announces it.
    stacks: bool = False  # Whether the others show the stacks of their threads.


def end_job(code: int, reason: str, *, stacks: bool = False) -> None:
    """Ends all processes of the job with a code and a line, from any thread.

    With `stacks` the others show the stacks of their threads.
    """
    failure = Failure(agreement.process_index(), code, reason, stacks=stacks)
    leave(announce(failure) if agreement.process_count() > 1 else failure)


def announce(failure: Failure) -> Failure:
    """Announces a failure to all processes; returns the one that came first."""
    # A second failure is refused: a collective that breaks follows from the first.
    text = json.dumps(dataclasses.astuple(failure))
    agreement.key_value_set(f"{FAILURE}/first", text)
    return Failure(*json.loads(agreement.key_value_dir_get(FAILURE).get("first", text)))


def leave(failure: Failure) -> None:
    """Ends this process with the reason; process 0 ends last."""
    reason = failure.reason
    if failure.process != agreement.process_index() and not failure.lost:
        reason = f"{agreement.process_name(failure.process)} failed: {reason}"
        if failure.stacks:
            show_stacks("this process, or the other one, hangs")
    sys.stdout.flush()
    print(printable(f"error: {reason}"), file=sys.stderr, flush=True)
    crash_reporter.clear()
    _end(failure.code, agreement.process_count() - failure.lost, failed=True)


def exit_process(code: int) -> None:
    """Ends this process without waiting for its threads; process 0 ends last."""
    _end(code, agreement.process_count(), failed=False)


def _end(code: int, everyone: int, *, failed: bool) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    processes.end_children()
    if agreement.process_count() > 1:
        agreement.key_value_set(f"{_LEAVING}/{agreement.process_index()}", "")
        if agreement.process_index() == 0:
            # It runs the service, and JAX aborts processes that lose it, without a
            # reason.
            patient = time.monotonic() + _PATIENCE_SECONDS
            while len(_ending(failed)) < everyone and time.monotonic() < patient:
                time.sleep(_POLL_SECONDS / 10)
            # The others exit shortly after they have written their key.
            time.sleep(_POLL_SECONDS / 2)
    os._exit(code)


def _ending(failed: bool) -> set[str]:
    ending = {*agreement.key_value_dir_get(_LEAVING)}
    if failed:  # Those that have ended in order write no key.
        beats = agreement.key_value_dir_get(BEATS)
        ending |= {process for process, beat in beats.items() if beat == LEFT}
    return ending


def end_at_once(code: int, reason: str) -> None:
    """Ends only this process, for example when the coordination service is gone."""
    # Not through sys.stderr: a thread that hangs may hold its lock.
    os.write(2, f"error: {reason}\n".encode())
    crash_reporter.clear()
    processes.end_children()
    os._exit(code)


def show_stacks(who: str) -> None:
    """Writes the stacks of all threads to stderr, then those of loader processes.

    The loader processes end.
    """
    # Not through sys.stderr: a thread that hangs may hold its lock.
    os.write(2, f"\n{who}: the stacks of all threads:\n".encode())
    faulthandler.dump_traceback(file=2, all_threads=True)
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            os.kill(child.pid, signal.SIGABRT)
        # Otherwise lines of several processes would be mixed.
        child.join(_STACKS_SECONDS)


# JAX's C++ code aborts a process that loses the coordination service, and one whose job
# does not come together. No option prevents it, so SIGABRT is caught before it ends the
# process, by C's `signal`: Python's handlers run in the main thread, which is too late.
_libc = ctypes.CDLL(None)
_libc.signal.restype = ctypes.c_void_p
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_abort_handlers: list[Callable[[], tuple[int, str] | None]] = []
_former_handlers: list[int | None] = []  # Such as faulthandler's.


def set_abort_handler(handler: Callable[[], tuple[int, str] | None]) -> None:
    """Sets the exit code and message of an abort; replaces the handler set before.

    Args:
      handler: called in the thread that aborts; returns the exit code and the line for
        stderr, or None if the job is not the cause. Then the process ends by SIGABRT.
    """
    _abort_handlers[:] = [handler]
    if not _former_handlers:
        function = ctypes.cast(_on_abort, ctypes.c_void_p)
        _former_handlers.append(_libc.signal(signal.SIGABRT, function))


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(number: int) -> None:
    with contextlib.suppress(Exception):  # The abort is what matters.
        if end := _abort_handlers[0]():
            end_at_once(*end)
    _libc.signal(signal.SIGABRT, _former_handlers[0])
    getattr(_libc, "raise")(number)  # It comes when this function has returned.
