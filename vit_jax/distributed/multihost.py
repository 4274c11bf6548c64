"""Joins the processes of a job, and ends all of them when one fails.

`jax.distributed.initialize` joins them. This file adds to it:

- If they do not all connect, an error of one line with a remedy.
- If one fails, all end with its reason (ending.py). A thread of every process reads it
  once a second and ends the process, whatever that is blocked in.
- If one is killed, all others end and name it. Each writes a heartbeat every few
  seconds, and process 0, which runs the service, announces one that has fallen silent.
  A loss has different symptoms: a collective breaks with one of several exceptions, or
  a save fails. So an exception of any type is announced only when every other process
  has been alive after it. If process 0 is killed, JAX aborts the others at once, and
  the handler of aborts gives them an exit code and a reason.
"""

import errno
import itertools
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Mapping

import jax

from vit_jax.distributed import agreement, crash_reporter, ending
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
_LATER_SECONDS = 10  # JAX looks for lost processes too, but must not be first.
_POLL_SECONDS = 1.0


def start() -> None:
    """Joins the other processes of the job that `find_job` returns, if any.

    Call it before the first computation; it does not look for devices yet.

    Raises:
      UserError: the environment is incomplete or contradicts itself.
      LostHost: process 0 cannot be reached within VIT_JAX_START_SECONDS.
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
    ending.set_abort_handler(lambda: _not_joined(job, seconds, until))
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
    """Connects to host:port once; returns the error, None if a server listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        return error
    return None


def _check_port(job: JobProcess) -> None:
    # JAX's service crashes (SIGSEGV) if its port is taken.
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
    # If the service answers before the limit, JAX has refused the numbers.
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
        f"above; start {job.count} processes, each with a different number (set by "
        f"{job.source}), or wait longer with {_START}"
    )


class Heartbeats:
    """Records when the heartbeat of each process last changed; `limit` is in seconds."""

    def __init__(self, processes: int, limit: int, clock=time.monotonic):
        self._limit, self._clock = limit, clock
        self._last = {i: ("", clock()) for i in range(processes)}

    def silent(self, beats: Mapping[int, str]) -> int | None:
        """Returns the first process that has been silent for longer than the limit.

        Args:
          beats: index of a process to its heartbeat; processes that have not sent one
            yet are left out.
        """
        now = self._clock()
        for process, beat in beats.items():
            if beat != self._last[process][0]:
                self._last[process] = (beat, now)
        for process, (beat, since) in self._last.items():
            if beat != ending.LEFT and now - since > self._limit:
                return process
        return None


