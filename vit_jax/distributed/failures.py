"""Ends all processes of a job when one of them fails, with its reason on every host.

A process that waits in a collective for a lost one may wait for ever, without a reason.
So the first process to fail writes its reason to the key-value store of JAX's
coordination service, which needs no collective. A thread of every other process reads it
once a second, prints the reason and ends its process, whatever that is blocked in.

A process that is killed writes no reason. So each writes a heartbeat every few seconds,
and process 0, which runs the service, announces one that has fallen silent. The loss of
another process looks different depending on where it strikes: a collective breaks with
one of several exceptions, a save "fails". So an exception of any type is announced only
when every other process has been seen alive after it. When process 0 itself is gone, JAX
aborts the others at once: the handler of aborts gives them an exit code and a reason.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

import jax
from jax._src import distributed as service  # As Orbax: there is no public API.

from vit_jax import processes
from vit_jax.distributed import crash_reporter
from vit_jax.errors import (
    EXIT_CRASH,
    EXIT_INTERRUPTED,
    EXIT_TRY_AGAIN,
    EXIT_USER_ERROR,
    UserError,
)
from vit_jax.printing import printable

_LOST = "VIT_JAX_LOST_SECONDS"
_LOST_SECONDS = 40
# Folders of the key-value store.
_FAILURE = "vit_jax/failure"
_LEAVING = "vit_jax/leaving"
_BEATS = "vit_jax/beats"
_HOSTS = "vit_jax/hosts"
LEFT = "left"  # The heartbeat of a process that has ended in order.
_POLL_SECONDS = 1.0
# A third of the minute that is promised: for hosts too busy to look at once.
_PATIENCE_SECONDS = 20.0
_STACKS_SECONDS = 2.0  # For a loader process to write its stacks.


@dataclasses.dataclass(frozen=True)
class _Failure:
    """Why the job ends."""

    process: int  # Index of the one that failed.
    code: int  # Exit code of all processes.
    reason: str
    lost: bool = False  # It is gone; another process announces it.
    stacks: bool = False  # The others show the stacks of their threads.


class Heartbeats:
    """Records when the heartbeat of each process last changed, by this process's clock.

    Args:
      processes: number of processes.
      limit: seconds of silence after which a process is lost.
      clock: monotonic clock, in seconds.
    """

    def __init__(self, processes: int, limit: int, clock=time.monotonic):
        self._limit, self._clock = limit, clock
        self._last = {i: ("", clock()) for i in range(processes)}

    def silent(self, beats: dict[int, str]) -> int | None:
        """Returns the first process that has been silent for longer than the limit.

        Args:
          beats: index of a process to its heartbeat, without those that have not begun.
        """
        now = self._clock()
        for process, beat in beats.items():
            if beat != self._last[process][0]:
                self._last[process] = (beat, now)
        for process, (beat, since) in self._last.items():
            if beat != LEFT and now - since > self._limit:
                return process
        return None


class FailureBroadcast:
    """Ends all processes of the job when the work within fails in one of them.

    A context manager, for between `start.start` and the first computation; a no-op in a
    process that runs alone. One of several prints the reason, stops its loader
    processes and exits by `os._exit`, since other code would wait for the others: with 2
    for bad input, 130 for Ctrl-C, 75 if a process was lost and 1 for any other
    exception. When the work is done, process 0 waits for the others.

    Args:
      workdir: where a restart continues, for messages; "" if it will not.
      debug: show tracebacks of bad input too.
    """

    def __init__(self, workdir: str | os.PathLike, *, debug: bool = False):
        self._workdir, self._debug = workdir, debug
        self._done, self._in_order = threading.Event(), False
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._answered = time.monotonic()  # When the service last did.

    def __enter__(self):
        # Before JAX looks for devices, which waits for those of the other processes.
        if process_count() > 1:
            self._limit = lost_seconds()
            self._prepare_for_sudden_end()
            self._watcher.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if not self._watcher.is_alive():
            return
        if error is None:
            self._wait_for_others_to_finish()
        elif not isinstance(error, KeyboardInterrupt):
            self._wait_for_signs_of_life()
        self._in_order = error is None
        self._done.set()
        self._watcher.join()  # It may be the one that ends this process.
        if error is None:
            crash_reporter.clear()
            return
        failure = _announce(_describe(error))
        ours = failure.process == process_index()
        known = isinstance(error, UserError | KeyboardInterrupt)
        if ours and (self._debug or not known):
            traceback.print_exception(error)
        _leave(failure)

    def _wait_for_others_to_finish(self) -> None:
        while process_index() == 0 and not self._done.wait(_POLL_SECONDS / 10):
            beats = self._beats() or {}
            left = [i for i, beat in beats.items() if beat == LEFT]
            if len(left) >= process_count() - 1:
                return

    def _wait_for_signs_of_life(self) -> None:
        """Waits until all others have been alive after this call, or one has failed."""
        others = set(range(process_count())) - {process_index()}
        before = self._beats() or {}
        until = time.monotonic() + 2 * self._limit  # The watcher needs less.
        while time.monotonic() < until and not key_value_dir_get(_FAILURE):
            beats = self._beats()
            if beats is None and self._service_is_lost():
                # Nothing can be agreed on with process 0.
                crash_reporter.clear()
                os.write(2, f"error: {self._gone}\n".encode())
                processes.end_children()
                os._exit(EXIT_TRY_AGAIN)
            beats = beats or {}
            if all(
                beats.get(i) != before.get(i) or beats.get(i) == LEFT for i in others
            ):
                return
            time.sleep(_POLL_SECONDS / 4)

    def _watch(self) -> None:
        beat, heartbeats = 0, Heartbeats(process_count(), self._limit)
        every = max(round(self._limit / (8 * _POLL_SECONDS)), 1)
        looks = 0
        while True:
            failures = _read(_FAILURE)
            if failures:
                _leave(_Failure(*json.loads(failures["first"])))
            if failures is not None:
                self._answered = time.monotonic()
            if looks % every == 0:
                beat += 1
                _beat(str(beat))
                if process_index() == 0:
                    self._find_lost(heartbeats)
            looks += 1
            if self._done.wait(_POLL_SECONDS):
                if self._in_order:
                    _beat(LEFT)
                return

    def _find_lost(self, heartbeats: Heartbeats) -> None:
        beats = self._beats()
        lost = None if beats is None else heartbeats.silent(beats)
        if lost is not None:
            reason = (
                f"{process_name(lost)} died or was lost: no sign of life for "
                f"{self._limit} s; {self._remedy()}"
            )
            _leave(_announce(_Failure(lost, EXIT_TRY_AGAIN, reason, lost=True)))

    def _beats(self) -> dict[int, str] | None:
        found = _read(_BEATS)
        if found is None:
            return None
        self._answered = time.monotonic()
        return {int(process): beat for process, beat in found.items()}

    def _prepare_for_sudden_end(self) -> None:
        own = process_index()
        name = f"{socket.gethostname()}, pid {os.getpid()}"
        key_value_set(f"{_HOSTS}/{own}", name)
        if own:  # Until process 0 is here too; it has been at the start.
            _call_service("blocking_key_value_get", f"{_HOSTS}/0", 60_000)
        crash_reporter.set_message(
            f"{process_name(own)} was killed (for want of memory?) or crashed: see the "
            f"lines above; {self._remedy()}"
        )
        address = service.global_state.coordinator_address
        gone = f"its coordination service at {address} is gone"
        self._gone = f"{process_name(0)} died or was lost: {gone}; {self._remedy()}"
        set_abort_handler(self._explain_abort)

    def _explain_abort(self) -> tuple[int, str] | None:
        # A process that dies closes its connections before it stops to listen.
        until = time.monotonic() + 2 * _POLL_SECONDS
        while not self._service_is_lost():
            if process_index() == 0 or time.monotonic() > until:
                return None
            time.sleep(_POLL_SECONDS / 10)
        processes.end_children()
        crash_reporter.clear()
        return EXIT_TRY_AGAIN, self._gone

    def _service_is_lost(self) -> bool:
        quiet = time.monotonic() - self._answered
        return process_index() != 0 and (
            quiet > self._limit / 2
            or service_is_gone(service.global_state.coordinator_address)
        )

    def _remedy(self) -> str:
        if not self._workdir:
            return "start the job again"
        return f"start the job again, it resumes from the checkpoint in {self._workdir}"


def end_job(code: int, reason: str, *, stacks: bool = False) -> None:
    """Ends all processes of the job with a code and a line, from any thread.

    With `stacks` the others show the stacks of their threads.
    """
    failure = _Failure(process_index(), code, reason, stacks=stacks)
    _leave(_announce(failure) if process_count() > 1 else failure)


def _describe(error: BaseException) -> _Failure:
    code = EXIT_CRASH
    reason = " ".join([str(error), *getattr(error, "__notes__", ())])
    if isinstance(error, UserError):
        code = EXIT_USER_ERROR
    else:
        reason = f"{type(error).__name__}: {reason}"
    if isinstance(error, KeyboardInterrupt):
        code, reason = EXIT_INTERRUPTED, "interrupted (Ctrl-C)"
    return _Failure(process_index(), code, " ".join(reason.split()))


def _announce(failure: _Failure) -> _Failure:
    """Announces a failure to all processes; returns the one that came first."""
    # A second failure is refused: a collective that breaks follows from the first.
    text = json.dumps(dataclasses.astuple(failure))
    key_value_set(f"{_FAILURE}/first", text)
    return _Failure(*json.loads(key_value_dir_get(_FAILURE).get("first", text)))


def _leave(failure: _Failure) -> None:
    """Ends this process with the reason; process 0 ends last."""
    reason = failure.reason
    if failure.process != process_index() and not failure.lost:
        reason = f"{process_name(failure.process)} failed: {reason}"
        if failure.stacks:
            show_stacks("this process, or the other one, hangs")
    sys.stdout.flush()
    print(printable(f"error: {reason}"), file=sys.stderr, flush=True)
    crash_reporter.clear()
    _end(failure.code, process_count() - failure.lost, failed=True)


def exit_process(code: int) -> None:
    """Ends this process without waiting for its threads; process 0 ends last."""
    _end(code, process_count(), failed=False)


def _end(code: int, everyone: int, *, failed: bool) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    processes.end_children()
    if process_count() > 1:
        key_value_set(f"{_LEAVING}/{process_index()}", "")
        if process_index() == 0:
            # It runs the service, and JAX aborts processes that lose it, without a reason.
            patient = time.monotonic() + _PATIENCE_SECONDS
            while len(_exiting(failed)) < everyone and time.monotonic() < patient:
                time.sleep(_POLL_SECONDS / 10)
            time.sleep(_POLL_SECONDS / 2)  # What they do after they have said so.
    os._exit(code)


def _exiting(failed: bool) -> set[str]:
    found = set(key_value_dir_get(_LEAVING))
    if failed:  # Those that had left in order before write no more.
        beats = key_value_dir_get(_BEATS)
        found |= {process for process, beat in beats.items() if beat == LEFT}
    return found


def _beat(text: str) -> None:
    key_value_set(f"{_BEATS}/{process_index()}", text, overwrite=True)


def lost_seconds() -> int:
    """Returns after how many seconds of silence a process counts as lost."""
    # At least 5: heartbeats are a second apart.
    return seconds_from_env(_LOST, _LOST_SECONDS, least=5)


def seconds_from_env(name: str, default: int, least: int = 1) -> int:
    """Returns a whole number of seconds, at least `least`, from the environment."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise UserError(
            f"{name}={text!r}: state a whole number of seconds, from {least} on"
        )
    return int(text)


