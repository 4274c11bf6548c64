"""A failure of one process ends all of them, with its reason on every host.

A process that waits in a collective for one that is gone may wait for ever, and does
not know why. So the first process to fail leaves its reason with JAX's coordination
service. There a thread of every other process looks once a second; it prints the reason
and ends its process, whatever that is blocked in.
"""

import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback

import jax
from jax._src import distributed  # As Orbax does: the service has no public door.

from vit_jax.errors import UserError

_FAILURE = "vit_jax/failure"
_LEAVING = "vit_jax/leaving"
_LOOK_SECONDS = 1.0
# A third of the minute that is promised: for hosts too busy to look at once.
_PATIENCE_SECONDS = 20.0
_EXIT_CRASH, _EXIT_USER_ERROR, _EXIT_INTERRUPTED = 1, 2, 130


class Together:
    """Ends all processes of the job when the work within fails in one of them.

    Use as a context manager. A process that runs alone does as ever. One of several
    prints the reason, stops its loader processes and leaves by `os._exit`: with 2 for
    bad input, 130 for Ctrl-C and 1 for any other exception. So nothing runs that would
    wait for the others. A checkpoint that is being written stays unfinished, as after
    a kill, and the one before it counts.

    Args:
      debug: show tracebacks of bad input too.
    """

    def __init__(self, *, debug: bool = False):
        self._debug = debug
        self._done = threading.Event()
        self._watcher = threading.Thread(target=_watch, args=(self._done,), daemon=True)

    def __enter__(self):
        if jax.process_count() > 1:
            self._watcher.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if not self._watcher.is_alive():
            return
        self._done.set()
        self._watcher.join()  # It may be the one that ends this process.
        if error is None:
            return
        failure = _announce(error)
        ours = json.loads(failure)[0] == jax.process_index()
        if ours and (self._debug or not isinstance(error, UserError)):
            traceback.print_exception(error)
        _leave(failure)


def _watch(done: threading.Event) -> None:
    while not done.wait(_LOOK_SECONDS):
        if failures := _look_up(_FAILURE):
            _leave(failures[0])


def _announce(error: BaseException) -> str:
    """Tells all processes why this one ends; returns the failure that came first."""
    code = _EXIT_CRASH
    reason = " ".join([str(error), *getattr(error, "__notes__", ())])
    if isinstance(error, UserError):
        code = _EXIT_USER_ERROR
    else:
        reason = f"{type(error).__name__}: {reason}"
    if isinstance(error, KeyboardInterrupt):
        code = _EXIT_INTERRUPTED
    reason = " ".join(reason.split())
    failure = json.dumps([jax.process_index(), code, reason])
    # A second failure is refused: a collective that breaks follows from the first.
    _ask("key_value_set", f"{_FAILURE}/first", failure)
    return [*_look_up(_FAILURE), failure][0]


def _leave(failure: str) -> None:
    """Ends this process with the reason; process 0 ends last."""
    process, code, reason = json.loads(failure)
    if process != jax.process_index():
        reason = f"process {process} of {jax.process_count()} failed: {reason}"
    sys.stdout.flush()
    print(f"error: {reason}", file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():  # os._exit leaves them running.
        child.terminate()
    _ask("key_value_set", f"{_LEAVING}/{jax.process_index()}", "")
    if jax.process_index() == 0:
        # It runs the service, and JAX aborts whoever loses that, without the reason.
        patient = time.monotonic() + _PATIENCE_SECONDS
        everyone = jax.process_count()
        while len(_look_up(_LEAVING)) < everyone and time.monotonic() < patient:
            time.sleep(_LOOK_SECONDS / 10)
        time.sleep(_LOOK_SECONDS / 2)  # What they do after their last word.
    os._exit(code)


def _look_up(folder: str) -> list[str]:
    return [value for _, value in _ask("key_value_dir_get", folder) or ()]


def _ask(method: str, *words: str):
    """Calls the coordination service; None if it refuses or is gone."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        return getattr(distributed.global_state.client, method)(*words)
    return None
