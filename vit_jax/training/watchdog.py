"""Ends a run that hangs, with the stack of every thread."""

import faulthandler
import os
import sys
import threading
import time

from vit_jax.distributed import multihost

EXIT_STALLED = 70  # EX_SOFTWARE of sysexits.h.
# How long this file's thread may be kept from running before C code ends the process.
_DEAF_SECONDS = 60.0
_WORDS_SECONDS = 30.0  # For telling the other processes.
_STOPPED_SECONDS = 5.0  # Later than this, a look comes from a process that was stopped.
_STARTING = 3  # Times the limit, before the first step.


class Watchdog:
    """Ends the process when nothing was finished for some time; a context manager.

    A thread looks. It prints the stacks of all threads, and those of loader processes,
    says what was finished last, tells the other processes of the job, and leaves with
    code 70, whatever the main thread is blocked in. Where some C code holds the
    interpreter's lock, so that no Python runs at all, faulthandler prints the stacks
    and leaves with code 1.

    Args:
      timeout: seconds, `config.stall_timeout`; 0 is off. Until the first step is done
        it is 3 times as long, because a large model compiles for longer than any step.
    """

    def __init__(self, timeout: float):
        self._timeout, self._limit = timeout, _STARTING * timeout
        self._last, self._when = "the start", time.monotonic()
        self._done = threading.Event()

    def reset(self, what: str, *, step: bool = False) -> None:
        """Restarts the timeout, because something is finished.

        Args:
          what: event for the message, as "step 12".
          step: the run is no longer starting.
        """
        if step:
            self._limit = self._timeout
        self._last, self._when = what, time.monotonic()

    def __enter__(self):
        if self._timeout:
            # Loader processes started from here on print their stacks when told to end.
            self._environment = os.environ.get("PYTHONFAULTHANDLER")
            os.environ["PYTHONFAULTHANDLER"] = "1"
            self.reset("the start")
            self._thread = threading.Thread(
                target=self._watch, daemon=True, name="watchdog"
            )
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        if not self._timeout:
            return
        self._done.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._environment is None:
            os.environ.pop("PYTHONFAULTHANDLER", None)
        else:
            os.environ["PYTHONFAULTHANDLER"] = self._environment

    def _watch(self) -> None:
        look = min(1.0, self._timeout / 10)
        deaf = max(self._limit, _DEAF_SECONDS)
        looked = time.monotonic()
        while not self._done.wait(look):
            late = time.monotonic() - looked - look
            looked = time.monotonic()
            if late > _STOPPED_SECONDS:  # The whole process stood: SIGSTOP, or a pause
                self._when += late  # of the machine. It is not to blame.
            if sys.__stderr__ is not None:  # As in some notebooks.
                faulthandler.dump_traceback_later(deaf, exit=True, file=sys.__stderr__)
            if time.monotonic() - self._when > self._limit:
                self._end()

    def _end(self) -> None:
        multihost.show_stacks("watchdog")
        leave = threading.Timer(_WORDS_SECONDS, os._exit, [EXIT_STALLED])
        leave.daemon = True
        leave.start()
        multihost.end_job(
            EXIT_STALLED,
            f"watchdog: no step, evaluation batch or save was finished in "
            f"{self._limit:g} s (stall_timeout); the last was {self._last}; the stacks "
            "above show where each thread hangs; the same command resumes from the "
            "newest checkpoint",
            # The first one to notice may only be waiting for the one that hangs.
            stacks=True,
        )