def show_stacks(who: str) -> None:
    """Writes the stacks of all threads, and of loader processes, which end, to stderr."""
    # Not through sys.stderr: a thread that hangs may hold its lock.
    os.write(2, f"\n{who}: the stacks of all threads:\n".encode())
    faulthandler.dump_traceback(file=2, all_threads=True)
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            os.kill(child.pid, signal.SIGABRT)
        # Or lines of several processes would be mixed.
        child.join(_STACKS_SECONDS)


# JAX's C++ code aborts a process that loses the coordination service, and one whose job
# does not come together. No option prevents it, so SIGABRT is caught before it ends the
# process.
_libc = ctypes.CDLL(None)
_libc.signal.restype = ctypes.c_void_p
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_abort_handlers: list[Callable[[], tuple[int, str] | None]] = []
_former_handlers: list[int | None] = []


def set_abort_handler(handler: Callable[[], tuple[int, str] | None]) -> None:
    """Sets the exit code and message of an abort, in place of what was set before.

    Args:
      handler: called in the thread that aborts; returns the exit code and the line for
        stderr, or None if the job is not the cause. Then the process ends by SIGABRT.
    """
    _abort_handlers[:] = [handler]
    if not _former_handlers:
        # Not Python's own `signal`: it runs handlers in the main thread, later.
        _former_handlers.append(_libc.signal(signal.SIGABRT, _on_abort_address))


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_abort(number: int) -> None:
    try:
        end = _abort_handlers[0]()
    except Exception:  # noqa: BLE001 (the abort is what matters)
        end = None
    if end is not None:
        code, line = end
        # Not through sys.stderr: a thread that hangs may hold its lock.
        os.write(2, f"error: {line}\n".encode())
        os._exit(code)
    _libc.signal(signal.SIGABRT, _former_handlers[0])  # Such as faulthandler's.
    getattr(_libc, "raise")(number)  # It comes when this function has returned.


