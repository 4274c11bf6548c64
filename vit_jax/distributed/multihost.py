"""Several processes of one job: how they join, what they must agree on, how they end.

`jax.distributed.initialize` joins them. This file adds to it:

- One line with a remedy where they do not come together.
- They compare their config, code and data. Processes that differ would compile different
  programs, and wait for each other in collectives that never meet.
- If one fails, all end with its reason: it writes the reason to the key-value store of
  JAX's coordination service, which needs no collective. A thread of every other process
  reads it once a second, prints it and ends its process, whatever that is blocked in.
- If one is killed, all others end with its name. Each writes a heartbeat every few
  seconds, and process 0, which runs the service, announces one that has fallen silent.
  A loss shows differently at each place: a collective breaks with one of several
  exceptions, a save "fails". So an exception of any type is announced only when every
  other process has been alive after it. If process 0 is killed, JAX aborts the others at
  once, and the handler of aborts gives them an exit code and a reason.
"""

import contextlib
import ctypes
import dataclasses
import errno
import faulthandler
import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping

import jax

from vit_jax.command_line import processes
from vit_jax.command_line.printing import printable
from vit_jax.distributed import crash_reporter
from vit_jax.distributed.internals import distributed as service
from vit_jax.distributed.schedulers import JobProcess, env_number, find_job
from vit_jax.errors import (
    EXIT_CRASH,
    EXIT_INTERRUPTED,
    EXIT_TRY_AGAIN,
    EXIT_USER_ERROR,
    LostHost,
    UserError,
)

# Hosts of one job may start minutes apart: images are pulled, machines booted.
_START, _START_SECONDS = "VIT_JAX_START_SECONDS", 300
_LOST, _LOST_SECONDS = "VIT_JAX_LOST_SECONDS", 40
_LATER_SECONDS = 10  # JAX looks for lost processes too, and should name none first.
# Folders of the key-value store.
_AGREEMENT = "vit_jax/agreement"
_FAILURE = "vit_jax/failure"
_LEAVING = "vit_jax/leaving"
_BEATS = "vit_jax/beats"
_NAMES = "vit_jax/hosts"
LEFT = "left"  # The heartbeat of a process that has ended in order.
_POLL_SECONDS = 1.0
# A third of the minute that is promised: for hosts too busy to look at once.
_PATIENCE_SECONDS = 20.0
_STACKS_SECONDS = 2.0  # For a loader process to write its stacks.
_MAX_KEYS, _MAX_PROCESSES = 4, 6  # In one message about a difference.
_REMEDIES = {
    "config": "start all processes with the same config",
    "code": "install the same code and packages on all hosts",
    "devices": "start every process with as many devices, of the same kind",
    "data": "give all hosts the same data",
    "weights": "give all hosts the same weights, opened with the same flags",
    "preprocess": "give all hosts the same flags on images",
    "workdir": "give all hosts the same --workdir, on storage that they share",
}
_comparisons = itertools.count()  # Their number is the same in all processes.


def start() -> None:
    """Joins the other processes of the job, if `find_job` returns one.

    Call it before the first computation; it does not look for devices yet.

    Raises:
      UserError: the environment is incomplete or contradicts itself.
      LostHost: process 0 cannot be reached in VIT_JAX_START_SECONDS.
    """
    seconds = env_number(_START, _START_SECONDS, least=1, remedy="it is in seconds")
    until = time.monotonic() + seconds
    job = find_job(seconds)
    if job is None:
        return
    _bypass_proxies(job.address)
    if job.process:
        _wait_for_service(job, seconds)
    else:
        _check_port(job)
    # JAX aborts this process if the others do not come, or come twice.
    set_abort_handler(lambda: _not_joined(job, seconds, until))
    crash_reporter.set_message(
        f"process {job.process} of {job.count} ended while it started"
    )
    jax.distributed.initialize(
        job.address,
        job.count,
        job.process,
        local_device_ids=job.gpus,
        cluster_detection_method="deactivate",  # find_job has done it.
        initialization_timeout=max(round(until - time.monotonic()), 1),
        # `FailureBroadcast` acts first, and names the process. JAX ends this one after
        # half of this at the earliest, even if its threads hang.
        heartbeat_timeout_seconds=2 * (lost_seconds() + _LATER_SECONDS),
    )


def _bypass_proxies(address: str) -> None:
    """Excludes process 0 from the web proxies that gRPC reads from the environment."""
    name = "no_grpc_proxy" if "no_grpc_proxy" in os.environ else "no_proxy"
    hosts = [os.environ.get(name, ""), address.rpartition(":")[0]]
    os.environ["no_grpc_proxy"] = ",".join(filter(None, hosts))
    jax.config.update("jax_check_proxy_envs", False)  # It warns of them.