class FailureBroadcast:
    """Ends all processes of the job when the work within fails in one of them.

    A context manager to enter between `start` and the first computation; it does
    nothing if the job has one process. After a failure each process prints the reason,
    stops its loader processes and exits by `os._exit`, since an ordinary exit would
    wait for the other processes. The exit code is 2 for bad input, 130 for Ctrl-C, 75
    if a process was lost and 1 for any other exception. When the work is done, process
    0 waits for the others.

    Args:
      workdir: folder from which a restart resumes, for messages; "" if it does not.
      debug: whether to show tracebacks of bad input too.
    """

    def __init__(self, workdir: str | os.PathLike, *, debug: bool = False):
        self._remedy = "start the job again"
        if workdir:
            self._remedy += f", it resumes from the checkpoint in {workdir}"
        self._debug = debug
        self._done, self._in_order = threading.Event(), False
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._answered = time.monotonic()  # When the service last answered.

    def __enter__(self):
        if agreement.process_count() == 1:
            return self
        self._limit, me = lost_seconds(), agreement.process_index()
        agreement.key_value_set(
            f"{agreement.NAMES}/{me}", f"{socket.gethostname()}, pid {os.getpid()}"
        )
        if me:  # The name of process 0 cannot be read any more when it is gone.
            agreement.call_service(
                "blocking_key_value_get", f"{agreement.NAMES}/0", 60_000
            )
        crash_reporter.set_message(
            f"{agreement.process_name(me)} was killed (out of memory?) or crashed: see "
            f"the lines above; {self._remedy}"
        )
        self._gone = (
            f"{agreement.process_name(0)} died or was lost: its coordination service at "
            f"{service.global_state.coordinator_address} is gone; {self._remedy}"
        )
        ending.set_abort_handler(self._explain_abort)
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
        self._watcher.join()  # The watcher may end this process first.
        if error is None:
            crash_reporter.clear()
            return
        failure = ending.announce(_describe(error))
        known = isinstance(error, UserError | KeyboardInterrupt)
        if failure.process == agreement.process_index() and (self._debug or not known):
            traceback.print_exception(error)
        ending.leave(failure)

    def _wait_for_others_to_finish(self) -> None:
        while agreement.process_index() == 0 and not self._done.wait(
            _POLL_SECONDS / 10
        ):
            if [*self._beats().values()].count(
                ending.LEFT
            ) >= agreement.process_count() - 1:
                return

    def _wait_for_signs_of_life(self) -> None:
        """Waits until all others have been alive after this call, or one has failed."""
        before = self._beats()
        others = set(range(agreement.process_count())) - {agreement.process_index()}
        until = time.monotonic() + 2 * self._limit  # The watcher is faster.
        while time.monotonic() < until and not agreement.key_value_dir_get(
            ending.FAILURE
        ):
            beats = self._beats()
            if not beats and self._service_is_lost():
                # Nobody is there to agree with.
                ending.end_at_once(EXIT_TRY_AGAIN, self._gone)
            alive = {
                i for i in beats if beats[i] == ending.LEFT or beats[i] != before.get(i)
            }
            if others <= alive:
                return
            time.sleep(_POLL_SECONDS / 4)

    def _watch(self) -> None:
        heartbeats = Heartbeats(agreement.process_count(), self._limit)
        every = max(round(self._limit / (8 * _POLL_SECONDS)), 1)
        for look in itertools.count():
            if failure := self._read(ending.FAILURE).get("first"):
                ending.leave(ending.Failure(*json.loads(failure)))
            if look % every == 0:
                _beat(str(look))
                if agreement.process_index() == 0:
                    self._find_lost(heartbeats)
            if self._done.wait(_POLL_SECONDS):
                if self._in_order:
                    _beat(ending.LEFT)
                return

    def _find_lost(self, heartbeats: Heartbeats) -> None:
        beats = self._beats()
        if beats and (lost := heartbeats.silent(beats)) is not None:
            reason = (
                f"{agreement.process_name(lost)} died or was lost: no sign of life for "
                f"{self._limit} s; {self._remedy}"
            )
            ending.leave(
                ending.announce(ending.Failure(lost, EXIT_TRY_AGAIN, reason, lost=True))
            )

    def _beats(self) -> dict[int, str]:
        return {
            int(process): beat for process, beat in self._read(ending.BEATS).items()
        }

    def _read(self, folder: str) -> dict[str, str]:
        texts = agreement.read(folder)
        if texts is not None:
            self._answered = time.monotonic()
        return texts or {}

    def _explain_abort(self) -> tuple[int, str] | None:
        # A process that dies closes its connections before it stops listening.
        until = time.monotonic() + 2 * _POLL_SECONDS
        while not self._service_is_lost():
            if agreement.process_index() == 0 or time.monotonic() > until:
                return None
            time.sleep(_POLL_SECONDS / 10)
        return EXIT_TRY_AGAIN, self._gone

    def _service_is_lost(self) -> bool:
        quiet = time.monotonic() - self._answered
        return agreement.process_index() != 0 and (
            quiet > self._limit / 2
            or _connection_error(service.global_state.coordinator_address) is not None
        )


def _describe(error: BaseException) -> ending.Failure:
    words = " ".join([str(error), *getattr(error, "__notes__", ())])
    code, reason = EXIT_CRASH, f"{type(error).__name__}: {words}"
    if isinstance(error, KeyboardInterrupt):
        code, reason = EXIT_INTERRUPTED, "interrupted (Ctrl-C)"
    elif isinstance(error, UserError):
        code, reason = EXIT_USER_ERROR, words
    return ending.Failure(agreement.process_index(), code, " ".join(reason.split()))


def lost_seconds() -> int:
    """Returns after how many seconds of silence a process counts as lost."""
    # At least 5: heartbeats are a second apart.
    return env_number(_LOST, _LOST_SECONDS, least=5, remedy="it is in seconds")


def _beat(text: str) -> None:
    agreement.key_value_set(
        f"{ending.BEATS}/{agreement.process_index()}", text, overwrite=True
    )