_on_abort_address = ctypes.cast(_on_abort, ctypes.c_void_p)


def service_is_gone(address: str) -> bool:
    """Returns whether nobody listens where process 0 runs the coordination service."""
    try:
        connect(address)
    except OSError:
        return True
    return False


def connect(address: str) -> None:
    """Connects to host:port once, and closes the connection.

    Raises:
      OSError: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=5):
        pass


def process_index() -> int:
    """Returns the index of this process in its job."""
    # Not `jax.process_index()`, which looks for the devices of all processes first.
    return service.global_state.process_id


def process_count() -> int:
    """Returns the number of processes of the job."""
    return service.global_state.num_processes


def process_name(process: int) -> str:
    """Returns the index, host and process id of a process of the job."""
    name = key_value_dir_get(_HOSTS).get(str(process), "host unknown")
    return f"process {process} of {process_count()} ({name})"


def key_value_set(key: str, text: str, *, overwrite: bool = False) -> None:
    """Writes a text to the key-value store; a key keeps it unless `overwrite`."""
    _call_service("key_value_set", key, text, overwrite)


def key_value_dir_get(folder: str) -> dict[str, str]:
    """Returns last part of the key to text; nothing if the service does not answer."""
    return _read(folder) or {}


def _read(folder: str) -> dict[str, str] | None:
    found = _call_service("key_value_dir_get", f"{folder}/")
    if found is None:
        return None
    return {key.rsplit("/", 1)[1]: text for key, text in found}


def _call_service(method: str, *args: str | int):
    """Calls the coordination service; returns None if it refuses or is gone."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        return getattr(service.global_state.client, method)(*args)
    return None