def _wait_for_service(job: JobProcess, seconds: int) -> None:
    # JAX waits too, but ends by an abort with a C++ stack trace.
    until = time.monotonic() + seconds
    while error := _connection_error(job.address):
        if time.monotonic() >= until:
            # An address that does not exist will not exist at the next start either.
            wrong = isinstance(error, socket.gaierror)
            raise (UserError if wrong else LostHost)(
                f"process {job.process} of {job.count} ({socket.gethostname()}) cannot "
                f"reach process 0 at {job.address} ({error.strerror or error}; tried "
                f"for {seconds} s; from {job.source}): start process 0 there, open the "
                f"port between the hosts, or wait longer with {_START}"
            )
        time.sleep(min(0.5, max(until - time.monotonic(), 0)))


def _connection_error(address: str) -> OSError | None:
    """Connects to host:port once; returns why nobody listens there, None if one does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        return error
    return None


def _check_port(job: JobProcess) -> None:
    # JAX's service crashes (SIGSEGV) where its port is taken.
    port = int(job.address.rpartition(":")[2])
    with socket.socket(socket.AF_INET6) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("::", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return  # A host without IPv6: JAX raises later.
            raise UserError(
                f"port {port} of this host ({socket.gethostname()}) is taken: another "
                f"job runs here, or the last one has not ended yet; choose another port "
                f"for {job.address} (from {job.source})"
            ) from error


def _not_joined(job: JobProcess, seconds: int, until: float) -> tuple[int, str]:
    """Returns the exit code and reason if JAX aborts before all have joined."""
    # Before the limit and with a service JAX has refused the numbers.
    late = time.monotonic() > until - 1
    lost = job.process and _connection_error(job.address)
    others = "the others"
    if lost:
        others = f"process 0 of {job.count}, which is lost,"
    elif late and job.count == 2:
        others = f"process {1 - job.process} of 2"
    return EXIT_TRY_AGAIN if late or lost else EXIT_USER_ERROR, (
        f"process {job.process} of {job.count} ({socket.gethostname()}) did not come "
        f"together with {others} at {job.address} in {seconds} s: see JAX's message "
        f"above; start {job.count} processes, each with another number (they are from "
        f"{job.source}), or wait longer with {_START}"
    )


def check_agreement(**kinds: Mapping[str, object]) -> None:
    """Checks that all processes of the job were started with the same values.

    All processes call it in the same order and wait for each other here, unless
    `FailureBroadcast` ends them because one of them fails or is lost.

    Args:
      **kinds: "config", "code", "devices", "data", "weights", "preprocess" or
        "workdir" to the values that must be the same: key to a JSON value.

    Raises:
      UserError: processes differ; with the kind, the keys and each process's value.
    """
    if process_count() == 1:
        return
    folder = f"{_AGREEMENT}/{next(_comparisons)}"
    key_value_set(f"{folder}/values/{process_index()}", json.dumps(kinds))
    if process_index() == 0:
        while len(texts := key_value_dir_get(f"{folder}/values")) < process_count():
            time.sleep(_POLL_SECONDS / 20)
        values = [json.loads(texts[str(i)]) for i in range(process_count())]
        key_value_set(f"{folder}/verdict/0", difference(values, process_name))
    while not (verdict := key_value_dir_get(f"{folder}/verdict")):
        time.sleep(_POLL_SECONDS / 20)
    if verdict["0"]:
        raise UserError(verdict["0"])


def difference(values: list[dict[str, dict]], name: Callable[[int], str] = str) -> str:
    """Describes in one line how the values of processes differ; "" if they do not.

    Args:
      values: for each process: kind to key to value.
      name: function from the index of a process to its name.
    """
    for kind in values[0]:
        texts = []
        for key in sorted({key for value in values for key in value[kind]}):
            holders = {}  # Value to the processes that have it.
            for process, value in enumerate(values):
                text = json.dumps(value[kind][key]) if key in value[kind] else "absent"
                holders.setdefault(text, []).append(process)
            if len(holders) > 1:
                held = [_held(text, some, name) for text, some in holders.items()]
                texts.append(f"{key} is {', '.join(held)}")
        if texts:
            if (more := len(texts) - _MAX_KEYS) > 0:
                texts[_MAX_KEYS:] = [f"and {more} more keys"]
            return f"the hosts differ in {kind}: {'; '.join(texts)}: {_REMEDIES[kind]}"
    return ""


def _held(text: str, some: list[int], name: Callable[[int], str]) -> str:
    names = ", ".join(name(process) for process in some[:_MAX_PROCESSES])
    if (more := len(some) - _MAX_PROCESSES) > 0:
        names += f" and {more} others"
    text = text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
    return f"{text} on {names}"


@dataclasses.dataclass(frozen=True)
class _Failure:
    """Why the job ends."""

    process: int  # Index of the one that failed.
    code: int  # Exit code of all processes.
    reason: str
    lost: bool = False  # It is gone; another process announces it.
    stacks: bool = False  # The others show the stacks of their threads.


class Heartbeats:
    """Records when the heartbeat of each process last changed; `limit` is in seconds."""

    def __init__(self, processes: int, limit: int, clock=time.monotonic):
        self._limit, self._clock = limit, clock
        self._last = {i: ("", clock()) for i in range(processes)}

    def silent(self, beats: Mapping[int, str]) -> int | None:
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

    A context manager, for between `start` and the first computation; a no-op in a
    process that runs alone. One of several prints the reason, stops its loader
    processes and exits by `os._exit`, since other code would wait for the others: with 2
    for bad input, 130 for Ctrl-C, 75 if a process was lost and 1 for any other
    exception. When the work is done, process 0 waits for the others.

    Args:
      workdir: where a restart resumes, for messages; "" if it does not.
      debug: whether to show tracebacks of bad input too.
    """

    def __init__(self, workdir: str | os.PathLike, *, debug: bool = False):
        self._remedy = "start the job again"
        if workdir:
            self._remedy += f", it resumes from the checkpoint in {workdir}"
        self._debug = debug
        self._done, self._in_order = threading.Event(), False
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._answered = time.monotonic()  # When the service last did.

    def __enter__(self):
        if process_count() == 1:
            return self
        self._limit, me = lost_seconds(), process_index()
        key_value_set(f"{_NAMES}/{me}", f"{socket.gethostname()}, pid {os.getpid()}")
        if me:  # Its name cannot be read when process 0 is gone.
            _call_service("blocking_key_value_get", f"{_NAMES}/0", 60_000)
        crash_reporter.set_message(
            f"{process_name(me)} was killed (for want of memory?) or crashed: see the "
            f"lines above; {self._remedy}"
        )
        self._gone = (
            f"{process_name(0)} died or was lost: its coordination service at "
            f"{service.global_state.coordinator_address} is gone; {self._remedy}"
        )
        set_abort_handler(self._explain_abort)
        # Before JAX looks for devices, which waits for those of the other processes.
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
        known = isinstance(error, UserError | KeyboardInterrupt)
        if failure.process == process_index() and (self._debug or not known):
            traceback.print_exception(error)
        _leave(failure)

    def _wait_for_others_to_finish(self) -> None:
        while process_index() == 0 and not self._done.wait(_POLL_SECONDS / 10):
            if [*self._beats().values()].count(LEFT) >= process_count() - 1:
                return

    def _wait_for_signs_of_life(self) -> None:
        """Waits until all others have been alive after this call, or one has failed."""
        before = self._beats()
        others = set(range(process_count())) - {process_index()}
        until = time.monotonic() + 2 * self._limit  # The watcher needs less.
        while time.monotonic() < until and not key_value_dir_get(_FAILURE):
            beats = self._beats()
            if not beats and self._service_is_lost():
                # Nobody is there to agree with.
                _end_at_once(EXIT_TRY_AGAIN, self._gone)
            alive = {i for i in beats if beats[i] == LEFT or beats[i] != before.get(i)}
            if others <= alive:
                return
            time.sleep(_POLL_SECONDS / 4)

    def _watch(self) -> None:
        heartbeats = Heartbeats(process_count(), self._limit)
        every = max(round(self._limit / (8 * _POLL_SECONDS)), 1)
        for look in itertools.count():
            if failure := self._read(_FAILURE).get("first"):
                _leave(_Failure(*json.loads(failure)))
            if look % every == 0:
                _beat(str(look))
                if process_index() == 0:
                    self._find_lost(heartbeats)
            if self._done.wait(_POLL_SECONDS):
                if self._in_order:
                    _beat(LEFT)
                return

    def _find_lost(self, heartbeats: Heartbeats) -> None:
        beats = self._beats()
        if beats and (lost := heartbeats.silent(beats)) is not None:
            reason = (
                f"{process_name(lost)} died or was lost: no sign of life for "
                f"{self._limit} s; {self._remedy}"
            )
            _leave(_announce(_Failure(lost, EXIT_TRY_AGAIN, reason, lost=True)))

    def _beats(self) -> dict[int, str]:
        return {int(process): beat for process, beat in self._read(_BEATS).items()}

    def _read(self, folder: str) -> dict[str, str]:
        texts = _read(folder)
        if texts is not None:
            self._answered = time.monotonic()
        return texts or {}

    def _explain_abort(self) -> tuple[int, str] | None:
        # A process that dies closes its connections before it stops to listen.
        until = time.monotonic() + 2 * _POLL_SECONDS
        while not self._service_is_lost():
            if process_index() == 0 or time.monotonic() > until:
                return None
            time.sleep(_POLL_SECONDS / 10)
        return EXIT_TRY_AGAIN, self._gone

    def _service_is_lost(self) -> bool:
        quiet = time.monotonic() - self._answered
        return process_index() != 0 and (
            quiet > self._limit / 2
            or _connection_error(service.global_state.coordinator_address) is not None
        )


