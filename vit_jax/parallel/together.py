"""A failure of one process ends all of them, with its reason on every host.

A process that waits in a collective for one that is gone may wait for ever, and does
not know why. So the first process to fail leaves its reason with JAX's coordination
service. There a thread of every other process looks once a second; it prints the reason
and ends its process, whatever that is blocked in.

A process that is killed leaves no reason. So each leaves a beat with the service every
few seconds, and process 0, which runs it, announces one that has fallen silent. When
process 0 itself is gone, JAX aborts the others at once: last_words.py speaks for them.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
import traceback

import jax
from jax._src import distributed as service  # As Orbax: there is no public door.

from vit_jax.errors import UserError
from vit_jax.parallel import distributed, heartbeats, last_words
from vit_jax.parallel.stacks import show as show_stacks
from vit_jax.printing import printable

_FAILURE = "vit_jax/failure"
_LEAVING = "vit_jax/leaving"
_BEATS = "vit_jax/beats"
_HOSTS = "vit_jax/hosts"
_LOOK_SECONDS = 1.0
# A third of the minute that is promised: for hosts too busy to look at once.
_PATIENCE_SECONDS = 20.0
_EXIT_CRASH, _EXIT_USER_ERROR, _EXIT_INTERRUPTED = 1, 2, 130
EXIT_LOST = 75  # As after SIGTERM: try again.
# Errors of JAX that are this process's own, and not a collective that breaks.
_OWN = "RESOURCE_EXHAUSTED|INVALID_ARGUMENT|NOT_FOUND|UNIMPLEMENTED|ut of memory"


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
    """Ends all processes of the job when the work within fails in one of them.

    Use as a context manager. A process that runs alone does as ever. One of several
    prints the reason, stops its loader processes and leaves by `os._exit`: with 2 for
    bad input, 130 for Ctrl-C, 75 if a process was lost and 1 for any other exception.
    So nothing runs that would wait for the others. A checkpoint that is being written
    stays unfinished, as after a kill, and the one before it counts.

    Args:
      workdir: of the run; a message says that it goes on from there. "" if it will not.
      debug: show tracebacks of bad input too.
    """

    def __init__(self, workdir: str | os.PathLike, *, debug: bool = False):
        self._workdir, self._debug = workdir, debug
        self._done, self._in_order = threading.Event(), False
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        if jax.process_count() > 1:
            self._limit = distributed.lost_seconds()
            self._leave_last_words()
            self._watcher.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if not self._watcher.is_alive():
            return
        if _may_be_anothers(error):
            # A collective breaks when a process is gone; the watcher will learn which.
            self._watcher.join(self._limit + 2 * _LOOK_SECONDS)
        self._in_order = error is None
        self._done.set()
        self._watcher.join()  # It may be the one that ends this process.
        if error is None:
            last_words.forget()
            return
        failure = _announce(_describe(error))
        ours = failure.process == jax.process_index()
        known = isinstance(error, UserError | KeyboardInterrupt)
        if ours and (self._debug or not known):
            traceback.print_exception(error)
        _leave(failure)

    def _watch(self) -> None:
        beat, beats = 0, heartbeats.Heartbeats(jax.process_count(), self._limit)
        every = max(round(self._limit / (8 * _LOOK_SECONDS)), 1)
        looks = 0
        while True:
            if failures := _look_up(_FAILURE):
                _leave(_Failure(*json.loads(failures[0])))
            if looks % every == 0:
                beat += 1
                _beat(str(beat))
                if jax.process_index() == 0:
                    self._find_lost(beats)
            last_words.answered()
            looks += 1
            if self._done.wait(_LOOK_SECONDS):
                if self._in_order:
                    _beat(heartbeats.LEFT)
                return

    def _find_lost(self, beats: heartbeats.Heartbeats) -> None:
        found = _ask("key_value_dir_get", _BEATS)
        if found is None:
            return
        lost = beats.silent({int(key.rsplit("/", 1)[1]): beat for key, beat in found})
        if lost is not None:
            reason = f"no sign of life for {self._limit} s"
            reason = f"{_who(lost)} died or was lost: {reason}; {self._remedy()}"
            _leave(_announce(_Failure(lost, EXIT_LOST, reason, lost=True)))

    def _leave_last_words(self) -> None:
        own = jax.process_index()
        name = f"{socket.gethostname()}, pid {os.getpid()}"
        _ask("key_value_set", f"{_HOSTS}/{own}", name)
        words = (
            f"{_who(own)} was killed (for want of memory?) or crashed: see the lines "
            f"above; {self._remedy()}"
        )
        if own == 0:
            last_words.leave(words)
            return
        address = service.global_state.coordinator_address
        # Until process 0 is here too; it has been at the start.
        _ask("blocking_key_value_get", f"{_HOSTS}/0", 60_000)
        gone = f"its coordination service at {address} is gone"
        gone = f"{_who(0)} died or was lost: {gone}; {self._remedy()}"
        last_words.leave(words, address, gone, patience=self._limit / 2)

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
    failure = _Failure(jax.process_index(), code, reason, stacks=stacks)
    _leave(_announce(failure) if jax.process_count() > 1 else failure)


def _describe(error: BaseException) -> _Failure:
    code = _EXIT_CRASH
    reason = " ".join([str(error), *getattr(error, "__notes__", ())])
    if isinstance(error, UserError):
        code = _EXIT_USER_ERROR
    else:
        reason = f"{type(error).__name__}: {reason}"
    if isinstance(error, KeyboardInterrupt):
        code, reason = _EXIT_INTERRUPTED, "interrupted (Ctrl-C)"
    return _Failure(jax.process_index(), code, " ".join(reason.split()))


def _may_be_anothers(error: BaseException | None) -> bool:
    """Tells whether the end of another process may be what this error comes from."""
    jaxs = isinstance(error, jax.errors.JaxRuntimeError)
    return jaxs and not re.search(_OWN, str(error))


def _announce(failure: _Failure) -> _Failure:
    """Tells all processes why they end; returns the failure that came first."""
    # A second failure is refused: a collective that breaks follows from the first.
    text = json.dumps(dataclasses.astuple(failure))
    _ask("key_value_set", f"{_FAILURE}/first", text)
    return _Failure(*json.loads([*_look_up(_FAILURE), text][0]))


def _leave(failure: _Failure) -> None:
    """Ends this process with the reason; process 0 ends last."""
    reason = failure.reason
    if failure.process != jax.process_index() and not failure.lost:
        reason = f"{_who(failure.process)} failed: {reason}"
        if failure.stacks:
            show_stacks("this process, or the other one, hangs")
    sys.stdout.flush()
    print(printable(f"error: {reason}"), file=sys.stderr, flush=True)
    last_words.forget()
    _end(failure.code, jax.process_count() - failure.lost, failed=True)


def leave(code: int) -> None:
    """Ends this process without waiting for its threads; process 0 ends last.

    Args:
      code: exit code.
    """
    _end(code, jax.process_count(), failed=False)


def _end(code: int, everyone: int, *, failed: bool) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():  # os._exit leaves them running.
        child.terminate()
    if jax.process_count() > 1:
        _ask("key_value_set", f"{_LEAVING}/{jax.process_index()}", "")
        if jax.process_index() == 0:
            # It runs the service, and JAX aborts whoever loses that, without the reason.
            patient = time.monotonic() + _PATIENCE_SECONDS
            while len(_away(failed)) < everyone and time.monotonic() < patient:
                time.sleep(_LOOK_SECONDS / 10)
            time.sleep(_LOOK_SECONDS / 2)  # What they do after their last word.
    os._exit(code)


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


def _who(process: int) -> str:
    names = dict(_ask("key_value_dir_get", _HOSTS) or ())
    name = names.get(f"{_HOSTS}/{process}", "host unknown")
    return f"process {process} of {jax.process_count()} ({name})"


def _beat(text: str) -> None:
    _ask("key_value_set", f"{_BEATS}/{jax.process_index()}", text, True)


def _look_up(folder: str) -> list[str]:
    return [value for _, value in _ask("key_value_dir_get", folder) or ()]


def _ask(method: str, *words: str | int):
    """Calls the coordination service; None if it refuses or is gone."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        return getattr(service.global_state.client, method)(*words)
    return None
