"""A failure of one process ends all of them, with its reason on every host.

A process that waits in a collective for one that is gone may wait for ever, and does
not know why. So the first process to fail leaves its reason with JAX's coordination
service. There a thread of every other process looks once a second; it prints the reason
and ends its process, whatever that is blocked in.

A process that is killed leaves no reason. So each leaves a beat with the service every
few seconds, and process 0, which runs it, announces one that has fallen silent. What the
loss of another process looks like depends on where it strikes: a collective breaks with
one of several exceptions, a save "fails". So an exception of any type is announced only
when every other process has been seen alive after it. When process 0 itself is gone, JAX
aborts the others at once: aborts.py gives them an exit code and a reason.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
import traceback

import jax
from jax._src import distributed as service  # As Orbax: there is no public door.

from vit_jax.errors import (
    EXIT_CRASH,
    EXIT_INTERRUPTED,
    EXIT_TRY_AGAIN,
    EXIT_USER_ERROR,
    UserError,
)
from vit_jax.parallel import aborts, distributed, heartbeats, last_words
from vit_jax.parallel.stacks import show as show_stacks
from vit_jax.printing import printable

_FAILURE = "vit_jax/failure"
_LEAVING = "vit_jax/leaving"
_BEATS = "vit_jax/beats"
_HOSTS = "vit_jax/hosts"
_LOOK_SECONDS = 1.0
# A third of the minute that is promised: for hosts too busy to look at once.
_PATIENCE_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class _Failure:
    """Why the job ends.

    Attributes:
      process: the one that failed.
      code: exit code of all.
      reason: one line.
      lost: it is gone; another process speaks for it.
      stacks: the other processes show what their threads are at.
    """

    process: int
    code: int
    reason: str
    lost: bool = False
    stacks: bool = False


class Together:
    """Joins the other processes of the job; ends all when the work within fails in one.

    Use as a context manager, before the first computation. A process that runs alone does
    as ever. One of several prints the reason, stops its loader processes and leaves by
    `os._exit`: with 2 for bad input, 130 for Ctrl-C, 75 if a process was lost and 1 for
    any other exception. So nothing runs that would wait for the others. A checkpoint that
    is being written stays unfinished, as after a kill, and the one before it counts. When
    the work is done, process 0 waits for the others.

    Args:
      workdir: of the run; a message says that it goes on from there. "" if it will not.
      debug: show tracebacks of bad input too.

    Raises:
      UserError, LostHost: as `distributed.start`.
    """

    def __init__(self, workdir: str | os.PathLike, *, debug: bool = False):
        self._workdir, self._debug = workdir, debug
        self._done, self._in_order = threading.Event(), False
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._answered = time.monotonic()  # When the service last did.

    def __enter__(self):
        # Before the devices are looked for, which waits for those of the others.
        if distributed.start() > 1:
            self._limit = distributed.lost_seconds()
            self._prepare_for_a_sudden_end()
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
            last_words.forget()
            return
        failure = _announce(_describe(error))
        ours = failure.process == index()
        known = isinstance(error, UserError | KeyboardInterrupt)
        if ours and (self._debug or not known):
            traceback.print_exception(error)
        _leave(failure)

    def _wait_for_others_to_finish(self) -> None:
        """Waits in process 0, which runs the service; the watcher may end the wait."""
        while index() == 0 and not self._done.wait(_LOOK_SECONDS / 10):
            beats = self._beats() or {}
            left = [i for i, beat in beats.items() if beat == heartbeats.LEFT]
            if len(left) >= count() - 1:
                return

    def _wait_for_signs_of_life(self) -> None:
        """Waits until all others have been alive after this call, or one has failed.

        If one is lost, the watcher learns which, and ends this process meanwhile.
        """
        others = set(range(count())) - {index()}
        before = self._beats() or {}
        until = time.monotonic() + 2 * self._limit  # The watcher needs less.
        while time.monotonic() < until and not _look_up(_FAILURE):
            beats = self._beats()
            if beats is None and self._service_is_lost():
                _end_lost(self._gone)
            beats = beats or {}
            if all(
                beats.get(i) != before.get(i) or beats.get(i) == heartbeats.LEFT
                for i in others
            ):
                return
            time.sleep(_LOOK_SECONDS / 4)

    def _watch(self) -> None:
        beat, beats = 0, heartbeats.Heartbeats(count(), self._limit)
        every = max(round(self._limit / (8 * _LOOK_SECONDS)), 1)
        looks = 0
        while True:
            failures = _ask("key_value_dir_get", _FAILURE)
            if failures:
                _leave(_Failure(*json.loads(failures[0][1])))
            if failures is not None:
                self._answered = time.monotonic()
            if looks % every == 0:
                beat += 1
                _beat(str(beat))
                if index() == 0:
                    self._find_lost(beats)
            looks += 1
            if self._done.wait(_LOOK_SECONDS):
                if self._in_order:
                    _beat(heartbeats.LEFT)
                return

    def _find_lost(self, known: heartbeats.Heartbeats) -> None:
        beats = self._beats()
        lost = None if beats is None else known.silent(beats)
        if lost is not None:
            reason = f"no sign of life for {self._limit} s"
            reason = f"{who(lost)} died or was lost: {reason}; {self._remedy()}"
            _leave(_announce(_Failure(lost, EXIT_TRY_AGAIN, reason, lost=True)))

    def _beats(self) -> dict[int, str] | None:
        """Returns the last beat of each process; None if the service does not answer."""
        found = _ask("key_value_dir_get", _BEATS)
        if found is None:
            return None
        self._answered = time.monotonic()
        return {int(key.rsplit("/", 1)[1]): beat for key, beat in found}

    def _prepare_for_a_sudden_end(self) -> None:
        own = index()
        name = f"{socket.gethostname()}, pid {os.getpid()}"
        _ask("key_value_set", f"{_HOSTS}/{own}", name)
        if own:  # Until process 0 is here too; it has been at the start.
            _ask("blocking_key_value_get", f"{_HOSTS}/0", 60_000)
        last_words.leave(
            f"{who(own)} was killed (for want of memory?) or crashed: see the lines "
            f"above; {self._remedy()}"
        )
        address = service.global_state.coordinator_address
        gone = f"its coordination service at {address} is gone"
        self._gone = f"{who(0)} died or was lost: {gone}; {self._remedy()}"
        aborts.explain(self._explain_abort)

    def _explain_abort(self) -> tuple[int, str] | None:
        # A process that dies closes its connections before it stops to listen.
        until = time.monotonic() + 2 * _LOOK_SECONDS
        while not self._service_is_lost():
            if index() == 0 or time.monotonic() > until:
                return None
            time.sleep(_LOOK_SECONDS / 10)
        _stop_loaders()
        last_words.forget()
        return EXIT_TRY_AGAIN, self._gone

    def _service_is_lost(self) -> bool:
        quiet = time.monotonic() - self._answered
        return index() != 0 and (
            quiet > self._limit / 2
            or distributed.service_is_gone(service.global_state.coordinator_address)
        )

    def _remedy(self) -> str:
        if not self._workdir:
            return "start the job again"
        return f"start the job again, it goes on from the checkpoint in {self._workdir}"


def end_all(code: int, reason: str, *, stacks: bool = False) -> None:
    """Ends this process and all others of the job, from any thread; never returns.

    Args:
      code: exit code of all.
      reason: one line.
      stacks: whether the others show the stacks of their threads.
    """
    failure = _Failure(index(), code, reason, stacks=stacks)
    _leave(_announce(failure) if count() > 1 else failure)


def _describe(error: BaseException) -> _Failure:
    code = EXIT_CRASH
    reason = " ".join([str(error), *getattr(error, "__notes__", ())])
    if isinstance(error, UserError):
        code = EXIT_USER_ERROR
    else:
        reason = f"{type(error).__name__}: {reason}"
    if isinstance(error, KeyboardInterrupt):
        code, reason = EXIT_INTERRUPTED, "interrupted (Ctrl-C)"
    return _Failure(index(), code, " ".join(reason.split()))


def _announce(failure: _Failure) -> _Failure:
    """Tells all processes why they end; returns the failure that came first."""
    # A second failure is refused: a collective that breaks follows from the first.
    text = json.dumps(dataclasses.astuple(failure))
    _ask("key_value_set", f"{_FAILURE}/first", text)
    return _Failure(*json.loads([*_look_up(_FAILURE), text][0]))


def _leave(failure: _Failure) -> None:
    """Ends this process with the reason; process 0 ends last."""
    reason = failure.reason
    if failure.process != index() and not failure.lost:
        reason = f"{who(failure.process)} failed: {reason}"
        if failure.stacks:
            show_stacks("this process, or the other one, hangs")
    sys.stdout.flush()
    print(printable(f"error: {reason}"), file=sys.stderr, flush=True)
    last_words.forget()
    _end(failure.code, count() - failure.lost, failed=True)


def _end_lost(reason: str) -> None:
    """Ends this process because process 0 is gone, with which nothing can be agreed."""
    last_words.forget()
    os.write(2, f"error: {reason}\n".encode())
    _stop_loaders()
    os._exit(EXIT_TRY_AGAIN)


def leave(code: int) -> None:
    """Ends this process without waiting for its threads; process 0 ends last.

    Args:
      code: exit code.
    """
    _end(code, count(), failed=False)


def _end(code: int, everyone: int, *, failed: bool) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    _stop_loaders()
    if count() > 1:
        _ask("key_value_set", f"{_LEAVING}/{index()}", "")
        if index() == 0:
            # It runs the service, and JAX aborts whoever loses that, without the reason.
            patient = time.monotonic() + _PATIENCE_SECONDS
            while len(_away(failed)) < everyone and time.monotonic() < patient:
                time.sleep(_LOOK_SECONDS / 10)
            time.sleep(_LOOK_SECONDS / 2)  # What they do after their last word.
    os._exit(code)


def _stop_loaders() -> None:
    for child in multiprocessing.active_children():  # os._exit leaves them running.
        child.terminate()


def _away(failed: bool) -> set[str]:
    """Returns the processes that leave.

    Args:
      failed: those that had left in order before count too: they write no more.
    """
    found = [key for key, _ in _ask("key_value_dir_get", _LEAVING) or ()]
    if failed:
        beats = _ask("key_value_dir_get", _BEATS) or ()
        found += [key for key, beat in beats if beat == heartbeats.LEFT]
    return {key.rsplit("/", 1)[1] for key in found}


def who(process: int) -> str:
    """Returns the number, host and process id of a process of the job."""
    names = dict(_ask("key_value_dir_get", _HOSTS) or ())
    name = names.get(f"{_HOSTS}/{process}", "host unknown")
    return f"process {process} of {count()} ({name})"


def _beat(text: str) -> None:
    _ask("key_value_set", f"{_BEATS}/{index()}", text, True)


def _look_up(folder: str) -> list[str]:
    return [value for _, value in _ask("key_value_dir_get", folder) or ()]


def _ask(method: str, *words: str | int):
    """Calls the coordination service; None if it refuses or is gone."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        return getattr(service.global_state.client, method)(*words)
    return None


def index() -> int:
    """Returns the number of this process in its job."""
    # Not `jax.process_index()`, which looks for the devices of all processes first.
    return service.global_state.process_id


def count() -> int:
    """Returns the number of processes of the job."""
    return service.global_state.num_processes