def end_job(code: int, reason: str, *, stacks: bool = False) -> None:
    """Ends all processes of the job with a code and a line, from any thread.

    With `stacks` the others show the stacks of their threads.
    """
    failure = _Failure(process_index(), code, reason, stacks=stacks)
    _leave(_announce(failure) if process_count() > 1 else failure)


def _describe(error: BaseException) -> _Failure:
    words = " ".join([str(error), *getattr(error, "__notes__", ())])
    code, reason = EXIT_CRASH, f"{type(error).__name__}: {words}"
    if isinstance(error, KeyboardInterrupt):
        code, reason = EXIT_INTERRUPTED, "interrupted (Ctrl-C)"
    elif isinstance(error, UserError):
        code, reason = EXIT_USER_ERROR, words
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
            while len(_ending(failed)) < everyone and time.monotonic() < patient:
                time.sleep(_POLL_SECONDS / 10)
            # The others have still to exit after they have written it.
            time.sleep(_POLL_SECONDS / 2)
    os._exit(code)


def _ending(failed: bool) -> set[str]:
    ending = {*key_value_dir_get(_LEAVING)}
    if failed:  # Those that had left in order before write no more.
        beats = key_value_dir_get(_BEATS)
        ending |= {process for process, beat in beats.items() if beat == LEFT}
    return ending


def _end_at_once(code: int, reason: str) -> None:
    # Not through sys.stderr: a thread that hangs may hold its lock.
    os.write(2, f"error: {reason}\n".encode())
    crash_reporter.clear()
    processes.end_children()
    os._exit(code)


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
# process, by C's `signal`: handlers of Python's run in the main thread, and too late.
_libc = ctypes.CDLL(None)
_libc.signal.restype = ctypes.c_void_p
_libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
_abort_handlers: list[Callable[[], tuple[int, str] | None]] = []
_former_handlers: list[int | None] = []  # Such as faulthandler's.


def set_abort_handler(handler: Callable[[], tuple[int, str] | None]) -> None:
    """Sets the exit code and message of an abort, in place of what was set before.

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
            _end_at_once(*end)
    _libc.signal(signal.SIGABRT, _former_handlers[0])
    getattr(_libc, "raise")(number)  # It comes when this function has returned.


def lost_seconds() -> int:
    """Returns after how many seconds of silence a process counts as lost."""
    # At least 5: heartbeats are a second apart.
    return env_number(_LOST, _LOST_SECONDS, least=5, remedy="it is in seconds")


def process_index() -> int:
    """Returns the index of this process in its job."""
    # Not `jax.process_index()`, which looks for the devices of all processes first.
    return service.global_state.process_id


def process_count() -> int:
    """Returns the number of processes of the job."""
    return service.global_state.num_processes


def process_name(process: int) -> str:
    """Returns the index, host and process id of a process of the job."""
    name = key_value_dir_get(_NAMES).get(str(process), "host unknown")
    return f"process {process} of {process_count()} ({name})"


def key_value_set(key: str, text: str, *, overwrite: bool = False) -> None:
    """Writes a text to the key-value store; a key keeps it unless `overwrite`."""
    _call_service("key_value_set", key, text, overwrite)


def key_value_dir_get(folder: str) -> dict[str, str]:
    """Returns last part of the key to text; nothing if the service does not answer."""
    return _read(folder) or {}


def _beat(text: str) -> None:
    key_value_set(f"{_BEATS}/{process_index()}", text, overwrite=True)


def _read(folder: str) -> dict[str, str] | None:
    items = _call_service("key_value_dir_get", f"{folder}/")
    return items if items is None else {k.rpartition("/")[2]: v for k, v in items}


def _call_service(method: str, *args: str | int):
    """Calls the coordination service; returns None if it refuses or is gone."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        return getattr(service.global_state.client, method)(*args)
    return None
